"""Files under a folder, those in zip files too: a zip counts as unpacked where it lies."""

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from whereformer.errors import InputError

ROOM = 2**28  # bytes of decoded images that are kept, so that small sets are decoded once
READERS = 8  # threads that read the headers of images
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
TAIL = 64  # bytes in which the end of an image is looked for
ORIENTATION, TURNED = 0x0112, range(5, 9)  # EXIF: its tag, and the values that exchange width and height
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")

Progress = Callable[[int, int], None]  # how many of how many images are done


@dataclass(frozen=True, slots=True)
class Header:
    """Size of an image in pixels, as its file stores it, and whether a camera was held upright or not.

    >>> Header(640, 480, turned=True).upright
    (480, 640)
    """

    width: int
    height: int
    turned: bool = False

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height as viewers show it."""
        return (self.height, self.width) if self.turned else self.size


class Tree:
    """The files of a folder, or of a zip file.

    It goes to other processes without its open files, and threads may share it.

    Args:
        root: the folder, or the zip file.
        on_image: told how many headers of how many images are read.
        decode: whether images are decoded when their headers are read, which finds those that are damaged inside.
        only: names below the folder, if not all of its files are meant.

    Raises:
        InputError: there is no such folder; a zip file in it is damaged.
    """

    def __init__(
        self,
        root: Path | str,
        on_image: Progress | None = None,
        *,
        decode: bool = False,
        only: Iterable[str] | None = None,
    ) -> None:
        self.root = Path(root)
        self.on_image = on_image
        self.decode = decode
        self.names: dict[str, str | None] = {}  # a name with slashes -> the zip that holds the file, or None
        self._headers: dict[str, Header | str] = {}
        self._archives: dict[str, zipfile.ZipFile] = {}
        self._pictures: dict[str, Any] = {}  # decoded, as long as there is room
        self._room = ROOM
        self._process = os.getpid()
        if only is not None:
            self.names = dict.fromkeys(only)
        elif self.root.is_dir():
            zips = []
            for name in _files(self.root):
                if name.lower().endswith(".zip"):
                    zips.append(name)
                else:
                    self.names[name] = None
            for name in zips:
                self._mount(name, name.rpartition("/")[0])
        elif self.root.suffix.lower() == ".zip" and self.root.is_file():
            self._mount("", "")
        else:
            raise InputError(f"data={str(root)!r}, expected a folder or a zip file")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_archives": {}, "_pictures": {}, "_room": ROOM, "on_image": None}

    def __repr__(self) -> str:
        return f"Tree({str(self.root)!r})"

    def folders(self) -> list[str]:
        """All folders that hold files, and those above them; the root is ""."""
        found = {""}
        for name in self.names:
            while (name := name.rpartition("/")[0]) and name not in found:
                found.add(name)
        return sorted(found)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # of many kinds, where zip files are damaged
            raise InputError(f"{str(self.root / name)!r} cannot be read: {error}") from None

    def read(self, name: str) -> bytes:
        """All of a file, however it fails where it is gone or damaged."""
        held = self.names[name]
        if held is None:
            return (self.root / name).read_bytes()
        archive, prefix = self._archive(held)
        return archive.read(name.removeprefix(prefix))

    def start(self, name: str, count: int) -> bytes:
        """The first bytes of a file.

        Raises:
            InputError: it cannot be read.
        """
        with self._reading(name), self._open(name) as file:
            return file.read(count)

    def text(self, name: str) -> str:
        """A file's text.

        Raises:
            InputError: it cannot be read.
        """
        with self._reading(name):
            return self.read(name).decode("utf-8-sig")

    def image(self, name: str, size: tuple[int, int]) -> Any:
        """The image, a PIL one in RGB; turned as its camera was if only so it has the `size`, (width, height).

        Raises:
            InputError: it is not, or no longer, an image of this size.
        """
        from PIL import Image, ImageOps

        if (known := self._pictures.get(name)) is not None and known.size == size:
            return known.copy()
        try:
            with Image.open(BytesIO(self.read(name))) as image:
                picture = ImageOps.exif_transpose(image) if image.size != size else image
                found = _rgb(picture)
        except Exception as error:  # of many kinds
            raise InputError(f"image {name!r} cannot be read: {type(error).__name__}: {error}") from None
        if found.size != size:
            raise InputError(f"image {name!r} is of size {found.size}, expected {size}")
        if (need := 3 * size[0] * size[1]) <= self._room:
            self._pictures[name] = found.copy()
            self._room -= need
        return found

    def headers(self, names: Iterable[str]) -> dict[str, Header | str]:
        """What the headers of images say; or a text, why one cannot be read."""
        asked = list(dict.fromkeys(names))
        new = [name for name in asked if name not in self._headers]
        with ThreadPoolExecutor(READERS) as pool:
            for done, (name, header) in enumerate(zip(new, pool.map(self._header, new), strict=True), 1):
                self._headers[name] = header
                if self.on_image:
                    self.on_image(done, len(new))
        return {name: self._headers[name] for name in asked}

    def _header(self, name: str) -> Header | str:
        from PIL import Image, UnidentifiedImageError

        try:
            with self._open(name) as file, Image.open(file) as image:
                known = image.format != "PNG" or "exif" in image.info  # else a PNG is decoded to look for it
                header = Header(*image.size, turned=known and image.getexif().get(ORIENTATION) in TURNED)
                end = ENDS.get(image.format or "")
                whole = end is not None and end in self._tail(name)
                if self.decode or not whole:  # it may be cut short: only decoding tells
                    image.load()
                return header
        except UnidentifiedImageError:
            return "no image"
        except Exception as error:  # of many kinds
            return " ".join(f"{type(error).__name__}: {error}".split())

    def _open(self, name: str) -> Any:
        held = self.names[name]
        if held is None:
            return open(self.root / name, "rb")
        archive, prefix = self._archive(held)
        return archive.open(name.removeprefix(prefix))

    def _tail(self, name: str) -> bytes:
        held = self.names[name]
        if held is None:
            with open(self.root / name, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
                return file.read()
        archive, prefix = self._archive(held)
        info = archive.getinfo(name.removeprefix(prefix))
        if info.compress_type != zipfile.ZIP_STORED:
            return archive.read(info)[-TAIL:]
        with open(self._path(held), "rb") as file:  # archive.open(...).seek would read all that comes before
            file.seek(info.header_offset + 26)
            lengths = file.read(4)
            begin = (
                info.header_offset
                + 30
                + sum(int.from_bytes(part, "little") for part in (lengths[:2], lengths[2:]))
            )
            file.seek(begin + max(0, info.file_size - TAIL))
            return file.read(min(TAIL, info.file_size))

    def _mount(self, held: str, folder: str) -> None:
        prefix = f"{folder}/" if folder else ""
        archive, _ = self._archive(held)
        for info in archive.infolist():
            if not info.is_dir() and not _hidden(info.filename):
                self.names.setdefault(prefix + info.filename, held)

    def _archive(self, held: str) -> tuple[zipfile.ZipFile, str]:
        """An open zip, and what its names are prefixed with in the tree."""
        if self._process != os.getpid():  # after a fork: a place in an open file would be shared
            self._archives, self._process = {}, os.getpid()
        if held not in self._archives:
            try:
                self._archives[held] = zipfile.ZipFile(self._path(held))
            except Exception as error:  # of many kinds
                raise InputError(f"{str(self._path(held))!r} cannot be read: {error}") from None
        folder = held.rpartition("/")[0]
        return self._archives[held], f"{folder}/" if folder else ""

    def _path(self, held: str) -> Path:
        return self.root / held if held else self.root


def _rgb(image: Any) -> Any:
    """In RGB, with the brightness of 16 bits brought to 8, and transparency left out."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        import numpy as np

        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _files(root: Path) -> Iterator[str]:
    """Names of all files, with slashes, sorted; hidden ones left out."""
    seen = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        if (place := os.path.realpath(folder)) in seen:  # a link to a folder that holds it
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not _hidden(name))
        start = Path(folder).relative_to(root).as_posix()
        for name in sorted(files):
            if not _hidden(name):
                yield name if start == "." else f"{start}/{name}"


def _hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
