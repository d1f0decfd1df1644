"""Broken annotations are reported with their ids and skipped, mended or refused, before anything is trained."""

import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from boxed import CAT, box, coco, image, picture, write
from whereformer import InputError
from whereformer.lab.detect.checks import Raw, examine
from whereformer.lab.detect.dataset import BoxedImages
from whereformer.lab.detect.load import load
from whereformer.lab.detect.outlines import outline
from whereformer.lab.detect.tree import Tree

NAN, INFINITY = float("nan"), float("inf")
FULL = {"size": [30, 40], "counts": [0, 1200]}


@pytest.fixture
def tree(tmp_path):
    picture(tmp_path / "1.jpg")
    picture(tmp_path / "2.png")
    return Tree(tmp_path)


def examined(tree, annotations, images=None, categories=(CAT,), **options):
    images = [image(1), image(2, "2.png")] if images is None else images
    return examine(Raw("the set", list(images), list(annotations), list(categories)), tree, **options)


SKIPPED = {
    "no width": ("no area", box(5, 1, (3, 3, 0, 4))),
    "negative": ("no area", box(5, 1, (3, 3, 4, -1))),
    "right of it": ("outside the image", box(5, 1, (40, 3, 4, 4))),
    "above it": ("outside the image", box(5, 1, (3, -9, 4, 4))),
    "nan": ("not a box", box(5, 1, (3, NAN, 4, 4))),
    "infinite": ("not a box", box(5, 1, (3, 3, INFINITY, 4))),
    "three numbers": ("not a box", box(5, 1, (3, 3, 4))),
    "words": ("not a box", box(5, 1, ("3", "3", "4", "4"))),
    "true": ("not a box", box(5, 1, (3, 3, True, 4))),
    "text": ("not a box", {**box(5, 1), "bbox": "3344"}),
    "no box": ("no box", {**box(5, 1), "bbox": None}),
    "no outline": ("no box", {**box(5, 1), "bbox": [], "segmentation": [[]]}),
    "odd outline": ("no box", {**box(5, 1), "bbox": [], "segmentation": [["x"]]}),
    "outline of objects": ("no box", {**box(5, 1), "bbox": [], "segmentation": [{"x": 1}]}),
    "outline beyond floats": ("no box", {**box(5, 1), "bbox": [], "segmentation": [[10**400, 1, 2, 3]]}),
    "runs that do not fill it": (
        "no box",
        {**box(5, 1), "bbox": [], "segmentation": {"size": [3, 3], "counts": [4]}},
    ),
    "category": ("unknown category", box(5, 1, category=4)),
    "category as text": ("unknown category", box(5, 1, category="3")),  # pyright: ignore[reportArgumentType]
    "category as list": ("unknown category", {**box(5, 1), "category_id": [3]}),
    "image": ("unknown image", box(5, 9)),
    "image as list": ("unknown image", {**box(5, 1), "image_id": [1]}),
    "no image": ("unknown image", {"id": 5, "category_id": 3, "bbox": [1, 1, 2, 2]}),
    "crowd": ("iscrowd", box(5, 1, iscrowd=2)),
    "crowd as text": ("iscrowd", box(5, 1, iscrowd="no")),
    "a number": ("not an annotation", 5),
    "again": ("repeated annotation id", box(1, 1)),
}


@pytest.mark.parametrize("what", SKIPPED)
def test_what_cannot_be_used_is_skipped_or_refused(tree, what):
    kind, annotation = SKIPPED[what]
    good = box(1, 1)
    annotations, report = examined(tree, [good, annotation])
    assert annotations.boxes.ids.tolist() == [1]
    (finding,) = report.findings
    assert (finding.kind, finding.fate) == (kind, "skipped")
    assert finding.where == f"annotation {annotation['id'] if isinstance(annotation, dict) else 'null'}"
    assert report.boxes == (2, 1)
    with pytest.raises(InputError, match=f"the set is refused: 1 x {kind}.*First: {finding.where}"):
        examined(tree, [good, annotation], broken="refuse")


MENDED = {
    "partly outside": ("partly outside", box(5, 1, (-10, 25, 20, 10)), [0, 25, 10, 5], 50),
    "larger area": ("partly outside", box(5, 1, (30, 20, 20, 20), area=300), [30, 20, 10, 10], 100),
    "polygon": ("no box", {**box(5, 1), "bbox": None, "segmentation": [[1, 2, 6, 2, 6, 9]]}, [1, 2, 5, 7], 35),
    "runs": ("no box", {**box(5, 1, iscrowd=1), "bbox": [], "segmentation": FULL}, [0, 0, 40, 30], 1200),
    "area nan": ("area", box(5, 1, area=NAN), [10, 5, 20, 10], 200),
    "area negative": ("area", box(5, 1, area=-3), [10, 5, 20, 10], 200),
    "mask of another size": (
        "mask",
        box(5, 1, iscrowd=1, segmentation={"size": [40, 30], "counts": [0, 1200]}),
        [10, 5, 20, 10],
        200,
    ),
    "mask that does not fill it": (
        "mask",
        box(5, 1, iscrowd=1, segmentation={"size": [30, 40], "counts": [0, 7]}),
        [10, 5, 20, 10],
        200,
    ),
    "no id": ("annotation without id", {**box(5, 1), "id": None}, [10, 5, 20, 10], 200),
    "id of another": ("repeated annotation id", box(1, 2), [10, 5, 20, 10], 200),
}


@pytest.mark.parametrize("what", MENDED)
def test_what_can_be_mended_is_and_it_is_said(tree, what):
    kind, annotation, xywh, area = MENDED[what]
    annotations, report = examined(tree, [box(1, 1, (1, 1, 2, 2)), annotation])
    assert [(one.kind, one.fate) for one in report.findings] == [(kind, "mended")]
    assert annotations.boxes.xywh.tolist()[1] == xywh
    assert annotations.boxes.area.tolist()[1] == area
    assert len(set(annotations.boxes.ids.tolist())) == 2
    with pytest.raises(InputError, match=f"refused: 1 x {kind}"):
        examined(tree, [box(1, 1, (1, 1, 2, 2)), annotation], broken="refuse")


def test_what_is_right_is_kept_to_the_last_digit(tree):
    rounding = box(1, 1, (20.01, 0, 20.12, 30.4), area=17.25)
    crowd = box(2, 1, iscrowd=1, segmentation={"size": [30, 40], "counts": "cdkW3"})
    annotations, report = examined(tree, [rounding, crowd], broken="refuse")
    assert report.findings == ()
    assert annotations.boxes.xywh.tolist()[0] == [20.01, 0, 20.12, 30.4]
    assert annotations.boxes.area.tolist() == [17.25, 200]
    assert (report.crowds, report.empty, report.per_category) == (1, 1, {"cat": 2})


def test_broken_images_are_found_before_training(tree):
    root = tree.root
    whole = picture(root / "whole.jpg", 64, 64).read_bytes()
    (root / "short.jpg").write_bytes(whole[: len(whole) // 2])
    whole = picture(root / "whole.png", 64, 64).read_bytes()
    (root / "short.png").write_bytes(whole[: len(whole) // 2])
    (root / "text.jpg").write_text("no image")
    (root / "empty.jpg").write_bytes(b"")
    (root / "padded.jpg").write_bytes(picture(root / "2.jpg").read_bytes() + b"\0" * 500)
    images = [
        *(image(1), image(2, "2.png"), image(10, "padded.jpg")),
        image(3, "short.jpg", 64, 64),
        image(4, "short.png", 64, 64),
        *(image(5, "text.jpg"), image(6, "empty.jpg"), image(7, "gone.jpg")),
        *(image(8, "2.png", 41, 30), image(1, "2.jpg"), {"id": "9", "file_name": "1.jpg"}, {"id": 11}, None),
    ]
    annotations, report = examined(Tree(root), [box(1, 1), box(2, 3), box(3, 8)], images)
    assert [one.id for one in annotations.pictures] == [1, 2, 10]
    assert {(one.where, one.kind) for one in report.findings} == {
        ("image 3", "unreadable image"),
        ("image 4", "unreadable image"),
        ("image 5", "unreadable image"),
        ("image 6", "unreadable image"),
        ("image 7", "missing image"),
        ("image 8", "image of another size"),
        ("image 1", "repeated image id"),
        ('image "9"', "image without id"),
        ("image 11", "missing image"),
        ("image null", "image without id"),
        ("annotation 2", "box of a skipped image"),
        ("annotation 3", "box of a skipped image"),
    }
    assert len([found for found, _ in BoxedImages(annotations)]) == 3
    sizes = next(one for one in report.findings if one.kind == "image of another size")
    assert str(sizes) == "image 8: '2.png' is 40 x 30 pixels, not 41 x 30"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_image_cut_short_is_found_in_a_zip(tmp_path, compression):
    whole = picture(tmp_path / "whole.jpg", 64, 64).read_bytes()
    with zipfile.ZipFile(tmp_path / "data.zip", "w", compression) as archive:
        archive.writestr("whole.jpg", whole)
        archive.writestr("short.jpg", whole[:-200])
    headers = Tree(tmp_path / "data.zip").headers(["whole.jpg", "short.jpg"])
    assert headers["whole.jpg"].size == (64, 64)  # pyright: ignore[reportAttributeAccessIssue]
    assert "truncated" in str(headers["short.jpg"])


def test_damage_inside_is_found_by_decoding(tmp_path):
    path = picture(tmp_path / "1.png", 64, 64)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 255
    path.write_bytes(damaged)
    assert not isinstance(Tree(tmp_path).headers(["1.png"])["1.png"], str)
    assert "broken data stream" in str(Tree(tmp_path, decode=True).headers(["1.png"])["1.png"])


@pytest.mark.parametrize("compression", [None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_only_headers_of_whole_images_are_read(tree, monkeypatch, compression):
    if compression is not None:
        with zipfile.ZipFile(tree.root / "data.zip", "w", compression) as archive:
            for name in tree.names:
                archive.write(tree.root / name, f"pictures/{name}")
        tree = Tree(tree.root / "data.zip")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert {header.size for header in tree.headers(tree.names).values()} == {(40, 30)}


def test_a_turned_camera(tmp_path):
    """A size as viewers show it means that boxes are so too; a size as it is stored, that they are not."""
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(tmp_path / "1.jpg", 40, 30, exif=exif)
    for size in ((40, 30), (30, 40)):
        annotations, report = examined(Tree(tmp_path), [], [image(1, None, *size)])
        assert report.findings == ()
        assert BoxedImages(annotations)[0][0].shape == (3, *size[::-1])
    annotations, _ = examined(Tree(tmp_path), [], [{"id": 1, "file_name": "1.jpg"}])
    assert (annotations.pictures[0].width, annotations.pictures[0].height) == (30, 40)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16", "1"])
def test_images_of_every_kind_become_rgb(tmp_path, mode):
    grey = np.full((30, 40), 200, dtype=np.uint8)
    if mode == "I;16":
        made = Image.fromarray(grey.astype(np.uint16) * 257)
    else:
        made = Image.fromarray(grey).convert("RGB").convert(mode)
    options = {"transparency": 0} if mode == "P" else {}
    made.save(tmp_path / ("1.tif" if mode == "CMYK" else "1.png"), **options)
    tree = Tree(tmp_path)
    (name,) = tree.names
    found = np.asarray(tree.image(name, (40, 30)))
    assert found.shape == (30, 40, 3)
    assert abs(int(found.astype(int).mean()) - (255 if mode == "1" else 200)) <= (100 if mode == "1" else 2)


def test_sizes_are_whole_numbers_however_the_file_writes_them(tree):
    (picture,) = examined(tree, [], [{**image(1), "width": 40.0, "height": 30.0}])[0].pictures
    assert (type(picture.width), type(picture.height)) == (int, int)


def test_file_names_from_other_systems(tree):
    images = [image(1, "C:\\pictures\\1.jpg"), image(2, "./2.png")]
    assert [one.file for one in examined(tree, [], images)[0].pictures] == ["1.jpg", "2.png"]


@pytest.mark.parametrize(
    ("categories", "match"),
    [
        ([], "no categories"),
        ([{"name": "cat"}], "whole number as its id"),
        ([CAT, {"id": 3, "name": "dog"}], "category 3 is both 'cat' and 'dog'"),
        ([CAT, {"id": 4, "name": "cat"}], "more than one category is called 'cat'"),
    ],
)
def test_categories_must_make_sense(tree, categories, match):
    with pytest.raises(InputError, match=match):
        examined(tree, [], categories=categories)


def test_no_image_left(tree):
    with pytest.raises(InputError, match=r"no image of 1 is left: image 1: no file 'x.jpg'"):
        examined(tree, [], [image(1, "x.jpg")])


def test_the_report_counts_and_shows_the_first_of_each_kind(tree):
    annotations = [box(n, 1, (1, 1, 0, 1)) for n in range(1, 8)] + [box(8, 1, (-5, 0, 9, 9)), box(9, 2)]
    _, report = examined(tree, annotations)
    lines = str(report).splitlines()
    assert lines[0] == "the set: 2 images, 2 of 9 boxes in 1 categories; 0 are crowds; 0 images hold none"
    assert lines[1] == "  no area: 7 skipped"
    assert lines[2] == "    annotation 1: [1, 1, 0, 1], on image 1 (40 x 30)"
    assert lines[7] == "    and 2 more"
    assert lines[8] == "  partly outside: 1 mended"
    said = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [one["where"] for one in said["findings"]["no area"]] == [f"annotation {n}" for n in range(1, 8)]
    assert said["boxes"] == {"found": 9, "left": 2, "crowds": 0}


def test_other_formats_are_checked_too_and_name_file_and_line(tmp_path):
    for name in "abcd":
        picture(tmp_path / f"images/{name}.jpg")
    lines = {"a": "0 0.5 0.5 0.5 0.5\n0 0.5 0.5 0 0.5\n7 0.5 0.5 0.5 0.5\n", "b": "0 0.5 0.5\nzero 1 1 1 1\n"}
    files = {f"labels/{name}.txt": text for name, text in lines.items()}
    (tmp_path / "images/c.jpg").write_bytes(b"")
    data = load(write(tmp_path, {"data.yaml": "names: [cat]", **files, "labels/d.txt": "0.5 0 0 nan 1"}))
    assert {(one.kind, one.where) for one in data.reports[0].findings} == {
        ("no area", "labels/a.txt, line 2"),
        ("unknown category", "labels/a.txt, line 3"),
        ("not a box", "labels/b.txt, line 1"),
        ("not a box", "labels/b.txt, line 2"),
        ("unreadable image", "image 3"),
        ("unknown category", "labels/d.txt, line 1"),
    }


def test_odd_numbers_of_classes_that_nothing_names(tmp_path):
    for name in "ab":
        picture(tmp_path / f"images/{name}.jpg")
    box = "0.5 0.5 0.5 0.5"
    data = load(
        write(tmp_path, {"labels/a.txt": f"1 {box}\n99999999999 {box}\n\u00b2 {box}\n", "labels/b.txt": ""})
    )
    assert data.train.names == ("0", "1")
    assert {(one.kind, one.where) for one in data.reports[0].findings} == {
        ("unknown category", "labels/a.txt, line 2"),
        ("not a box", "labels/a.txt, line 3"),
    }


def test_broken_xml_files(tmp_path):
    good = "<annotation><object><name>cat</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax>"
    good += "</bndbox></object></annotation>"
    for name in "abcdefh":
        picture(tmp_path / f"JPEGImages/{name}.jpg")
    files = {
        "a": good,
        "b": "<annotation>",
        "c": good.replace("<xmin>1", "<xmin>one"),
        "d": good.replace("<name>cat</name>", ""),
        "e": "<annotation><object><name>cat</name></object></annotation>",
        "f": good.replace("<annotation>", "<annotation><size><width>41</width><height>30</height></size>"),
        "g": good,
        "h": good.replace("<annotation>", "<annotation><size><width>\u00b2</width><height>30</height></size>"),
    }
    data = load(write(tmp_path, {f"Annotations/{name}.xml": text for name, text in files.items()}))
    assert {(one.kind, one.where) for one in data.reports[0].findings} == {
        ("unreadable annotation file", "Annotations/b.xml"),
        ("not a box", "Annotations/c.xml, object 1"),
        ("unknown category", "Annotations/d.xml, object 1"),
        ("no box", "Annotations/e.xml, object 1"),
        ("image of another size", "image 6"),
        ("box of a skipped image", "Annotations/f.xml, object 1"),
        ("missing image", "image 7"),
        ("box of a skipped image", "Annotations/g.xml, object 1"),
        ("image of another size", "image 8"),
        ("box of a skipped image", "Annotations/h.xml, object 1"),
    }


def test_an_image_that_is_gone_since_is_named(tmp_path):
    picture(tmp_path / "1.jpg")
    picture(tmp_path / "2.jpg")
    data = load(write(tmp_path, {"all.json": coco([image(1), image(2)], [box(1, 1)])}))
    first, second = (part.pictures[0].file for part in (data.train, data.validation))
    picture(tmp_path / first, 41, 30)
    (tmp_path / second).unlink()
    with pytest.raises(InputError, match=rf"image '{first}' is of size \(41, 30\), expected \(40, 30\)"):
        BoxedImages(data.train)[0]
    with pytest.raises(InputError, match=f"image '{second}' cannot be read: FileNotFoundError"):
        BoxedImages(data.validation)[0]


def test_boxes_around_run_lengths():
    generator = np.random.default_rng(0)
    for _ in range(200):
        height, width = generator.integers(1, 7, 2).tolist()
        mask = generator.random((height, width)) < generator.choice([0.1, 0.5, 0.9])
        flat = mask.T.ravel().tolist()
        counts, value = [0], False
        for pixel in flat:  # slowly
            if pixel != value:
                counts.append(0)
                value = pixel
            counts[-1] += 1
        rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
        expected = None
        if mask.any():
            top, left = rows[0], columns[0]
            expected = [left, top, columns[-1] - left + 1, rows[-1] - top + 1]
        assert outline({"size": [height, width], "counts": counts}) == expected
