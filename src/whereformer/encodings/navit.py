import functools
import operator
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from whereformer.encoding import PositionEncoding
from whereformer.encodings.common.absolute import Longer, add, first_rows, spread
from whereformer.errors import InputError, check_count, check_one_of, check_positive
from whereformer.grid import Grid
from whereformer.resample import resample_line

Coordinate = Literal["absolute", "fractional"]
Combine = Literal["sum", "concat", "product"]


class NaViT(PositionEncoding):
    """x_n += φ_y(y) + φ_x(x), each φ a learned table: factorized position embeddings.   NaViT, section 2.1.

    Args:
        coordinate: "absolute": φ(p), row p of a table of `size` rows. "fractional": φ(r) of the place relative
            to the side of the image, r in 0 ... 1: the table, from end to end, is stretched over the side. The
            paper writes r = p / side and not how a learned φ is read between its rows: here as timm's
            "factorized" does, linearly, with centres of patches on centres of rows, r = (p + 1/2) / side.
        combine: "sum", or of section 3.4 "concat" (stacking: φ_y first, D/2 wide each) or "product".
        size: rows of each table (the paper's maxLen, which it does not tell). None: those of the home grid if
            fractional, 64 if absolute.
        longer: for absolute coordinates, what becomes of a side longer than `size`: "refuse" (an error), or
            "interpolate" (the whole table is stretched).
        std: of the normal that tables start from (timm's; the paper does not tell).

    The paper's sinusoidal and Fourier φ are not here: it does not say which frequencies they have. In a video a
    φ_t joins them ("extending the positional embedding to include the temporal dimension").

    Shapes: tables.y, tables.x (tables.t) [size, dim], for concat [size, dim / axes].
    """

    formula = "x_n + φ_y(y) + φ_x(x), or of y / H, x / W"
    paper = "Dehghani et al. 2023, Patch n' Pack: NaViT, sections 2.1, 3.4"
    axes = (2, 3)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        coordinate: Coordinate = "absolute",
        combine: Combine = "sum",
        size: int | None = None,
        longer: Longer = "refuse",
        std: float = 0.02,
    ) -> None:
        super().__init__(dim, num_heads, grid)
        check_one_of("NaViT: coordinate", coordinate, get_args(Coordinate))
        check_one_of("NaViT: combine", combine, get_args(Combine))
        check_one_of("NaViT: longer", longer, get_args(Longer))
        if coordinate == "fractional" and longer != "refuse":
            raise InputError(f"NaViT: longer={longer!r} with coordinate='fractional', which fits every grid")
        check_positive("NaViT: std", std)
        if size is not None:
            check_count("NaViT: size", size)
        if combine == "concat" and dim % grid.axes:
            raise InputError(f"NaViT: dim={dim}, expected a multiple of {grid.axes} to concat that many axes")
        self.coordinate: Coordinate = coordinate
        self.combine: Combine = combine
        self.longer: Longer = longer
        self.std = std
        self.names = "tyx"[-grid.axes :]
        self.sized_by_grid = size is None and coordinate == "fractional"
        lengths = grid.size if self.sized_by_grid else [size or 64] * grid.axes
        width = dim // grid.axes if combine == "concat" else dim
        self.tables = nn.ParameterDict(
            {
                axis: nn.Parameter(torch.empty(length, width))
                for axis, length in zip(self.names, lengths, strict=True)
            }
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.tables.values():
            nn.init.normal_(table, std=self.std)

    def tokens(self, x: Tensor, grid: Grid) -> Tensor:
        phi = spread(*self._read(grid).values())
        match self.combine:
            case "sum":
                image = sum(phi[1:], phi[0])
            case "product":
                image = functools.reduce(operator.mul, phi)
            case "concat":
                image = torch.cat(phi, -1)
        return add(x, grid, grid.pick(image))

    def tables_on(self, grid: Grid) -> dict[str, Tensor]:
        return {f"tables.{axis}": t for axis, t in self._read(grid).items()} if self.sized_by_grid else {}

    def _read(self, grid: Grid) -> dict[str, Tensor]:
        """The tables on a grid, by axis."""
        read = {axis: (self.tables[axis], n) for axis, n in zip(self.names, grid.size, strict=True)}
        if self.coordinate == "fractional":
            return {axis: resample_line(table, n) for axis, (table, n) in read.items()}
        return {axis: first_rows(table, n, self.longer, f"NaViT: {axis}") for axis, (table, n) in read.items()}

    def macs(self, grid: Grid) -> int:
        return grid.patches * self.dim * (grid.axes - 1) if self.combine == "product" else 0

    def extra_repr(self) -> str:
        return f"coordinate={self.coordinate!r}, combine={self.combine!r}, longer={self.longer!r}"
