"""Fuzz tests: any config, image list, image or checkpoint leads to exit code 0, or to 2 with one error message.

Tracebacks, hangs, executed programs and files outside OUTPUT_DIR are failures. Each kind of input has a few examples;
``FASTAMP_FUZZ=5000 python -m pytest -m "" -n 0 tests/test_fuzz.py`` runs 5000 new ones of each kind.
"""

import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
import sqlite3
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import fuzz
import hostile_pickles
import numpy as np
import pytest
import tiny
import torch
import train_net
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fastamp import Predictor
from fastamp.config import get_cfg
from fastamp.config.defaults import KEYS
from fastamp.engine import setup
from fastamp.evaluation import PROTOCOL_REGISTRY, Protocol
from fastamp.inference import evaluate_features
from fastamp.inference.runtime import ExportedModel
from fastamp.retrieval import features_file, npz
from fastamp.retrieval.gallery_store import DATABASE_FILE, Item
from fastamp.retrieval.index_file import read_index
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.retrieval.search import search
from fastamp.utils.errors import UserError

EXAMPLES = int(os.environ.get("FASTAMP_FUZZ", "0"))
fuzzed = settings(
    max_examples=EXAMPLES or 5,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,  # hangs are detected by an alarm that tolerates slow machines
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
seeds = given(seed=st.integers(0, 2**48))
WATCH = fuzz.Watch()


class Place:
    """Folder with a few images in a CSV file, a config for them, and a checkpoint."""

    def __init__(self, root):
        self.root, self.output = root, root / "output"
        self.files = fuzz.image_files()
        (root / "cwd").mkdir()
        for number in range(12):
            (root / f"{number}.png").write_bytes(self.files["PNG"])
        self.rows = [["path", "pid", "camid", "split"]]
        self.rows += [[f"{n}.png", f"{n // 2}", f"{n % 2}", "train"] for n in range(8)]
        self.rows += [[f"{n}.png", f"{8 + n % 2}", f"{n // 2}", "query" if n < 10 else "gallery"] for n in range(8, 12)]
        self.csv = root / "images.csv"
        self.write_csv(fuzz.nasty_csv(NoChange(), self.rows))
        name = f"csv:{self.csv}"
        sizes = ("INPUT.SIZE_TRAIN", "(32, 16)", "INPUT.SIZE_TEST", "(32, 16)", "SOLVER.IMS_PER_BATCH", "4")
        sets = ("DATASETS.NAMES", name, "DATASETS.TESTS", name, "DATALOADER.NUM_INSTANCE", "2")
        cfg = tiny.tiny_config(self.output, *sizes, *sets, "SOLVER.MAX_EPOCH", "1", "SOLVER.STEPS", "()")
        self.config = _set_keys(cfg)
        self.config_file = root / "config.yml"
        self.config_file.write_text(yaml.safe_dump(self.config))
        assert self.run() == (0, "")
        self.good = (self.output / "model_final.pth").read_bytes()
        self.content = torch.load(io.BytesIO(self.good), weights_only=True)
        self.clean()

    def write_csv(self, content):
        self.csv.write_bytes(content)

    def clean(self):
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir()

    def run(self, *argv, opts=()):
        """Run the program, check the invariants of every run, and return the exit code and stderr."""
        out, err = io.StringIO(), io.StringIO()
        # Keys that would write elsewhere or take long.
        kept = (
            "OUTPUT_DIR",
            self.output,
            "SOLVER.MAX_EPOCH",
            "1",
            "DATALOADER.NUM_WORKERS",
            "0",
            "TEST.NUM_WORKERS",
            "0",
        )
        kept += ("DATALOADER.CACHE_DIR", "", "MODEL.COMPILE", "False", "MODEL.BACKBONE.PRETRAIN", "False")
        argv = ("--config-file", self.config_file, *argv) if "--config-file" not in argv else argv
        argv = [str(argument) for argument in (*argv, *opts, *(kept if len(opts) % 2 == 0 else ()))]
        quiet = contextlib.ExitStack()
        quiet.enter_context(contextlib.redirect_stdout(out))
        quiet.enter_context(contextlib.redirect_stderr(err))
        with quiet, fuzz.bounded(), WATCH.over(self.output, self.root / ".fastamp-cache", "/dev/shm"):
            try:
                code = train_net.cli(argv)
            except SystemExit as stopped:  # argparse has printed the error
                code = stopped.code
        stderr = err.getvalue()
        assert WATCH.seen == [], WATCH.seen
        assert code in (0, 2), (code, stderr)
        assert "Traceback" not in stderr + out.getvalue() and "Logging error" not in stderr, stderr
        if code == 2:
            assert stderr.count("error: ") >= 1 and len(stderr) < 20_000, stderr
        return code, stderr if code else ""


class NoChange(random.Random):
    """Random source that always chooses no change."""

    def choice(self, options):
        return options[0]

    def random(self):
        return 1.0


def _set_keys(cfg):
    """Return the keys of ``cfg`` that differ from their defaults, in the form of a config file."""
    changed = {}
    for key, value in cfg.keys_below():
        if key.path in KEYS and value != KEYS[key.path].default and not key.is_free_form:
            *sections, name = key.path.split(".")
            node = changed
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = list(value) if isinstance(value, tuple) else value
    return changed


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(root))
        # The same in every run, and half of its time.
        patch.setattr(setup, "inspect_environment", functools.cache(setup.inspect_environment))
        patch.setattr(os, "fsync", lambda file: None)
        place = Place(root)
        patch.chdir(root / "cwd")
        yield place


@pytest.mark.integration
@fuzzed
@seeds
def test_training_with_a_damaged_config_file_never_crashes(place, seed):
    rng = random.Random(seed)
    place.clean()
    file = place.root / "nasty.yml"
    file.write_bytes(fuzz.nasty_config(rng, place.config))
    flags = ["--config-file", file]
    if rng.random() < 0.2:
        base = place.root / "child.yml"
        base.write_text("_BASE_: nasty.yml\n")
        flags = ["--config-file", base]
    code, stderr = place.run(*flags)
    assert code == 0 or stderr.startswith("error: ")


@pytest.mark.integration
@fuzzed
@seeds
def test_training_with_random_config_values_never_crashes(place, seed):
    rng = random.Random(seed)
    place.clean()
    opts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(list(KEYS))
        if rng.random() < 0.1:
            key = rng.choice((key.lower(), key.rpartition(".")[0], f"{key}.x", "", "\0", "--resume", "_BASE_"))
        value = fuzz.nasty_value(rng, key)
        text = str(value) if rng.random() < 0.5 else yaml.safe_dump(value, default_flow_style=True).strip()
        opts += [key or "X", text]
    if rng.random() < 0.05:
        opts.pop()
    code, stderr = place.run(opts=opts)
    assert code == 0 or "error: " in stderr


@pytest.mark.integration
@fuzzed
@seeds
def test_training_with_a_damaged_image_list_never_crashes(place, seed):
    rng = random.Random(seed)
    place.clean()
    place.write_csv(fuzz.nasty_csv(rng, place.rows))
    try:
        code, stderr = place.run()
    finally:
        place.write_csv(fuzz.nasty_csv(NoChange(), place.rows))
    assert code == 0 or re.match(r"error: .*(/|[A-Z]\.[A-Z])", stderr, re.DOTALL), stderr


@pytest.mark.integration
@fuzzed
@seeds
def test_training_with_a_damaged_image_never_crashes(place, seed):
    rng = random.Random(seed)
    place.clean()
    kind = rng.choice(list(place.files))
    number = rng.choice((3, 11))
    file = place.root / f"{number}.png"
    file.write_bytes(fuzz.damage(rng, place.files[kind], list(place.files.values())))
    opts = rng.choice(((), (), ("INPUT.CHANNELS", "1"), ("DATALOADER.ON_CORRUPT", "skip")))
    try:
        code, stderr = place.run(opts=opts)
    finally:
        file.write_bytes(place.files["PNG"])
    assert code == 0 or str(file) in stderr, stderr


@pytest.mark.integration
@pytest.mark.parametrize("resume", [True, False])
@fuzzed
@seeds
def test_training_or_evaluation_with_a_damaged_checkpoint_never_crashes(place, seed, resume):
    rng = random.Random(seed)
    place.clean()
    path = place.output / "model_0000.pth"
    if rng.random() < 0.5:
        path.write_bytes(fuzz.damage(rng, place.good, [place.good, *place.files.values()]))
    else:
        content = place.content
        if rng.random() < 0.5:  # interrupted in the middle of the training, so that it resumes
            content = content | {"trainer": content["trainer"] | {"iteration": 1}}
        legacy = {"_use_new_zipfile_serialization": rng.random() < 0.8}
        torch.save(fuzz.nasty_checkpoint(rng, content), path, **legacy)
    if resume:
        (place.output / "last_checkpoint").write_text(path.name)
        code, stderr = place.run("--resume")
    else:
        flags = rng.choice((("--eval-only",), ()))
        code, stderr = place.run(*flags, opts=("MODEL.WEIGHTS", path))
    assert code == 0 or path.name in stderr or "finite" in stderr, stderr


# ---- extractions, indices, galleries, exported files and checkpoints, read without a run

SAVED = Path(__file__).parent / "reference/saved_gallery"
SLOWEST: dict[str, float] = {}


@contextlib.contextmanager
def read_in_time(kind):
    """Context manager that fails unless its block ends or raises a UserError within the limits of ``fuzz.bounded``.

    Writing files and starting programs are failures, too. The maximum time per kind of input is recorded.
    """
    started = time.perf_counter()
    with fuzz.bounded(), WATCH.over(Path("/nowhere")):
        try:
            yield
        except UserError as error:
            assert 0 < len(str(error)) < 20_000
    assert WATCH.seen == [], WATCH.seen
    SLOWEST[kind] = max(SLOWEST.get(kind, 0), time.perf_counter() - started)


@pytest.fixture(scope="module", autouse=True)
def report_slowest():
    yield
    if EXAMPLES:
        print("\nslowest:", ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in SLOWEST.items()))


def arrays_in(path):
    with zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy"): npz.read_array(archive, name[:-4]) for name in archive.namelist()}


def nasty_npz(rng, content, arrays, others):
    """Return an npz file with damaged bytes or with changed arrays, in a random compression."""
    if rng.random() < 0.5:
        return fuzz.damage(rng, content, others)
    file = io.BytesIO()
    arrays = fuzz.nasty_arrays(rng, arrays)
    rng.choice((np.savez, np.savez, np.savez_compressed))(file, allow_pickle=False, **arrays)
    return fuzz.damage(rng, file.getvalue(), others) if rng.random() < 0.2 else file.getvalue()


@fuzzed
@seeds
def test_reading_a_damaged_extraction_never_crashes(tmp_path_factory, seed):
    """``read_in_time`` contains the assertions: any exception other than a UserError fails the test."""
    rng, path = random.Random(seed), tmp_path_factory.getbasetemp() / "nasty.npz"
    good = (SAVED / "gallery.npz").read_bytes()
    path.write_bytes(nasty_npz(rng, good, arrays_in(SAVED / "gallery.npz"), [good, *fuzz.image_files().values()]))
    with read_in_time("extraction"):
        extraction = features_file.read_features(path)
        float(extraction.matrix.sum(dtype=np.float64)), extraction.images.paths.tolist()
    with read_in_time("evaluated features"):
        rule = PROTOCOL_REGISTRY.build(rng.choice(["market1501", "no_camera"]), get_cfg())
        arrays = evaluate_features.read_arrays(str(path), Protocol(rule=rule))
        for column in evaluate_features.COLUMNS[1:]:
            if f"query_{column}" in arrays:
                evaluate_features.column_of(arrays, column)
        [evaluate_features.features_of(arrays, side) for side in evaluate_features.SIDES]


@fuzzed
@seeds
def test_searching_a_damaged_index_never_crashes(tmp_path_factory, seed):
    rng, path = random.Random(seed), tmp_path_factory.getbasetemp() / "nasty.index"
    files = {kind: (SAVED / f"{kind}.index").read_bytes() for kind in ("ivf", "hnsw")}
    kind = rng.choice(list(files))
    if rng.random() < 0.5:
        path.write_bytes(fuzz.damage(rng, files[kind], list(files.values())))
    else:  # the index is unchanged, so that its checksum matches
        arrays, file = arrays_in(SAVED / f"{kind}.index"), io.BytesIO()
        file.write(files[kind][: int(arrays["size"])])
        whole = {name: arrays.pop(name) for name in ("size", "crc")}
        other = arrays_in(SAVED / f"{rng.choice(list(files))}.index")
        arrays["kind"] = other["kind"]
        npz.write_arrays(file, whole | (fuzz.nasty_arrays(rng, arrays) if rng.random() < 0.7 else arrays))
        path.write_bytes(file.getvalue())
    with read_in_time("index"):
        features = features_file.read_features(SAVED / "gallery.npz")
        index = read_index(path, features)
        found = search(np.ones((2, tiny.WIDTH), np.float32), replace(features, index=index), 3)
        assert found.rows.shape == (2, 3)


@fuzzed
@seeds
def test_predictor_with_a_damaged_checkpoint_never_crashes(tmp_path_factory, seed):
    rng, path = random.Random(seed), tmp_path_factory.getbasetemp() / "nasty.pth"
    good = (SAVED / "model_final.pth").read_bytes()
    kind = rng.randrange(4)
    if kind == 0:
        path.write_bytes(fuzz.damage(rng, good, [good, *fuzz.image_files().values()]))
    elif kind == 1:  # only the pickle is damaged; the checksum matches
        code = rng.choice((pickle_of(good), *hostile_pickles.PICKLES.values()))
        code = code if len(code) < 10**5 else code[: rng.choice((10**3, 10**5))]
        hostile_pickles.write(fuzz.damage(rng, code, [code]), path, legacy=rng.random() < 0.5)
    else:
        content = fuzz.nasty_checkpoint(rng, torch.load(io.BytesIO(good), weights_only=True))
        torch.save(content, path, _use_new_zipfile_serialization=kind == 2)
    with read_in_time("checkpoint"):
        predictor = Predictor(path, device="cpu")
        image = np.zeros((64, 32, 3), np.uint8)
        str(predictor.compare(image, image))


def pickle_of(content):
    """Return the opcodes of the pickle of a checkpoint, without the first and the last."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)[2:-1]


@contextlib.contextmanager
def read_in_limits(kind, folder):
    """``read_in_time`` with at most 10 s of CPU time and 1 GiB of additional memory, for files in ``folder``."""
    started = time.process_time()
    with fuzz.bounded(memory=2**30), WATCH.over(folder):
        try:
            yield
        except UserError as error:
            assert 0 < len(str(error)) < 20_000
    assert WATCH.seen == [], WATCH.seen
    seconds = time.process_time() - started
    SLOWEST[kind] = max(SLOWEST.get(kind, 0), seconds)
    assert seconds < 10


@functools.cache
def good_gallery():
    """Return the content of the database of a gallery with 60 items."""
    with tempfile.TemporaryDirectory() as folder:
        with MutableGallery(Path(folder) / "a.gallery", ModelId(tiny.WIDTH, "cosine", "hash", "a.pth")) as gallery:
            items = [Item(f"item{number}", camera="c", time=float(number), picture=b"x" * 900) for number in range(60)]
            gallery.add(items, np.random.default_rng(0).standard_normal((60, tiny.WIDTH)).astype(np.float32))
        with contextlib.closing(sqlite3.connect(Path(folder) / "a.gallery" / DATABASE_FILE)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        return (Path(folder) / "a.gallery" / DATABASE_FILE).read_bytes()


RECURSION = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
SQL_VALUES = (
    *("NULL", "9e999", "-1", "0", "9223372036854775807", "1e300", "'text'", "''", "x'00ff'", "CAST(x'ff' AS TEXT)"),
    *("zeroblob(20000000)", "hex(zeroblob(9000000))", "random()", "'1'", "char(0)", "printf('%.5000d', 1)"),
)
SQL_CHANGES = (
    "UPDATE OR IGNORE items SET {item} = {value} WHERE random() % 3 = 0",
    "UPDATE OR IGNORE items SET {item} = {value}",
    "UPDATE gallery SET {model} = {value}",
    "UPDATE items SET picture = {value}",
    "UPDATE sqlite_sequence SET seq = {value}",
    "ALTER TABLE items RENAME COLUMN {item} TO other",
    "CREATE TABLE other (a)",
    "CREATE INDEX other ON items ({item})",
    "CREATE TRIGGER other AFTER INSERT ON items BEGIN DELETE FROM items; END",
    "DELETE FROM gallery",
    "INSERT INTO gallery SELECT * FROM gallery",
    "DROP TABLE items; CREATE VIEW items AS {recursion} i AS id, i AS number, '' AS name, '' AS identity, '' AS camera,"
    " NULL AS time, zeroblob(16) AS feature, 0 AS crc FROM n",
    "PRAGMA user_version = 77",
    "PRAGMA page_size = 512; VACUUM",
)


@fuzzed
@seeds
def test_opening_and_changing_a_hostile_gallery_never_crashes(tmp_path_factory, seed):
    rng, folder = random.Random(seed), tmp_path_factory.getbasetemp() / "nasty.gallery"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    content = good_gallery()
    if rng.random() < 0.4:
        content = fuzz.damage(rng, content, [content, *fuzz.image_files().values()])
    (folder / DATABASE_FILE).write_bytes(content)
    with contextlib.closing(sqlite3.connect(folder / DATABASE_FILE)) as connection:
        for _ in range(rng.choice((0, 1, 1, 2))):
            columns = {"item": rng.choice(("id", "number", "name", "identity", "camera", "time", "feature", "crc"))}
            columns["model"] = rng.choice(("width", "metric", "config_hash", "checkpoint", "token"))
            change = rng.choice(SQL_CHANGES).format(**columns, value=rng.choice(SQL_VALUES), recursion=RECURSION)
            with contextlib.suppress(sqlite3.Error):
                connection.executescript(change)
    if rng.random() < 0.2:
        (folder / f"{DATABASE_FILE}-{rng.choice(('wal', 'journal'))}").write_bytes(rng.randbytes(5000))
    with read_in_limits("gallery", folder), MutableGallery(folder) as gallery:
        feature = np.ones((1, gallery.model.width), np.float32)
        assert search(feature, gallery, 3).rows.shape[0] == 1
        assert gallery.columns["time"].shape == (len(gallery),)
        for item in gallery.items[:2]:
            gallery.picture(item.id)
        gallery.add([Item("new", picture=b"x")], feature)
        gallery.remove(["new"])


@functools.cache
def exported_graph():
    """Return an ONNX graph that computes the mean of each channel, and the metadata of an export."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    sides = {name: onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in _SHAPES.items()}
    node = onnx.helper.make_node("ReduceMean", ["images"], ["features"], axes=[2, 3], keepdims=0)
    graph = onnx.helper.make_graph([node], "mean", [sides["images"]], [sides["features"]])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)


_SHAPES = {"images": ["batch", 3, "height", "width"], "features": ["batch", 3]}
_CALIBRATION = {"config_hash": "1", "metric": "cosine", "scores": [0.0, 1.0], "probabilities": [0.1, 0.9], "seed": 0}
_METADATA = {
    **{"config_hash": "1", "resize": [8, 4], "center_crop": None, "interpolation": "bilinear", "channels": 3},
    **{"color_order": "RGB", "normalization": "outside", "preprocess": "outside", "l2": False, "metric": "cosine"},
    **{"pixel_mean": [1.0, 2.0, 3.0], "pixel_std": [1.0, 2.0, 3.0], "protocol": "market1501", "feature_width": 3},
    "calibration": _CALIBRATION,
}
_JSON = (
    *(
        None,
        True,
        -1,
        0,
        1,
        4,
        10**6,
        2**31,
        2**63,
        10**400,
        1.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\0",
        "1",
    ),
    *([], [[]], [0], [-1, -1], [1, 1], [10**5, 10**5], [4096, 4096], [1e400] * 3, [None] * 3, {}, {"a": [1]}),
    *(["inside"], "inside", "outside", "nearest", "euclidean", "x" * 10**6),
)


@fuzzed
@seeds
def test_exported_files_with_hostile_metadata_never_crash(tmp_path_factory, seed):
    model, rng = exported_graph(), random.Random(seed)
    path = tmp_path_factory.getbasetemp() / "nasty.onnx"
    values = _METADATA | {"calibration": dict(_CALIBRATION)}
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        target = values["calibration"] if rng.random() < 0.2 and isinstance(values["calibration"], dict) else values
        name = rng.choice([*target])
        target[name] = rng.choice(_JSON)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    for name in rng.sample([*texts], rng.choice((0, 0, 0, 1))):
        texts.pop(name)
    if rng.random() < 0.1:
        texts[rng.choice(["other", *texts])] = rng.choice(("[" * 10**5, '{"a":' * 10**5, "9" * 10**5))
    del model.metadata_props[:]
    for name, text in texts.items():
        model.metadata_props.add(key=name, value=text)
    content = model.SerializeToString()
    path.write_bytes(fuzz.damage(rng, content, [content]) if rng.random() < 0.1 else content)
    with read_in_limits("exported file", Path("/nowhere")):
        exported = ExportedModel(path, threads=1)
        str(exported.protocol), str(exported.calibration), exported.config_hash
        assert exported.features([np.ones((9, 5, 3), np.uint8)] * 3).shape == (3, exported.feature_dim)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Client of a service with a gallery, whose model has been trained by an earlier version."""
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from fastamp.serving.app import create_app
    from fastamp.serving.options import Limits
    from fastamp.serving.service import Service

    model = Predictor(SAVED / "model_final.pth", device="cpu")
    gallery = MutableGallery(tmp_path_factory.mktemp("service") / "a.gallery", model.model_id)
    service = Service(model, gallery, Limits(megabytes=4))
    with TestClient(create_app(service, api_key="", local=False), raise_server_exceptions=False) as client:
        yield client


ROUTES = [
    *(("POST", f"/v1/{name}") for name in ("features", "compare", "search")),
    *(("GET", "/v1/gallery"), ("GET", "/v1/gallery/items"), ("POST", "/v1/gallery/items")),
    *(("PUT", "/v1/gallery/items"), ("GET", "/v1/gallery/items/a"), ("DELETE", "/v1/gallery/items/a")),
]


@pytest.mark.integration
@settings(fuzzed, max_examples=EXAMPLES // 2 or 5)
@seeds
def test_hostile_bodies_of_requests_are_answered(client, seed):
    rng = random.Random(seed)
    files, boundary = list(fuzz.image_files().values()), b"b"
    parts = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        name = rng.choice(
            ("images", "image", "first", "second", "metadata", "k", "cameras", "after", "", "é", "x" * 900)
        )
        is_file = rng.random() < 0.6
        value = rng.choice(files) if is_file else str(rng.choice(_JSON)).encode("utf-8", "replace")[:10_000]
        if rng.random() < 0.4:
            value = fuzz.damage(rng, value, files)
        if not is_file and rng.random() < 0.3:
            value = json.dumps([{"id": rng.choice(_JSON), "time": rng.choice(_JSON)}]).encode()
        kind = f'; filename="{rng.choice(("a.png", "../a", ""))}"' if is_file else ""
        head = f'Content-Disposition: form-data; name="{name}"{kind}'.encode()
        parts.append(b"--b\r\n" + head + b"\r\n\r\n" + value + b"\r\n")
    body = b"".join(parts) + b"--b--\r\n"
    if rng.random() < 0.3:
        body = fuzz.damage(rng, body, [body, b"--b\r\n", b"\r\n\r\n"])
    forms = (f"multipart/form-data; boundary={boundary.decode()}", "multipart/form-data", "application/json", "x", "")
    content_type = rng.choice((forms[0],) * 4 + forms)
    method, route = rng.choice(ROUTES)
    query = rng.choice(("", "", "", "?k=-1", "?limit=99999999999", "?k=%00", "?after=%ff", "?offset=-5"))
    started = time.process_time()
    with fuzz.bounded(memory=2**30):
        found = client.request(method, route + query, content=body, headers={"Content-Type": content_type})
    SLOWEST["request"] = max(SLOWEST.get("request", 0), time.process_time() - started)
    assert found.status_code < 500 and "Traceback" not in found.text, (method, route, found.text)
    assert time.process_time() - started < 10
