"""Messages of projects/ and tools/: FastTune, the open loop and the soak test."""

import pickle
import runpy
import shutil
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from messages import REPOSITORY, Recorder
from PIL import Image
from tiny import tiny_options
from torch import nn

from fastamp.config import get_cfg, read_config
from fastamp.config.projects import import_project
from fastamp.data.build import build_dataset
from fastamp.data.columns import EncodedColumn
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets import data_root
from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.items import ImageItem, PackedItems
from fastamp.data.transforms import build_transforms
from fastamp.modeling import META_ARCH_REGISTRY, build_model

TOOLS = ("plain_train_net", "soak")
SITES = ["projects", *(f"tools/{name}.py" for name in TOOLS)]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    search_spaces(record)
    searches(record)
    distillation(record)
    classification(record)
    retrieval(record)
    challenge(record)
    faces(record)
    partial_queries(record, request.getfixturevalue("run_folder"))
    attributes(record)
    domains(record)
    clip_reid(record)
    unsupervised(record)
    open_loop(record)
    soak(record)


SPACES = (
    "SOLVER.BASE_LRR: {uniform: [0.1, 0.2]}",
    "SOLVER.BASE_LR: {uniform: [-1.0, 0.2]}",
    "SOLVER.BASE_LR: {uniforn: [0.1, 0.2]}",
    "SOLVER.BASE_LR: {uniform: [0.2, 0.1]}",
    "SOLVER.BASE_LR: {uniform: [0.2]}",
    "SOLVER.BASE_LR: {uniform: [a, b]}",
    "SOLVER.BASE_LR: {quniform: [0.0, 1.0, 0.0]}",
    "SOLVER.BASE_LR: {loguniform: [0, 1.0]}",
    "SOLVER.BASE_LR: {randint: [0.5, 2]}",
    "SOLVER.BASE_LR: 0.1",
    "SOLVER.BASE_LR: {choice: []}",
    "SOLVER.WARMUP_ITERS: {uniform: [10, 20]}",
    "SOLVER.OPT: {choice: [3, [Adam]]}",
    "SOLVER.OPT: {uniform: [0, 1]}",
    "SOLVER.MAX_EPOCH: {choice: [2, 4]}",
    "SOLVER: {BASE_LR: {uniform: [0.1, 1.0]}}",
    "IDENTITIES: {randint: [0, 4]}",
    "IDENTITIES: {loguniform: [1, 4]}",
    "IDENTITIES: {choice: [2.5, 4]}",
    "{bsz: {choice: [64]}, IDENTITIES: {randint: [4, 8]}}",
    "{lr: {uniform: [0.1, 1.0]}, SOLVER.BASE_LR: {uniform: [0.1, 1.0]}}",
    "",
    "[1, 2]",
)


def search_spaces(record):
    """Read invalid FastTune search spaces."""
    from autotuner.space import default_space, read_space

    for text in SPACES:
        path = record.file("space.yml", text)
        with record(f"--space: {text}"):
            read_space(path, get_cfg())
    for name, content in (("nowhere.yml", None), ("bytes.yml", b"\xff\xfe\x00")):
        if content:
            record.file(name, content)
        with record(f"--space {name}"):
            read_space(record.root / name, get_cfg())
    with record("--config-file mine.yml without --space"):
        default_space("mine.yml")


def searches(record):
    """Start FastTune searches with invalid settings."""
    import tune_net
    from autotuner import disk
    from autotuner.algorithms import check_installed
    from autotuner.search import Search, _check_folder
    from autotuner.space import read_space

    space = record.file("good.yml", "lr: {loguniform: [1e-4, 1e-1]}")
    identities = record.file("identities.yml", "IDENTITIES: {choice: [50]}")
    batches = record.file("batches.yml", "bsz: {choice: [500]}")
    optimizer = record.file("optimizer.yml", "SOLVER.OPT: {choice: [Adam, SGD]}")
    train_only = record.file("train_only.csv", "path,pid\na.png,1")
    config = record.file("tiny.yml", read_config("", tiny_options("logs/tiny")).dump())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ray", "hyperopt", "hpbandster", "ConfigSpace"):
            patch.setitem(sys.modules, name, None)
        for argv in (
            ("--space", space, "--srch-algo", "bohb", "--scheduler", "asha"),
            ("--space", space, "--srch-algo", "bohb"),
            ("--space", space, "--pbt", "--srch-algo", "optuna"),
            ("--space", space, "--pbt", "--scheduler", "asha"),
            ("--space", optimizer, "--pbt"),
            ("--space", space),
            ("--space", space, "--srch-algo", "random"),
            ("--space", space, "--num-trials", "0"),
            ("--space", space, "--seed", "-1"),
            ("--space", space, "--cpus-per-trial", "0.5x"),
            ("--space", identities, "--srch-algo", "random"),
            ("--space", batches, "--srch-algo", "random"),
            ("--space", space, "--srch-algo", "random", "TUNE.VAL_FRACTION", "0.99"),
            ("--space", space, "--srch-algo", "random", "DATASETS.TESTS", "Dmeo", "LOGGERS", "wandb"),
            ("--space", space, "--srch-algo", "random", "LOGGERS", "wandbb"),
            ("--space", space, "--srch-algo", "random", "DATASETS.TESTS", f"csv:{train_only}"),
            ("--space", space, "--srch-algo", "random", "MODEL.DEVICE", "cuda:1"),
            ("--srch-algo", "random"),
            ("--space", space, "--srch-algo", "random", "--parts", "nowhere.py"),
        ):
            output = ("OUTPUT_DIR", record.root / "search")
            record.command(tune_net.cli, "tune_net.py", "--config-file", config, *argv, *output)
        usage = disk.shutil.disk_usage(record.root)
        cfg = read_config(str(config), [])
        search = Search(title="search", folder=record.root / "s", cfg=cfg, space=read_space(space, cfg), trials=4)
        with record("a new search"):
            _check_folder(search, resume=False)
        for title, changed, resume in (
            ("a search into the same folder", search, False),
            ("a resume with more trials", replace(search, trials=9), True),
            ("a resume with another seed", replace(search, seed=3), True),
        ):
            with record(title):
                _check_folder(changed, resume=resume)
        with record("optuna is not installed"):
            patch.setitem(sys.modules, "optuna", None)
            check_installed("optuna")
        for free in (10**12, 100_000):
            patch.setattr(disk.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
            with record(f"{free} bytes are free for a search"):
                disk.check_disk(search, 16, concurrent=2)
        from autotuner import picture

        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with record("a search without matplotlib"):
            picture.draw_trials([], search.space, record.root / "trials.png")


def distillation(record):
    """Build overhaul distillation with teachers and options that it does not support."""
    cfg = read_config("FastDistill/demo-student")
    from fastdistill.distiller_overhaul import DistillerOverhaul
    from fastdistill.stages import last_blocks

    own = {"MODEL.META_ARCHITECTURE": "DistillerOverhaul", "KD.EMA.ENABLED": True, "MODEL.HEADS.NUM_CLASSES": 4}
    cfg = cfg.with_values(own | {"MODEL.DEVICE": "cpu"})
    with record("the stages of a linear layer"):
        last_blocks(nn.Linear(2, 2))
    with record("MODEL.COMPILE inductor with DistillerOverhaul"):
        DistillerOverhaul.further_options(cfg.with_values({"MODEL.COMPILE": "inductor"}))
    model = build_model(cfg)
    with record("a teacher of one stage"):
        model._build_connectors(nn.ModuleDict({"layer1": model.backbone.layer1}))
    with record("a teacher with smaller maps"):
        maps = torch.zeros(1, 64, 4, 2)
        model._overhaul_loss([maps], [maps[..., :1]], model.backbone, model.connectors[0])


def classification(record):
    """Train on class folders with missing folders, other classes and settings that are not supported."""
    cfg = read_config("FastClas/demo", ["DATASETS.NAMES", "ClassFolder", "DATASETS.TESTS", "ClassFolder"])
    from fastclas.class_folder import ClassFolder
    from fastclas.evaluator import ClasEvaluator

    folder = record.root / "classes"
    for name in ("train/ant", "train/bee", "val/ant", "val/wasp"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name / "0.png")
    values = {"DATASETS.CLASS_FOLDER": str(folder)}
    with record("ClassFolder without DATASETS.CLASS_FOLDER"):
        build_dataset("ClassFolder", cfg)
    with record("DATASETS.COMBINEALL with class folders"):
        build_dataset("ClassFolder", cfg.with_values(values | {"DATASETS.COMBINEALL": True}))
    dataset = build_dataset("ClassFolder", cfg.with_values(values))
    with record("test images of another class"):
        dataset.test_items()
    items = PackedItems.of(dataset.train)
    (folder / "train/none").mkdir()
    with record("a class folder without images"):
        ClassFolder(path=str(folder)).read("train")
    (record.root / "empty/train").mkdir(parents=True)
    (record.root / "empty/val").mkdir()
    with record("a split without class folders"):
        ClassFolder(path=str(record.root / "empty")).read("train")
    with record("DATASETS.CLASSES of other names"):
        other = cfg.with_values({"DATASETS.CLASSES": ["bee", "ant"]})
        dataset.adapt_config(other, SimpleNamespace(sources=[dataset], items=items))
    with record("class folders and persons"):
        dataset.adapt_config(cfg, SimpleNamespace(sources=[dataset, None], items=items))
    with record("features of an EmbeddingHead for ClasEvaluator"):
        evaluator = ClasEvaluator(cfg.with_values({"DATASETS.CLASSES": ["ant", "bee"]}))
        evaluator.process({"targets": torch.zeros(1, dtype=torch.int64)}, torch.zeros(1, 9))


def faces(record):
    """Read damaged files of faces, and verify images that are not pairs."""
    import_project("FastFace")
    from fastface.carray import read_images, read_labels
    from fastface.face_evaluator import FaceEvaluator
    from fastface.packed_files import read_pairs, read_records

    root = record.root / "faces"
    (root / "lfw").mkdir(parents=True)
    (root / "MS_Celeb_1M").mkdir()
    for label, text in (("empty list", "10 300\n"), ("invalid line", "anna 1\nanna one two\n")):
        (root / "lfw/pairs.txt").write_text(text)
        with record(f"LFW: {label}"):
            DATASET_REGISTRY.get("LFW")(root).query  # noqa: B018
    with record("FaceFolder without images"):
        DATASET_REGISTRY.get("FaceFolder")(root).train  # noqa: B018
    with record("FaceRecords without DATASETS.REC_PATH"):
        DATASET_REGISTRY.get("FaceRecords")("")
    with record("DATASETS.REC_PATH for another training set"):
        values = {"PROJECTS": ["FastFace"], "DATASETS.REC_PATH": "faces/train.rec", "DATASETS.NAMES": ["DemoFaces"]}
        cfg = get_cfg().with_values(values)
        META_ARCH_REGISTRY.get("FaceBaseline").adapt_to_training_set(cfg, SimpleNamespace(sources=[None]))
    with record("a missing .rec file"):
        (root / "a.idx").write_text("0 0\n")
        list(read_records(root / "a.rec"))
    first = struct.pack("<IIIfQQ", 0xCED7230A, 1 << 29 | 24, 0, 1, 0, 0)
    for label, content in (
        ("empty", b""),
        ("damaged", b"damaged" * 8),
        ("with an incomplete record", first),
        ("with a part of another kind", first + first),
        ("without images", struct.pack("<IIIfQQ", 0xCED7230A, 24, 0, 0, 0, 0)),
    ):
        (root / "a.rec").write_bytes(content)
        with record(f"a .rec file: {label}"):
            list(read_records(root / "a.rec"))
    (root / "a.idx").write_text("0 -1\n")
    with record("a damaged .idx file"):
        list(read_records(root / "a.rec"))
    for label, content in (("integers", ([1, 2], [True])), ("missing images", ([b"a"], [True])), ("functions", print)):
        (root / "a.bin").write_bytes(pickle.dumps(content))
        with record(f"a .bin file: {label}"):
            read_pairs(root / "a.bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "blosc", None)
        with record("a bcolz array without the package blosc"):
            list(read_images(root / "array"))
        patch.setitem(sys.modules, "blosc", SimpleNamespace(decompress=lambda chunk: chunk[16:]))
        with record("a missing bcolz array"):
            list(read_images(root / "array"))
        for name in ("data", "meta"):
            (root / "array" / name).mkdir(parents=True)
        (root / "array/meta/sizes").write_text('{"shape": [1, 3, 1, 1]}')
        (root / "array/meta/storage").write_text('{"dtype": "float32", "chunklen": 1}')
        with record("a bcolz array without a chunk"):
            list(read_images(root / "array"))
        chunk = struct.pack("<4s12x4xI8x3f", b"blpk", 12, 7, 7, 7)
        (root / "array/data/__0.blp").write_bytes(chunk)
        with record("a bcolz array of other values"):
            list(read_images(root / "array"))
    with record("a bcolz array without labels"):
        read_labels(root / "array_list.npy", 2)
    (root / "a.rec").write_bytes(b"")
    unpack = runpy.run_path(str(REPOSITORY / "projects/FastFace/unpack.py"))
    with pytest.MonkeyPatch.context() as patch, record("unpack.py: existing folder"):
        patch.setattr(sys, "argv", ["unpack.py", str(root / "a.rec"), str(root)])
        unpack["main"]()
    with pytest.MonkeyPatch.context() as patch, record("unpack.py: --bgr for a file"):
        patch.setattr(sys, "argv", ["unpack.py", "--bgr", str(root / "a.rec"), str(root / "new")])
        unpack["main"]()
    templates(record, root)
    evaluator = FaceEvaluator(get_cfg())
    with record("FaceEvaluator without the column"):
        evaluator.process({}, torch.zeros(2, 4))
    with record("FaceEvaluator without images"):
        evaluator.evaluate()
    evaluator.process({"indices": torch.arange(4), "same": torch.tensor([1, 1, 0, 0])}, torch.eye(4))
    with record("FaceEvaluator with two pairs"):
        evaluator.evaluate()


def templates(record, root):
    """Verify templates by lists that do not fit the features."""
    from fastface.templates import true_accept_rates

    verify = runpy.run_path(str(REPOSITORY / "projects/FastFace/verify_templates.py"))
    rows = {"features": np.eye(2, 4, dtype=np.float32), "pids": np.zeros(2, int), "camids": np.zeros(2, int)}
    rows |= {"config_hash": "0", "checkpoint": "x", "metric": "cosine"}
    two = "1.jpg 0 0\n2.jpg 1 0\n"
    for label, names, images, pairs in (
        ("an invalid row", ["1.jpg", "2.jpg"], "1.jpg 0\n", "0 1 0\n"),
        ("an empty list", ["1.jpg", "2.jpg"], two, ""),
        ("images of the same name", ["a/1.jpg", "b/1.jpg"], two, "0 1 0\n"),
        ("missing features", ["1.jpg", "3.jpg"], two, "0 1 0\n"),
        ("pairs of other templates", ["1.jpg", "2.jpg"], two, "0 5 0\n"),
    ):
        np.savez(root / "templates.npz", **rows, paths=np.array(names))
        (root / "images.txt").write_text(images)
        (root / "template_pairs.txt").write_text(pairs)
        with record(f"verify_templates: {label}"):
            lists = {"templates": root / "images.txt", "pairs": root / "template_pairs.txt"}
            verify["main"](SimpleNamespace(features=str(root / "templates.npz"), normalize=False, **lists))
    with record("verify_templates: missing list"):
        lists = {"templates": root / "missing.txt", "pairs": root / "template_pairs.txt"}
        verify["main"](SimpleNamespace(features=str(root / "templates.npz"), normalize=False, **lists))
    with record("true_accept_rates: pairs of one kind"):
        true_accept_rates(np.ones(3), np.ones(3, dtype=bool), np.array([0.1]))


def challenge(record):
    """Read damaged lists of NAIC20, exchange channels and write submissions of unsuitable files."""
    project = REPOSITORY / "projects/NAIC20"
    import_project("NAIC20")
    dataset = DATASET_REGISTRY.get("NAIC20_R1")
    root = record.root / "challenge"
    folder = root / dataset.folder
    (folder / "images").mkdir(parents=True)
    Image.new("RGB", (8, 16)).save(folder / "images/1.png")
    for label, text in (("invalid line", "1.png 3\n"), ("long tail only", "1.png:3\n")):
        (folder / "label.txt").write_text(text)
        with record(f"NAIC20_R1: {label}"):
            dataset(root).train  # noqa: B018
    shuffle = runpy.run_path(str(project / "shuffle_channels.py"))["shuffle_channels"]
    for label, text in (
        ("invalid line", "1.png 3\n"),
        ("path", "images/1.png:3\n"),
        ("missing image", "2.png:3\n"),
        ("first", "1.png:3\n"),
        ("again", ""),
    ):
        (folder / "label.txt").write_text(text)
        with record(f"shuffle_channels: {label}"):
            shuffle(folder)
    with record("shuffle_channels: negative seed"):
        shuffle(folder, seed=-1)
    submit = runpy.run_path(str(project / "submit.py"))
    rows = {"features": np.eye(2, 4, dtype=np.float32), "pids": np.zeros(2, int), "camids": np.zeros(2, int)}
    rows |= {"paths": np.array(["a/1.png", "b/1.png"]), "config_hash": "0", "checkpoint": "x", "metric": "cosine"}
    for label, split in (("without queries", ["gallery", "gallery"]), ("repeated names", ["query", "query"])):
        np.savez(root / "features.npz", **rows, split=np.array(split))
        with record(f"submit: {label}"):
            submit["main"](
                SimpleNamespace(output=root / "s.json", features=str(root / "features.npz"), opts=[], count=3)
            )
    with record("submit: a key without effect"):
        opts = ["TEST.PROTOCOL", "no_camera"]
        submit["main"](SimpleNamespace(output=root / "s.json", features="", opts=opts, count=3))
    with record("submit: missing folder"):
        submit["main"](SimpleNamespace(output=root / "missing/s.json", features="", opts=[], count=3))


def retrieval(record):
    """Evaluate test sets with different protocols."""
    cfg = read_config("FastRetri/demo", ["DATASETS.TESTS", "[CUB, InShop]"])
    from fastretri.retri_evaluator import retrieval_config

    with record("test sets CUB and InShop"):
        retrieval_config(cfg)


def partial_queries(record, run_folder):
    """Evaluate PartialReID with settings, models and images that it does not support."""
    cfg = read_config("PartialReID/demo", ["MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "4"])
    from partialreid.demo_occluded import OccludedDemo
    from partialreid.dsr_distance import pool_places
    from partialreid.dsr_evaluation import DsrEvaluator, PlaceFile

    for values in (
        {"MODEL.HEADS.EMBEDDING_DIM": 8},
        {"MODEL.HEADS.TEMPORAL_POOL": "avg"},
        {"MODEL.HEADS.NAME": "EmbeddingHead"},
    ):
        with record(f"PartialBaseline with {values}"):
            build_model(cfg.with_values(values))
    with record("a feature map of 4 x 1"):
        pool_places(torch.zeros(1, 8, 4, 1))
    with record("images with 11 and 9 places"):
        file = PlaceFile()
        for count in (11, 9):
            file.append(torch.tensor([0]), torch.zeros(1, 4, count))
    for values in ({"TEST.METRIC": "euclidean"}, {"TEST.RERANK.ENABLED": True}, {"TEST.PROTOCOL": "vehicleid"}):
        with record(f"DsrEvaluator with {values}"):
            DsrEvaluator(cfg.with_values(values), num_query=2)
    evaluator = DsrEvaluator(cfg, num_query=2)
    with record("DsrEvaluator with a linear layer"):
        evaluator.extract(nn.Linear(2, 2), {}, None)
    with record("DsrEvaluator.evaluate"):
        draw = torch.Generator().manual_seed(0)
        batch = {"targets": torch.arange(6) % 2, "camids": torch.arange(6), "images": torch.zeros(6, 3, 8, 8)}
        features, places = torch.rand(6, 4, generator=draw), torch.rand(6, 4, 5, generator=draw)
        evaluator.process(batch, (features, places, torch.full((6, 5), 0.2)))
        evaluator.evaluate()
    choose_weight = runpy.run_path(str(REPOSITORY / "projects/PartialReID/choose_weight.py"))
    with record("choose_weight.py: a dataset whose images were used for training"):
        choose_weight["check_held_out"](
            cfg.with_values({"DATASETS.NAMES": "Demo", "DATASETS.PARTIAL.SEED": 77}), "DemoHeldOut"
        )
    for folder in data_root().glob("fastamp-demo-occluded-*"):
        shutil.rmtree(folder)  # the data root is shared with other tests
    with record("choose_weight.py: a run without reconstruction"):
        choose_weight["choose"](str(run_folder))
    demo = record.root / "demo"
    demo.mkdir()
    with record("occluded images of a folder without distractors"):
        OccludedDemo(demo, 0)
    with pytest.MonkeyPatch.context() as patch, record("occluded images in a folder that is not writable"):
        patch.setattr(
            OccludedDemo, "_write", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
        OccludedDemo(demo, 0)


def domains(record):
    """Train and evaluate DomainGeneralization with settings and models that it does not support."""
    cfg = read_config("DomainGeneralization/demo", ["MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "4"])
    from domaingeneralization.evaluation import MatchingEvaluator
    from domaingeneralization.graph_sampler import GraphSampler
    from domaingeneralization.matcher import PairwiseMatchingLoss
    from domaingeneralization.trainer import GraphTrainer

    for values in ({"MODEL.HEADS.TEMPORAL_POOL": "avg"}, {"MODEL.HEADS.NAME": "EmbeddingHead"}):
        with record(f"MatchingBaseline with {values}"):
            build_model(cfg.with_values(values))
    with record("PairwiseMatchingLoss without scores"):
        PairwiseMatchingLoss()({}, torch.zeros(2))
    with record("MatchingEvaluator with {'TEST.RERANK.ENABLED': True}"):
        MatchingEvaluator(cfg.with_values({"TEST.RERANK.ENABLED": True}), num_query=2)
    evaluator = MatchingEvaluator(cfg, num_query=2)
    with record("MatchingEvaluator with a linear layer"):
        evaluator.extract(nn.Linear(2, 2), {}, None)
    with record("MatchingEvaluator with tracklets"):
        evaluator.process({"tracklet": torch.zeros(2)}, (torch.zeros(2, 4), torch.zeros(2, 4, 2, 2)))
    with record("GraphSampler with one identity in a batch"):
        GraphSampler(labels=[0, 0, 1, 1], camids=[0] * 4, batch_size=2, num_instances=2, seed=0)
    loader = SimpleNamespace()
    with record("GraphTrainer with a custom training set"):
        GraphTrainer.from_config(cfg, model=nn.Linear(2, 2), data_loader=loader, optimizers=[])
    loader = SimpleNamespace(dataset=object.__new__(ReidDataset), batch_sampler=SimpleNamespace(sampler=None))
    with record("GraphTrainer with another sampler"):
        other = cfg.with_values({"DATALOADER.SAMPLER_TRAIN": "TrainingSampler"})
        GraphTrainer.from_config(other, model=nn.Linear(2, 2), data_loader=loader, optimizers=[])


def attributes(record):
    """Train on attributes and files of attributes that are not supported, and evaluate one-sided attributes."""
    cfg = read_config("FastAttr/demo", ["MODEL.ATTRIBUTES.NAMES", "[hat=cap]"])
    from fastattr.attributes import parse_names, with_attributes
    from fastattr.datasets import PA100K, Market1501Attr, read_mat
    from fastattr.evaluator import AttrEvaluator
    from fastattr.model import AttrBaseline
    from scipy.io import savemat

    with record("an attribute that is not in DATASETS.CATEGORIES"):
        parse_names(["hat=cap"], {"hat": ["none"]})
    columns = {
        "hat": EncodedColumn(np.array([0, 1, 2])),
        "color": EncodedColumn(np.array([0, 1]), ("red", "blue")),
    }
    with record("a training set without columns"):
        with_attributes(cfg.with_values({"MODEL.ATTRIBUTES.COLUMNS": []}), SimpleNamespace())
    with record("attributes with the values 0, 1 and 2"):
        with_attributes(cfg.with_values({"MODEL.ATTRIBUTES.COLUMNS": ["hat"]}), SimpleNamespace(columns=columns))
    with record("MODEL.HEADS.NUM_CLASSES 26 of one text column with two values"):
        dataset = SimpleNamespace(columns=columns)
        values = {"MODEL.ATTRIBUTES.COLUMNS": ["color"], "MODEL.HEADS.NUM_CLASSES": 26}
        AttrBaseline.adapt_to_training_set(cfg.with_values(values), dataset)
    with record("AttrBaseline with an EmbeddingHead"):
        AttrBaseline.from_config(cfg.with_values({"MODEL.HEADS.NAME": "EmbeddingHead"}))
    with record("AttrBaseline without BinaryCrossEntropyLoss"):
        AttrBaseline.from_config(cfg.with_values({"MODEL.LOSSES.NAME": ["CrossEntropyLoss"]}))
    names = {"MODEL.ATTRIBUTES.NAMES": ["hat"]}
    with record("an attribute that no test image has"):
        evaluator = AttrEvaluator(cfg.with_values(names), output_dir=str(record.root / "attributes"))
        evaluator.process({"hat": torch.zeros(2, dtype=torch.int64)}, torch.zeros(2, 1))
        evaluator.evaluate()

    folder = record.root / "PA-100K"
    (folder / "data").mkdir(parents=True)
    savemat(folder / "annotation.mat", {"train_images_name": ["a.jpg"], "train_label": [[0, 1]], "attributes": ["hat"]})
    with record("labels of PA-100K of another number of attributes"):
        list(PA100K(record.root).train)
    with record("a MATLAB file without a variable"):
        read_mat(folder / "annotation.mat", ["train_label", "test_label"])
    (folder / "damaged.mat").write_bytes(b"damaged")
    with record("a damaged MATLAB file"):
        read_mat(folder / "damaged.mat", ["train_label"])
    market = record.root / "Market-1501-v15.09.15"
    for split in ("bounding_box_train", "query", "bounding_box_test"):
        (market / split).mkdir(parents=True)
        Image.new("RGB", (8, 16)).save(market / split / "0002_c1s1_000001_00.jpg")
    with record("Market-1501 without market_attribute.mat"):
        list(Market1501Attr(record.root).train)
    savemat(market / "market_attribute.mat", {"market_attribute": {"train": {"age": [1]}}})
    with record("market_attribute.mat without image_index"):
        list(Market1501Attr(record.root).train)
    savemat(market / "market_attribute.mat", {"market_attribute": {"train": {"age": [5], "image_index": ["0002"]}}})
    with record("market_attribute.mat with the age 5"):
        list(Market1501Attr(record.root).train)


def clip_reid(record):
    """Build CLIP-ReID with prompts, vocabularies, weights and models that do not fit, and use prompts of others."""
    options = ("MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "2", "CLIPREID.TEXT_WIDTH", "16")
    cfg = read_config("CLIPReID/demo", [*options, "CLIPREID.TEXT_BLOCKS", "1"])
    from clipreid.text import PromptLearner
    from clipreid.trainer import CLIPReIDTrainer, check_identities

    files = {
        "missing.gz": None,
        "damaged.gz": "damaged",
        "other.txt": "first\none two three\n",
        "merges.txt": "first\no f</w>\n",
        "image.pth": {"visual.proj": torch.zeros(2, 2)},
        "wide.pth": {"token_embedding.weight": torch.zeros(2, 32), "text_projection": torch.zeros(32, 8)},
    }
    for name, content in files.items():
        if isinstance(content, dict):
            torch.save(content, record.root / name)
        elif content:
            record.file(name, content)
    cases = {
        f"CLIPREID.VOCABULARY {name}": {"CLIPREID.VOCABULARY": str(record.root / name)} for name in list(files)[:3]
    }
    cases |= {
        "a long prompt": {
            "CLIPREID.VOCABULARY": str(record.root / "merges.txt"),
            "CLIPREID.PROMPT": "X X X X" + " of" * 80,
        },
        "a prompt without vocabulary": {"CLIPREID.PROMPT": "A photo of a X X X X zebra."},
        "a prompt without place": {"CLIPREID.PROMPT": "A photo."},
        "CLIPReIDHead without projection": {"MODEL.BACKBONE.PROJECTION": False, "MODEL.BACKBONE.FEAT_DIM": 512},
        "CLIPReID with EmbeddingHead": {"MODEL.HEADS.NAME": "EmbeddingHead"},
        "CLIPReID with MODEL.COMPILE": {"MODEL.COMPILE": "inductor"},
    }
    for title, values in cases.items():
        with record(title):
            build_model(cfg.with_values(values))
    model = build_model(cfg)
    from clipreid.model import _load_text_tower

    for name in ("image.pth", "wide.pth"):
        with record(f"the text tower in {name}"):
            _load_text_tower(model.text_encoder, str(record.root / name))
    with record("a token beyond the embedding"):
        PromptLearner(2, 4, start=1, length=4).set_words([9], torch.zeros(3, 4))
    with record("training of a model without identities"):
        build_model(cfg.with_values({"MODEL.HEADS.NUM_CLASSES": 0})).train()({"images": torch.zeros(2, 3, 64, 32)})
    with record("CLIPReIDTrainer with another model"):
        CLIPReIDTrainer.from_config(cfg, model=nn.Linear(2, 2), data_loader=(), optimizers=[])
    with record("CLIPReIDTrainer with a custom training set"):
        CLIPReIDTrainer.from_config(cfg, model=model, data_loader=(), optimizers=[])
    for title, found in {"unknown": [0, 0], "other": [1, 3]}.items():
        with record(f"prompts of {title} identities"):
            check_identities(torch.tensor(found), torch.tensor([1, 2]))


def unsupervised(record):
    """Cluster features and build the parts of ClusterTrainer with invalid settings."""
    import_project("Unsupervised")
    from unsupervised.cluster_contrast import ClusterContrastLoss
    from unsupervised.domain_norm import DomainBatchNorm2d
    from unsupervised.pseudo_labels import PseudoLabels
    from unsupervised.sampler import ClusterSampler
    from unsupervised.trainer import ClusterTrainer

    def cfg_of(*opts):
        return read_config("", tiny_options(record.root / "run", "PROJECTS", "[Unsupervised]", *opts))

    items = [ImageItem(f"{row}.png", row // 4, row % 2) for row in range(24)]
    dataset = ReidDataset(items, build_transforms(cfg_of(), is_train=False), relabel=True)
    no_labels = np.zeros(24, dtype=bool)
    loss, features = ClusterContrastLoss(), torch.eye(6).repeat_interleave(4, dim=0)
    with record("ClusterContrastLoss without a memory"):
        loss({"features": features}, torch.zeros(24, dtype=torch.int64))
    with record("UNSUPERVISED.EPS_GAP above EPS"):
        PseudoLabels.from_config(cfg_of("UNSUPERVISED.EPS_GAP", "0.7"), dataset, no_labels)
    cases = {
        "no cluster": (9, 4, features, None),
        "one cluster": (2, 24, torch.ones(24, 6), None),
        "no reliable cluster": (2, 4, features, -1),
    }
    for title, (min_samples, k1, vectors, threshold) in cases.items():
        opts = (
            "UNSUPERVISED.EPS_GAP",
            "0.02",
            "UNSUPERVISED.MIN_SAMPLES",
            str(min_samples),
            "UNSUPERVISED.K1",
            str(k1),
        )
        labels = PseudoLabels.from_config(cfg_of(*opts, "UNSUPERVISED.K2", "1"), dataset, no_labels)
        labels.set_threshold(threshold)
        with record(f"pseudo labels: {title}"):
            labels.compute([vectors], 0, torch.device("cpu"))
    adapt = ("DATASETS.NAMES", "[Demo, Market1501]", "UNSUPERVISED.LABELED", "[Demo]")
    with record("half of a batch of 15"):
        cfg = cfg_of(*adapt, "SOLVER.IMS_PER_BATCH", "15")
        ClusterSampler.from_config(cfg, camids=dataset.camids, sets=no_labels, world_size=1)
    sampler = ClusterSampler.from_config(cfg_of(), camids=dataset.camids, sets=no_labels, world_size=1)
    loaders = [
        SimpleNamespace(dataset=each, batch_sampler=SimpleNamespace(sampler=sampling))
        for each, sampling in ((None, None), (dataset, None), (dataset, sampler))
    ]
    trainers = {
        "without a memory": (nn.Identity(), None, ()),
        "with a custom training set": (loss, loaders[0], ()),
        "with another sampler": (loss, loaders[1], ()),
        "with an unknown labeled dataset": (loss, loaders[2], ("UNSUPERVISED.LABELED", "[Market1501]")),
        "with DomainBN and no labeled dataset": (nn.Sequential(loss, DomainBatchNorm2d(4)), loaders[2], ()),
    }
    for title, (model, loader, opts) in trainers.items():
        with record(f"ClusterTrainer {title}"):
            ClusterTrainer.from_config(cfg_of(*opts), model=model, data_loader=loader, optimizers=[])


def open_loop(record):
    """Trigger the messages of tools/plain_train_net.py."""
    import plain_train_net

    from fastamp.cli.train import argument_parser
    from fastamp.engine import run_command_line

    def run(argv):
        return run_command_line(lambda: plain_train_net.main(argument_parser().parse_args(argv)))

    config = record.file("plain.yml", read_config("", tiny_options("logs/tiny", "SOLVER.MAX_EPOCH", "2")).dump())
    for argv in (
        ("--resume",),
        ("SOLVER.EMA", "True"),
        ("--resume", "SOLVER.MAX_EPOCH", "3", "SOLVER.IMS_PER_BATCH", "8"),
    ):
        output = ("OUTPUT_DIR", record.root / "plain")
        record.command(run, "tools/plain_train_net.py", "--config-file", config, *argv, *output)


def soak(record):
    """Run tools/soak.py with too few kills, and with a non-empty OUTPUT_DIR."""
    import soak as tool

    config = ("--config-file", record.root / "plain.yml")
    record.command(tool.cli, "tools/soak.py", *config, "--kills", "2")
    record.file("full/file")
    record.command(tool.cli, "tools/soak.py", *config, "OUTPUT_DIR", record.root / "full")
