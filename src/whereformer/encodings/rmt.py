import math

from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.distance import by_distance
from whereformer.errors import check_positive
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid


class RMT(PositionEncoding):
    """e_ij = q_i·k_j/√d + ln(γ_h) (|dy| + |dx|), γ_h = 1 − 2^(−a − b h / H): a decay by Manhattan distance.

    Fan et al. 2024, section 3.2, Manhattan self-attention. The released code adds ln(γ) times the distance
    before the softmax, as here. The paper multiplies the weights by γ^(|dy| + |dx|) after it (eq. 5), so that
    they no longer sum to one: that is no bias, and not what the released models do. Heads are h = 0 ... H − 1.
    Pairs with a prefix token get 0.

    Args:
        start: a. The released models have 2.
        span: b. The released models have 4 to 6, larger in later stages.
    """

    formula = "e_ij + ln(γ_h) (|dy| + |dx|), γ_h = 1 − 2^(−a − b h/H)"
    paper = "Fan et al. 2024, RMT: Retentive Networks Meet Vision Transformers, section 3.2"
    axes = (2, 3)

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, start: float = 2.0, span: float = 4.0) -> None:
        super().__init__(dim, num_heads, grid)
        check_positive("RMT: start", start)
        check_positive("RMT: span", span)
        self.start = start
        self.span = span

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        decays = [
            math.log1p(-(2 ** (-self.start - self.span * h / self.num_heads))) for h in range(self.num_heads)
        ]

        def bias(length: Tensor) -> Tensor:
            return length * length.new_tensor(decays).reshape(-1, *[1] * length.ndim)

        return (by_distance(bias, "manhattan", queries, keys, q),)

    def extra_repr(self) -> str:
        return f"start={self.start}, span={self.span}"
