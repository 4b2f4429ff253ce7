"""FastFace: networks of insightface and FastReID, verification, datasets of faces, and a run."""

import gzip
import io
import itertools
import json
import pickle
import runpy
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import preloaded
import pytest
import reference_weights
import tiny
import torch
from PIL import Image
from project_recipes import check_equal_to_fastreid, files_of

from fastamp.checkpoint.load_state import load_model_state
from fastamp.cli import main
from fastamp.config import get_cfg, read_config
from fastamp.config.projects import import_project
from fastamp.data.build import build_dataset, build_reid_train_loader
from fastamp.data.decode import read_image
from fastamp.data.file_parts import read_bytes
from fastamp.engine import DefaultTrainer
from fastamp.modeling import build_model
from fastamp.modeling.infer_config import infer_config
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = Path(__file__).parents[1] / "reference"
UNPACK = Path(__file__).parents[2] / "projects/FastFace/unpack.py"


@pytest.fixture(autouse=True, scope="module")
def project(unregistered):
    import_project("FastFace")


def shapes(name):
    return json.loads(gzip.decompress((REFERENCE / f"methods/{name}_keys.json.gz").read_bytes()))["shapes"]


@pytest.mark.integration
@pytest.mark.parametrize("name, depth", [("iresnet_if18", "18x"), ("iresnet_fastface50", "50x")])
def test_features_equal_the_original_programs(name, depth):
    options = [
        "MODEL.DEVICE",
        "cpu",
        "SOLVER.AMP",
        "off",
        "MODEL.HEADS.NUM_CLASSES",
        "0",
        "MODEL.BACKBONE.DEPTH",
        depth,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.init, "normal_", lambda tensor, *options, **named: tensor)
        model = build_model(read_config("FastFace/face_base", options)).eval()
    report = load_model_state(model, reference_weights.state_dict(shapes(name)), source="reference")
    assert report.missing == report.dropped == report.other_shape == []
    with torch.no_grad():
        features = model({"images": reference_weights.images((112, 112))}).numpy()
    expected = np.load(REFERENCE / f"methods/{name}.npz")["features"]
    assert np.abs(features - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.integration
def test_network_of_a_file_is_recognized():
    state = reference_weights.state_dict(shapes("iresnet_if18"))
    cfg = get_cfg().with_values({"PROJECTS": ["FastFace"]})
    keys = infer_config({f"backbone.{name}": value for name, value in state.items()}, "file", cfg)
    assert (keys["MODEL.BACKBONE.NAME"], keys["MODEL.BACKBONE.DEPTH"]) == ("build_iresnet_backbone", "18x")


def test_ten_folds_equal_insightface():
    from fastface.verification import verify_pairs

    arrays = np.load(REFERENCE / "methods/face1.npz")
    accuracies, thresholds = verify_pairs(arrays["embeddings"], arrays["same"])
    np.testing.assert_allclose(accuracies, arrays["accuracy_folds"], atol=1e-12)
    np.testing.assert_allclose(thresholds, arrays["threshold_folds"], atol=1e-12)
    with pytest.raises(ValueError, match="2 rows"):
        verify_pairs(arrays["embeddings"][:-1], arrays["same"])


def make_faces(root, people=4, images=3):
    """Write a folder of training images for each person, and a test set of pairs."""
    generator = np.random.default_rng(0)
    for name in ("MS_Celeb_1M", "lfw"):
        for person in range(people):
            folder = root / name / f"p{person}"
            folder.mkdir(parents=True)
            for number in range(1, images + 1):
                pixels = generator.integers(256, size=(16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"p{person}_{number:04d}.jpg")
    lines = ["1 4", *(f"p{person} 1 2" for person in range(people))]
    lines += [f"p{person} 1 p{(person + 1) % people} 3" for person in range(people)]
    (root / "lfw/pairs.txt").write_text("\n".join(lines) + "\n")


def tiny_recipe(output, *opts):
    return read_config("FastFace/face_base", [
        "MODEL.DEVICE", "cpu", "SOLVER.AMP", "off", "MODEL.BACKBONE.DEPTH", "18x", "INPUT.SIZE_TRAIN", "(16, 16)",
        "INPUT.SIZE_TEST", "(16, 16)", "MODEL.BACKBONE.FEAT_DIM", "512", "SOLVER.MAX_EPOCH", "1", "SOLVER.BASE_LR",
        "1e-4", "SOLVER.IMS_PER_BATCH", "6", "DATALOADER.NUM_WORKERS", "0", "TEST.NUM_WORKERS", "0",
        "DATASETS.TESTS", "LFW", "SOLVER.WARMUP_ITERS", "0", "MODEL.HEADS.EMBEDDING_DIM", "8",
        "OUTPUT_DIR", str(output), *opts,
    ])  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("rate", [None, 0.5])
def test_training_reports_the_accuracy_of_pairs_and_the_run_is_evaluated(tmp_path, datasets_root, capsys, rate):
    make_faces(tmp_path)
    partial = ("MODEL.HEADS.PFC.ENABLED", "True", "MODEL.HEADS.PFC.SAMPLE_RATE", str(rate)) if rate else ()
    results = DefaultTrainer(tiny_recipe(tmp_path / "run", *partial)).train()
    assert 0 <= results["Accuracy"] <= 100 and results["metric"] == results["Accuracy"]
    assert tiny.weights(tmp_path / "run/model_final.pth")["heads.weight"].shape == (4, 8)
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert f"{results['Accuracy']:.2f}" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), "TEST.FLIP.ENABLED", "True"]) == 0


def test_all_images_of_a_folder_and_all_pairs_are_read(tmp_path, datasets_root):
    cfg = get_cfg().with_values({"PROJECTS": ["FastFace"]})
    for name, match in (("FaceFolder", "MS_Celeb_1M"), ("LFW", "pairs.txt")):
        with pytest.raises(DataError, match=match):
            build_dataset(name, cfg)
    make_faces(tmp_path)
    assert len(build_dataset("FaceFolder", cfg).train) == 12
    pairs = build_dataset("LFW", cfg).query
    assert [item.columns["same"] for item in pairs] == [1] * 8 + [0] * 8
    assert [Path(item.path).name for item in pairs[8:10]] == ["p0_0001.jpg", "p1_0003.jpg"]
    (tmp_path / "lfw").rename(tmp_path / "cfp_fp")
    assert len(build_dataset("CFP_FP", cfg).query) == 16 and len(build_dataset("MS1MV2", cfg).train) == 12
    (tmp_path / "cfp_fp").rename(tmp_path / "lfw")
    (tmp_path / "lfw/pairs.txt").write_text("p0 1\np0 one two\n")
    with pytest.raises(DataError, match="'p0 one two'"):
        list(build_dataset("LFW", cfg).query)


def test_generated_pairs_are_balanced_in_each_fold_and_of_test_images(demo):
    data = build_dataset("DemoFaces", get_cfg().with_values({"PROJECTS": ["FastFace"]}))
    pairs = [*zip(data.query[::2], data.query[1::2], strict=True)]
    assert len(pairs) == 600 and not {item.path for item in data.query} & {item.path for item in data.train}
    for one, other in pairs:
        same = one.columns["same"]
        assert other.columns["same"] == same == (one.pid == other.pid) and one.path != other.path
    assert all(sum(one.columns["same"] for one, _ in pairs[fold : fold + 60]) == 30 for fold in range(0, 600, 60))


def test_baselines_are_verified_like_the_features(demo):
    from fastface.face_evaluator import FaceEvaluator

    cfg = get_cfg().with_values({"TEST.BASELINES": True})
    images = torch.randint(0, 256, (40, 3, 16, 16), generator=torch.Generator().manual_seed(0)).float()
    images[20:] = images[:20]  # pairs 10 to 19 are copies of pairs 0 to 9
    images[1::2] = images[::2] // 2  # darker copies
    evaluator, order = FaceEvaluator(cfg), torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for part in order.split(7):
        same = torch.ones(len(part), dtype=torch.int64)
        evaluator.process({"indices": part, "same": same, "images": images[part]}, torch.ones(len(part), 2))
    metrics = evaluator.evaluate()
    assert metrics["Accuracy"] == metrics["baselines"]["raw pixels"]["Accuracy"] == 100
    assert set(metrics["baselines"]) == {"raw pixels", "color histogram"}


@pytest.mark.integration
def test_test_set_without_pairs_is_a_data_error(tmp_path, datasets_root, capsys):
    make_faces(tmp_path)
    (tmp_path / "table.csv").write_text("path,pid,camid,split\nlfw/p0/p0_0001.jpg,1,1,query\n")
    cfg = tiny_recipe(tmp_path / "run", "DATASETS.TESTS", f"csv:{tmp_path / 'table.csv'}")
    with pytest.raises(DataError, match="'same'"):
        DefaultTrainer(cfg).train()


@pytest.mark.parametrize("path", files_of("FastFace"))
def test_recipe_equals_the_file_of_fastreid(path, tmp_path):
    different = "MODEL.HEADS.NUM_CLASSES", "DATASETS.REC_PATH", "INPUT.SIZE_TRAIN", "INPUT.SIZE_TEST"
    if path.endswith("face_base.yml"):
        check_equal_to_fastreid(path, tmp_path, (*different, "MODEL.BACKBONE.FEAT_DIM"))
    else:
        check_equal_to_fastreid(path, tmp_path)


@pytest.mark.integration
def test_images_that_are_not_resized_are_trained_with_the_configured_width(tmp_path, datasets_root):
    make_faces(tmp_path)
    sizes = ("INPUT.SIZE_TRAIN", "[0]", "INPUT.SIZE_TEST", "[0]")
    assert "Accuracy" in DefaultTrainer(tiny_recipe(tmp_path / "run", *sizes)).train()
    with pytest.raises(ConfigError, match="512 x 1 x 1.*1024"):
        DefaultTrainer(tiny_recipe(tmp_path / "other", *sizes, "MODEL.BACKBONE.FEAT_DIM", "1024")).train()


def test_dropout_is_applied_in_training_only():
    from fastface.iresnet import build_iresnet_backbone

    options = ["MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.DROPOUT", "0.9"]
    model = build_iresnet_backbone(read_config("FastFace/face_base", options))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert (model(x) == 0).float().mean() > 0.8 and (model.eval()(x) == 0).float().mean() < 0.1


@pytest.mark.parametrize(
    "name, expected", [("r50_ir", ("build_iresnet_backbone", False)), ("r101_ir", ("build_resnetIR_backbone", True))]
)
def test_recipes_have_partial_fc_and_cosface(name, expected):
    cfg = read_config(f"FastFace/{name}")
    assert expected == (cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.WITH_SE)
    heads = cfg.MODEL.HEADS
    assert (heads.CLS_LAYER, heads.SCALE, heads.MARGIN, heads.PFC.ENABLED, heads.PFC.SAMPLE_RATE) == (
        "CosSoftmax", 64, 0.4, True, 0.1,
    )  # fmt: skip
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.STEPS, cfg.SOLVER.MAX_EPOCH) == (0.05, (8, 12, 15, 18), 20)


def test_squeeze_excitation_scales_channels():
    from fastface.iresnet import SqueezeExcitation

    module, x = SqueezeExcitation(32), torch.randn(2, 32, 3, 3)
    y = module(x)
    ratio = (y / x).flatten(2)
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
    assert ((ratio > 0) & (ratio < 1)).all()


def record(labels, image):
    """Return a record as MXNet writes it."""
    if isinstance(labels, float):
        content = struct.pack("<IfQQ", 0, labels, 0, 0) + image
    else:
        content = struct.pack(f"<IfQQ{len(labels)}f", len(labels), 0, 0, 0, *labels) + image
    return struct.pack("<II", 0xCED7230A, len(content)) + content + b"\0" * (-len(content) % 4)


def write_records(path, records):
    offsets, content = [], b""
    for record in records:
        offsets.append(len(content))
        content += record
    path.write_bytes(content)
    path.with_suffix(".idx").write_text("".join(f"{number}\t{offset}\n" for number, offset in enumerate(offsets)))


def encoded(shade):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(stream, "JPEG")
    return stream.getvalue()


def unpack(*words):
    return preloaded.run(UNPACK, *words)


@pytest.mark.integration
def test_record_files_are_unpacked_without_the_records_of_identities(tmp_path):
    images = [encoded(shade) for shade in (10, 90, 200)]
    # Record 0: records 1 to 3 are images; the others describe identities.
    rows = [record((4.0, 6.0), b""), record(5.0, images[0]), record((7.0, 1.0), images[1]), record(5.0, images[2])]
    write_records(tmp_path / "train.rec", [*rows, record((1.0, 3.0), b""), record((3.0, 4.0), b"")])
    process = unpack(tmp_path / "train.rec", tmp_path / "faces")
    assert process.returncode == 0 and "wrote 3 images" in process.stdout, process.stderr
    folder = tmp_path / "faces"
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.jpg")}
    assert files == {"5/1.jpg": images[0], "7/2.jpg": images[1], "5/3.jpg": images[2]}
    content = (tmp_path / "train.rec").read_bytes()
    (tmp_path / "train.rec").write_bytes(content[: len(rows[0]) + 20])
    process = unpack(tmp_path / "train.rec", tmp_path / "other")
    assert process.returncode == 2 and "record 2 begins at byte" in process.stderr
    assert not (tmp_path / "other").exists() and not [*tmp_path.glob(".*")]
    (tmp_path / "train.idx").unlink()
    assert "train.idx" in unpack(tmp_path / "train.rec", tmp_path / "third").stderr


def divided(content):
    """Return a record in parts, as MXNet writes content that contains the magic number at a multiple of four bytes."""
    magic = struct.pack("<I", 0xCED7230A)
    parts = content.split(magic)
    kinds = [1, *[2] * (len(parts) - 2), 3]
    return b"".join(
        struct.pack("<II", 0xCED7230A, kind << 29 | len(part)) + part + b"\0" * (-len(part) % 4)
        for kind, part in zip(kinds, parts, strict=True)
    )


def test_divided_records_are_joined(tmp_path):
    from fastface.packed_files import read_records

    magic = struct.pack("<I", 0xCED7230A)
    images = [b"abcd" + magic + b"efgh" + magic + b"ij", b"whole"]
    header = struct.pack("<IfQQ", 0, 5.0, 0, 0)
    write_records(tmp_path / "a.rec", [divided(header + images[0]), record(6.0, images[1])])
    assert list(read_records(tmp_path / "a.rec")) == [(5, images[0]), (6, images[1])]


@pytest.mark.parametrize(
    "rows, index, message",
    [
        ([record((float("nan"), 2.0), b""), record(5.0, b"x")], None, "record 0 .*nan"),
        ([record(5.0, b"x"), record(float("nan"), b"y")], None, "record 1 .*nan"),
        ([struct.pack("<IIIfQQ", 0xCED7230A, 24, 2**30, 0, 0, 0)], None, r"record 0\b"),
        ([struct.pack("<II", 0xCED7230A, 3 << 29 | 24) + bytes(24)], None, r"record 0\b"),
        ([record(5.0, b"x"), record(6.0, b"")], None, r"record 1\b"),
        ([record(5.0, b"x")], "0 0\n1 4000\n", "record 1 .*4000 .*36 bytes"),
        ([record(5.0, b"x")], "0 2\n", r"record 0\b"),
        ([record((2.0, 3.0), b""), record((1.0, 1.0), b"")], None, r"record 1\b"),
        ([record((1.0, 2.0), b""), record((1.0, 1.0), b"")], None, "has no images"),
        ([record(5.0, b"x")], "", "it is empty"),
        ([record(5.0, b"x")], "0 -8\n", "at least 0"),
        ([record(5.0, b"x")], f"0 {2**63}\n", "63 bits"),
        ([record(5.0, b"x")], "0 1 2\n", "too many values"),
    ],
)
def test_damaged_records_and_indices_are_data_errors(tmp_path, rows, index, message):
    from fastface.packed_files import read_records

    write_records(tmp_path / "a.rec", rows)
    if index is not None:
        (tmp_path / "a.idx").write_text(index)
    with pytest.raises(DataError, match=message):
        list(read_records(tmp_path / "a.rec"))


def identical(batches, others):
    for one, other in zip(batches, others, strict=True):
        assert torch.equal(one["images"], other["images"]) and torch.equal(one["targets"], other["targets"])


@pytest.mark.integration
def test_training_reads_a_record_file_like_the_unpacked_folder(tmp_path, datasets_root, capsys):
    make_faces(tmp_path)
    rng, rows = np.random.default_rng(0), []
    for person in (3, 4, 7):
        for _ in range(3):
            stream = io.BytesIO()
            Image.fromarray(rng.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(stream, "JPEG")
            rows.append((person, stream.getvalue()))
    # The magic number in a comment, behind the image, divides the record.
    rows[5] = (rows[5][0], rows[5][1] + b"\0" * (-len(rows[5][1]) % 4) + struct.pack("<I", 0xCED7230A) + b"end")
    parts = [record(float(person), image) for person, image in rows]
    parts[5] = divided(struct.pack("<IfQQ", 0, float(rows[5][0]), 0, 0) + rows[5][1])
    write_records(tmp_path / "train.rec", [record((10.0, 11.0), b""), *parts, record((1.0, 4.0), b"")])
    assert unpack(tmp_path / "train.rec", tmp_path / "unpacked").returncode == 0

    def recipe(name, *opts):
        source = ("DATASETS.REC_PATH", str(tmp_path / "train.rec"))
        folder = ("DATASETS.FACE_FOLDER", "unpacked")
        return tiny_recipe(tmp_path / name, *(source if name.startswith("packed") else folder), *opts)

    packed, folder = (build_dataset("MS1MV2", recipe(name)).train for name in ("packed", "folder"))
    assert [item.pid for item in packed] == [item.pid for item in folder]
    assert [bytes(read_bytes(item.path)) for item in packed] == [Path(item.path).read_bytes() for item in folder]
    for opts in (("DATALOADER.NUM_WORKERS", "2"), ("DATALOADER.CACHE", "disk")):
        loaders = [build_reid_train_loader(recipe(name, *opts)) for name in ("packed", "folder")]
        identical(*(itertools.islice(loader, 4) for loader in loaders))
    runs = []
    for name in ("packed", "folder"):
        torch.manual_seed(0)
        runs.append(DefaultTrainer(recipe(name)).train())
    assert runs[0] == runs[1]
    one, other = (tiny.weights(tmp_path / f"{name}/model_final.pth") for name in ("packed", "folder"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())

    command = ["check-data", "FaceFolder", "--plugin", "FastFace", "--output", str(tmp_path / "check")]
    command += ["--write-clean", str(tmp_path / "clean.csv"), "DATASETS.REC_PATH", str(tmp_path / "train.rec")]
    assert main(command) == 0
    assert list((tmp_path / "check").glob("*.png")) and "9" in capsys.readouterr().out
    table = build_dataset(f"csv:{tmp_path / 'clean.csv'}", get_cfg()).train
    assert [read_bytes(item.path) for item in table] == [read_bytes(item.path) for item in packed]

    content = (tmp_path / "train.rec").read_bytes()
    (tmp_path / "train.rec").write_bytes(content[:-200])
    with pytest.raises(DataError, match=r"record \d+"):
        DefaultTrainer(recipe("packed2"))
    (tmp_path / "train.idx").unlink()
    for missing in ("train.idx", "train.rec"):
        with pytest.raises(DataError, match=missing):
            DefaultTrainer(recipe("packed2"))
        (tmp_path / "train.rec").unlink(missing_ok=True)


def test_record_file_that_no_training_set_reads_is_a_config_error(tmp_path, demo):
    opts = ("DATASETS.REC_PATH", "train.rec", "DATASETS.TESTS", "DemoFaces", "DATASETS.NAMES", "DemoFaces")
    with pytest.raises(ConfigError, match="DATASETS.REC_PATH.*train.rec.*DemoFaces"):
        DefaultTrainer(tiny_recipe(tmp_path / "run", *opts))


def test_evaluator_requires_pairs_of_equal_labels(caplog):
    from fastface.face_evaluator import FaceEvaluator

    def evaluate(*same):
        evaluator = FaceEvaluator(get_cfg())
        indices = torch.arange(len(same))
        features = torch.rand(len(same), 4, generator=torch.Generator().manual_seed(0))
        if same:
            evaluator.process({"indices": indices, "same": torch.tensor(same)}, features)
        return evaluator.evaluate()

    for same in ((), (1, 1), (1, 0, 0, 1), (1, 1, 0, 0, 1)):
        with pytest.raises(DataError, match=rf"'same'[\s\S]* {len(same)} "):
            evaluate(*same)
    assert "Accuracy" in evaluate(1, 1, 0, 0)
    assert "2 pairs are verified in 2 folds instead of 10" in caplog.text


@pytest.mark.integration
def test_pairs_are_unpacked_to_a_set_that_lfw_reads(tmp_path, monkeypatch):
    images = [encoded(shade) for shade in (10, 20, 30, 40)]
    for protocol in (2, 4):
        source = tmp_path / f"{protocol}.bin"
        source.write_bytes(pickle.dumps((images, [True, False]), protocol=protocol))
        root = tmp_path / str(protocol)
        assert unpack(source, root / "lfw").returncode == 0
        monkeypatch.setenv("FASTAMP_DATASETS", str(root))
        items = build_dataset("LFW", get_cfg().with_values({"PROJECTS": ["FastFace"]})).query
        assert [Path(item.path).read_bytes() for item in items] == images
        assert [item.columns["same"] for item in items] == [1, 1, 0, 0]


def save_array(folder, images, labels, blosc, rows=3):
    """Write a bcolz array of ``rows`` images in a chunk, and the labels next to it."""
    (folder / "data").mkdir(parents=True)
    (folder / "meta").mkdir()
    values = (images.astype(np.float32) / 255 - 0.5) / 0.5
    sizes = {"shape": list(values.shape), "nbytes": values.nbytes, "cbytes": 0}
    storage = {"dtype": "float32", "cparams": {"shuffle": 1}, "chunklen": rows, "dflt": 0.0, "expectedlen": len(values)}
    (folder / "meta/sizes").write_text(json.dumps(sizes))
    (folder / "meta/storage").write_text(json.dumps(storage))
    for number, start in enumerate(range(0, len(values), rows)):
        chunk = blosc.compress(values[start : start + rows].tobytes(), typesize=4)
        content = b"blpk" + struct.pack("<B3xq", 1, 1) + chunk
        (folder / f"data/__{number}.blp").write_bytes(content)
    np.save(f"{folder}_list.npy", np.array(labels))


class Deflate:
    """Replacement of the package blosc, with the header of its chunks."""

    def compress(self, content, typesize):
        return struct.pack("<4BIII", 2, 1, 1, typesize, len(content), 0, 0) + zlib.compress(content)

    def decompress(self, chunk):
        return zlib.decompress(chunk[16:])


@pytest.fixture
def blosc(monkeypatch):
    """Return the package blosc if it is installed, else its replacement."""
    try:
        import blosc
    except ImportError:
        blosc = Deflate()
        monkeypatch.setitem(sys.modules, "blosc", blosc)
    return blosc


@pytest.mark.parametrize("bgr", [False, True])
def test_bcolz_arrays_are_unpacked_to_a_set_that_lfw_reads(tmp_path, datasets_root, blosc, bgr):
    images = np.random.default_rng(0).integers(256, size=(8, 3, 6, 5), dtype=np.uint8)
    save_array(tmp_path / "emore/lfw", images, [True, False, False, True], blosc)
    unpack_array = runpy.run_path(str(UNPACK))["unpack_array"]
    (tmp_path / "lfw").mkdir()
    assert unpack_array(tmp_path / "emore/lfw", tmp_path / "lfw", bgr=bgr) == 8
    items = build_dataset("LFW", get_cfg().with_values({"PROJECTS": ["FastFace"]})).query
    expected = images[:, ::-1] if bgr else images
    assert np.array_equal(torch.stack([read_image(item.path) for item in items]).numpy(), expected)
    assert [item.columns["same"] for item in items] == [1, 1, 0, 0, 0, 0, 1, 1]


def test_damaged_bcolz_arrays_are_data_errors(tmp_path, blosc):
    from fastface.carray import read_images, read_labels

    images = np.full((8, 3, 6, 5), 100, dtype=np.uint8)
    folder, chunk = tmp_path / "a", tmp_path / "a/data/__1.blp"
    save_array(folder, images, [True] * 4, blosc)
    assert len(list(read_images(folder))) == 8
    content = chunk.read_bytes()
    for damaged in (b"", content[:20], content[:40], b"x" + content[1:], content[:20] + b"\xff" * 4 + content[24:]):
        chunk.write_bytes(damaged)
        with pytest.raises(DataError, match=r"__1\.blp[\s\S]*fix:"):
            list(read_images(folder))
    chunk.unlink()
    with pytest.raises(DataError, match="No such file"):
        list(read_images(folder))
    save_array(tmp_path / "b", images.astype(np.float32) * 3, [True] * 4, blosc)
    with pytest.raises(DataError, match=r"-1\.\.1"):
        list(read_images(tmp_path / "b"))
    for labels in ([True] * 3, [2, 0, 0, 1]):
        np.save(tmp_path / "a_list.npy", np.array(labels))
        with pytest.raises(DataError, match=r"a_list\.npy.* 4 "):
            read_labels(tmp_path / "a_list.npy", 8)
    for meta in ("{", "{}", '{"shape": [8, 1, 6, 5]}', '{"shape": 3}'):
        (folder / "meta/sizes").write_text(meta)
        with pytest.raises(DataError, match=f"{folder.name} .*bcolz"):
            list(read_images(folder))


@pytest.mark.integration
def test_bcolz_arrays_require_blosc(tmp_path):
    (tmp_path / "a").mkdir()
    process = unpack(tmp_path / "a", tmp_path / "lfw")
    assert process.returncode == 2 and "Traceback" not in process.stderr and "fix:" in process.stderr
    process = unpack("--bgr", tmp_path / "a.bin", tmp_path / "lfw")
    assert process.returncode == 2 and "--bgr" in process.stderr


class Harmful:
    """Object whose unpickling would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.integration
def test_pairs_with_other_objects_are_refused_and_nothing_is_executed(tmp_path):
    source = tmp_path / "evil.bin"
    source.write_bytes(pickle.dumps(([Harmful(tmp_path / "touched")], [True])))
    process = unpack(source, tmp_path / "lfw")
    assert process.returncode == 2 and "is not executed" in process.stderr
    assert not (tmp_path / "touched").exists()
    source.write_bytes(pickle.dumps(([b"a"], [True])))
    assert "two images for each of 1 pairs" in unpack(source, tmp_path / "lfw").stderr
    for content in (([3, 4], [True]), ([b"a", b"b"], ["no"]), ([], [])):
        source.write_bytes(pickle.dumps(content))
        process = unpack(source, tmp_path / "lfw")
        assert process.returncode == 2 and "Traceback" not in process.stderr and not (tmp_path / "lfw").exists()


def naive_rates(scores, same, rates):
    thresholds = [*np.unique(scores), -np.inf]
    allowed = [[t for t in thresholds if (scores[~same] > t).mean() <= rate + 1e-12] for rate in rates]
    return [(scores[same] > min(thresholds)).mean() for thresholds in allowed]


def test_true_accept_rates_equal_a_loop_over_all_thresholds():
    from fastface.templates import true_accept_rates

    rng = np.random.default_rng(0)
    same = rng.random(400) < 0.4
    for scores in (rng.normal(size=400) + same, rng.integers(5, size=400) + 2.0 * same):
        rates = np.array([0, 0.001, 0.01, 0.1, 0.29, 0.5, 1])
        np.testing.assert_allclose(true_accept_rates(scores, same, rates), naive_rates(scores, same, rates))
    with pytest.raises(DataError, match=r"\b3 and 0\b"):
        true_accept_rates(np.ones(3), np.ones(3, dtype=bool), np.array([0.1]))


def test_templates_are_sums_of_the_means_of_their_media():
    from fastface.templates import pair_scores, template_features

    rng = np.random.default_rng(1)
    features, templates, media = rng.normal(size=(30, 5)), rng.integers(4, size=30) * 7, rng.integers(3, size=30)
    numbers, pooled = template_features(features, templates, media)
    for number, row in zip(numbers, pooled, strict=True):
        of_template = templates == number
        total = sum(features[of_template & (media == medium)].mean(0) for medium in set(media[of_template]))
        np.testing.assert_allclose(row, total / np.linalg.norm(total))
    first, second = np.array([0, 7, 21]), np.array([7, 7, 0])
    rows = dict(zip(numbers.tolist(), pooled, strict=True))
    expected = [rows[a] @ rows[b] for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    np.testing.assert_allclose(pair_scores(numbers, pooled, first, second), expected)
    with pytest.raises(DataError, match=r"\b1 templates.* 8\b"):
        pair_scores(numbers, pooled, np.array([8]), np.array([0]))


@pytest.mark.integration
def test_templates_are_verified_from_a_features_file(tmp_path):
    rng = np.random.default_rng(2)
    people = np.repeat(np.arange(6), 4)
    features = (np.eye(6)[people] + 0.1 * rng.normal(size=(24, 6))).astype(np.float32)
    np.savez(
        tmp_path / "a.npz", features=features, paths=np.array([f"x/{n}.jpg" for n in range(24)]),
        pids=np.zeros(24, int), camids=np.zeros(24, int), config_hash="0", checkpoint="x", metric="cosine",
    )  # fmt: skip
    (tmp_path / "t.txt").write_text("".join(f"{n}.jpg {n // 2} {n % 2}\n" for n in range(24)))
    pairs = [(a, b, int(a // 2 == b // 2)) for a in range(12) for b in range(a)]
    (tmp_path / "p.txt").write_text("".join("{} {} {}\n".format(*pair) for pair in pairs))

    def verify(*words):
        command = ["--templates", tmp_path / "t.txt", "--pairs", tmp_path / "p.txt", tmp_path / "a.npz", *words]
        return preloaded.run(Path(__file__).parents[2] / "projects/FastFace/verify_templates.py", *command)

    for words in ((), ("--normalize",)):
        process = verify(*words)
        assert process.returncode == 0, process.stderr
        assert "12 templates, 6 pairs of one identity, 60 of different ones" in process.stdout
        assert "0.1                  100.00" in process.stdout and "needs 1000000 pairs" in process.stdout
    arrays = dict(np.load(tmp_path / "a.npz"))
    np.savez(tmp_path / "a.npz", **arrays | {"paths": np.array([f"x/{n}.jpg" for n in range(23)] + ["y/0.jpg"])})
    process = verify()
    assert process.returncode == 2 and "24 images have 23 different names" in process.stderr
    np.savez(tmp_path / "a.npz", **arrays)
    (tmp_path / "t.txt").write_text("missing.jpg 0 0\n")
    process = verify()
    assert process.returncode == 2 and "1 of 1 images, e.g. missing.jpg" in process.stderr


@pytest.mark.parametrize(
    "text", ["0 1 same\n", "0 1\n", "0 1 --1\n", "0 1 1\n0 1\n", "", "\n", f"0 1 {2**64}\n", "\x00"]
)
def test_damaged_lists_of_templates_are_data_errors(tmp_path, text):
    from fastface.templates import read_table

    path = tmp_path / "list.txt"
    path.write_text(text)
    with pytest.raises(DataError, match="template, template, label"):
        read_table(path, ("template", "template", "label"))
    with pytest.raises(DataError, match="image, template, medium"):
        read_table(path, ("image", "template", "medium"))
    path.write_text("0 1 1\n5 -7 0\n")
    columns = read_table(path, ("template", "template", "label"))
    assert [column.tolist() for column in columns] == [[0, 5], [1, -7], [1, 0]]
    path.unlink()
    with pytest.raises(DataError, match="list.txt"):
        read_table(path, ("template", "template", "label"))
