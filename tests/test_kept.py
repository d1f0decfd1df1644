"""What is kept from one call to the next: maps and angles that follow from sizes and options alone."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spellings
from whereformer import Grid, Rotation, attention, kept, parse
from whereformer.encodings.common.rotary import Rotary

GRID = Grid(4, 3, prefix=1)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_found", {})


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


def test_made_once_and_fit_for_training() -> None:
    with torch.inference_mode():
        first = kept.kept("ones", lambda: torch.ones(3), torch.numel)
    assert kept.kept("ones", lambda: torch.zeros(3), torch.numel) is first
    assert not first.is_inference()
    assert kept.kept("twos", lambda: torch.full((3,), 2.0), torch.numel).tolist() == [2, 2, 2]


def test_modes_and_transforms_make_their_own() -> None:
    with Mode():
        kept.kept("ones", lambda: torch.ones(3), torch.numel)
    with torch.device("meta"):
        kept.kept("ones", lambda: torch.ones(3), torch.numel)
    torch.func.vmap(lambda x: x + kept.kept("ones", lambda: torch.ones(3), torch.numel))(torch.zeros(2, 3))
    assert not kept._found


def test_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_NUMBERS", 10)
    for n in range(5):
        kept.kept(n, lambda: torch.ones(3), torch.numel)
    assert list(kept._found) == [2, 3, 4]
    kept.kept("large", lambda: torch.ones(11), torch.numel)
    assert list(kept._found) == [2, 3, 4]


def rotary() -> list[tuple[str, Rotary]]:
    made = [(text, parse(text)[0](48, 2, GRID)) for text in spellings.ALL]
    return [(text, encoding) for text, encoding in made if isinstance(encoding, Rotary) and encoding.fixed]


def test_no_option_is_forgotten() -> None:
    """Of all spellings after one another, on two grids, each gets its own angles, and gets them again."""
    assert len(rotary()) > 6
    for _ in range(2):
        for text, encoding in rotary():
            assert not list(encoding.parameters()), text
            for grid in (GRID, Grid(5, 7, prefix=2)):
                (got,), expected = encoding.rotations(grid), encoding._rotation(grid, None)
                assert isinstance(got, Rotation)
                assert got.layout == expected.layout, text
                assert torch.equal(got.angles, expected.angles), text
                for one, other in zip(got.waves, expected.waves, strict=True):
                    assert torch.equal(one, other), text


def test_angles_are_kept_but_not_of_chosen_patches_nor_learned_ones() -> None:
    (axial,), (mixed,) = (parse(text)[0](48, 2, GRID).rotations(GRID) for text in ("rope_axial", "rope_mixed"))
    assert next(iter(parse("rope_axial")[0](48, 2, GRID).rotations(Grid(4, 3, prefix=1)))) is axial
    assert mixed.angles.requires_grad
    before = len(kept._found)
    list(parse("rope_axial")[0](48, 2, GRID).rotations(GRID.keep(torch.tensor([[0, 5]]))))
    list(parse("rope_mixed")[0](48, 2, GRID).rotations(GRID))
    assert len(kept._found) == before


def test_trains_after_inference_mode() -> None:
    (factory,) = parse("rope_axial")
    q = torch.randn(1, 2, GRID.tokens, 24, requires_grad=True)
    with torch.inference_mode():
        expected = attention(q, q, q, GRID, [factory(48, 2, GRID)])
    out = attention(q, q, q, GRID, [factory(48, 2, GRID)])
    out.sum().backward()
    assert torch.allclose(out, expected)
