from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.errors import InputError, check_bool, check_positive
from whereformer.forms import BucketBias, BucketValues, Scores
from whereformer.grid import Grid
from whereformer.index import Buckets, Clip, Euclidean, Index, Mapping, Piecewise, Quantization, Separable

Method = Literal["euclidean", "quantization", "cross", "product"]
Mode = Literal["bias", "contextual"]
MOST_BUCKETS = 1_000_000
SHORT = {"euc": "euclidean", "quant": "quantization", "ctx": "contextual"}


class IRPE(PositionEncoding):
    """Image relative position encoding: r_ij is a learned row (a number in bias mode) of bucket I(i, j).

        e_ij = q_i·k_j/√d + b_ij                    b_ij = r_ij                               (13, 14: bias)
                                                    b_ij = (q_i·r^K_ij + k_j·r^Q_ji)/√d       (15, 16: contextual)
        z_i  = Σ_j softmax_j(e_ij) (v_j + r^V_ij)                                             (17)

    With g the piecewise index (18) or the clip (9), and (dy, dx) = query − key in patches, r_ij is

        euclidean     p[g(√(dy² + dx²))]            (19, 20)     undirected
        quantization  p[g(quant(√(dy² + dx²)))]     (21)         undirected
        cross         p^y[g(dy)] + p^x[g(dx)]       (22-24)      directed
        product       p[g(dy), g(dx)]               (25)         directed

    All pairs with a prefix token share one more bucket, the last. Sums over a bucket come before products with
    its row (26-28), so that nothing of size tokens² x features is made: O(n k d), on values too.

    Wu, Peng, Chen, Fu, Chao 2021, Rethinking and Improving Relative Position Encoding for Vision Transformer.
    Where the released code differs from the paper, the default loads the released checkpoints.

    Args:
        method: as above; "euc" and "quant" for short.
        mode: "contextual" (or "ctx") or "bias". Bias mode has no value side.
        on: any of "q", "k", "v" together, "qkv" for all. On "k" the query reads r^K; on "q" the key reads r^Q,
            at the bucket of (j, i) as the released code does: the paper's r^Q_ij with its table mirrored.
        shared: one table for all heads, or one each.
        ratio: α, β, γ = ratio · (1, 2, 8), in patches. Released: 1.9 for 50 product buckets, 20 for euclidean
            and cross, 33 for quantization.
        index: "piecewise" or "clip" (which has β alone).
        alpha, beta, gamma: in place of those that follow from `ratio`.
        quant: "squared" (the released code: quant(x) = x²) or "rank" (eq. 21).
        rounded: whether euclidean distances are rounded to whole patches before g (the released code).
        scale_bias: divide r by √d in bias mode (eq. 13); the released code does not.

    Shapes: `tables.k`, `tables.q` [1 or heads, d, buckets], `tables.v` [1 or heads, buckets, d], bias mode
    [1 or heads, buckets]; for cross, two each: `tables.k_rows`, `tables.k_columns`. They start at zero.
    """

    formula = "e_ij + q_i·r_I(i,j) [k], + k_j·r_I(j,i) [q]; z_i + Σ_j a_ij r_I(i,j) [v]"
    paper = "Wu et al. 2021, Rethinking and Improving Relative Position Encoding for Vision Transformer (iRPE)"
    steady = True
    by_size = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        method: Method | Literal["euc", "quant"] = "product",
        mode: Mode | Literal["ctx"] = "contextual",
        on: str = "k",
        shared: bool = True,
        ratio: float = 1.9,
        index: Literal["piecewise", "clip"] = "piecewise",
        alpha: float | None = None,
        beta: float | None = None,
        gamma: float | None = None,
        quant: Literal["squared", "rank"] = "squared",
        rounded: bool = True,
        scale_bias: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        for name, value in (("shared", shared), ("rounded", rounded), ("scale_bias", scale_bias)):
            check_bool(f"IRPE: {name}", value)
        self.method = _one_of("method", method, get_args(Method))
        self.mode = _one_of("mode", mode, get_args(Mode))
        _one_of("index", index, ("piecewise", "clip"))
        _one_of("quant", quant, ("squared", "rank"))
        if not isinstance(on, str) or not on or len(set(on)) < len(on) or set(on) - set("qkv"):
            raise InputError(f"IRPE: on={on!r}, expected one to three of 'q', 'k', 'v', such as 'k' or 'qkv'")
        if self.mode == "bias" and "v" in on:
            raise InputError(
                f"IRPE: on={on!r} with mode='bias', which has no value side: expected 'q', 'k' or 'qk'"
            )
        check_positive("IRPE: ratio", ratio)
        self.on = "".join(side for side in "qkv" if side in on)
        self.shared = shared
        self.quant = quant
        self.rounded = rounded
        self.scale_bias = scale_bias
        beta = 2 * ratio if beta is None else beta
        g: Index
        if index == "clip":
            if alpha is not None or gamma is not None:
                raise InputError(f"IRPE: alpha={alpha}, gamma={gamma} with index='clip', which has beta alone")
            g = Clip(beta)
        else:
            g = Piecewise(ratio if alpha is None else alpha, beta, 8 * ratio if gamma is None else gamma)
        self.index = g
        self.mappings: dict[str, Mapping] = {
            "euclidean": {"": Euclidean(g, rounded)},
            "quantization": {"": Quantization(g, quant)},
            "cross": {"_rows": Separable(g, None), "_columns": Separable(None, g)},
            "product": {"": Separable(g, g)},
        }[self.method]
        buckets = max(mapping.count for mapping in self.mappings.values())
        if buckets > MOST_BUCKETS:
            raise InputError(
                f"IRPE: ratio={ratio!r}, {g} makes {buckets:,} buckets, expected at most {MOST_BUCKETS:,}"
            )
        self.tables = nn.ParameterDict(
            {
                side + part: nn.Parameter(torch.empty(self._shape(side, mapping)))
                for side in self.on
                for part, mapping in self.mappings.items()
            }
        )
        self.reset_parameters()

    def _shape(self, side: str, mapping: Mapping) -> tuple[int, ...]:
        heads = 1 if self.shared else self.num_heads
        buckets = Buckets(mapping, self.grid, self.grid).count
        if self.mode == "bias":
            return (heads, buckets)
        return (heads, buckets, self.head_dim) if side == "v" else (heads, self.head_dim, buckets)

    def reset_parameters(self) -> None:
        for table in self.tables.values():
            nn.init.zeros_(table)

    def biases(self, q: Tensor, k: Tensor, queries: Grid, keys: Grid) -> Iterator[BucketBias]:
        if "k" in self.on:
            yield from self._read("k", q, queries, keys)
        if "q" in self.on:
            yield from self._read("q", k, keys, queries)

    def _read(self, side: Literal["q", "k"], x: Tensor, here: Grid, there: Grid) -> Iterator[BucketBias]:
        for part, mapping in self.mappings.items():
            table = self.tables[side + part]
            if self.mode == "contextual":
                scores = Scores(x, table, self.head_dim**-0.5)
            else:
                scores = (table * self.head_dim**-0.5 if self.scale_bias else table)[None, :, None].to(x.dtype)
            yield BucketBias(scores, Buckets(mapping, here, there), "query" if side == "k" else "key")

    def values(self, v: Tensor, queries: Grid, keys: Grid) -> Iterator[BucketValues]:
        if "v" in self.on:
            for part, mapping in self.mappings.items():
                yield BucketValues(self.tables["v" + part], Buckets(mapping, queries, keys))

    def moments(self) -> tuple[str, ...]:
        return ("biases",) * ("q" in self.on or "k" in self.on) + ("values",) * ("v" in self.on)

    def macs(self, grid: Grid) -> int:
        if self.mode == "bias":
            return 0
        buckets = sum(Buckets(mapping, self.grid, self.grid).count for mapping in self.mappings.values())
        return len(self.on) * grid.tokens * self.dim * buckets

    def extra_repr(self) -> str:
        own = {"euclidean": ("rounded",), "quantization": ("quant",)}.get(self.method, ())
        own += ("scale_bias",) if self.mode == "bias" else ()
        said = ("method", "mode", "on", "shared", "index", *own)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in said)


def _one_of(name: str, value: str, accepted: tuple[str, ...]) -> str:
    chosen = SHORT.get(value, value) if isinstance(value, str) else value
    if chosen not in accepted:
        raise InputError(f"IRPE: {name}={value!r}, expected one of {list(accepted)}")
    return chosen
