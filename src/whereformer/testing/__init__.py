"""The promises that every encoding makes, so that encodings living elsewhere can be held to them by one line.

>>> from whereformer.encodings import SinCos2D
>>> check_encoding(SinCos2D, compile=False)
"""

from collections.abc import Callable

from whereformer.catalog import Factory, spell
from whereformer.errors import InputError
from whereformer.testing import graphs, numbers, places, sizes, state
from whereformer.testing.subject import DIM, HEADS, Subject

__all__ = ["check_encoding"]

Promise = Callable[[Subject], None]
"""Its docstring is a sentence that begins with "it"; it raises where the sentence does not hold."""

PROMISES: tuple[Promise, ...] = (
    places.is_built_where_it_says,
    places.any_grid,
    state.tells_the_truth,
    state.repeats_itself,
    state.keeps_only_parameters,
    state.keeps_nothing_derived,
    state.starts_anew,
    places.counts_tokens,
    places.knows_its_prefix,
    places.spares_prefix_tokens,
    places.keeps_to_masks,
    numbers.takes_any_strides,
    numbers.backends_agree,
    places.sees_one_image,
    numbers.is_real,
    numbers.keeps_dtypes,
    state.sees_updates,
    state.forgets_sizes,
    state.can_be_copied,
    state.trains_after_inference,
    state.changes_nothing,
    state.can_start_without_memory,
    state.moves,
    places.keeps_images_apart,
    places.serves_kept_patches,
    places.crosses_grids,
    places.tells_if_it_keeps_norms,
    places.tells_if_it_goes_by_offset,
    sizes.can_be_resized,
    sizes.resizes_in_float32,
)
SLOW: tuple[Promise, ...] = (graphs.compiles, graphs.exports)
ON_VIDEOS: tuple[Promise, ...] = (
    places.any_grid,
    places.counts_tokens,
    places.spares_prefix_tokens,
    numbers.backends_agree,
    places.serves_kept_patches,
    places.crosses_grids,
    places.tells_if_it_keeps_norms,
    places.tells_if_it_goes_by_offset,
    sizes.can_be_resized,
    sizes.resizes_in_float32,
)
"""What is held to on videos too, of encodings that were held to everything on images."""


def check_encoding(factory: Factory, *, name: str | None = None, compile: bool = True) -> None:
    """Hold an encoding to every promise, on images, on videos, or on both: where it is defined.

    Args:
        factory: `factory(dim, num_heads, grid)` builds the encoding: its class, or a `functools.partial` of it.
            It is asked for 24 features in 1, 2, 3 and 6 heads, of which it may refuse all but 3.
        name: what to call the encoding in messages.
        compile: whether to check torch.compile and torch.export too, the slowest promises.

    Raises:
        AssertionError: a promise is broken; the message says which, on which grid, and how far off.
    """
    name = name or spell(factory)
    first, *others = subjects(factory)
    held = [(promise, first) for promise in PROMISES]
    held += [(promise, other) for other in others for promise in ON_VIDEOS]
    held += [(promise, first) for promise in SLOW if compile]
    for promise, subject in held:
        try:
            promise(subject)
        except Exception as error:
            broken = f"{name} breaks the promise that it {promise.__doc__}"
            detail = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{broken}: {detail}") from error


def subjects(factory: Factory) -> list[Subject]:
    """The encoding on images, and on videos, unless it refuses them; on images if it refuses both."""
    found = []
    for subject in (Subject(factory, frames=None), Subject(factory, frames=2)):
        try:
            factory(DIM, HEADS, subject.home)
        except InputError:
            continue
        except Exception:
            pass  # a promise that builds it will say so
        found.append(subject)
    return found or [Subject(factory, frames=None)]
