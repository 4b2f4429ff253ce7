"""Miniature folder trees of all datasets; readers use only file names and lists, so the images are empty files."""

import io
import json

import pytest
from scipy.io import savemat

from fastamp.config import read_config
from fastamp.data.build import build_dataset
from fastamp.utils.errors import DataError

MARKET = {
    "bounding_box_train": ("0002_c1s1_000451_03.jpg", "0002_c6s2_000001_01.jpg", "0007_c3s1_000001_00.jpg"),
    "query": ("0001_c1s1_000001_00.jpg",),
    "bounding_box_test": ("0001_c2s1_000001_00.jpg", "0000_c5s1_000001_00.jpg", "-1_c4s1_000001_00.jpg"),
}
MARKET_ITEMS = ([(2, 0), (2, 5), (7, 2)], [(1, 0)], [(0, 4), (1, 1)])
MARKET_FILES = [f"{folder}/{name}" for folder, names in MARKET.items() for name in names]
VEHICLE_IDS = {
    **{f"image/{image:07d}.jpg": "" for image in range(1, 12)},
    "train_test_split/train_list.txt": "0000001 7\n0000002 7\n0000003 9\n",
    **{
        f"train_test_split/test_list_{count}.txt": "".join(
            f"{image:07d} {vehicle}\n" for image, vehicle in [(4, 20), (5, 20), (6, 20), (7, vid), (8, vid)]
        )
        for count, vid in ((13164, 21), (800, 22), (1600, 23), (2400, 24))
    },
}
WILD = {
    "images/00001/000001.jpg": "",
    **{f"images/0000{vehicle}/00000{vehicle}.jpg": "" for vehicle in range(2, 9)},
    "train_test_split/vehicle_info.txt": "id/image;Camera ID;Time;Model;Type;Color\n00001/000001;12;t;m;t;c\n"
    + "".join(f"0000{vid}/00000{vid};{camera};t;m;t;c\n" for vid, camera in enumerate((3, 3, 12, 174, 9, 9, 9), 2)),
    "train_test_split/train_list.txt": "00001/000001.jpg\n00002/000002.jpg\n",
    **{
        f"train_test_split/test_{count}{ending}.txt": f"0000{vehicle}/00000{vehicle}.jpg\n"
        for count, query, gallery in ((3000, 3, 4), (5000, 5, 6), (10000, 7, 8))
        for ending, vehicle in (("_query", query), ("", gallery))
    },
}
MSMT = {
    **{f"{{train}}/{name}": "" for name in ("0000/0000_000_01_0303morning_0015_0.jpg", "0000/0000_001_15_x.jpg")},
    "{train}/0001/0001_000_02_x y.jpg": "",
    **{f"{{test}}/{name}": "" for name in ("0000/0000_000_03_x.jpg", "0001/0001_000_04_x.jpg")},
    "list_train.txt": "0000/0000_000_01_0303morning_0015_0.jpg 0\n0001/0001_000_02_x y.jpg 1\n",
    "list_val.txt": "0000/0000_001_15_x.jpg 0\n",
    "list_query.txt": "0000/0000_000_03_x.jpg 0\n",
    "list_gallery.txt": "0001/0001_000_04_x.jpg 1\r\n0000/0000_000_03_x.jpg 0\r\n",
}


def msmt(folder, train, test):
    """Return the files of one MSMT17 version as path -> text; the versions name the folders differently."""
    return {f"{folder}/{path.format(train=train, test=test)}": text for path, text in MSMT.items()}


def under(folder, files):
    """Move ``files`` (path -> text, or a list of paths of empty files) into a folder; return path -> text."""
    return {f"{folder}/{path}": files[path] if isinstance(files, dict) else "" for path in files}


def training_only(folder, files, train):
    """Return the ``TREES`` entry of a dataset that contains only training images."""
    return under(folder, files), train, [], []


SYSU = {
    **{f"cam{camera}/{pid:04d}/0001.jpg": "" for pid in (1, 2, 3) for camera in range(1, 7)},
    "cam3/0003/0002.jpg": "",
    "exp/train_id.txt": "1,\n",
    "exp/val_id.txt": "2",
    "exp/test_id.txt": "3\n",
}
REGDB = {
    **{
        f"{folder}/{pid}/male_front_{letter}_00001_{pid}.bmp": ""
        for folder, letter in (("Visible", "v"), ("Thermal", "t"))
        for pid in (3, 285)
    },
    **{
        f"idx/{split}_{name}_{trial}.txt": f"{folder}/{pid}/male_front_{name[0]}_00001_{pid}.bmp 0\n"
        for split, pids in (("train", (3, 285)), ("test", (285, 3)))
        for name, folder in (("visible", "Visible"), ("thermal", "Thermal"))
        for trial, pid in enumerate(pids, 1)
    },
}
LLCM = {
    "vis/0001/0001_c01_s1_f1_vis.jpg": "",
    "nir/0001/0001_c09_s1_f1_nir.jpg": "",
    "test_vis/cam1/0002/0002_c01_s1_f1_vis.jpg": "",
    "test_vis/cam3/0002/0002_c03_s1_f1_vis.jpg": "",
    "test_vis/cam3/0004/0004_c03_s1_f1_vis.jpg": "",
    "test_nir/cam9/0002/0002_c09_s1_f1_nir.jpg": "",
    "idx/train_vis.txt": "vis/0001/0001_c01_s1_f1_vis.jpg 0\n",
    "idx/train_nir.txt": "nir/0001/0001_c09_s1_f1_nir.jpg 0\n",
    "idx/test_id.txt": "2",
}
LTCC = ["train/000_1_c9_1.png", "train/000_2_c1_1.png", "query/005_1_c2_1.png", "test/005_2_c12_1.png"]
PRCC = [
    *(f"rgb/train/001/{camera}_cropped_rgb001.jpg" for camera in "ABC"),
    *(f"rgb/test/{camera}/{pid}/cropped_rgb001.jpg" for camera in "ABC" for pid in ("002", "004")),
]
VC_CLOTHES = [
    "train/0001-01-01-01.jpg",
    *(f"query/0002-{camera:02d}-01-01.jpg" for camera in (1, 2, 3, 4)),
    *(f"gallery/0002-{camera:02d}-02-02.jpg" for camera in (1, 2, 3, 4)),
]
LAST = [
    "train/000001/000001_0001_A.jpg",
    "train/000001/000001_0002_B.jpg",
    "test/query/000007_0001.jpg",
    "test/gallery/000007/000007_0002.jpg",
    "test/gallery/000008/000008_0002.jpg",
]
DEEP_CHANGE = {
    "train-set/P1_C3_1_01.jpg": "",
    "train-set/P1_C4_2_01.jpg": "",
    "test-set-query/P2_C1_1_01.jpg": "",
    "test-set-gallery/P2_C1_2_01.jpg": "",
    "train-set-bbox.txt": "P1_C3_1_01.jpg,0\nP1_C4_2_01.jpg,5\n",
    "test-set-query-bbox.txt": "P2_C1_1_01.jpg,7,1,2\n",
    "test-set-gallery-bbox.txt": "P2_C1_2_01.jpg,8\n",
}
AG_REID = [
    "bounding_box_train/P0006T02140A0C0F1831.jpg",
    "bounding_box_train/P0006T02140A2C3F1831.jpg",
    "query_all_c0/P0001T04041A1C0F31.jpg",
    "query_all_c3/P0001T04041A1C3F31.jpg",
    "bounding_box_test_all_c0/P0001T04041A1C0F61.jpg",
    "bounding_box_test_all_c3/P0001T04041A1C3F61.jpg",
]
AG_REID_V2 = {
    "train_all/P0006T02140A0/P0006T02140A0C2F31.jpg": "",
    "query/P0001T04041A1/P0001T04041A1C0F31.jpg": "",
    "query/P0001T04041A1/P0001T04041A1C3F31.jpg": "",
    "gallery/P0001T04041A1/P0001T04041A1C0F61.jpg": "",
    "gallery/P0001T04041A1/P0001T04041A1C2F61.jpg": "",
    "exp1.txt": "query/P0001T04041A1/P0001T04041A1C0F31.jpg\ngallery/P0001T04041A1/P0001T04041A1C2F61.jpg\n",
}

PRODUCTS = {
    "bicycle_final/1_0.JPG": "",
    "bicycle_final/1_1.JPG": "",
    "chair_final/2_0.JPG": "",
    "chair_final/2_1.JPG": "",
    "Ebay_train.txt": "image_id class_id super_class_id path\n"
    "1 7 1 bicycle_final/1_0.JPG\n2 7 1 bicycle_final/1_1.JPG\n",
    "Ebay_test.txt": "image_id class_id super_class_id path\n3 9 2 chair_final/2_0.JPG\n4 9 2 chair_final/2_1.JPG\n",
}
IN_SHOP = {
    **{f"Img/img/WOMEN/Dresses/id_0000000{number}/02_1_front.jpg": "" for number in (1, 2)},
    "Img/img/MEN/Pants/id_00000002/03_1_back.jpg": "",
    "Eval/list_eval_partition.txt": "3\nimage_name item_id evaluation_status\n"
    "img/WOMEN/Dresses/id_00000001/02_1_front.jpg id_00000001 train\n"
    "img/WOMEN/Dresses/id_00000002/02_1_front.jpg  id_00000002 query\n"
    "img/MEN/Pants/id_00000002/03_1_back.jpg id_00000002 gallery\n",
}
CUB = {
    **{f"images/{number:03d}.Bird/{image}.jpg": "" for number in (100, 101) for image in "ab"},
    "images.txt": "1 100.Bird/a.jpg\n2 100.Bird/b.jpg\n3 101.Bird/a.jpg\n4 101.Bird/b.jpg\n",
    "image_class_labels.txt": "1 100\n2 100\n3 101\n4 101\n",
}


def mat(**variables):
    """Return the content of a MATLAB file."""
    file = io.BytesIO()
    savemat(file, variables)
    return file.getvalue()


def mars_names(*tracks):
    """Return the file names of tracks ``(identity, camera, tracklet, frames)``."""
    return [
        f"{pid:0>4}C{camera}T{number:04d}F{frame:03d}.jpg"
        for pid, camera, number, count in tracks
        for frame in range(1, count + 1)
    ]


MARS_TRAIN = mars_names((1, 1, 1, 2), (1, 2, 1, 1), (3, 6, 1, 2))
MARS_TEST = mars_names(("00-1", 1, 1, 2), (0, 2, 1, 1), (2, 1, 1, 2), (2, 5, 1, 1), (2, 5, 2, 1))
MARS = {
    **{f"bbox_train/{name[:4]}/{name}": "" for name in MARS_TRAIN},
    **{f"bbox_test/{name[:4]}/{name}": "" for name in MARS_TEST},
    "info/train_name.txt": "\n".join(MARS_TRAIN) + "\n",
    "info/test_name.txt": "\n".join(MARS_TEST) + "\n",
    "info/tracks_train_info.mat": mat(track_train_info=[[1, 2, 1, 1], [3, 3, 1, 2], [4, 5, 3, 6]]),
    "info/tracks_test_info.mat": mat(
        track_test_info=[[1, 2, -1, 1], [3, 3, 0, 2], [4, 5, 2, 1], [6, 6, 2, 5], [7, 7, 2, 5]]
    ),
    "info/query_IDX.mat": mat(query_IDX=[[3, 4]]),
}
DUKE_VIDEO = {
    "train/0001/0000/0001C6F0002X30823.jpg": "",
    "train/0001/0000/0001C6F0001X30823.jpg": "",
    "train/0003/0000/0003_C1_F0001_X1.jpg": "",
    "query/0002/0000/0002C1F0001X1.jpg": "",
    "gallery/0002/0001/0002C8F0001X1.jpg": "",
    "gallery/0002/0001/0002C8F0010X1.jpg": "",
    "gallery/0009/0000/0009C2F0001X1.jpg": "",
}
CCVID = {
    "train.txt": "session1/001_01\t001\tu0_l0\nsession1/001_02\t001\tu1_l0\n",
    "query.txt": "session1/002_01 002 u0_l0\n",
    "gallery.txt": "session3/002_02 002 u1_l0\nsession2/003_01 003 u0_l0\n",
    **{
        f"{name}.jpg": ""
        for name in (
            *("session1/001_01/00002", "session1/001_01/00001", "session1/001_02/00001", "session1/002_01/00001"),
            *("session3/002_02/00001", "session3/002_02/00002", "session2/003_01/00001"),
        )
    },
}


def two_cameras(folder, cameras, person, numbers):
    """Return two frames of each person from each camera."""
    return {
        f"{folder}/{camera}/{person}{number}/{camera}_{frame:05d}.png": ""
        for camera in cameras
        for number in numbers
        for frame in (10, 9)
    }


VEHICLE_TRAIN = [(7, 1), (7, 2), (9, 3)]
WILD_TRAIN = [(1, 2), (2, 0)]
# Files of each dataset, and its training, query and gallery images as (identity, camera).
TREES = {
    "Market1501": (under("Market-1501-v15.09.15", MARKET_FILES), *MARKET_ITEMS),
    "DukeMTMC": (under("DukeMTMC-reID", MARKET_FILES), *MARKET_ITEMS),
    "OccludedDuke": (under("Occluded_Duke", MARKET_FILES), *MARKET_ITEMS),
    "MSMT17": (msmt("MSMT17_V1", "train", "test"), [(0, 0), (1, 1)], [(2, 2)], [(3, 3), (2, 2)]),
    "VeRi": (
        under(
            "veri",
            [
                "image_train/0002_c002_00030600_0.jpg",
                "image_train/0003_c020_00030600_1.jpg",
                "image_query/0005_c001_1_0.jpg",
                "image_test/0005_c019_1_0.jpg",
            ],
        ),
        [(2, 1), (3, 19)],
        [(5, 0)],
        [(5, 18)],
    ),
    **{
        name: (under("vehicleid", VEHICLE_IDS), VEHICLE_TRAIN, None, None)
        for name in ("VehicleID", "SmallVehicleID", "MediumVehicleID", "LargeVehicleID")
    },
    **{
        name: (under("VERI-Wild", WILD), WILD_TRAIN, [(query, camera)], [(query + 1, other)])
        for name, query, camera, other in (
            ("VeRiWild", 7, 1, 1),
            ("SmallVeRiWild", 3, 0, 2),
            ("MediumVeRiWild", 5, 3, 1),
            ("LargeVeRiWild", 7, 1, 1),
        )
    },
    "MARS": (
        under("mars", MARS),
        [(1, 0), (1, 0), (1, 1), (3, 5), (3, 5)],
        [(2, 0), (2, 0), (2, 4)],
        [(0, 1), (2, 0), (2, 0), (2, 4), (2, 4)],
    ),
    "DukeMTMCVideo": (
        under("dukemtmc-vidreid/DukeMTMC-VideoReID", DUKE_VIDEO),
        [(1, 5), (1, 5), (3, 0)],
        [(2, 0)],
        [(2, 7), (2, 7), (9, 1)],
    ),
    "iLIDSVID": (
        under(
            "ilids-vid",
            {
                **two_cameras("i-LIDS-VID/sequences", ("cam1", "cam2"), "person", ("001", "002", "005", "319")),
                "train-test people splits/train_test_splits_ilidsvid.mat": mat(ls_set=[[4, 2, 1, 3], [1, 2, 3, 4]]),
            },
        ),
        [(1, 0), (1, 0), (1, 1), (1, 1), (5, 0), (5, 0), (5, 1), (5, 1)],
        [(2, 0), (2, 0), (319, 0), (319, 0)],
        [(2, 1), (2, 1), (319, 1), (319, 1)],
    ),
    "CCVID": (
        under("CCVID", CCVID),
        [(1, 0), (1, 0), (1, 1)],
        [(2, 0)],
        [(2, 13), (2, 13), (3, 0)],
    ),
    "PRID2011": (
        under(
            "prid2011",
            {
                **two_cameras("prid_2011/multi_shot", ("cam_a", "cam_b"), "person_", ("0001", "0002", "0003")),
                "splits_prid2011.json": json.dumps(
                    [
                        {"train": ["person_0003"], "test": ["person_0001"]},
                        {"train": ["person_0001"], "test": ["person_0002"]},
                    ]
                ),
            },
        ),
        [(3, 0), (3, 0), (3, 1), (3, 1)],
        [(1, 0), (1, 0)],
        [(1, 1), (1, 1)],
    ),
    "AirportALERT": training_only(
        "AirportALERT",
        {
            "filepath.txt": "cam4\\11001\\a b.jpg\ncam10\\12000\\c.jpg\ncam10\\11000\\d.jpg\n",
            **dict.fromkeys(("cam4/11001/a b.jpg", "cam10/12000/c.jpg", "cam10/11000/d.jpg"), ""),
        },
        [(11001, 1), (12000, 0)],
    ),
    "CAVIARa": training_only("CAVIARa", ["1001001.jpg", "1001002.jpg", "1002.jpg"], [(1001, 0), (1001, 0), (1002, 0)]),
    "cuhkSYSU": training_only("cuhk_sysu/cropped_images", ["p11422_s16929_1.jpg", "p-1_s1_1.jpg"], [(11422, 0)]),
    "GRID": training_only(
        "underground_reid/images", ["0001_1_2_3.jpeg", "0001_6_2_3.jpeg", "0000_2_2_3.jpeg"], [(1, 0), (1, 1)]
    ),
    "iLIDS": training_only("iLIDS", ["person001/cam1_x.png", "person9/cam2_x.png"], [("person001", 0), ("person9", 1)]),
    "LPW": training_only(
        "pep_256x128/data_slim", ["scen1/view1/3/a.jpg", "scen2/view3/3/a.jpg"], [("scen1-3", 0), ("scen2-3", 1)]
    ),
    "PeS3D": training_only("3DPeS", ["12/1_c9.bmp", "13/2_c8.bmp"], [(12, 0), (13, 0)]),
    "PKU": training_only("PKUv1a_128x48", ["001_1_4.png", "114_2_10.png"], [(1, 0), (114, 1)]),
    "PRAI": training_only("PRAI-1581/images", ["0001_2_3.jpg", "0002_10_3.jpg"], [(1, 0), (2, 1)]),
    "PRID": training_only(
        "prid_2011/slim_train", ["person_0001/a_1.png", "deep/er/person_0200/b_1.png"], [(1, 0), (200, 1)]
    ),
    "SAIVT": training_only("SAIVT-SoftBio/cropped_images", ["15/x-1-C3-2.jpeg", "16/x-1-C8.jpeg"], [(15, 0), (16, 1)]),
    "SenseReID": (
        under("SenseReID", ["test_probe/00012_0.jpg", "test_gallery/00012_1.jpg", "test_gallery/00099_1.jpg"]),
        [(12, 0), (12, 1), (99, 1)],
        [(12, 0)],
        [(12, 1), (99, 1)],
    ),
    "Shinpuhkan": training_only("shinpuhkan", ["001_02_03_4.jpg", "a/b/002_02_16.jpg"], [(1, 0), (2, 1)]),
    "SYSU_mm": training_only(
        "SYSU-MM01", [f"cam{number}/{number:04d}/0001.jpg" for number in range(1, 7)], [(1, 0), (2, 1), (4, 2), (5, 3)]
    ),
    "Thermalworld": training_only("thermalworld_rgb", ["12/3.jpg", "13/3.jpg"], [(12, 0), (13, 0)]),
    "VIPeR": (under("VIPeR", [f"cam_{ab}/{pid:03d}_45.bmp" for pid in range(8) for ab in "ab"]), None, None, None),
    "WildTrackCrop": training_only(
        "Wildtrack_crop_dataset/crop", ["12/3_0001.png", "13/4_0001.png"], [(12, 0), (13, 1)]
    ),
    "SYSUMM01": (
        under("SYSU-MM01", SYSU),
        [(pid, camera) for pid in (1, 2) for camera in range(6)],
        [(3, 2), (3, 2), (3, 5)],
        [(3, 0), (3, 1), (3, 3), (3, 4)],
    ),
    "RegDB": (under("RegDB", REGDB), [(3, 0), (3, 1)], [(285, 0)], [(285, 1)]),
    "RegDBThermalToVisible": (under("RegDB", REGDB), [(3, 0), (3, 1)], [(285, 1)], [(285, 0)]),
    "LLCM": (under("LLCM", LLCM), [(1, 0), (1, 8)], [(2, 8)], [(2, 0), (2, 2)]),
    "LLCMVisibleToInfrared": (under("LLCM", LLCM), [(1, 0), (1, 8)], [(2, 0), (2, 2)], [(2, 8)]),
    "LTCC": (under("LTCC_ReID", LTCC), [(0, 8), (0, 0)], [(5, 1)], [(5, 11)]),
    "PRCC": (under("prcc", PRCC), [(1, 0), (1, 1), (1, 2)], [(2, 2), (4, 2)], [(2, 0), (4, 0)]),
    "PRCCSC": (under("prcc", PRCC), [(1, 0), (1, 1), (1, 2)], [(2, 1), (4, 1)], [(2, 0), (4, 0)]),
    **{
        name: (under("VC-Clothes", VC_CLOTHES), [(1, 0)], [(2, camera) for camera in cameras], None)
        for name, cameras in (("VCClothes", range(4)), ("VCClothesSC", (1, 2)), ("VCClothesCC", (2, 3)))
    },
    "LaST": (under("last", LAST), [(1, 0), (1, 1)], [(7, 0)], [(7, 1), (8, 2)]),
    "DeepChange": (under("DeepChangeDataset", DEEP_CHANGE), [(1, 0), (1, 5)], [(2, 7)], [(2, 8)]),
    "AGReID": (under("AG-ReID", AG_REID), [(6021400, 0), (6021402, 3)], [(1040411, 0)], [(1040411, 3)]),
    "AGReIDGroundToAerial": (under("AG-ReID", AG_REID), [(6021400, 0), (6021402, 3)], [(1040411, 3)], [(1040411, 0)]),
    "AGReIDv2": (
        under("AG-ReID.v2", AG_REID_V2),
        [(6021400, 2)],
        [(1040411, 0), (1040411, 3)],
        [(1040411, 0), (1040411, 2)],
    ),
    "SOP": (under("Stanford_Online_Products", PRODUCTS), [(7, 0), (7, 1)], [(9, 0)], [(9, 1)]),
    "InShop": (under("InShop", IN_SHOP), [(1, 0)], [(2, 0)], [(2, 1)]),
    "CUB200": (under("CUB_200_2011", CUB), [(100, 0), (100, 1)], [(101, 0)], [(101, 1)]),
}


def write(root, files):
    """Write ``files`` (path -> text or bytes) below ``root``."""
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def build(name, root, files=(), **keys):
    """Write the files of a dataset and further ``files``, and build the dataset.

    Keyword arguments set keys in the config section DATASETS; ``__`` stands for a dot.
    """
    write(root, TREES[name][0] | dict(files))
    pairs = [text for key, value in keys.items() for text in (f"DATASETS.{key.replace('__', '.')}", value)]
    return build_dataset(name, read_config("", pairs))


def message(call, *args):
    """Return the message of the DataError that ``call(*args)`` raises."""
    with pytest.raises(DataError) as raised:
        call(*args)
    return str(raised.value)
