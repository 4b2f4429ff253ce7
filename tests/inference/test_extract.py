"""Tests of extraction: equality with evaluation, columns, and bit-identical resume."""

import csv
import itertools
import json
import multiprocessing
import shutil
import signal
import sys

import evaluate_features
import numpy as np
import pytest
import torch
from command import run_command

from fastamp import Predictor
from fastamp.cli import extract as command
from fastamp.cli import main, search
from fastamp.data import build_reid_test_loader
from fastamp.data import decode as decode_module
from fastamp.data.build import build_dataset
from fastamp.engine import DefaultTrainer
from fastamp.inference import image_folder, partial_rows
from fastamp.inference.extract import extract
from fastamp.inference.image_folder import open_source
from fastamp.inference.image_list import list_images
from fastamp.inference.outputs import PredictorOutput
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.open_gallery import open_gallery
from fastamp.utils import lock
from fastamp.utils.errors import ConfigError, DataError, UserError, WriteError


@pytest.fixture
def predictor(demo, checkpoint):
    return Predictor(checkpoint, device="cpu", opts=["TEST.IMS_PER_BATCH", "8"])


@pytest.fixture
def images(demo, tmp_path):
    """Folder with 11 images in subfolders, and with files that are not images."""
    folder = tmp_path / "images"
    for number, item in enumerate(build_dataset("Demo").gallery[:11]):
        place = folder / "abc"[number % 3] / str(number)
        place.mkdir(parents=True)
        shutil.copy(item.path, place / f"{number}.jpg")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.jpg").write_text("no image")
    return folder


def test_extraction_reproduces_features_and_metrics_of_evaluation(predictor, run_folder, tmp_path, capsys):
    found, left_out = extract(predictor, "Demo", tmp_path / "demo.npz")
    dataset, rows = build_dataset("Demo"), []
    for split in ("query", "gallery", "train"):
        items = getattr(dataset, split)
        rows += [(item.path, int(dataset.identity(item.pid)), item.camid, split) for item in items]
    columns = zip(found.images.paths, found.images.pids, found.images.camids, found.images.split, strict=True)
    assert [(str(a), int(b), int(c), str(d)) for a, b, c, d in columns] == rows and left_out == []
    loader, _ = build_reid_test_loader(predictor.cfg, "Demo")
    expected = predictor.compute(loader)
    assert np.array_equal(found.matrix[: len(expected)], expected.numpy()) and found.matrix.dtype == np.float32
    assert found.model == predictor.model_id
    assert not list(tmp_path.glob("*.parts"))

    # Read with NumPy and with evaluate_features: the metrics equal those of the last evaluation of the run.
    with np.load(tmp_path / "demo.npz", allow_pickle=False) as file:
        assert np.array_equal(file["features"], found.matrix) and str(file["config_hash"]) == predictor.config_hash
    assert evaluate_features.cli([str(found.path), "--json", "MODEL.DEVICE", "cpu"]) == 0
    judged = json.loads(capsys.readouterr().out)
    lines = (run_folder / "metrics.json").read_text().splitlines()
    evaluated = next(row for row in map(json.loads, reversed(lines)) if "Demo/mAP" in row)
    assert judged["mAP"] == pytest.approx(evaluated["Demo/mAP"], abs=1e-3)


def test_extraction_of_a_folder_includes_images_in_subfolders(predictor, images, tmp_path):
    found, _ = extract(predictor, images, tmp_path / "out.npz")
    paths = sorted(images.rglob("?/*.jpg")) + sorted(images.rglob("??/*.jpg"))
    assert sorted(found.images.paths.tolist()) == sorted(map(str, paths)) and len(paths) == 11
    assert found.images.paths.tolist() == [str(path) for path in sorted(paths)]
    assert (found.images.pids == -1).all() and (found.images.camids == -1).all() and found.images.split is None
    expected = torch.cat([predictor.features(found.images.paths.tolist()[start : start + 8]) for start in (0, 8)])
    assert np.array_equal(found.matrix, expected.numpy())


def test_extraction_of_a_model_in_float64_stores_float32(predictor, images, tmp_path, monkeypatch):
    expected = np.array(extract(predictor, images, tmp_path / "a.npz")[0].matrix)
    forward = type(predictor.model).forward
    monkeypatch.setattr(type(predictor.model), "forward", lambda self, batch: forward(self, batch).double())
    found = extract(predictor, images, tmp_path / "b.npz")[0].matrix
    assert found.dtype == np.float32 and np.allclose(found, expected, rtol=1e-5)


def test_extraction_of_a_csv_file_stores_identity_names_and_boxes(predictor, images, tmp_path):
    first, second = sorted(images.rglob("[0-9].jpg"))[:2]
    listed = tmp_path / "mine.csv"
    listed.write_text(f"path,pid,camid,x0,y0,x1,y1\n{first},ann,1,0,0,9,20\n{second},bob,2,4,4,9,30\n")
    found, _ = extract(predictor, listed, tmp_path / "out.npz")
    assert found.images.pids.tolist() == ["ann", "bob"] and found.images.split.tolist() == ["train"] * 2
    assert found.images.boxes.tolist() == [[0, 0, 9, 20], [4, 4, 9, 30]]
    other = list_images(f"csv:{listed}", predictor.cfg)
    assert [item.path for item in other.items] == found.images.paths.tolist()


def test_extraction_reads_the_boxes_of_a_frame_together(predictor, images, tmp_path, monkeypatch):
    """The rows keep the order of the list, without those of an unreadable frame, also after an interruption."""
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    frames = [*sorted(images.rglob("[0-9].jpg"))[:3], tmp_path / "broken.jpg"]
    rows = [(frames[number % 4], number % 5, 6 + number) for number in range(20)]
    lines = [f"{path},p{number},1,{left},0,{left + 9},{bottom}" for number, (path, left, bottom) in enumerate(rows)]
    listed = tmp_path / "mine.csv"
    listed.write_text("\n".join(["path,pid,camid,x0,y0,x1,y1", *lines]))
    read, decode = [], decode_module.decode_image
    monkeypatch.setattr(
        decode_module,
        "decode_image",
        lambda content, *args, **kw: read.append(kw["name"]) or decode(content, *args, **kw),
    )
    with monkeypatch.context() as patch:
        killed_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            extract(predictor, listed, tmp_path / "out.npz", skip_corrupt=True, num_workers=0)
    found, skipped = extract(predictor, listed, tmp_path / "out.npz", skip_corrupt=True, num_workers=0)
    assert len(skipped) == 5 and all("broken.jpg" in message for message in skipped)
    assert max(map(read.count, map(str, frames[:3]))) <= 2  # again after the interruption
    kept = [number for number in range(20) if number % 4 != 3]
    assert found.images.pids.tolist() == [f"p{number}" for number in kept]
    for row, number in enumerate(kept):
        path, left, bottom = rows[number]
        expected = predictor.features(str(path), boxes=[(left, 0, left + 9, bottom)])
        assert np.allclose(found.matrix[row], expected[0].numpy(), rtol=1e-4, atol=1e-6)


def killed_after(number, monkeypatch):
    """Interrupt extractions after ``number`` batches."""
    append, appended = partial_rows.PartialRows.append, []

    def dying(self, *args):
        if len(appended) == number:
            raise KeyboardInterrupt
        appended.append(append(self, *args))

    monkeypatch.setattr(partial_rows.PartialRows, "append", dying)
    monkeypatch.setattr(partial_rows, "_SAVE_SECONDS", -1.0)


class Norm(PredictorOutput):
    stored = True

    def compute(self, model, batch):
        features = model(batch)
        return features, features.norm(dim=1, keepdim=True)


def count_batches(predictor):
    """Return a list to which the model appends the number of images of each batch."""
    counts = []
    predictor.model.register_forward_hook(lambda module, inputs, output: counts.append(len(output)))
    return counts


def test_resumed_extraction_is_bit_identical_to_uninterrupted_extraction(
    predictor, images, tmp_path, monkeypatch, caplog
):
    extract(predictor, images, tmp_path / "whole.npz")
    out, parts = tmp_path / "out.npz", tmp_path / "out.npz.parts"
    with monkeypatch.context() as patch:
        killed_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            extract(predictor, images, out)
    assert not out.exists() and json.loads((parts / "of.json").read_text())["done"] == 8
    with (parts / "rows.f32").open("ab") as file:
        file.write(b"not complete")
    computed = count_batches(predictor)
    extract(predictor, images, out)
    assert computed == [3] and "8 of 11 images" in caplog.text
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes() and not parts.exists()

    # Rows that are missing are computed again.
    with monkeypatch.context() as patch:
        killed_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            extract(predictor, images, out)
    (parts / "rows.f32").write_bytes(b"short")
    extract(predictor, images, out)
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()

    # Parts with values of outputs that are not computed are not reused.
    with monkeypatch.context() as patch:
        patch.setattr(predictor, "outputs", {"norm": Norm(["norm"])})
        killed_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            extract(predictor, images, out)
    extract(predictor, images, out)
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()

    # Parts of other images are not reused.
    with monkeypatch.context() as patch:
        killed_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            extract(predictor, images, out)
    next(images.rglob("3.jpg")).unlink()
    found, _ = extract(predictor, images, out)
    assert len(found.images.paths) == 10 and "out.npz.parts" in caplog.text and "images" in caplog.text


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {"rows.f32": "mine"},
        {"of.json": "{}"},
        {"of.json": "mine"},
        {"of.json": '["model", "images"]', "a/b": ""},
    ],
)
def test_extraction_raises_if_parts_folder_contains_other_files(predictor, images, tmp_path, files):
    parts = tmp_path / "out.npz.parts"
    for name, text in files.items():
        (parts / name).parent.mkdir(parents=True, exist_ok=True)
        (parts / name).write_text(text)
    before = contents(parts)
    with pytest.raises(ConfigError, match=r"out\.npz\.parts"):
        extract(predictor, images, tmp_path / "out.npz")
    assert contents(parts) == before and not (tmp_path / "out.npz").exists()


@pytest.mark.parametrize("target", ["a file", "a folder", "an extraction's folder", "nothing"])
def test_extraction_raises_if_parts_folder_is_a_link(predictor, images, tmp_path, monkeypatch, target):
    elsewhere = tmp_path / "elsewhere"
    if target == "a file":
        elsewhere.write_text("mine")
    elif target == "a folder":
        elsewhere.mkdir()
    elif target == "an extraction's folder":
        with monkeypatch.context() as patch:
            killed_after(1, patch)
            with pytest.raises(KeyboardInterrupt):
                extract(predictor, images, tmp_path / "first.npz")
        (tmp_path / "first.npz.parts").rename(elsewhere)
    (tmp_path / "out.npz.parts").symlink_to(elsewhere)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"out\.npz\.parts.*elsewhere"):
        extract(predictor, images, tmp_path / "out.npz")
    assert contents(tmp_path) == before and (tmp_path / "out.npz.parts").is_symlink()


def test_extraction_keeps_other_files_in_parts_folder(predictor, images, tmp_path, monkeypatch):
    out, parts = tmp_path / "out.npz", tmp_path / "out.npz.parts"
    with monkeypatch.context() as patch:
        killed_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            extract(predictor, images, out)
    assert sorted(path.name for path in parts.iterdir()) == ["of.json", "rows.f32"]
    (parts / "features.npz").write_text("mine")
    (parts / ".of.json.abc.tmp").write_text("a killed extraction's")
    elsewhere = tmp_path / "elsewhere.npz"
    elsewhere.write_text("mine")
    (parts / "rows.f32").unlink()
    (parts / "rows.f32").symlink_to(elsewhere)
    next(images.rglob("3.jpg")).unlink()  # makes the parts those of another extraction
    assert len(extract(predictor, images, out)[0].images.paths) == 10
    assert [path.name for path in parts.iterdir()] == ["features.npz"]
    assert (parts / "features.npz").read_text() == elsewhere.read_text() == "mine"


@pytest.mark.integration
def test_concurrent_extraction_to_the_same_file_raises(predictor, images, tmp_path, monkeypatch):
    """The second extraction raises while the first is running, and resumes from its parts after it was killed."""
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.0)
    out, fork = tmp_path / "out.npz", multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def first():
        append = partial_rows.PartialRows.append

        def appending(self, *args):
            append(self, *args)
            sender.send("started")
            signal.pause()

        partial_rows.PartialRows.append, partial_rows._SAVE_SECONDS = appending, -1.0
        extract(predictor, images, out)

    process = fork.Process(target=first, daemon=True)
    process.start()
    assert receiver.poll(60) and receiver.recv() == "started"
    with pytest.raises(ConfigError, match=rf"{process.pid}"):
        extract(predictor, images, out)
    process.kill()
    process.join()
    computed = count_batches(predictor)
    assert len(extract(predictor, images, out)[0].images.paths) == 11 and computed == [3]


@pytest.mark.integration
def test_extraction_raises_on_or_skips_unreadable_images(predictor, images, tmp_path, capsys, checkpoint):
    bad = images / "a" / "zz.jpg"
    bad.write_text("not an image")
    with pytest.raises(DataError, match=r"zz\.jpg(.|\n)*--skip-corrupt"):
        extract(predictor, images, tmp_path / "out.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images"]
    code = run_command(
        command, checkpoint, images, "-o", tmp_path / "out.npz", "--skip-corrupt", "--device", "cpu", "--workers", 1
    )
    out = capsys.readouterr().out
    assert code == 0 and "zz.jpg" in out and "11 features" in out
    assert str(bad) not in read_features(tmp_path / "out.npz").images.paths.tolist()
    table = tmp_path / "images.csv"
    table.write_text(f"path,pid\n{images / 'a' / '0' / '0.jpg'},1\n{bad},2\n")
    with pytest.raises(DataError, match=r"zz\.jpg.*\n  listed in .*images\.csv, line 3\n  fix: .*--skip-corrupt"):
        extract(predictor, table, tmp_path / "table.npz")
    for image in images.rglob("*.jpg"):
        image.write_text("not an image")
    with pytest.raises(DataError, match="12 images"):
        extract(predictor, images, tmp_path / "none.npz", skip_corrupt=True)
    assert not (tmp_path / "none.npz.parts").exists()


def test_extraction_raises_if_source_or_output_is_invalid(predictor, images, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for source, out, error in (
        (tmp_path / "empty", "out.npz", "empty"),
        (tmp_path / "nowhere", "out.npz", "nowhere"),
        ("Demoo", "out.npz", "Demoo.*'Demo'"),
        (images, "out.txt", r"out\.txt.*\.npz"),
        (images, "missing/out.npz", "missing"),
    ):
        with pytest.raises(UserError, match=error):
            extract(predictor, source, tmp_path / out)
    with pytest.raises(ConfigError, match="query, gallery, train"):
        extract(predictor, "Demo", tmp_path / "out.npz", splits=["test"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "images"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (command, ["nowhere/images", "-o", "out.npz"]),
        (command, ["images", "-o", "out.txt"]),
        (command, ["images", "-o", "nowhere/out.npz"]),
        (search, ["nowhere.jpg", "--gallery", "images"]),
        (search, ["images", "--gallery", "nowhere"]),
        (search, ["images", "--gallery", "nowhere.csv"]),
    ],
)
def test_commands_check_paths_before_the_model_is_loaded(command, words, images, tmp_path, monkeypatch, input_error):
    monkeypatch.chdir(tmp_path)
    module_name = command.__name__.rpartition(".")[2]
    monkeypatch.setattr(
        command, "model_of" if command is search else "predictor_of", lambda *_: pytest.fail("the model is loaded")
    )
    text = input_error(main, [module_name, "logs/run", *words])
    assert ("nowhere" in text or "out.txt" in text) and "fix:" in text


def test_extraction_and_search_name_a_folder_that_is_not_writable(predictor, images, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    with pytest.raises(ConfigError, match=r"out\.npz"):
        extract(predictor, images, tmp_path / "out.npz")
    with pytest.raises(ConfigError, match=r"(?s)a\.\w+\.npz.*--index"):
        open_source(images, predictor, index=tmp_path / "a.index")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images"]


@pytest.mark.parametrize("part", ["PartialRows.append", "write_atomically"])
def test_extraction_raises_and_leaves_no_files_if_disk_is_full(predictor, images, tmp_path, monkeypatch, part):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"fastamp.inference.partial_rows.{part}", full)
    with pytest.raises(ConfigError, match=r"out\.npz.*No space left"):
        extract(predictor, images, tmp_path / "out.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images"]


@pytest.mark.parametrize("size", [0, 10, 2000, -3])
def test_reading_a_truncated_or_incomplete_extraction_raises(predictor, images, tmp_path, size):
    extract(predictor, images, tmp_path / "out.npz")
    content = (tmp_path / "out.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[:size])
    with pytest.raises(DataError, match="cut.npz"):
        read_features(tmp_path / "cut.npz")
    np.savez(tmp_path / "other.npz", features=np.zeros((3, 2)))
    with pytest.raises(DataError, match=r"other\.npz.*paths"):
        read_features(tmp_path / "other.npz")


def named_set(images, tmp_path):
    """Write a CSV file with named identities and cameras, and a split."""
    files = sorted(images.rglob("[0-9].jpg"))[:8]
    rows = [
        f"{file},{'ann' if n < 4 else 'bob'},{('gate', 'café')[n % 2]},{'gallery' if n % 4 else 'query'}"
        for n, file in enumerate(files)
    ]
    path = tmp_path / "named.csv"
    path.write_text("\n".join(["path,pid,camid,split", *rows]))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_extraction_to_a_table_has_the_values_of_the_npz_file(predictor, images, tmp_path, suffix):
    listed = named_set(images, tmp_path)
    expected, _ = extract(predictor, listed, tmp_path / "out.npz")
    found, _ = extract(predictor, listed, tmp_path / f"out{suffix}")
    assert found.path == tmp_path / f"out{suffix}" and np.array_equal(found.matrix, expected.matrix)
    assert {path.name for path in tmp_path.glob("out*")} == {"out.npz", f"out{suffix}"}
    if suffix == ".csv":
        with found.path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        width = expected.matrix.shape[1]
        features = np.array([[row[f"f{number}"] for number in range(width)] for row in rows], dtype=np.float32)
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(found.path)
        rows, metadata = table.to_pylist(), table.schema.metadata
        features = np.array([row["features"] for row in rows], dtype=np.float32)
        assert metadata[b"config_hash"].decode() == predictor.config_hash
    assert np.array_equal(features, expected.matrix)
    assert [row["path"] for row in rows] == expected.images.paths.tolist()
    assert [row["pid"] for row in rows] == expected.images.pids.tolist()
    cameras = expected.images.cameras.tolist()
    assert [row["camid"] for row in rows] == cameras and {"gate", "café"} == set(cameras)
    assert [row["split"] for row in rows] == expected.images.split.tolist()


def test_tables_of_a_folder_have_no_columns_for_identities_and_cameras(predictor, images, tmp_path):
    found, _ = extract(predictor, images, tmp_path / "out.csv")
    with found.path.open(newline="") as file:
        header = next(csv.reader(file))
    assert header == ["path", *(f"f{number}" for number in range(found.matrix.shape[1]))]


@pytest.fixture
def without_cameras(images, tmp_path):
    """CSV file with 4 identities, and without cameras."""
    path = tmp_path / "mine.csv"
    names = ("ann", "bob", "eve", "joe")
    files = sorted(images.rglob("[!.]*.jpg"))
    rows = [f"{file},{names[number % 4]}" for number, file in enumerate(files)]
    path.write_text("\n".join(["path,pid", *rows]))
    return path


def test_extraction_without_cameras_has_unknown_cameras(predictor, without_cameras, tmp_path, capsys):
    found, _ = extract(predictor, without_cameras, tmp_path / "out.npz")
    assert (found.images.camids == -1).all() and found.images.cameras is None and len(found.images.camids) == 11
    extract(predictor, without_cameras, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert next(csv.reader(file))[:4] == ["path", "pid", "split", "f0"]
    # Images whose camera is unknown are not from the same camera: the metrics equal those of an evaluation.
    assert evaluate_features.cli([str(found.path), "--json", "MODEL.DEVICE", "cpu"]) == 0
    saved = json.loads(capsys.readouterr().out)
    cfg = predictor.cfg.with_values({"DATASETS.TESTS": (f"csv:{without_cameras}",), "OUTPUT_DIR": str(tmp_path)})
    evaluated = DefaultTrainer.test(cfg, predictor.model)
    assert saved["num_valid_queries"] == evaluated["num_query"] > 0
    assert saved["mAP"] == pytest.approx(evaluated["mAP"], abs=1e-3)


def test_search_table_shows_no_unknown_identity_or_camera(predictor, images, without_cameras, checkpoint, capsys):
    query = sorted(images.rglob("*.jpg"))[3]

    def rows(gallery):
        words = (checkpoint, query, "--gallery", gallery, "--top", 2, "--device", "cpu")
        assert run_command(search, *words) == 0
        title, header, *_ = capsys.readouterr().out.splitlines()[-5:]
        assert run_command(search, *words, "--json") == 0
        (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])
        return title, header.replace("|", " ").split(), found["found"][0]

    title, header, row = rows(images)
    assert "identities and cameras unknown" in title and header == ["rank", "score", "path"]
    assert row["pid"] is None and row["camid"] is None
    found, _ = extract(predictor, without_cameras, without_cameras.with_suffix(".npz"))
    title, header, row = rows(found.path)
    assert "; cameras unknown" in title and header == ["rank", "score", "path", "pid"]
    assert row["pid"] in ("ann", "bob", "eve", "joe") and row["camid"] is None
    found, _ = extract(predictor, named_set(images, without_cameras.parent), without_cameras.with_name("named.npz"))
    title, header, row = rows(found.path)
    assert "unknown" not in title and header == ["rank", "score", "path", "pid", "camera"]
    assert row["camera"] in ("gate", "café") and row["camid"] in (0, 1)


def test_parquet_without_pyarrow_names_the_extra_before_the_extraction(predictor, images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r'pip install "fastamp\[parquet\]"'):
        extract(predictor, images, tmp_path / "out.parquet")
    assert not list(tmp_path.glob("out*"))


def test_search_in_a_large_folder_extracts_it_once(predictor, images, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(image_folder, "_IN_MEMORY_UP_TO", 0)
    query = sorted(images.rglob("[0-9].jpg"))[3]
    result = predictor.search(query, images, k=2)
    assert result.images.paths[0, 0] == str(query)
    (features,) = tmp_path.glob("images.*.npz")
    written = features.stat().st_mtime_ns
    assert predictor.search(query, images, k=1).images.paths[0, 0] == str(query)
    assert features.stat().st_mtime_ns == written
    shutil.copy(query, images / "a" / "new.jpg")
    (images / "a" / "bad.jpg").write_text("no image")
    (images / "a" / "link.jpg").symlink_to("link.jpg")
    assert set(predictor.search(query, images, k=2).images.paths[0]) == {str(query), str(images / "a" / "new.jpg")}
    assert "skipped 2 images of the gallery that cannot be read" in caplog.text
    assert "bad.jpg" in caplog.text and "link.jpg" in caplog.text
    written = features.stat().st_mtime_ns
    predictor.search(query, images, k=2)
    assert features.stat().st_mtime_ns == written


def test_search_in_a_small_folder_writes_no_file(predictor, images, tmp_path, caplog):
    before = sorted(tmp_path.rglob("*"))
    query = sorted(images.rglob("[0-9].jpg"))[3]
    (images / "a" / "bad.jpg").write_text("no image")
    found = predictor.search(query, images, k=3)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, images / "a" / "bad.jpg"])
    assert "skipped 1 image of the gallery" in caplog.text and "bad.jpg" in caplog.text
    stored, _ = extract(predictor, images, tmp_path / "out.npz", skip_corrupt=True)
    expected = predictor.search(query, stored.path, k=3)
    assert found.images.paths.tolist() == expected.images.paths.tolist()
    assert found.rows.tolist() == expected.rows.tolist()
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
    for path in images.rglob("*.jpg"):
        path.write_text("no image")
    with pytest.raises(DataError, match="none of the"):
        predictor.search(torch.zeros(3, 64, 32, dtype=torch.uint8), images)


def test_search_in_a_folder_next_to_which_nothing_can_be_written_names_the_flag(predictor, images, monkeypatch):
    def fail(*args, **kwargs):
        raise WriteError("images.npz cannot be written: Read-only file system")

    monkeypatch.setattr(image_folder, "_IN_MEMORY_UP_TO", 0)
    monkeypatch.setattr("fastamp.inference.predictor.extract", fail)
    with pytest.raises(WriteError, match="--index"):
        predictor.search(next(images.rglob("[!.]*.jpg")), images)


def test_search_in_a_folder_overwrites_no_other_file(predictor, images, tmp_path):
    index = tmp_path / "gallery.index"
    foreign, cache = tmp_path / "gallery.npz", tmp_path / f"gallery.{predictor.config_hash}.npz"
    np.savez(foreign, mine=np.arange(3))
    content = foreign.read_bytes()
    for _ in range(2):
        assert open_source(images, predictor, index=index).path == cache
    assert foreign.read_bytes() == content
    assert {path.name for path in tmp_path.glob("gallery*")} == {foreign.name, cache.name}
    shutil.copytree(images, tmp_path / "other")
    extract(predictor, tmp_path / "other", tmp_path / "other.npz")
    extract(predictor, "Demo", tmp_path / "demo.npz")
    arrays = dict(np.load(cache)) | {"config_hash": np.array("another")}
    np.savez(tmp_path / "model.npz", **arrays)
    for name, cause in (
        ("gallery.npz", "no array features"),
        ("other.npz", "features of other images"),
        ("demo.npz", "extraction of a dataset"),
        ("model.npz", "different model"),
    ):
        for path, options in ((cache, {"index": index}), (tmp_path / f"images.{predictor.config_hash}.npz", {})):
            content = shutil.copy(tmp_path / name, path).read_bytes()
            with pytest.raises(ConfigError, match=rf"(?s){path.name}.*{cause}.*fix:"):
                open_source(images, predictor, **options)
            assert path.read_bytes() == content
    cache.unlink()
    cache.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=rf"{cache.name}.*No such file"):
        open_source(images, predictor, index=index)


def test_search_returns_the_camera_names_of_the_gallery(predictor, images, tmp_path):
    extraction, _ = extract(predictor, named_set(images, tmp_path), tmp_path / "out.npz")
    result = predictor.search(extraction.images.paths[0], extraction.path, k=3)
    assert set(result.images.cameras[0]) <= {"gate", "café"} and set(result.images.pids[0]) <= {"ann", "bob"}


def columns_file(folder, *, rows=12):
    """Write a CSV file of demo images with columns of each type."""
    lines = ["path,pid,camid,split,species,age,date,marks,notes"]
    for number, item in enumerate(build_dataset("Demo").gallery[:rows]):
        species = ("lion", "zebra", "")[number % 3]
        marks, notes = f"[{number}; 1]".replace(";", ","), '["a", "b"]' if number % 2 else "[]"
        cells = [item.path, number % 4, number % 2, "gallery", species, number / 2, f"2021-05-0{number % 3 + 1}"]
        lines.append(";".join(map(str, [*cells, marks, notes])))
    path = folder / "animals.csv"
    path.write_text(lines[0].replace(",", ";") + "\n" + "\n".join(lines[1:]) + "\n")
    return path


def test_columns_of_a_dataset_are_in_extraction_index_table_and_search(
    predictor, checkpoint, tmp_path, input_error, capsys
):
    file = columns_file(tmp_path)
    found, _ = extract(predictor, file, tmp_path / "animals.npz")
    assert list(found.images.further) == ["species", "age", "date", "marks", "notes"]
    assert found.images.further["species"].tolist()[:4] == ["lion", "zebra", "", "lion"]
    assert found.images.further["age"].dtype == np.float64 and found.images.further["marks"].shape == (12, 2)
    assert found.images.further["notes"].tolist()[:2] == ["", '["a", "b"]']
    result = predictor.search([found.images.paths[0]], tmp_path / "animals.npz", 12)
    assert np.array_equal(result.images.further["age"], found.images.further["age"][result.rows])

    extract(predictor, file, tmp_path / "animals_table.csv")
    with (tmp_path / "animals_table.csv").open() as table:
        row = next(csv.DictReader(table))
    assert row["species"] == "lion" and row["date"] == "2021-05-01" and "marks" not in row

    run = [str(checkpoint), str(found.images.paths[0]), "--gallery", str(tmp_path / "animals.npz"), "--top", "12"]
    arguments = ["search", *run, "--device", "cpu"]
    assert main([*arguments, "--group-by", "species", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)[0]["found"]
    groups = [name for name, _ in itertools.groupby(row["species"] for row in rows)]
    assert sorted(map(str, groups)) == ["None", "lion", "zebra"] and groups[0] == "lion"
    assert main([*arguments, "--group-by", "camera"]) == 0
    assert capsys.readouterr().out.count("camera ") >= 2
    error = input_error(main, [*arguments, "--group-by", "specie"])
    assert "identity, camera, species" in error and "Did you mean 'species'" in error


def test_search_shows_missing_values_as_unknown(predictor, checkpoint, tmp_path, capsys):
    items = build_dataset("Demo").gallery[:4]
    cells = ["lion,3,0.5,-1", ",,,0", "lion,,,-1", ",5,1.5,-2"]
    rows = zip(items, cells, strict=True)
    lines = [f"{item.path},{number},gallery,{cell}" for number, (item, cell) in enumerate(rows)]
    file, out = tmp_path / "missing.csv", tmp_path / "missing.npz"
    file.write_text("\n".join(["path,pid,split,species,age,weight,change", *lines]))
    found, _ = extract(predictor, file, out)
    run = ["search", str(checkpoint), str(found.images.paths[0]), "--gallery", str(out), "--device", "cpu"]
    assert main([*run, "--json"]) == 0
    rows = {row["pid"]: row for row in json.loads(capsys.readouterr().out)[0]["found"]}
    shown = [[rows[pid][name] for name in ("species", "age", "weight", "change")] for pid in range(4)]
    assert shown == [["lion", 3, 0.5, -1], [None, None, None, 0], ["lion", None, None, -1], [None, 5, 1.5, -2]]
    assert main([*run, "--group-by", "weight"]) == 0
    assert "weight unknown:" in capsys.readouterr().out


def test_index_is_rebuilt_if_only_the_columns_changed(predictor, tmp_path):
    file = columns_file(tmp_path)
    extract(predictor, file, tmp_path / "animals.npz")
    assert open_gallery(tmp_path / "animals.npz").columns["species"][1] == "zebra"
    file.write_text(file.read_text().replace("zebra", "okapi"))
    extract(predictor, file, tmp_path / "animals.npz")
    assert open_gallery(tmp_path / "animals.npz").columns["species"][1] == "okapi"
