from whereformer.encoding import PositionEncoding


class NoPositions(PositionEncoding):
    """Says nothing: the transformer sees a set of patches (NoPE), unless its patch embedding tells more."""

    formula = "x"
    paper = "Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, appendix D.4 (no positional information)"
    axes = (2, 3)
