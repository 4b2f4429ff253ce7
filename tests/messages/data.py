"""Messages of fastamp/data and fastamp/demo: datasets, images, loaders and samplers."""

import errno
import functools
import os
import re
import shutil
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from dataset_trees import TREES, mat, under, write
from messages import Recorder
from PIL import Image
from tiny import tiny_config
from torch.utils.data import DataLoader, TensorDataset
from video_set import write_video

from fastamp.config import get_cfg
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.build import build_dataset
from fastamp.data.cache import ImageCache
from fastamp.data.check import Report, check_dataset, write_clean
from fastamp.data.columns import encode_columns
from fastamp.data.contact_sheet import contact_sheet as contact_sheet_of_dataset
from fastamp.data.custom_loader import CustomTrainLoader
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.file_utils import list_files, read_lines
from fastamp.data.datasets.filename_dataset import FilenameDataset
from fastamp.data.datasets.items import Column, PackedItems
from fastamp.data.decode import read_image
from fastamp.data.group_sampler import GroupIdentitySampler
from fastamp.data.loader import explain_exhausted_resources, explain_lost_workers, worker_count
from fastamp.data.missing_images import check_files
from fastamp.data.samplers import NaiveIdentitySampler, SetReWeightSampler, build_sampler
from fastamp.data.split import hold_out
from fastamp.data.split_table import SplitOptions, split_table
from fastamp.data.training_images import exclude_rare_identities, training_items
from fastamp.data.wildlife_splits import draw_identities
from fastamp.demo import contact_sheet, generate_demo, image_attributes
from fastamp.demo.animals import generate_animals
from fastamp.demo.variants import generate_variant

SITES = ["fastamp/data", "fastamp/demo"]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(record.root / "home"))
        tables(record)
        columns(record)
        checks(record)
        folders(record)
        data_set_names(record)
        public_data_sets(record, patch)
        cuhk03(record, patch)
        demo(record, patch)
    user_data_sets(record)
    training_data(record)
    test_data(record)
    video(record)
    transforms(record)
    images(record)
    workers(record)
    cache(record)
    samplers(record)
    animal_splits(record)
    custom_loaders(record)


def tables(record):
    """Read invalid CSV datasets."""
    for name, text in {
        "header": "path,id,camid\na,1,1",
        "box_header": "path,pid,x0,y0\na,1,1,1",
        "twice": "path,pid,pid\na,1,1",
        "empty": "",
        "no_lines": "path,pid",
        "no_value": "path,pid\na,",
        "more_values": "path,pid\na,1,2",
        "split": "path,pid,split\na,1,trian",
        "box": "path,pid,x0,y0,x1,y1\na,1,5,0,5,9",
        "box_text": "path,pid,x0,y0,x1,y1\na,1,5,0,x,9",
        "control": "path,pid\n\x1b[31ma,1",
        "long_header": "path,pid," + "x" * 100_000,
        "bytes": b"\xff\xd8\xff\x00",
        "semicolons": "path;pid,camid\na;1,2",
        "junk": "path,pid,camid,shape\na,-1,1,x\nb,1,1,y\nc,1,2,y",
        "no_camera": "path,pid\na.png,1",
        "no_split": "path,pid,camid\n" + "".join(f"{n}.png,{n // 4},{n % 2}\n" for n in range(24)),
        "repeated": "path,pid,split\na.png,1,train\nb.png,1,train\na.png,1,query",
        "invalid_lines": "path,pid,split\na.png,,train\nb.png,1,trian",
        "test_split": "path,pid,split\n" + "".join(f"{n}.png,{n},test\n" for n in range(20)),
        "quote": 'path,pid\na.png,"Jo "Al" Ray"',
        "box_xywh": "path,pid,x,y,w,h\na,1,5,5,0,9",
        "box_xywh_text": "path,pid,x,y,w,h\na,1,5,5,wide,9",
        "box_theta": "path,pid,x,y,w,h,theta\na,1,5,5,9,9,0.1",
        "decimal_comma": "path;pid;x0;y0;x1;y1\na;1;5,5;0;9;9",
    }.items():
        file = record.file(f"{name}.csv", text)
        with record(f"DATASETS.NAMES csv:{file}"):
            build_dataset(f"csv:{file}")


def columns(record):
    """Read columns of CSV files and encode columns."""
    header = "path,pid,cam_id,split,features"
    with record("a CSV file with columns whose names are reserved or similar to others"):
        build_dataset(f"csv:{record.file('typo.csv', header + chr(10) + '0.png,1,2,train,5')}")
    with record("a column with a reserved name"):
        PackedItems.of([ImageItem("a.jpg", 1, 0, columns={"targets": 1})])
    encode = functools.partial(encode_columns, title="Market1501", training=True)
    with record("DATASETS.CATEGORIES of a column that does not exist"):
        encode({"modality": Column.pack(["visible"])}, {"modalty": []})
    with record("DATASETS.CATEGORIES without a value of the training set"):
        encode({"modality": Column.pack(["visible", "radar"])}, {"modality": ["visible", "infrared"]})
    with record("negative integers and missing values"):
        encode({"side": Column.pack([-2, None])})
    with record("floats that are equal in float32"):
        encode({"time": Column.pack([1600000000.25, 1600000001.5])})


def checks(record):
    """Check datasets and write CSV files and contact sheets."""
    lines = ("a.png,1,query", "b.png,\u4e2d,train", "empty.png,2,train", "text.png,2,train")
    file = record.file("unreadable.csv", "\n".join(["path,pid,split", *lines]))
    record.file("empty.png")
    record.file("text.png", "not an image")
    dataset = build_dataset(f"csv:{file}")
    windows = build_dataset("csv:" + str(record.file("windows.csv", "path,pid,split\nimages\\a.png,1,train")))
    with record("check_files of a path with a backslash"):
        check_files(windows.train, [windows])
    with record("check_files of missing and empty files"):
        check_files(dataset.train, [dataset])
    with record("write_clean of unreadable images"):
        write_clean(dataset, check_dataset(dataset), record.root / "clean.csv")
    one_camera = record.file(
        "one_camera.csv", "\n".join(["path,pid,camid", *(f"{n}.png,{n // 2},gate" for n in range(8))])
    )
    with record("write_clean of test images of one camera"):
        write_clean(build_dataset(f"csv:{one_camera}"), Report([]), record.root / "no_cameras.csv")
    with record("contact_sheet without a font"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.utils.fonts._font_files", lambda: ())
        contact_sheet_of_dataset(dataset, record.root / "sheet.png")


def folders(record):
    """Read invalid folder datasets."""
    people = record.root / "people"
    for identity in range(10):
        for camera in range(3):
            record.file(f"people/person {identity}/cam{camera}_0.jpg")
    record.file("parts/train/person 0/a.jpg")
    record.file("no_images/person/notes.txt")
    for name in ("loose.jpg", *(f"person {n}/{n}.jpg" for n in range(4)), "empty/notes.txt"):
        record.file(f"mixed/{name}")
    record.file("file")
    for folder, values in (
        (people, {"CAMERA": r"c(\d"}),
        (people, {"CAMERA": "cam"}),
        (people, {"CAMERA": r"camera(\d)"}),
        (people, {"TEST_FRACTION": "0.95"}),
        (people, {"TEST_FRACTION": "0.5"}),
        (record.root / "parts", {}),
        (record.root / "no_images", {}),
        (record.root / "mixed", {"TEST_FRACTION": "0"}),
        (record.root / "file", {}),
        (record.root / "nowhere", {}),
    ):
        words = [word for key, value in values.items() for word in (f"DATASETS.FOLDER.{key}", value)]
        with record(f"DATASETS.NAMES folder:{folder} {' '.join(words)}"):
            cfg = get_cfg()
            cfg.merge_from_list(words)
            build_dataset(f"folder:{folder}", cfg)


def data_set_names(record):
    """Use unknown names in DATASETS.NAMES."""
    for name in ("csv:", "csv:mine.csv", "folder:mine", "/data/mine.csv", "data/mine", "csv:a.csv,csv:b.csv",
                 "cvs:mine", "Market", 5):  # fmt: skip
        with record(f"DATASETS.NAMES {name}"), pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTAMP_DATASETS", str(record.root / "empty"))
            build_dataset(name)


# Files of public datasets with a fault, and the config that reads them.
FAULTS = {
    "Market1501": [("Market-1501-v15.09.15", ["bounding_box_train/2_c1.jpg"])],
    "MSMT17": [("MSMT17_V1", {"list_train.txt": "0000/0000_000.jpg 0\n"}), ("MSMT17_V1", {"list_train.txt": "a b c\n"}),
               ("MSMT17_V1", {"list_train.txt": ""}), ("MSMT17_V1", {"list_train.txt": "0000/0000_000_09_x.jpg 0\n"})],
    "VehicleID": [("vehicleid", {}), ("vehicleid", {"train_test_split/train_list.txt": "one 7\n"}),
                  ("vehicleid", {"train_test_split/train_list.txt": "0000001 seven\n"}),
                  ("vehicleid", {"train_test_split/train_list.txt": "0000999 7\n"})],
    "VeRiWild": [("VERI-Wild", {"train_test_split/train_list.txt": "00001.jpg\n"}),
                 ("VERI-Wild", {"train_test_split/train_list.txt": "00001/000077.jpg\n"})],
    "AirportALERT": [("AirportALERT", {"filepath.txt": "cam4/11001/a.jpg\n"}),
                     ("AirportALERT", {"filepath.txt": "a.jpg\n"}),
                     ("AirportALERT", {"filepath.txt": "cam4\\1\\a.jpg\n"}), ("AirportALERT", {})],
    "SenseReID": [("SenseReID", {})],
    "VIPeR": [("VIPeR", {})],
    "CAVIARa": [("CAVIARa", ["a.jpg", "b.jpg"])],
    "SYSUMM01": [("SYSU-MM01", {"exp/test_id.txt": "3,x"}), ("SYSU-MM01", {"exp/test_id.txt": "3,9"})],
    "RegDB": [("RegDB", {"idx/test_visible_1.txt": "male_front_v_00001_3.bmp 0\n"}),
              ("RegDB", {"idx/test_visible_1.txt": "Visible/3/a.bmp 0\nVisible/3/b.bmp 1\n"})],
    "LLCM": [("LLCM", {"idx/train_vis.txt": "vis/0001/x.jpg 0\n", "vis/0001/x.jpg": ""})],
    "LTCC": [("LTCC_ReID", ["query/005__c2_1.png"])],
    "LaST": [("last", ["train/000001/000001_0003_.jpg"])],
    "SOP": [("Stanford_Online_Products", {"Ebay_test.txt": "header\n3 x 2 a.JPG\n"}),
            ("Stanford_Online_Products", {"Ebay_test.txt": "header\n"})],
    "InShop": [("InShop", {"Eval/list_eval_partition.txt": "1\nx\nimg/a/b/c.jpg id_1 trian\n"}),
               ("InShop", {"Eval/list_eval_partition.txt": "1\nx\nimg/a/b/c.jpg id_1 query\n"})],
    "CUB200": [("CUB_200_2011", {"image_class_labels.txt": "1 100\n"}),
               ("CUB_200_2011", {"images.txt": "1 100.Bird/a.jpg\n"})],
    "DeepChange": [("DeepChangeDataset", {"test-set-query-bbox.txt": "P2_C1_1_01.jpg\n"})],
    "MARS": [("mars/info", {"tracks_train_info.mat": mat(track_train_info=[[1, 9, 1, 1]])}),
             ("mars/info", {"query_IDX.mat": mat(query_IDX=[[0]])}), ("mars/info", {"query_IDX.mat": "text"})],
    "CCVID": [("CCVID", {"train.txt": "session1/001_01 001\n"})],
    "DukeMTMCVideo": [("dukemtmc-vidreid/DukeMTMC-VideoReID", ["train/0001/0000/0000.jpg"])],
    "iLIDSVID": [("ilids-vid/train-test people splits", {"train_test_splits_ilidsvid.mat": mat(ls_set=[[9]])})],
    "PRID2011": [("prid2011", {"splits_prid2011.json": text}) for text in (
        "{", '[{"train": ["x"], "test": []}]', '[{"train": ["person_0001"], "test": []}]')],
}  # fmt: skip
MARKET_VIEWS = "/home/VeRi/image_train/0002_c002_00030600_0.jpg 12 -1 3"


def public_data_sets(record, patch):
    """Read public datasets with a missing, incomplete or differently organized folder."""

    def build(title, name, files, *opts):
        root = record.root / "public/root"
        shutil.rmtree(root, ignore_errors=True)
        write(root, files)
        patch.setenv("FASTAMP_DATASETS", str(root))
        with record(f"DATASETS.NAMES {name}: {title}"):
            cfg = get_cfg()
            cfg.merge_from_list(list(opts))
            dataset = build_dataset(name, cfg)
            len(dataset.train), len(dataset.query), len(dataset.gallery)

    for name in TREES:
        build("no folder", name, {})
    for name, faults in FAULTS.items():
        files = TREES[name][0]
        for folder, wrong in faults:
            given = dict(wrong) if isinstance(wrong, Mapping) else dict.fromkeys(wrong, "")
            shown = {path: "..." if isinstance(content, bytes) else content for path, content in given.items()}
            text = ", ".join(f"{path} {content!r}" for path, content in shown.items()) or "complete"
            build(text, name, files | under(folder, given))
    market, views = TREES["Market1501"][0], TREES["VeRi"][0]
    build("another folder name", "Market1501", {f"Market1501/{path}": "" for path in market})
    build("empty folders", "Market1501", {"Market-1501-v15.09.15/bounding_box_train/notes.txt": ""}
          | {path: text for path, text in market.items() if "train" not in path})  # fmt: skip
    build("other names", "Market1501", {"Market-1501-v15.09.15/bounding_box_train/a.jpg": ""}
          | {path: text for path, text in market.items() if "train" not in path})  # fmt: skip
    build("camera 0", "Market1501", market | {"Market-1501-v15.09.15/bounding_box_train/0002_c0s1_000451_03.jpg": ""})
    build("distractors", "Market1501", market | {"Market-1501-v15.09.15/images/0_c1s1_000451_03.jpg": ""},
          "DATASETS.MARKET1501_500K", "True")  # fmt: skip
    build("split 10", "VIPeR", TREES["VIPeR"][0], "DATASETS.VIPER.SPLIT", "10")
    build("a list of an image that does not exist", "AGReIDv2",
          TREES["AGReIDv2"][0] | {"AG-ReID.v2/exp1.txt": "query/P0001T04041A1C0F99.jpg\n"},
          "DATASETS.AGREIDV2.SPLIT", "exp1")  # fmt: skip
    build("no image of cameras 2 and 3", "VCClothesSC",
          {path: text for path, text in TREES["VCClothes"][0].items() if "query" not in path}
          | {"VC-Clothes/query/0002-01-01-01.jpg": ""})  # fmt: skip
    build("no infrared image", "LLCM",
          {path: text for path, text in TREES["LLCM"][0].items() if "test_nir" not in path}
          | {"LLCM/test_nir/cam1/0002/notes.txt": ""})  # fmt: skip
    build("split 9", "PRID2011", TREES["PRID2011"][0], "DATASETS.PRID2011.SPLIT", "9")
    build("views", "VeRi", views, "DATASETS.VERI.VIEWS", "True")
    for title, train, test in (
        ("a view is missing", MARKET_VIEWS, "x/image_query/0005_c001_1_0.jpg 12 -1 7"),
        ("a line without a view", MARKET_VIEWS, "x/image_query/0005_c001_1_0.jpg 12 -1 7.5"),
    ):
        lists = {"veri/keypoint_train.txt": train, "veri/keypoint_test.txt": test}
        build(title, "VeRi", views | lists, "DATASETS.VERI.VIEWS", "True")


def cuhk03(record, patch):
    """Read CUHK03 from a damaged folder."""
    for title, files in {
        "images without splits": {"images_detected/1_001_1_01.png": ""},
        "splits that are not JSON": {"images_detected/1_001_1_01.png": "", "splits_new_detected.json": "{"},
        "an empty list of splits": {"images_detected/1_001_1_01.png": "", "splits_new_detected.json": "[]"},
        "splits without images": {"images_detected/1_001_1_01.png": "", "splits_new_detected.json": "[1]"},
        "split 3 of 1": {"images_detected/1_001_1_01.png": "", "splits_new_detected.json": "[1]"},
        "images without splits, with .mat files": {
            "images_detected/1_001_1_01.png": "",
            "cuhk03_release/cuhk-03.mat": "x",
            "cuhk03_new_protocol_config_detected.mat": "x",
        },
        "a damaged cuhk-03.mat": {
            "cuhk03_release/cuhk-03.mat": "<html>",
            "cuhk03_new_protocol_config_detected.mat": "<html>",
            "cuhk03_new_protocol_config_labeled.mat": "<html>",
        },
    }.items():
        root = record.root / "roots" / title.replace(" ", "_").replace(",", "")
        write(root, under("cuhk03", files))
        patch.setenv("FASTAMP_DATASETS", str(root))
        with record(f"DATASETS.NAMES CUHK03: {title}"):
            cfg = get_cfg()
            cfg.merge_from_list(["DATASETS.CUHK03.SPLIT", "3"] if title.startswith("split 3") else [])
            build_dataset("CUHK03", cfg)
    with record("DATASETS.NAMES CUHK03: h5py is not installed"), patch.context() as without:
        without.setitem(__import__("sys").modules, "h5py", None)
        build_dataset("CUHK03")


class UserDataset(ImageDataset):
    """Dataset in FastReID's style; the base class checks the files."""

    def __init__(self, root="datasets"):
        self.check_before_run([f"{root}/nowhere"])


def user_data_sets(record):
    """Read invalid datasets that a user has registered."""
    with record("check_before_run of a missing folder"):
        UserDataset(str(record.root))
    with record("a class with left_out"):

        class Old(FilenameDataset):
            left_out = (0,)

    with record("VIPeR(split=10)"):
        root = write(record.root / "viper", TREES["VIPeR"][0])
        DATASET_REGISTRY.get("VIPeR")(str(root), split=10)
    for title, call in {
        "list_files of a folder without images": lambda: list_files("Mine", record.root / "no_images/person", ".jpg"),
        "list_files of a missing folder": lambda: list_files("Mine", record.root / "nowhere", ".jpg"),
        "read_lines of a missing file": lambda: read_lines("Mine", record.root / "nowhere.txt"),
    }.items():
        with record(title):
            call()
    with record("NaiveIdentitySampler(num_instances=0)"):
        NaiveIdentitySampler(labels=[0, 0, 1, 1], camids=[0, 1, 0, 1], batch_size=4, num_instances=0, seed=0)


def demo(record, patch):
    """Generate the demo dataset with invalid options."""
    small = {"train_identities": 2, "test_identities": 2, "images_per_identity": 4, "distractors": 1, "cameras": 2,
             "image_size": (64, 32), "workers": 1}  # fmt: skip
    folder = record.root / "demo"
    generate_demo(folder, **small)
    record.file("photos/mine.jpg")
    for title, call in {
        "generate_demo over a folder of photos": lambda: generate_demo(record.root / "photos", **small),
        "generate_demo with another seed": lambda: generate_demo(folder, **small, seed=3),
        "generate_demo of no identity": lambda: generate_demo(record.root / "x", **{**small, "train_identities": 0}),
        "image_attributes of a folder of photos": lambda: image_attributes(record.root / "photos"),
        "generate_animals over a folder of photos": lambda: generate_animals(record.root / "photos"),
        "generate_variant of an unknown variant": lambda: generate_variant("thermal", record.root / "x"),
        "generate_variant of no identity": lambda: generate_variant("video", record.root / "x", train_identities=0),
        "generate_animals of one animal": lambda: generate_animals(record.root / "x", individuals=1),
        "contact_sheet of split gallery": lambda: contact_sheet(folder, record.root / "sheet.png", split="gallery"),
        "contact_sheet of a folder of photos": lambda: contact_sheet(record.root / "photos", record.root / "s.png"),
    }.items():
        with record(title):
            call()
    blocked = record.file("blocked")
    patch.setenv("FASTAMP_DATASETS", str(blocked))
    with record(f"DATASETS.NAMES Demo, FASTAMP_DATASETS {blocked}"):
        build_dataset("Demo")
    for name in ("DemoAnimals", "DemoInfrared"):
        with record(f"DATASETS.NAMES {name}, FASTAMP_DATASETS {blocked}"):
            build_dataset(name)


def training_data(record):
    """Build training loaders that cannot form a batch."""
    for opts in (
        ("DATASETS.NAMES", "()"),
        ("SOLVER.IMS_PER_BATCH", "400"),
        ("SOLVER.IMS_PER_BATCH", "6"),
        ("SOLVER.IMS_PER_BATCH", "80"),
        ("DATALOADER.SAMPLER_TRAIN", "RandomSampler"),
        ("DATALOADER.SAMPLER_TRAIN", "SetReWeightSampler", "DATALOADER.SET_WEIGHT", "(1, 2)"),
        ("MODEL.HEADS.NUM_CLASSES", "7"),
        ("MODEL.BACKBONE.SIE_CAMERAS", "2"),
        ("MODEL.BACKBONE.SIE_CAMERAS", "6", "MODEL.BACKBONE.SIE_VIEWS", "8"),
        ("DATALOADER.CACHE", "ram", "INPUT.SIZE_TRAIN", "(0,)", "INPUT.CROP", "True"),
        ("DATALOADER.NUM_WORKERS", "9999"),
        ("DATASETS.MIN_IMAGES", "99"),
        ("DATASETS.NAMES", "('Demo', 'Demo')"),
        ("INPUT.SIZE_TRAIN", "(0,)", "INPUT.PADDING", "False"),
    ):
        with record(f"training data {' '.join(opts)}"):
            cfg = tiny_config(record.root / "run", *opts)
            loader = build_reid_train_loader(cfg)
            if cfg.MODEL.HEADS.NUM_CLASSES:
                from fastamp.data.build import with_num_classes

                with_num_classes(cfg, loader.dataset.num_classes)
            if "SIZE_TRAIN" in str(opts):
                next(iter(loader))
    with record("TrainLoader.start_iter = 3"):
        build_reid_train_loader(tiny_config(record.root / "run")).start_iter = 3
    with record("a batch of 9 for 2 ranks"):
        build_reid_train_loader(tiny_config(record.root / "run", "SOLVER.IMS_PER_BATCH", "9"), rank=0, world_size=2)
    one = record.file("one.csv", "path,pid,camid\n" + "".join(f"{number}.jpg,1,1\n" for number in range(20)))
    Image.new("RGB", (32, 64)).save(record.root / "there.png")
    two = record.file("two.csv", "path,pid,camid\n" + "".join(f"there.png,{number},1\n" for number in range(4)))
    same = record.file("same.csv", "path,pid,camid\n" + "".join(f"there.png,{number},1\n" for number in range(4)))
    single = record.file("single.csv", "path,pid,camid\n" + "".join("there.png,1,1\n" for _ in range(4)))
    tests = record.file("tests.csv", "path,pid,split\nthere.png,1,query\nthere.png,1,gallery\n")
    for names, *opts in (
        (f"csv:{one}",),
        (f"csv:{one}", "DATASETS.COMBINEALL", "True"),
        (f"csv:{tests}",),
        (f"('csv:{two}', 'csv:{same}')", "SOLVER.IMS_PER_BATCH", "4", "DATALOADER.NUM_INSTANCE", "1"),
        (f"csv:{single}", "SOLVER.IMS_PER_BATCH", "4"),
        (f"('Demo', 'csv:{two}')", "MODEL.BACKBONE.SIE_CAMERAS", "4"),
    ):
        with record(f"DATASETS.NAMES {names} {' '.join(opts)}"):
            build_reid_train_loader(tiny_config(record.root / "run", "DATASETS.NAMES", names, *opts))
    missing = record.file("missing.csv", "path,pid,camid\n" + "".join(f"{n}.jpg,{n % 8},1\n" for n in range(32)))
    for policy in ("error", "skip"):
        with record(f"DATASETS.NAMES csv:{missing} DATALOADER.ON_CORRUPT {policy}"):
            opts = ("DATASETS.NAMES", f"csv:{missing}", "DATALOADER.ON_CORRUPT", policy)
            next(iter(build_reid_train_loader(tiny_config(record.root / "run", *opts))))
    for number in range(8):
        Image.new("RGB", (32, 64)).save(record.root / f"good{number}.png")
    record.file("bad.png", (record.root / "good1.png").read_bytes()[:60])
    lines = [f"{'bad.png' if n == 0 else f'good{n}.png'},{n % 4},1" for n in range(8)]
    corrupt = record.file("corrupt.csv", "\n".join(["path,pid,camid", *lines]))
    for policy in ("error", "skip"):
        with record(f"DATASETS.NAMES csv:{corrupt} DATALOADER.ON_CORRUPT {policy}"):
            opts = ("DATASETS.NAMES", f"csv:{corrupt}", "DATALOADER.ON_CORRUPT", policy, "SOLVER.IMS_PER_BATCH", "8",
                    "DATALOADER.SAMPLER_TRAIN", "TrainingSampler", "DATASETS.FOLDER.TEST_FRACTION", "0")  # fmt: skip
            next(iter(build_reid_train_loader(tiny_config(record.root / "run", *opts))))

    class One(ImageDataset):
        dataset_name = "same"

    class Two(One):
        pass

    items = [(f"{number}.jpg", f"same_{number}", "same_1") for number in range(2)]
    with record("two classes with one dataset_name"):
        training_items([One(items, [], []), Two(items, [], [])])


def test_data(record):
    """Build loaders of test sets that cannot be evaluated."""
    cfg = tiny_config(record.root / "run")
    train_only = record.file("train_only.csv", "path,pid\na.png,1")
    with record(f"DATASETS.TESTS csv:{train_only}"):
        build_reid_test_loader(cfg, f"csv:{train_only}")
    with record("more processes than test images"):
        build_reid_test_loader(cfg, "Demo", rank=0, world_size=1000)
    with record("DATASETS.TESTS Demo, a backbone of other cameras"):
        cfg = tiny_config(record.root / "run", "MODEL.BACKBONE.SIE_CAMERAS", "3", "DATASETS.NAMES", "Market1501")
        build_reid_test_loader(cfg, "Demo")
    with record("a protocol without published results"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DATASET_REGISTRY.get("Demo"), "protocols", ("cloth_changing", "same_clothes"))
        build_reid_test_loader(tiny_config(record.root / "run"), "Demo")
    with record("INPUT.SIZE_TEST (0,)"):
        opts = ("INPUT.SIZE_TEST", "(0,)", "INPUT.CROP", "False")
        build_reid_test_loader(tiny_config(record.root / "run", *opts), "Demo")
    for key in ("CHECK", "x"):
        record.fastamp("check-data", key)
    record.fastamp("check-data", f"csv:{record.root / 'corrupt.csv'}", output=True)
    with record("query identities as text"):

        class Named(ImageDataset):
            pass

        from fastamp.data.dataset import ReidDataset

        dataset = Named([], [ImageItem("a.jpg", "seven", "one")], [])
        ReidDataset(dataset.query, None, relabel=False)


def video(record):
    """Build loaders of videos with an invalid column tracklet."""
    (record.root / "video").mkdir()
    file = write_video(record.root / "video")
    text = file.read_text()
    numbers = record.file("video/numbers.csv")
    people = record.file("video/people.csv", "\n".join(re.sub(",[0-9]+(_[0-9]+_[0-9]+)$", r",x\1", line)
                                                       for line in text.splitlines()))  # fmt: skip
    cameras = record.file("video/cameras.csv", "\n".join(re.sub("_[0-9]+(_[0-9]+)$", r"_x\1", line)
                                                         for line in text.splitlines()))  # fmt: skip
    options = ("DATALOADER.SAMPLER_TRAIN", "TrackletSampler", "DATALOADER.NUM_INSTANCE", "2")
    for name, opts in (
        (f"csv:{file}", ("SOLVER.IMS_PER_BATCH", "20")),
        (f"csv:{file}", ("SOLVER.IMS_PER_BATCH", "64")),
        (f"csv:{people}", ()),
        (f"csv:{cameras}", ()),
        ("Demo", ()),
    ):
        with record(f"TrackletSampler, DATASETS.NAMES {name} {' '.join(opts)}"):
            build_reid_train_loader(tiny_config(record.root / "run", "DATASETS.NAMES", name, *options, *opts))
    with record("more processes than tracklets"):
        build_reid_test_loader(tiny_config(record.root / "run"), f"csv:{file}", rank=0, world_size=20)
    with record("a column tracklet with decimals"):
        lines = ["path,pid,camid,split,tracklet", *(f"0_{n}_0_0.png,0,{n},{each},0.5" for n, each in
                 enumerate(("query", "gallery")))]  # fmt: skip
        numbers.write_text("\n".join(lines))
        build_reid_test_loader(tiny_config(record.root / "run"), f"csv:{numbers}")


def transforms(record):
    """Build transforms from incompatible INPUT keys."""
    from fastamp.data.transforms import build_transforms
    from fastamp.data.transforms.build import TRANSFORM_REGISTRY

    for opts in (
        ("INPUT.BLUR.ENABLED", "True", "INPUT.BLUR.KERNEL_SIZE", "4"),
        ("INPUT.BLUR.ENABLED", "True", "INPUT.BLUR.SIGMA", "(2, 1)"),
        ("INPUT.BLUR.ENABLED", "True", "INPUT.BLUR.KERNEL_SIZE", "201"),
        ("INPUT.PADDING.SIZE", "90", "INPUT.PADDING.MODE", "reflect"),
        ("INPUT.CROP.ENABLED", "True", "INPUT.CROP.SCALE", "(1, 0.5)"),
        ("INPUT.CROP.ENABLED", "True", "INPUT.CROP.SIZE", "(128, 64)"),
        ("INPUT.AUGMIX.ENABLED", "True", "INPUT.CHANNELS", "4"),
        ("INPUT.AUGMIX.ENABLED", "True", "INPUT.AUGMIX.PROB", "0"),
        ("INPUT.AUTOAUG.ENABLED", "True", "INPUT.AUTOAUG.PROB", "0"),
        ("INPUT.REA.VALUE", "(1, 2)"),
    ):
        with record(f"transforms {' '.join(opts)}"):
            build_transforms(tiny_config(record.root / "run", *opts), is_train=True)
    with record("test images smaller than INPUT.CROP.SIZE"):
        opts = ("INPUT.CROP.ENABLED", "True", "INPUT.CROP.SIZE", "(128, 64)")
        build_transforms(tiny_config(record.root / "run", *opts), is_train=False)
    with record("images of two sizes in a batch"):
        opts = ("INPUT.SIZE_TEST", "(32,)")
        transforms = build_transforms(tiny_config(record.root / "run", *opts), is_train=False)
        transforms.stack([torch.zeros(3, 32, 64), torch.zeros(3, 32, 65)])
    with record("a transform without a key ENABLED"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRANSFORM_REGISTRY._components, "MINE", type("Mine", (), {"before": ""}))
        build_transforms(tiny_config(record.root / "run"), is_train=True)


def images(record):
    """Decode files that are not images, and invalid boxes."""
    Image.new("RGB", (32, 64)).save(record.root / "image.jpg")
    content = (record.root / "image.jpg").read_bytes()
    record.file("cut.jpg", content[:100])
    record.file("empty.jpg")
    record.file("text.jpg", "no image")
    Image.new("F", (32, 64)).save(record.root / "floats.tiff")
    large = record.root / "large.bmp"
    Image.new("1", (32, 64)).save(large)
    path = record.root / "image.jpg"
    for name in ("cut.jpg", "empty.jpg", "text.jpg", "floats.tiff", "nowhere.jpg", "\0.jpg"):
        with record(f"read_image {name!r}"):
            read_image(str(record.root / name))
    with record("read_image of a folder"):
        read_image(str(record.root))
    with record("read_image with max_pixels 100"):
        read_image(str(path), max_pixels=100)
    with record("read_image with a box beyond the image"):
        read_image(str(path), box=(5, 6, 61, 38))
    with record("read_image above the limit of Pillow"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        read_image(str(large), channels=4)


def workers(record):
    """Simulate killed workers and exhausted resources."""
    for text in ("Killed.", "Bus error. It is possible", "Segmentation fault."):
        error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
        error.__cause__ = RuntimeError(f"DataLoader worker (pid 7) is killed by signal: {text} ")
        with record(f"a worker is killed: {text}"), explain_lost_workers():
            raise error
    with record("the connection to a worker breaks"), explain_lost_workers(fetching=True):
        raise EOFError
    for error in (
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("unable to mmap 100 bytes from file </torch_1>: Cannot allocate memory (12)"),
    ):
        with record(f"loading fails: {error}"), explain_exhausted_resources():
            raise error
    worker_count("DATALOADER.NUM_WORKERS", 0)


def cache(record):
    """Build image caches that fail or print a warning."""
    items = []
    for number in range(3):
        Image.fromarray(np.zeros((8, 4, 3), np.uint8)).save(record.root / f"small{number}.png")
        items.append(ImageItem(str(record.root / f"small{number}.png"), 1, 1))

    def read(index):
        return read_image(items[index].path)

    read.items, read.key = items, "key"
    file = record.file("no_folder")
    folder = str(record.root / "cache")
    with record("DATALOADER.CACHE disk"):
        ImageCache(items, (3, 8, 4), read, where="disk", folder=folder)
    with record("DATALOADER.CACHE_DIR is a file"):
        ImageCache(items, (3, 8, 4), read, where="disk", folder=str(file))
    with record("DATALOADER.CACHE disk, full"), pytest.MonkeyPatch.context() as patch:

        def full(number, start, length):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "posix_fallocate", full, raising=False)
        ImageCache(items[:2], (3, 8, 4), read, where="disk", folder=folder)
    with record("DATALOADER.CACHE disk, too small"):
        ImageCache(items * 20, (4, 2**12, 2**12 * 1000), read, where="disk", folder=folder)
    with record("DATALOADER.CACHE ram in a folder of another user"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.data.cache._SHARED_MEMORY", record.root)
        (record.root / f"fastamp-cache-{os.getuid()}").symlink_to(record.root)
        ImageCache(items, (3, 8, 4), read, where="ram")
    with record("DATALOADER.CACHE disk without locks"), pytest.MonkeyPatch.context() as patch:

        def no_locks(file, kind):
            raise OSError(errno.ENOLCK, "No locks available")

        patch.setattr("fcntl.flock", no_locks)
        ImageCache(items[:1], (3, 8, 4), read, where="disk", folder=folder)


def samplers(record):
    """Build samplers and splits from invalid arguments."""
    items = [ImageItem(f"{number}.jpg", f"set_{number // 3}", f"set_c{number % 3}") for number in range(30)]
    for fraction in (0.0, 0.95):
        with record(f"hold_out {fraction}"):
            hold_out(items, fraction, 0, key="DATASETS.FOLDER.TEST_FRACTION")
    for column in ("modality", "captions", "side"):
        with record(f"ColumnBalancedSampler, DATALOADER.BALANCE_COLUMN {column}"):
            cfg = get_cfg()
            cfg.merge_from_list(
                ["DATALOADER.SAMPLER_TRAIN", "ColumnBalancedSampler", "DATALOADER.BALANCE_COLUMN", column]
            )
            columns = {"captions": [("a",), ("b",)], "side": np.array([-1, -1])}
            build_sampler(cfg, labels=[0, 1], camids=[0, 1], sets=[0, 0], world_size=1, columns=columns)
    with record("hold_out where no identity has two images"):
        hold_out([item._replace(pid=item.path) for item in items], 0.3, 0, key="DATASETS.FOLDER.TEST_FRACTION")
    for sets, weights in (((0, 1), (1, 0)), ((0, 1), (100, 1)), ((0, 1), (1, 3))):
        labels = [number // 4 for number in range(40)]
        with record(f"SetReWeightSampler, DATALOADER.SET_WEIGHT {weights}"):
            SetReWeightSampler(
                sets=[sets[int(label >= 8)] for label in labels], weights=weights, labels=labels, camids=[0] * 40,
                batch_size=16, num_instances=4, seed=0,
            )  # fmt: skip

    with record("DATASETS.MIN_IMAGES 2 and an identity with one image"):
        exclude_rare_identities([PackedItems.of([*items, ImageItem("one.jpg", "set_one", "set_c0")])], 2)
    for column in ("genus", "captions"):
        with record(f"GroupIdentitySampler, DATALOADER.GROUPS.COLUMN {column}"):
            cfg = get_cfg()
            cfg.merge_from_list(
                ["DATALOADER.SAMPLER_TRAIN", "GroupIdentitySampler", "DATALOADER.GROUPS.COLUMN", column]
            )
            columns = {"captions": [("a",), ("b",)], "side": np.array([-1, -1])}
            build_sampler(cfg, labels=[0, 1], camids=[0, 1], sets=[0, 0], world_size=1, columns=columns)
    with record("GroupIdentitySampler, DATALOADER.GROUPS.BATCH single with a small group"):
        labels = [number // 4 for number in range(40)]
        GroupIdentitySampler(
            groups=[int(label > 6) for label in labels], single=True, labels=labels, camids=[0] * 40,
            batch_size=16, num_instances=4, seed=0,
        )  # fmt: skip


def animal_splits(record):
    """Split tables of animals with missing or invalid values."""
    tables = {
        "split": ("path,pid,split\na,1,train", {}),
        "no_name": ("path,name\na,1", {}),
        "other_length": ("path,pid\na,1,3", {}),
        "header_only": ("path,pid\n", {}),
        "no_identity": ("path,pid\na,\nb,2", {}),
        "all_unknown": ("path,pid\na,unknown\nb,-1", {}),
        "one_image_each": ("path,pid\na,1\nb,2", {}),
        "german_date": ("path,pid,date\na,1,31.7.2021\nb,1,2021-01-01", {"method": "time"}),
        "no_dates": ("path,pid,date\na,1,\nb,1,", {"method": "time"}),
        "fraction": ("path,pid\na,1\nb,1", {"train": 2}),
        "validation": ("path,pid\na,1\nb,1", {"validation": 0.5}),
        "no_image": ("path,pid\na.png,1\nb.png,1", {"near_duplicates": True}),
    }
    for name, (text, options) in tables.items():
        file = record.file(f"animals_{name}.csv", text)
        with record(f"fastamp split of {text.splitlines()} with {options}"):
            split_table(file, record.root / f"out_{name}.csv", SplitOptions(**{"method": "closed", **options}))
    with record("fastamp split to a file that exists"):
        split_table(file, file, SplitOptions("closed"))
    for options in ({}, {"count": 5}):
        with record(f"draw_identities({options})"):
            draw_identities(["a", "b"], **options)


def custom_loaders(record):
    """Build loaders over custom datasets that do not fit the config."""
    cfg = get_cfg()
    images = TensorDataset(torch.zeros(100, 3, 8, 4))
    small = TensorDataset(torch.zeros(2, 3, 8, 4))
    with record("a custom train_set without img_items"):
        cfg.merge_from_list(["DATALOADER.SAMPLER_TRAIN", "NaiveIdentitySampler"])
        build_reid_train_loader(cfg, train_set=images)
    cfg.merge_from_list(["DATALOADER.SAMPLER_TRAIN", "TrainingSampler"])
    with record("a custom train_set that is smaller than one batch"):
        build_reid_train_loader(cfg, train_set=small)
    with record("sampler without train_set"):
        build_reid_train_loader(cfg, sampler=[0, 1])
    with record("a sampler that returns no batch"):
        next(iter(build_reid_train_loader(cfg, train_set=images, sampler=[])))
    with record("build_reid_test_loader(cfg)"):
        build_reid_test_loader(cfg)
    with record("build_train_loader returns a DataLoader without batch_sampler"):
        CustomTrainLoader.wrap(DataLoader(images, batch_size=None), batch_size=4)
