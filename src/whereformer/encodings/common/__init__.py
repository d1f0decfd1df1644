"""What encodings of one family share; an encoding itself is a file next door."""
