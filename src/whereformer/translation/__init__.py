"""Start one encoding from another: least squares on what forms mean."""

from whereformer.translation.report import Part, Translation
from whereformer.translation.translate import translate

__all__ = ["Part", "Translation", "translate"]
