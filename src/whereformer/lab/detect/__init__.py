"""Detection: images with boxes, their checks, augmentation and metrics. Needs the extra `detect`."""
