import math

from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.distance import Distance, by_distance, check_distance
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid


class ALiBi(PositionEncoding):
    """e_ij = q_i·k_j/√d − m_h |i − j|: attention with linear biases, m_h = 2^(−8 (h + 1) / H), h = 0 ... H − 1.

    Press et al. 2022, section 3. Patches are numbered row by row, as words in a text. The paper's texts are
    causal; here keys on both sides lose by their distance. If H is not a power of two, the next lower one
    gives the first slopes, and twice that one, every second, the others (the released code). Pairs with a
    prefix token get 0.

    Args:
        distance: "raster" (|i − j|), or between places in the image, "euclidean" (then it is `ALiBi2D`) or
            "manhattan".

    >>> alibi_slopes(4), alibi_slopes(3)
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """

    formula = "e_ij − m_h |i − j|, m_h = 2^(−8 (h + 1)/H) for H a power of 2"
    paper = "Press, Smith, Lewis 2022, Train Short, Test Long: Attention with Linear Biases, section 3"
    axes = (2, 3)

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, distance: Distance = "raster") -> None:
        super().__init__(dim, num_heads, grid)
        check_distance("ALiBi", distance)
        self.distance: Distance = distance

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        return (alibi_bias(self.num_heads, self.distance, queries, keys, q),)

    def extra_repr(self) -> str:
        return f"distance={self.distance!r}"


def alibi_bias(heads: int, distance: Distance, queries: Grid, keys: Grid, q: Tensor) -> OffsetBias | DenseBias:
    """−m_h times the distance."""
    slopes = alibi_slopes(heads)

    def bias(length: Tensor) -> Tensor:
        return -length * length.new_tensor(slopes).reshape(-1, *[1] * length.ndim)

    return by_distance(bias, distance, queries, keys, q)


def alibi_slopes(heads: int) -> list[float]:
    """m_h of each head."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[::2][: heads - power]
