from typing import Any, Self

import torch
from torch import Tensor, nn

from whereformer.encoding import replace_parameter
from whereformer.encodings.axial_deeplab import Axis, check_axis
from whereformer.encodings.common.offsets import Exact, resized
from whereformer.errors import InputError, check_bool, check_count, check_heads, check_in_memory
from whereformer.forms import BucketBias, BucketValues
from whereformer.grid import Grid
from whereformer.index import Buckets, Separable
from whereformer.resample import without_autocast


class AxialAttention(nn.Module):
    """The position-sensitive axial-attention layer of Axial-DeepLab: projection and attention along one axis.

        e_ij = q_i·k_j + q_i·r^q_{i − j} + k_j·r^k_{j − i}
        z_i  = Σ_j softmax_j(e_ij) (v_j + r^v_{i − j})

    for i and j in one column (or row); queries and keys have half the features of values, and nothing is divided
    by √d. Wang et al. 2020, Axial-DeepLab, section 3. Its released code normalises everything (`normalized`):

        e_ij = BN(q_i·k_j) + BN(q_i·r^q_{i − j}) + BN(k_j·r^k_{j − i})
        z_i  = BN(Σ_j a_ij v_j) + BN(Σ_j a_ij r^v_{i − j})

    each a BatchNorm, of the logits one channel a head, and of the projections too. Its checkpoints then load under
    their own names; their index, a buffer that follows from the span, is dropped.

    Args:
        dim: features of a token; they come out as many.
        num_heads: dim is a multiple of 2 num_heads.
        span: patches of the axis that the table is made for, the released code's `kernel_size` (56). On an axis of
            another length the table is resized linearly.
        axis: "height" (within columns) or "width" (within rows).
        normalized: with the BatchNorms of the released code.

    Shapes: qkv_transform.weight [2 dim, dim, 1], of each head d / 2 rows for q, d / 2 for k, d for v, d = dim /
    num_heads; starts normal, std 1/√dim. relative [2 d, 2 span − 1], in the same order, shared by all heads;
    starts normal, std 1/√d.

    >>> layer = AxialAttention(8, 2, span=3, axis="width")
    >>> layer(torch.zeros(1, 6, 8), Grid(2, 3)).shape
    torch.Size([1, 6, 8])
    """

    def __init__(
        self, dim: int, num_heads: int, span: int, *, axis: Axis = "height", normalized: bool = False
    ) -> None:
        super().__init__()
        check_heads("AxialAttention", dim, num_heads, 2)
        check_count("AxialAttention: span", span)
        check_axis("AxialAttention", axis)
        check_bool("AxialAttention: normalized", normalized)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.span = span
        self.axis: Axis = axis
        self.normalized = normalized
        self.qkv_transform = nn.Conv1d(dim, 2 * dim, 1, bias=False)
        self.relative = nn.Parameter(torch.empty(2 * self.head_dim, 2 * span - 1))
        self.bn_qkv = nn.BatchNorm1d(2 * dim) if normalized else nn.Identity()
        self.bn_similarity = nn.BatchNorm2d(3 * num_heads) if normalized else nn.Identity()
        self.bn_output = nn.BatchNorm1d(2 * dim) if normalized else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.qkv_transform.weight, std=self.qkv_transform.in_channels**-0.5)
        nn.init.normal_(self.relative, std=self.head_dim**-0.5)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens [batch, tokens, dim] of a whole grid without prefix tokens to tokens of the same shape."""
        grid.check(x.shape[1], "x")
        if grid.prefix or not grid.regular or grid.axes != 2:
            raise InputError(f"AxialAttention: {grid}, expected a whole image without prefix tokens")
        image = grid.lay(x)
        lines = image.transpose(1, 2) if self.axis == "height" else image  # [batch, lines, patches of one, dim]
        out = self._attend(lines.flatten(0, 1)).unflatten(0, lines.shape[:2])
        return grid.pick(out.transpose(1, 2) if self.axis == "height" else out)

    def _attend(self, x: Tensor) -> Tensor:
        """[lines, patches, dim] -> the same."""
        half, patches = self.head_dim // 2, x.shape[1]
        qkv = self.bn_qkv(self.qkv_transform(x.mT)).unflatten(1, (self.num_heads, -1)).mT
        q, k, v = qkv.split([half, half, self.head_dim], -1)  # [lines, heads, patches, features]
        relative = resized(self.relative.mT, patches).mT.to(q.dtype)
        r_q, r_k, r_v = relative.split([half, half, self.head_dim])
        line = Grid(1, patches)
        buckets = Buckets(Separable(None, Exact(patches)), line, line)
        logits = [q @ k.mT, BucketBias(q @ r_q, buckets).dense(), BucketBias(k @ r_k, buckets, "key").dense()]
        logits = self.bn_similarity(torch.cat(logits, 1)).unflatten(1, (3, -1)).sum(1)
        weights = logits.softmax(-1)
        parts = [weights @ v, BucketValues(r_v.mT[None], buckets).dense(weights)]
        parts = torch.stack([part.mT for part in parts], 3)  # [lines, heads, d, (v, r^v), patches]
        return self.bn_output(parts.flatten(1, 3)).unflatten(1, (-1, 2)).sum(2).mT

    @torch.no_grad()
    def resize(self, grid: Grid) -> Self:
        """Make the table for an axis of `grid`, in place: there it gives what it gives there already."""
        span = grid.height if self.axis == "height" else grid.width
        check_in_memory("AxialAttention.relative", self.relative)
        with without_autocast(self.relative.device):
            replace_parameter(self, "relative", resized(self.relative.mT, span).mT)
        self.span = span
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(prefix + "flatten_index", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, span={self.span}, axis={self.axis!r}, normalized={self.normalized}"
