"""COCO, Pascal VOC and YOLO folders, zipped or not, are read into the same thing."""

import pickle
import shutil
import zipfile

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import tv_tensors

from boxed import CAT, DOG, box, coco, image, picture, write
from whereformer import InputError
from whereformer.lab.detect.dataset import BoxedImages
from whereformer.lab.detect.load import load, load_files
from whereformer.lab.detect.tree import Tree

TRAIN = coco(
    [image(1), image(2)], [box(5, 1, category=7, area=120.5, iscrowd=0), box(6, 1, (0, 0, 40, 30), iscrowd=1)]
)
VALIDATION = coco([image(8)], [box(1, 8)])

LAYOUTS = {
    "coco": ("annotations/instances_train2017.json", "train2017", "annotations/instances_val2017.json", "val2017"),
    "roboflow": ("train/_annotations.coco.json", "train", "valid/_annotations.coco.json", "valid"),
    "one folder of images": ("annotations/train.json", "images", "annotations/val.json", "images"),
    "split images": ("train.json", "images/train", "val.json", "images/val"),
    "beside": ("training/labels.json", "training/data", "validation/labels.json", "validation/data"),
}


def laid_out(root, layout):
    train, images, validation, others = LAYOUTS[layout]
    for number in (1, 2):
        picture(root / images / f"{number}.jpg")
    picture(root / others / "8.jpg")
    return write(root, {train: TRAIN, validation: VALIDATION})


def zipped(folder, path, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(path.parent if folder.parent == path.parent else folder))
    return path


def check(data):
    assert data.train.names == ("cat", "dog")
    assert [(one.id, one.width, one.height) for one in data.train.pictures] == [(1, 40, 30), (2, 40, 30)]
    boxes = data.train.of(0)
    assert boxes.xywh.tolist() == [[10, 5, 20, 10], [0, 0, 40, 30]]
    assert boxes.labels.tolist() == [1, 0]
    assert boxes.area.tolist() == [120.5, 1200]
    assert boxes.crowd.tolist() == [False, True]
    assert len(data.train.of(1)) == 0
    assert [one.id for one in data.validation.pictures] == [8]
    assert data.train.tree.image(data.train.pictures[0].file, (40, 30)).mode == "RGB"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coco_is_found_wherever_it_lies(tmp_path, layout):
    data = load(laid_out(tmp_path, layout))
    assert (data.format, data.held_out) == ("COCO", False)
    check(data)
    assert [report.findings for report in data.reports] == [(), ()]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one folder of images"])
def test_images_of_two_sets_may_have_the_same_names(tmp_path, layout):
    train, images, validation, others = LAYOUTS[layout]
    for folder, width in ((images, 40), (others, 50)):
        picture(tmp_path / folder / "1.jpg", width)
    write(tmp_path, {train: coco([image(1)], []), validation: coco([image(1, width=50)], [])})
    data = load(tmp_path, broken="refuse")
    assert [one.file for one in data.train.pictures] == [f"{images}/1.jpg"]
    assert [one.file for one in data.validation.pictures] == [f"{others}/1.jpg"]


def test_zips_count_as_unpacked_where_they_lie(tmp_path):
    laid_out(tmp_path, "coco")
    for name in ("train2017", "val2017", "annotations"):
        zipped(tmp_path / name, tmp_path / f"{name}.zip")
        shutil.rmtree(tmp_path / name)
    check(load(tmp_path))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_data_may_be_one_zip(tmp_path, compression):
    root = laid_out(tmp_path / "all", "coco")
    check(load(zipped(root, tmp_path / "other.zip", compression)))


def test_an_explicit_pair_of_paths(tmp_path):
    root = laid_out(tmp_path / "all", "coco")
    archive = zipped(root / "train2017", tmp_path / "pictures.zip")
    annotations = root / "annotations"
    pairs = ((annotations / f"instances_{name}2017.json") for name in ("train", "val"))
    check(load_files((next(pairs), archive), (next(pairs), root / "val2017")))
    with pytest.raises(InputError, match="cannot be read"):
        load_files((annotations / "nothing.json", archive))


def test_one_set_is_split_and_the_same_way_each_time(tmp_path):
    for number in range(1, 9):
        picture(tmp_path / "images" / f"{number}.jpg")
    write(tmp_path, {"annotations.json": coco([image(n) for n in range(1, 9)], [box(n, n) for n in range(1, 9)])})
    first, second = load(tmp_path), load(tmp_path)
    assert first.held_out
    assert (len(first.train), len(first.validation)) == (6, 2)
    assert first.train.pictures == second.train.pictures
    assert {one.id for one in (*first.train.pictures, *first.validation.pictures)} == set(range(1, 9))
    for part in (first.train, first.validation):  # boxes went with their images
        assert [int(part.of(i).ids[0]) for i in range(len(part))] == [one.id for one in part.pictures]


def test_a_set_for_testing_stands_in_for_validation(tmp_path):
    picture(tmp_path / "train/1.jpg")
    picture(tmp_path / "test/8.jpg")
    write(tmp_path, {"train/a.json": coco([image(1)], [box(1, 1)]), "test/a.json": VALIDATION})
    assert [one.id for one in load(tmp_path).validation.pictures] == [8]


def test_a_set_for_validation_alone_is_split(tmp_path):
    for number in range(1, 5):
        picture(tmp_path / f"val2017/{number}.jpg")
    data = load(write(tmp_path, {"annotations/instances_val2017.json": coco([image(n) for n in range(1, 5)], [])}))
    assert (len(data.train), len(data.validation), data.held_out) == (3, 1, True)


def test_categories_have_the_numbers_of_the_training_set(tmp_path):
    for number in (1, 8):
        picture(tmp_path / f"images/{number}.jpg")
    others = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}, {"id": 5, "name": "cow"}]
    files = {
        "train.json": coco([image(1)], [box(1, 1)]),
        "val.json": coco([image(8)], [box(1, 8, category=1), box(2, 8, category=2)], others),
    }
    data = load(write(tmp_path, files))
    assert data.validation.of(0).labels.tolist() == [1, 0]
    assert [one["category_id"] for one in data.validation.to_coco()["annotations"]] == [7, 3]
    write(tmp_path, {"val.json": coco([image(8)], [box(1, 8, category=5)], others)})
    with pytest.raises(InputError, match="cow"):
        load(tmp_path)


VOC = """<annotation><filename>{name}.jpg</filename><size><width>40</width><height>30</height></size>
<object><name>dog</name><difficult>1</difficult><bndbox>{box}</bndbox><part><name>head</name></part></object>
</annotation>"""


def corners(*numbers):
    names = ("xmin", "ymin", "xmax", "ymax")
    return "".join(f"<{name}>{number}</{name}>" for name, number in zip(names, numbers, strict=True))


@pytest.mark.parametrize(("first", "written"), [(1, (11, 6, 30, 15)), (0, (10, 5, 30, 15))])
def test_pascal_voc(tmp_path, first, written):
    root = tmp_path / "VOCdevkit/VOC2012"
    for name in "abcd":
        picture(root / f"JPEGImages/{name}.jpg")
    edge = corners(first, 1, 40, 30)
    write(
        root,
        {
            "Annotations/a.xml": VOC.format(name="a", box=corners(*written)),
            "Annotations/b.xml": VOC.format(name="wrong", box=edge).replace("dog", "cat"),
            "Annotations/c.xml": VOC.format(name="c", box=edge),
            "Annotations/d.xml": VOC.format(name="d", box=edge),
            "ImageSets/Main/train.txt": "a\nb\n",
            "ImageSets/Main/val.txt": "c\n",
            "ImageSets/Main/trainval.txt": "a\nb\nc\n",
            "ImageSets/Main/cat_train.txt": "d 1\n",
        },
    )
    data = load(tmp_path)
    assert data.format == "Pascal VOC"
    assert [len(data.train), len(data.validation)] == [2, 1]
    assert data.train.names == ("cat", "dog")
    assert data.train.of(0).xywh.tolist() == [[10, 5, 20, 10]]
    assert data.train.of(1).xywh[0, 0] == 0
    assert data.train.boxes.labels.tolist() == [1, 0]
    assert data.reports[0].findings == ()


def test_pascal_voc_beside_its_images(tmp_path):
    for split in ("train", "valid"):
        picture(tmp_path / split / "a.jpg")
        write(tmp_path, {f"{split}/a.xml": VOC.format(name="a", box=corners(11, 6, 30, 15))})
    data = load(tmp_path)
    assert [one.file for one in (*data.train.pictures, *data.validation.pictures)] == [
        "train/a.jpg",
        "valid/a.jpg",
    ]


YOLO = {
    "by kind": ("images/train", "labels/train", "images/val", "labels/val"),
    "by set": ("train/images", "train/labels", "valid/images", "valid/labels"),
    "beside": ("train", "train", "val", "val"),
    "as the YAML file says": ("images/one", "labels/one", "images/two", "labels/two"),
}


@pytest.mark.parametrize("layout", YOLO)
def test_yolo(tmp_path, layout):
    images, labels, others, other_labels = YOLO[layout]
    for name in "ab":
        picture(tmp_path / images / f"{name}.jpg")
    picture(tmp_path / others / "c.jpg")
    yaml = f"path: ../datasets\ntrain: ./{images}\nval: [../{others}]\nnames: [cat, dog]\n"
    write(
        tmp_path,
        {
            "data.yaml": yaml,
            f"{labels}/a.txt": "1 0.5 0.5 0.5 0.2\n\n0 0 0 0.5 0 0.5 1\n",
            f"{other_labels}/c.txt": "0 0.5 0.5 1 1",
        },
    )
    data = load(tmp_path)
    assert data.format == "YOLO"
    assert data.train.names == ("cat", "dog")
    assert data.train.of(0).xywh.tolist() == [[10, 12, 20, 6], [0, 0, 20, 30]]
    assert data.train.of(0).labels.tolist() == [1, 0]
    assert len(data.train.of(1)) == 0  # an image without a text file has no objects
    assert data.validation.of(0).xywh.tolist() == [[0, 0, 40, 30]]


@pytest.mark.parametrize(
    ("files", "names"), [({"classes.txt": "cat\ndog\n"}, ("cat", "dog")), ({}, ("0", "1", "2"))]
)
def test_yolo_without_a_yaml_file(tmp_path, files, names):
    for number in range(4):
        picture(tmp_path / f"images/{number}.jpg")
        write(tmp_path, {f"labels/{number}.txt": f"{number % 2 if files else number % 3} 0.5 0.5 0.5 0.5"})
    data = load(write(tmp_path, files))
    assert data.train.names == names
    assert data.held_out


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(InputError, match="expected a folder or a zip file"):
        load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"nothing of COCO \(annotations/instances"):
        load(tmp_path)
    with pytest.raises(InputError, match="broken='maybe', expected one of"):
        load(tmp_path, broken="maybe")  # pyright: ignore[reportArgumentType]
    write(tmp_path / "a", {"annotations/train.json": '{"images": 3'})
    with pytest.raises(InputError, match=r"train.json' is not JSON"):
        load(tmp_path / "a")
    write(tmp_path / "b", {"annotations/train.json": '{"images": []}'})
    with pytest.raises(InputError, match="expected lists named images, annotations, categories"):
        load(tmp_path / "b")
    picture(write(tmp_path / "c", {"annotations/train.json": TRAIN}) / "pictures/other.jpg")
    with pytest.raises(InputError, match=r"images such as '1.jpg', but none of them"):
        load(tmp_path / "c")
    (tmp_path / "d.zip").write_bytes(b"PK no zip")
    with pytest.raises(InputError, match="cannot be read: File is not a zip"):
        load(tmp_path / "d.zip")
    picture(write(tmp_path / "e", {"data.yaml": "names: 3", "images/1.txt": "0 0 0 1 1"}) / "images/1.jpg")
    (tmp_path / "e/images/1.txt").rename(tmp_path / "e/1.txt")
    write(tmp_path / "e", {"labels/1.txt": "0 0 0 1 1"})
    with pytest.raises(InputError, match="names=3, expected a list"):
        load(tmp_path / "e")
    write(tmp_path / "e", {"data.yaml": "names: [cat]\nmade: 2020-13-45"})
    with pytest.raises(InputError, match=r"data\.yaml' is not YAML: month must be"):
        load(tmp_path / "e")


def test_yaml_files_of_others_are_not_in_the_way(tmp_path):
    for name in "ab":
        picture(tmp_path / "voc" / f"{name}.jpg")
        write(tmp_path, {f"voc/{name}.xml": VOC.format(name=name, box=corners(11, 6, 30, 15))})
        picture(tmp_path / "yolo/images" / f"{name}.jpg")
        write(tmp_path, {f"yolo/labels/{name}.txt": "0 0.5 0.5 0.5 0.5"})
    assert load(write(tmp_path / "voc", {"config.yaml": "model: !theirs [1]"})).format == "Pascal VOC"
    assert load(write(tmp_path / "yolo", {"data.yaml": "train: 5\nnames: [cat]"})).format == "YOLO"


def test_targets_are_what_torchvision_transforms(tmp_path):
    annotations = load(laid_out(tmp_path, "coco")).train
    found, target = BoxedImages(annotations)[0]
    assert isinstance(found, tv_tensors.Image)
    assert (found.shape, found.dtype) == ((3, 30, 40), torch.uint8)
    assert isinstance(target["boxes"], tv_tensors.BoundingBoxes)
    assert target["boxes"].tolist() == [[10, 5, 30, 15]]  # without the crowd
    assert target["boxes"].canvas_size == (30, 40)
    assert target["labels"].tolist() == [1]
    assert (target["image_id"].item(), target["orig_size"].tolist()) == (1, [30, 40])
    both = BoxedImages(annotations, crowds=True)[0][1]
    assert both["iscrowd"].tolist() == [0, 1]
    assert both["area"].tolist() == [120.5, 1200]
    empty = BoxedImages(annotations)[1][1]
    assert (empty["boxes"].shape, empty["labels"].dtype) == ((0, 4), torch.int64)


def test_worker_processes_read_a_zip_each_for_itself(tmp_path):
    """Forked ones would else share the place in one open file."""
    root = tmp_path / "all"
    numbers = range(1, 41)
    for number in numbers:
        picture(root / f"train/{number}.jpg", width=20 + number, quality=95)
    write(root, {"train.json": coco([image(n, width=20 + n) for n in numbers], [box(1, 1)])})
    annotations = load(zipped(root, tmp_path / "data.zip")).train
    annotations.tree.image(annotations.pictures[0].file, (annotations.pictures[0].width, 30))
    loader = DataLoader(BoxedImages(annotations), None, num_workers=2, multiprocessing_context="fork")
    widths = [found.shape[-1] for found, _ in loader]
    assert widths == [one.width for one in annotations.pictures]


def test_a_tree_goes_to_other_processes_without_open_files(tmp_path):
    root = laid_out(tmp_path / "all", "coco")
    tree = Tree(zipped(root, tmp_path / "data.zip"), on_image=lambda done, count: None)
    tree.headers(["all/train2017/1.jpg"])
    assert pickle.loads(pickle.dumps(tree)).image("all/train2017/1.jpg", (40, 30)).size == (40, 30)


def test_categories_and_boxes_go_back_to_coco(tmp_path):
    data = load(laid_out(tmp_path, "coco"))
    again = data.train.to_coco()
    assert again["categories"] == [CAT, DOG]
    assert again["annotations"] == [
        {"id": 5, "image_id": 1, "category_id": 7, "bbox": [10, 5, 20, 10], "area": 120.5, "iscrowd": 0},
        {"id": 6, "image_id": 1, "category_id": 3, "bbox": [0, 0, 40, 30], "area": 1200, "iscrowd": 1},
    ]
