from torch import Tensor

from whereformer.encoding import PositionEncoding
from whereformer.encodings.alibi import alibi_bias
from whereformer.forms import DenseBias, OffsetBias
from whereformer.grid import Grid


class ALiBi2D(PositionEncoding):
    """e_ij = q_i·k_j/√d − m_h |p_i − p_j|: ALiBi by the Euclidean distance between patches, slopes as in `ALiBi`.

    Fuller et al. 2023 (CROMA). It serves cross-attention as it serves self-attention: the released model reads
    one sensor's image from another's. Pairs with a prefix token get 0.
    """

    formula = "e_ij − m_h |p_i − p_j|, m_h = 2^(−8 (h + 1)/H) for H a power of 2"
    paper = "Fuller, Millard, Green 2023, CROMA: Remote Sensing Representations"
    axes = (2, 3)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> tuple[OffsetBias | DenseBias]:
        return (alibi_bias(self.num_heads, "euclidean", queries, keys, q),)
