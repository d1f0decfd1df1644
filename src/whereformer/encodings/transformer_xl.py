from collections.abc import Iterator

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.offsets import (
    Offsets,
    along_row,
    check_offsets,
    per_axis,
    query_minus_key,
    read,
    read_too,
)
from whereformer.errors import InputError, check_bool, check_positive
from whereformer.forms import Bias, LowRankBias
from whereformer.grid import Grid


class TransformerXL(PositionEncoding):
    """Attention to fixed waves of the offset, with a global content bias u and a global position bias v.

        e_ij = [(q_i + u)·k_j + (q_i + v)·W^R s_{i − j}] / √d
        s_x = (sin ω_0 x, ... sin ω_{C/2 − 1} x, cos ω_0 x, ...),   ω_c = T^(−2 c / C)

    Dai et al. 2019, section 3.3, for sequences, C = D. On images s = (s_dy, s_dx), each of half of the channels:
    the product of iRPE (Wu et al. 2021, eq. 10 and Table 5), and by linearity W^R s is a term of rows and a term
    of columns. There is no table, so that every grid is home. Pairs with a prefix token have no offset: u alone
    speaks of them.

    The released code shares u and v among all layers unless told to untie them; here each block has its own.

    Args:
        offsets: "product" for (dy, dx), or "raster" for the paper's offset along a sequence, of the patches in
            row-by-row order.
        clip: offsets are clipped to −clip ... clip patches, along each axis; None: they are not.
        shared: u, v and W^R of all heads are one, u and v in R^d, and s has d channels (iRPE's eq. 10), or each
            head has its own (the paper).
        temperature: T.

    Shapes: u, v [heads or 1, d]; weight, W^R, [heads d, D], shared [d, d]. All start normal, std .02.
    """

    formula = "[(q_i + u)·k_j + (q_i + v)·W s_{p_i − p_j}]/√d, s sinusoids"
    paper = "Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length Context, section 3.3"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        offsets: Offsets = "product",
        clip: int | None = None,
        shared: bool = False,
        temperature: float = 10000.0,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_bool("TransformerXL: shared", shared)
        check_offsets("TransformerXL", offsets, clip)
        check_positive("TransformerXL: temperature", temperature)
        self.offsets: Offsets = offsets
        self.clip = clip
        self.shared = shared
        self.temperature = temperature
        heads, channels = (1, self.head_dim) if shared else (num_heads, dim)
        if channels % (multiple := 4 if offsets == "product" else 2):
            what = f"head_dim={channels}" if shared else f"dim={channels}"
            raise InputError(f"TransformerXL: {what}, expected a multiple of {multiple}: sines and cosines")
        self.u = nn.Parameter(torch.empty(heads, self.head_dim))
        self.v = nn.Parameter(torch.empty(heads, self.head_dim))
        self.weight = nn.Parameter(torch.empty(heads * self.head_dim, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.u, self.v, self.weight):
            nn.init.normal_(parameter, std=0.02)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[Bias]:
        scale = self.head_dim**-0.5
        yield LowRankBias(k.new_ones(1, 1, 1, 1), k @ (self.u * scale).to(k.dtype)[..., None])
        if self.offsets == "product":
            tables = [
                self._embeddings(max(n, m), weight * scale, q)
                for n, m, weight in zip(queries.size, keys.size, self.weight.chunk(2, -1), strict=True)
            ]
            yield from per_axis(q, tables, queries, keys, query_minus_key, self.v)
        else:
            queries, keys = queries.as_row(), keys.as_row()
            table = self._embeddings(max(queries.width, keys.width), self.weight * scale, q)
            yield (of_queries := read(q, table, along_row(queries, keys)))
            yield read_too(self.v, of_queries)

    def _embeddings(self, patches: int, weight: Tensor, like: Tensor) -> Tensor:
        """W s_x at all offsets of an axis: [heads or 1, 2 patches − 1, d]."""
        exact = torch.promote_types(weight.dtype, torch.float32)
        x = torch.arange(1 - patches, patches, device=weight.device)
        if self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        channels = weight.shape[1]
        exponents = torch.arange(0, channels, 2, device=weight.device, dtype=exact) / channels
        angles = x[:, None] / self.temperature**exponents
        waves = torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)
        return (waves @ weight.to(like.dtype).mT).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def macs(self, grid: Grid) -> int:
        lengths = grid.size if self.offsets == "product" else (grid.patches,)
        offsets = sum(2 * n - 1 for n in lengths)
        channels = self.weight.numel() // len(lengths)
        return offsets * channels + grid.tokens * self.dim * (offsets + 1)

    def extra_repr(self) -> str:
        return f"offsets={self.offsets!r}, clip={self.clip}, shared={self.shared}, temperature={self.temperature}"
