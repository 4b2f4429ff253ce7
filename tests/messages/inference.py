"""Messages of fastamp/inference: prediction, extraction, gallery indices, comparison and export."""

import contextlib
import errno
import io
import json
import os
import sqlite3
import sys
import zipfile
from types import SimpleNamespace
from unittest import mock

import numpy as np
import PIL.Image
import pytest
import torch
from messages import REPOSITORY, Recorder
from tiny import tiny_config
from torch import nn

import fastamp
from fastamp.inference import extract as extract_module
from fastamp.inference import gallery as gallery_module
from fastamp.inference.attribute_search import attribute_columns, parse_query
from fastamp.inference.calibration import write_calibrated
from fastamp.inference.export import export, tensorrt_format, tflite_format
from fastamp.inference.extract import extract
from fastamp.inference.features_file import read_extraction, write_arrays
from fastamp.inference.gallery import MutableGallery
from fastamp.inference.gallery_store import GalleryModel, Item
from fastamp.inference.index import build_index, load_index, open_gallery
from fastamp.inference.package import License, check_packaged, package
from fastamp.inference.parity import compare
from fastamp.inference.runtime import ExportedModel
from fastamp.inference.similarity import sample_pair_scores
from fastamp.utils.errors import WriteError
from fastamp.utils.files import file_sha256

FOLDER = REPOSITORY / "fastamp/inference"
SITES = sorted(str(path.relative_to(REPOSITORY)) for path in FOLDER.rglob("*.py") if path.name != "hub.py")


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    checkpoint = request.getfixturevalue("checkpoint")
    predictor = fastamp.Predictor(checkpoint, device="cpu")
    checkpoints(record, checkpoint)
    images(record, predictor, checkpoint)
    folder = record.root / "images"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(6):
        PIL.Image.fromarray(random.integers(0, 256, (64, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    extractions(record, predictor, folder)
    gallery = record.root / "gallery.npz"
    features_files(record, gallery)
    indices(record, predictor, checkpoint, gallery)
    galleries(record, predictor, checkpoint, folder)
    comparisons(record, predictor, checkpoint, folder)
    calibrations(record, checkpoint)
    exports(record, predictor, checkpoint)
    exported_files(record, predictor)
    saved_features(record)
    clusters(record, gallery)
    imports(record, checkpoint)
    packages(record, checkpoint)


def clusters(record, gallery):
    """Cluster an extraction with unusable outputs, and with fewer than two clusters."""
    with record("fastamp cluster -o in a missing folder"):
        record.fastamp("cluster", gallery, "-o", record.root / "missing/clusters.csv")
    for eps, min_samples in (("0.5", "31"), ("0.99", "2")):  # 30 images
        with record(f"fastamp cluster --min-samples {min_samples}"):
            options = ("--eps", eps, "--min-samples", min_samples, "--device", "cpu")
            record.fastamp("cluster", gallery, *options)
    with record("fastamp cluster of a folder without --model"):
        record.fastamp("cluster", record.root)


def checkpoints(record, checkpoint):
    """Load invalid checkpoints in a Predictor."""
    content = torch.load(checkpoint, weights_only=True)
    nan = {name: value.clone() for name, value in content["model"].items()}
    nan["backbone.0.weight"].fill_(float("nan"))
    for name, state in {
        "bare": {"model": content["model"]},
        "other_version": content | {"config": "MODEL: {NOSE: 1}"},
        "nan": content | {"model": nan},
        "pairs": content | {"pairs": {"genuine": 3}},
    }.items():
        torch.save(state, record.root / f"{name}.pth")
        with record(f"Predictor({name}.pth)"):
            fastamp.Predictor(record.root / f"{name}.pth", device="cpu").features(np.zeros((64, 32, 3), np.uint8))
    with record("Predictor(pairs.pth).compare()"):
        image = np.zeros((64, 32, 3), np.uint8)
        fastamp.Predictor(record.root / "pairs.pth", device="cpu").compare(image, image)


def images(record, predictor, checkpoint):
    """Pass invalid images and boxes to a Predictor."""
    array, path = np.zeros((8, 8, 3), np.uint8), record.root / "image.png"
    PIL.Image.fromarray(array).save(path)
    for title, call in {
        "features([])": lambda: predictor.features([]),
        "features(3)": lambda: predictor.features(3),
        "tracklet_features([])": lambda: predictor.tracklet_features([]),
        "features of bytes": lambda: predictor.features(b"image"),
        "features of a folder": lambda: predictor.features(record.root),
        "search in 3": lambda: predictor.search(array, 3),
        "features of a float image": lambda: predictor.features(PIL.Image.new("F", (4, 4))),
        "features of float32": lambda: predictor.features(array / np.float32(255)),
        "features of int32": lambda: predictor.features([array, array.astype(np.int32)]),
        "features of channels first": lambda: predictor.features(np.zeros((3, 8, 8), np.uint8)),
        "features of channels last": lambda: predictor.features(torch.zeros(8, 8, 3, dtype=torch.uint8)),
        "features of a missing file": lambda: predictor.features("nowhere.jpg"),
        "features of an empty image": lambda: predictor.features([array, array[:0]]),
        "features of empty images": lambda: predictor.features(array[:0]),
        "features, color brg": lambda: predictor.features(array, color="brg"),
        "features, boxes as text": lambda: predictor.features(array, boxes=[["a", 1, 2, 3]]),
        "features, boxes of 3 numbers": lambda: predictor.features(array, boxes=[[1, 2, 3]]),
        "features, boxes of two images": lambda: predictor.features([array, array], boxes=[[1, 2, 3, 4]]),
        "features, empty boxes": lambda: predictor.features(array, boxes=[[1, 1, 1, 3], [0, 0, 4, 4]]),
        "compare of three images": lambda: predictor.compare([array, array], array),
        "compare of an empty image": lambda: predictor.compare(array[:0], array),
        "preprocess of an empty image": lambda: predictor.preprocess(array[:0]),
    }.items():
        with record(title):
            call()
    # A model with camera embeddings, as the attribute that lists them.
    with record("features of a model with camera embeddings"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastamp.Predictor, "camera_view_counts", {"camids": 6})
        predictor.features(array)
    with record("features of camera 7 of 6"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastamp.Predictor, "camera_view_counts", {"camids": 6})
        predictor.features(array, camids=[7])
    with record("features, modality of a model without stems for it"):
        predictor.features(array, modality="infrared")
    with record("features of a two-stem model without a modality"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastamp.Predictor, "modalities", ("visible", "infrared"))
        predictor.features(array)
    with record("modality of a dataset without the column"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastamp.Predictor, "modalities", ("visible", "infrared"))
        patch.setattr(fastamp.Predictor, "modality_column", "modality")
        predictor.check_modality((), "csv:mine.csv")
    record.fastamp("compare", checkpoint, path, "nowhere.jpg", "--device", "cpu")
    record.fastamp("compare", checkpoint, path, path, "--device", "cpu", "--opts", "SEED")


def galleries(record, predictor, checkpoint, folder):
    """Change a mutable gallery with wrong items, and open damaged ones."""
    path, image = record.root / "people.gallery", folder / "0.png"
    options = ("--model", checkpoint, "--device", "cpu")
    record.fastamp("gallery", "add", path, image, image, *options, output=True)
    record.fastamp("gallery", "add", path, folder, *options, "--time", "2026-01-31", output=True)
    record.fastamp("gallery", "add", path, image)
    record.fastamp("gallery", "add", path, "nowhere.png", *options)
    (record.root / "no_items").mkdir()
    record.fastamp("gallery", "add", path, record.root / "no_items", *options)
    record.fastamp("gallery", "add", path, image, *options, "--time", "noon")
    record.fastamp("gallery", "add", folder, image, *options)
    record.fastamp("gallery", "remove", path, "missing.png")
    record.fastamp("gallery", "list", folder)
    record.fastamp("search", checkpoint, image, "--gallery", path, "--kind", "flat", "--device", "cpu")
    record.fastamp("search", checkpoint, image, "--gallery", path, "--camera", "door", "--device", "cpu", output=True)
    record.fastamp("search", checkpoint, image, "--gallery", record.root / "gallery.npz", "--camera", "door",
                   "--device", "cpu")  # fmt: skip
    ones = np.ones((1, 16))
    with MutableGallery(path) as gallery:
        for title, change in {
            "add an item that exists": lambda: gallery.add([gallery.items[0]], ones),
            "add an item twice": lambda: gallery.add([Item("a"), Item("a")], np.ones((2, 16))),
            "add an item with 15 values": lambda: gallery.add([Item("a")], np.ones((1, 15))),
            "add an item without an id": lambda: Item(""),
        }.items():
            with record(title):
                change()
        with record("add to a full disk"), pytest.MonkeyPatch.context() as patch:
            error = sqlite3.OperationalError("database or disk is full")
            patch.setattr(type(gallery._store), "insert", mock.Mock(side_effect=error))
            gallery.add([Item("a")], ones)
        path.rename(record.root / "moved.gallery")
        with record("add to a gallery that was moved"):
            gallery.add([Item("a")], ones)
        (record.root / "moved.gallery").rename(path)
    features = np.random.default_rng(0).standard_normal((300, 16))
    other = record.root / "other.gallery"
    with MutableGallery(other, GalleryModel(16, "cosine", "hash", "model.pth")) as gallery:
        gallery.add([Item(str(row)) for row in range(300)], features)
        for wanted in (1.1, 0.0):
            with record(f"build_candidates, recall {wanted}"), pytest.MonkeyPatch.context() as patch:
                patch.setattr(gallery_module, "FLAT_UP_TO", 100)
                patch.setattr(gallery_module, "WANTED_RECALL", wanted)
                patch.setattr(MutableGallery, "_measure", lambda _, built: built.choose(1, 0.5))
                gallery.build_candidates()
    (other / "candidates.index").write_text("not an index")
    with record("MutableGallery(damaged candidates)"):
        MutableGallery(other)
    for title, statement in {
        "a damaged feature": "UPDATE items SET crc = 0",
        "an unknown format": "UPDATE gallery SET format = 9",
    }.items():
        with contextlib.closing(sqlite3.connect(other / "items.db")) as connection:
            connection.execute(statement)
            connection.commit()
        with record(f"MutableGallery({title})"):
            MutableGallery(other)
    (other / "items.db").write_text("not a database" * 100)
    with record("MutableGallery(damaged)"):
        MutableGallery(other)


def extractions(record, predictor, folder):
    """Trigger the messages of `fastamp extract`."""
    out = record.root / "gallery.npz"
    (record.root / "no_images").mkdir()
    train_only = record.file("train_only.csv", "path,pid\na.png,1")
    checkpoint = predictor.checkpoint
    for source, target in (
        (record.root / "no_images", out),
        (record.root / "nowhere", out),
        ("Demoo", out),
        (folder, record.root / "out.txt"),
        (folder, record.root / "missing/out.npz"),
    ):
        record.fastamp("extract", checkpoint, source, "-o", target, "--device", "cpu")
    record.fastamp("extract", checkpoint, f"csv:{train_only}", "-o", out, "--splits", "query", "--device", "cpu")
    record.fastamp("extract", checkpoint, "Demo", "-o", out, "--splits", "query", "gallery", "--device", "cpu",
                   output=True)  # fmt: skip
    (folder / "bad.png").write_text("not an image")
    record.fastamp("extract", checkpoint, folder, "-o", record.root / "bad.npz", "--device", "cpu")
    record.fastamp("extract", checkpoint, folder, "-o", record.root / "skipped.npz", "--device", "cpu",
                   "--skip-corrupt", output=True)  # fmt: skip
    record.fastamp("search", checkpoint, folder / "0.png", "--gallery", folder, "--device", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        record.fastamp("extract", checkpoint, folder, "-o", out, "--device", "cpu")
        other = record.root / "other" / "image.index"
        record.fastamp("search", checkpoint, folder / "0.png", "--gallery", folder, "--index", other, "--device", "cpu")
    record.fastamp("search", checkpoint, folder / "0.png", "--gallery", "nowhere", "--device", "cpu")
    record.root.joinpath(f"images.{predictor.config_hash}.npz").write_text("not an extraction")
    record.fastamp("search", checkpoint, folder / "0.png", "--gallery", folder, "--device", "cpu")
    record.fastamp("extract", checkpoint, folder, "-o", record.root / "a.csv", "--device", "cpu", "--skip-corrupt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        record.fastamp("extract", checkpoint, folder, "-o", record.root / "a.parquet", "--device", "cpu")
    only_bad = record.root / "only_bad"
    only_bad.mkdir()
    (only_bad / "bad.png").write_text("not an image")
    record.fastamp("extract", checkpoint, only_bad, "-o", record.root / "b.npz", "--device", "cpu", "--skip-corrupt")
    (folder / "bad.png").unlink()
    record.file("mine.npz.parts/notes.txt", "mine")
    record.fastamp("extract", checkpoint, folder, "-o", record.root / "mine.npz", "--device", "cpu")
    # An extraction that is interrupted after its first part, resumed with the same images, then with others.
    with pytest.MonkeyPatch.context() as patch:
        compute, calls = predictor.features_of_batch, []

        def interrupt(batch):
            calls.append(batch)
            if len(calls) > 1:
                raise KeyboardInterrupt
            return compute(batch)

        patch.setattr(extract_module, "_PART_SECONDS", -1.0)
        for target in ("resumed.npz", "changed.npz"):
            calls.clear()
            patch.setattr(predictor, "features_of_batch", interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                extract(predictor, "Demo", record.root / target)
        patch.setattr(predictor, "features_of_batch", compute)
        with record("extract after an interruption"):
            extract(predictor, "Demo", record.root / "resumed.npz")
        with record("extract of other images after an interruption"):
            extract(predictor, folder, record.root / "changed.npz")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with record("extract on a full disk"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract_module, "write_arrays", full)
        extract(predictor, folder, record.root / "full.npz")


def features_files(record, gallery):
    """Read damaged extractions."""
    with np.load(gallery, allow_pickle=False) as file:
        arrays = dict(file)
    content = gallery.read_bytes()
    record.file("empty.npz")
    record.file("cut.npz", content[: len(content) // 2])
    for name, changed in {
        "other": {"features": np.zeros((3, 2))},
        "no_features": arrays | {"features": np.zeros((0, 16), np.float32)},
        "float64": arrays | {"features": arrays["features"].astype(np.float64)},
        "pids": arrays | {"pids": np.zeros(3)},
        "texts": arrays | {"metric": np.zeros(3)},
        "column": arrays | {"column.species": np.zeros(3)},
        "one_identity": arrays | {"pids": np.ones_like(arrays["pids"])},
    }.items():
        with (record.root / f"{name}.npz").open("wb") as file:
            write_arrays(file, changed)
    with zipfile.ZipFile(record.root / "claims.npz", "w") as archive:
        for name, array in arrays.items():
            content = npy(array)
            if name == "features":
                content = content.replace(b"(30, 16)", b"(99, 16)")
            archive.writestr(f"{name}.npy", content)
    with zipfile.ZipFile(record.root / "version.npz", "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", npy(array)[:6] + (b"\x07" if name == "features" else b"\x01")
                             + npy(array)[7:])  # fmt: skip
    for name in ("nowhere", "empty", "claims", "version", "cut", "other", "no_features", "float64", "pids", "texts",
                 "column"):  # fmt: skip
        with record(f"read_extraction({name}.npz)"):
            read_extraction(record.root / f"{name}.npz")
    with record("read_extraction that is larger than the memory"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.inference.features_file.available_memory", lambda: 0)
        np.savez_compressed(record.root / "large.npz", **arrays)
        read_extraction(record.root / "large.npz")
    with record("sample_pair_scores of one identity"):
        sample_pair_scores(record.root / "one_identity.npz")
    with record("sample_pair_scores(cross_camera=True)"):
        sample_pair_scores(gallery, cross_camera=True)


def npy(array):
    """Serialize an array in the npy format."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def rewrite(source, target, entries, changes):
    """Copy an index file and change entries of its archive, which follows faiss's data."""
    with zipfile.ZipFile(source) as archive:
        start = min(entry.header_offset for entry in archive.infolist())
    target.write_bytes(source.read_bytes()[:start])
    with zipfile.ZipFile(target, "a") as archive:
        for name, content in (entries | changes).items():
            if content is not None:
                archive.writestr(name, content)


def read_only(*args, **kwargs):
    raise WriteError("images.npz cannot be written: Read-only file system")


def indices(record, predictor, checkpoint, gallery):
    """Build, read and search invalid gallery indices."""
    extraction = read_extraction(gallery)
    path = record.root / "gallery.index"
    with record("build_index"):
        index = build_index(extraction, path)
    for title, call in {
        "build_index of kind tree": lambda: build_index(extraction, path, kind="tree"),
        "build_index into a missing folder": lambda: build_index(extraction, record.root / "missing/a.index"),
        "search of k 0": lambda: index.search(np.zeros((1, 16)), 0),
        "search_attributes of k 0": lambda: index.search_attributes("hat", 0),
        "search of another width": lambda: index.search(np.zeros((1, 15))),
        "search of NaN": lambda: index.search(np.full((1, 16), np.nan)),
        "load_index of a missing file": lambda: load_index(record.root / "nowhere.index"),
        "load_index of an extraction": lambda: load_index(gallery),
        "open_gallery of a folder": lambda: open_gallery(record.root),
        "open_gallery of a dataset": lambda: open_gallery("csv:images.csv"),
        "open_gallery of a table": lambda: open_gallery("features.parquet"),
    }.items():
        with record(title):
            call()
    with record("open_gallery of a folder next to which nothing can be written"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract_module, "lock_folder", read_only)
        open_gallery(record.root / "images", of=predictor, index=record.root / "new.index")
    content = path.read_bytes()
    flipped = content[: len(content) // 3] + bytes([content[len(content) // 3] ^ 1]) + content[len(content) // 3 + 1 :]
    for name, damaged in (("cut", content[:-5]), ("flipped", flipped)):
        with record(f"load_index of a {name} file"):
            load_index(record.file(f"{name}.index", damaged))
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for title, changes in {
        "without a kind": {"kind.npy": None},
        "whose size is text": {"size.npy": npy(np.array("x"))},
        "of kind hnsw that holds another": {"kind.npy": npy(np.array("hnsw"))},
    }.items():
        changed = record.root / "changed.index"
        rewrite(path, changed, entries, changes)
        with record(f"load_index of an index {title}"):
            load_index(changed, verify=False)
    with record("build_index of NaN"):
        with np.load(gallery, allow_pickle=False) as file:
            arrays = dict(file)
        with (record.root / "nan.npz").open("wb") as file:
            write_arrays(file, arrays | {"features": arrays["features"] * np.float32("nan")})
        build_index(read_extraction(record.root / "nan.npz"), record.root / "nan.index")
    with record("open_gallery with the index of other features"):
        with np.load(gallery, allow_pickle=False) as file:
            arrays = dict(file)
        with (record.root / "changed_gallery.npz").open("wb") as file:
            write_arrays(file, arrays | {"features": arrays["features"] + 1})
        open_gallery(record.root / "changed_gallery.npz", index=path)
    image = record.root / "image.png"
    other = ("--device", "cpu", "--opts", "INPUT.SIZE_TEST", "(32, 32)")
    record.fastamp("search", checkpoint, image, "--gallery", gallery, *other)
    record.fastamp("search", checkpoint, record.root / "no_images", "--gallery", gallery, "--device", "cpu")
    record.fastamp("search", checkpoint, "--gallery", gallery, "--device", "cpu", "--attributes", "hat")
    values = np.array([0.25, 0.75], dtype=np.float32)
    for columns in ({}, {"probability.hat": values[:, None]}):
        with record(f"attribute_columns of {len(columns)}"):
            attribute_columns(columns, "gallery.index")
    stub = mock.MagicMock(**{"cfg.TEST.THRES": 0.5})
    empty = mock.MagicMock(**{"rows_with_attributes.return_value": np.empty(0, np.int64), "__len__.return_value": 12})
    with record("search for attributes that no image has"):
        fastamp.Predictor._rows_with_attributes(stub, empty, "hat")
    with record("classify by a model without classes"):
        fastamp.Predictor(checkpoint, device="cpu").classify(image)
    stub = mock.MagicMock(**{"class_names": ("red", "blue"), "features.return_value": torch.zeros(1, 3)})
    with record("classify with the names of two of three classes"):
        fastamp.Predictor.classify(stub, image)
    for query in ("", "blue"):
        with record(f"parse_query of {query!r}"):
            parse_query(query, ("upper_color=red", "hat"))


def comparisons(record, predictor, checkpoint, folder):
    """Trigger the messages of `fastamp compare` about its reference."""
    pair = (folder / "0.png", folder / "1.png")
    record.fastamp("compare", checkpoint, *pair, "--device", "cpu", "--reference", record.root / "one_identity.npz")
    record.fastamp("compare", checkpoint, *pair, "--device", "cpu", "--reference", record.root / "other.npz")


def calibrations(record, checkpoint):
    """Calibrate on unsuitable data, write to existing files, and use calibrations of other features."""
    random = np.random.default_rng(0)
    folder = record.root / "calibration"
    people = folder / "people"
    people.mkdir(parents=True)
    rows = []
    for pid in range(30):
        color = random.integers(30, 226, 3)
        for camid in range(3):
            path = people / f"{pid}_{camid}.png"
            pixels = color + random.normal(0, 25, (64, 32, 3))
            PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
            rows.append(f"{path},{pid},{camid},{'query' if camid == 0 else 'gallery'}\n")
    header = "path,pid,camid,split\n"
    table = record.file("calibration/people.csv", (header + "".join(rows)).encode())
    shared = record.file(
        "calibration/shared.csv", (header + "".join([*rows, rows[0].replace("query", "train")])).encode()
    )
    model = folder / "model.pth"
    model.write_bytes(checkpoint.read_bytes())
    common = (model, "--data", f"csv:{table}", "--device", "cpu")
    rates = ("--far", "0.05", "--frr", "0.3", "--fpir", "0.3")
    record.fastamp("calibrate", *common)
    record.fastamp("calibrate", *common, *rates, output=True)
    record.fastamp("calibrate", *common, *rates)
    record.fastamp("calibrate", *common, *rates, "--output", model)
    record.fastamp("calibrate", *common, *rates, "--output", "model.onnx")
    record.fastamp("calibrate", *common, *rates, "--output", "new.pth", "--in-place")
    training = ("DATASETS.NAMES", f"('csv:{shared}',)", "--output", folder / "new.pth")
    record.fastamp("calibrate", model, "--data", f"csv:{shared}", "--device", "cpu", *rates, *training)
    calibrated, images = folder / "model_calibrated.pth", (people / "0_0.png", people / "0_1.png")
    for opts in (("TEST.METRIC", "euclidean"), ("INPUT.SIZE_TEST", "(32, 32)")):
        record.fastamp("compare", calibrated, *images, "--device", "cpu", *opts)
    found = fastamp.Predictor(calibrated, device="cpu")
    extract(found, people, folder / "people.npz")
    record.fastamp("search", calibrated, images[0], "--gallery", folder / "people.npz", "--device", "cpu")
    record.fastamp("calibrate", *common, *rates, "--in-place")
    record.fastamp("calibrate", *common, *rates, "--in-place")
    extract(fastamp.Predictor(model, device="cpu", opts=["TEST.METRIC", "euclidean"]), people, folder / "other.npz")
    record.fastamp("search", calibrated, images[0], "--gallery", folder / "other.npz", "--device", "cpu")
    content = torch.load(calibrated, weights_only=True)
    for name, changed in {
        "config": {each: content[each] for each in content if each != "config"},
        "rate": content | {"calibration": content["calibration"] | {"far": 0.0}},
    }.items():
        torch.save(changed, folder / f"{name}.pth")
    record.fastamp("compare", folder / "rate.pth", *images, "--device", "cpu")
    with record("write_calibrated to a copy of a checkpoint without a config"):
        write_calibrated(folder / "config.pth", found.calibration, folder / "other.pth")


def exports(record, predictor, checkpoint):
    """Trigger the messages of `fastamp export`."""
    for argv in (
        ("model.pb",),
        ("missing/model.onnx",),
        ("model.pt2", "--opset", "18"),
        ("model.onnx", "--opset", "3"),
        ("model.onnx", "--format", "torchscript"),
        ("model.onnx", "--tolerance", "200"),
        ("model.onnx", "--preprocess", "inside", "--no-normalization"),
        ("model.onnx", "--color-order", "bgr"),
        ("model.pt2", "--data", "Demoo"),
        ("model.pt2", "INPUT.SIZE_TEST", "(0,)"),
        ("model.pt2", "--precision", "int8"),
        ("model.onnx", "--calibration-images", "8"),
        ("model.onnx", "--precision", "int8", "--calibration-images", "0"),
        ("model.onnx", "--precision", "int8", "DATASETS.TESTS", "()"),
        ("model.onnx", "--precision", "int8", "DATASETS.NAMES", "Market1501"),
        ("model.onnx", "--precision", "int8", "DATASETS.NAMES", "()"),
    ):
        name, *rest = argv
        record.fastamp("export", checkpoint, record.root / name, *rest, "--device", "cpu")
    with record("features of another shape"):
        compare("random", torch.zeros(1, 3), torch.zeros(1, 4))
    with record("an export of another class of model"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictor, "model", nn.Linear(1, 1))
        export(predictor, record.root / "model.pt2", data="")
    with record("ExportReport of an inexact model"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.inference.export.check.MIN_COSINE", {"float32": 2.0, "fp16": 2.0})
        export(predictor, record.root / "model.pt2", data="")
    with record("an int8 export with sensitive layers"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.inference.export.quantize.MAX_ERROR", 1e-12)
        patch.setattr("fastamp.inference.export.quantize.MAX_FLOAT", 1)
        export(predictor, record.root / "model.onnx", precision="int8", data="Demo", tolerance=100)
    with record("an int8 export without layers"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.inference.export.quantize._trunk_nodes", lambda model, source: [])
        export(predictor, record.root / "model.onnx", precision="int8", data="Demo")
    without_packages = record.file("python", b"#!/bin/sh\nexit 1\n")
    without_packages.chmod(0o755)
    for python in ("", "/nowhere/python", str(without_packages)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTAMP_TFLITE_PYTHON", python)
            record.fastamp("export", checkpoint, record.root / "model.tflite", "--device", "cpu")
    versions = '{"litert-torch": "0.10.0", "torch": "2.4.0"}'
    worker = "echo 'ValueError: cannot convert' >&2; exit 1"
    other = f"#!/bin/sh\ncase $2 in -c) echo '{versions}'; exit 0;; esac\n{worker}\n"
    other_versions = record.file("other_python", other.encode())
    other_versions.chmod(0o755)
    with (
        record("TFLite with preprocessing inside, and other versions"),
        mock.patch.dict(os.environ, {"FASTAMP_TFLITE_PYTHON": str(other_versions)}),
    ):
        export(predictor, record.root / "model.tflite", preprocess="inside", data="")
    with record("int8 with a crop inside"):
        crop = ["INPUT.CROP.ENABLED", "True", "INPUT.CROP.SIZE", "(32, 16)"]
        cropped = type(predictor)(checkpoint, device="cpu", opts=crop)
        export(cropped, record.root / "model.onnx", precision="int8", preprocess="inside")
    with (
        record("TFLite conversion that fails"),
        mock.patch.dict(os.environ, {"FASTAMP_TFLITE_PYTHON": str(other_versions)}),
    ):
        export(predictor, record.root / "model.tflite", data="")
    with (
        record("TFLite conversion without its Python"),
        mock.patch.dict(os.environ, {"FASTAMP_TFLITE_PYTHON": "/nowhere/python"}),
    ):
        tflite_format.run_worker("run", record.root)
    with mock.patch.dict(sys.modules, {"tensorrt": None}):
        record.fastamp("export", checkpoint, record.root / "model.engine", "--device", "cpu")
    with (
        mock.patch.dict(sys.modules, {"tensorrt": mock.MagicMock()}),
        mock.patch("fastamp.inference.export.tensorrt_format._has_gpu", return_value=False),
    ):
        record.fastamp("export", checkpoint, record.root / "model.engine", "--device", "cpu")
    tensorrt = mock.MagicMock()
    for parsed in (False, True):
        parser = tensorrt.OnnxParser.return_value
        parser.parse.return_value, parser.num_errors, parser.get_error.return_value = parsed, 1, "unsupported operator"
        tensorrt.Builder.return_value.build_serialized_network.return_value = None
        with record("TensorRT fails"), mock.patch.dict(sys.modules, {"tensorrt": tensorrt}):
            tensorrt_format.build(b"", {"images": [-1, 3, 64, 32]})
    tensorrt.Runtime.return_value.deserialize_cuda_engine.return_value = None
    with record("TensorRT cannot read the engine"), mock.patch.dict(sys.modules, {"tensorrt": tensorrt}):
        tensorrt_format.Engine(b"")
    (record.root / "folder.onnx").mkdir()
    record.fastamp("export", checkpoint, record.root / "folder.onnx", "--device", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "onnx", None)
        record.fastamp("export", checkpoint, record.root / "model.onnx", "--device", "cpu")
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_, **__):
            raise RuntimeError("the operator is not supported")

        patch.setattr(torch.export, "export", fail)
        patch.setenv("FASTAMP_DATASETS", str(record.root / "none"))
        record.fastamp(
            "export", checkpoint, record.root / "model.pt2", "--device", "cpu", "DATASETS.TESTS", "Market1501"
        )


def exported_files(record, predictor):
    """Run exported files that are damaged or foreign, or that require more than images."""
    path = record.file("damaged.onnx", "x")
    for damaged in (path, record.file("model.pt2", "x")):
        with record(f"damaged file {damaged.name}"):
            ExportedModel(damaged)
    with record("missing ONNX file"):
        ExportedModel(record.root / "missing.onnx")
    with record("ONNX file without onnxruntime"), mock.patch.dict(sys.modules, {"onnxruntime": None}):
        ExportedModel(path)
    metadata = {"config_hash": "0", "resize": "[64, 32]", "center_crop": "null", "interpolation": "bicubic"}
    metadata |= {"channels": "3", "normalization": "inside", "pixel_mean": "[0]", "pixel_std": "[1]"}
    metadata |= {"feature_width": "4"}
    frames = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    for names, values in ((["images"], {}), (["images", "camids"], metadata), (["images"], metadata)):
        session = mock.Mock()
        session.get_modelmeta.return_value.custom_metadata_map = values
        session.get_inputs.return_value = [SimpleNamespace(name=name) for name in names]
        with (
            record(f"ONNX file with inputs {', '.join(names)} and {len(values)} values of metadata"),
            mock.patch("onnxruntime.InferenceSession", return_value=session),
        ):
            ExportedModel(path).features(frames, boxes=[[0, 0, 1, 1]])
    for name, value in (("camids", [0]), ("attributes", "hat")):
        with record(f"{name} with an exported file"), mock.patch("onnxruntime.InferenceSession", return_value=session):
            model = ExportedModel(path)
            if name == "camids":
                model.features(frames[0], camids=value)
            else:
                model.require_attributes()
    with record("calibration of other features"), mock.patch("onnxruntime.InferenceSession", return_value=session):
        others = {"calibration": '{"config_hash": "1"}', "l2": "true", "metric": "euclidean"}
        session.get_modelmeta.return_value.custom_metadata_map = metadata | others
        assert ExportedModel(path).calibration is None
    session.get_modelmeta.return_value.custom_metadata_map = metadata
    with record("folder with an exported file"), mock.patch("onnxruntime.InferenceSession", return_value=session):
        open_gallery(record.root, of=ExportedModel(path))
    session.run.return_value = [np.full((2, 4), np.nan, dtype=np.float32)]
    with record("features that are not finite"), mock.patch("onnxruntime.InferenceSession", return_value=session):
        ExportedModel(path).features(list(frames))
    with record("image without pixels"), mock.patch("onnxruntime.InferenceSession", return_value=session):
        ExportedModel(path).preprocess(frames[:, :0][0])


def saved_features(record):
    """Trigger the messages of `fastamp evaluate-features`."""
    random = np.random.default_rng(0)
    arrays = {
        "query_features": random.standard_normal((4, 8)).astype(np.float32),
        "gallery_features": random.standard_normal((9, 8)).astype(np.float32),
        "query_pids": np.arange(4) % 3, "gallery_pids": np.arange(9) % 3,
        "query_camids": np.zeros(4, int), "gallery_camids": np.ones(9, int),
    }  # fmt: skip
    without_cameras = {name: array for name, array in arrays.items() if "camids" not in name}
    for name, content in {
        "good": arrays,
        "no_cameras": without_cameras,
        "no_query": {name: array for name, array in arrays.items() if name != "query_features"},
        "one_dimension": arrays | {"query_features": arrays["query_features"][0]},
        "float_pids": arrays | {"query_pids": np.array([0.5, 1, 2, 3])},
        "split": {"split": np.zeros(3), "features": arrays["query_features"]},
        "nan": arrays | {"query_features": arrays["query_features"] * np.nan},
    }.items():
        np.savez(record.root / f"saved_{name}.npz", **content)
        record.fastamp("evaluate-features", record.root / f"saved_{name}.npz", "MODEL.DEVICE", "cpu")
    good, outfits = record.root / "saved_good.npz", record.root / "saved_outfits.npz"
    np.savez(outfits, **arrays, query_clothes=np.zeros(3), gallery_clothes=np.zeros(9))
    for argv in (
        ("nowhere.npz",),
        (good, "TEST.PROTOCOL", "cloth_changing"),
        (outfits, "TEST.PROTOCOL", "cloth_changing"),
        (record.file("text.npz", "text"),),
        (good, "TEST.FLIP", "True"),
        (good, "TEST.PER_QUERY", "True"),
        (good, "--per-query", record.root / "missing/a.npz"),
        (good, "TEST.METRIC"),
    ):
        record.fastamp("evaluate-features", *argv)


def imports(record, checkpoint):
    """Trigger the messages of `fastamp import`."""
    content = torch.load(checkpoint, weights_only=True)
    bare = record.root / "bare.pth"
    torch.save(content["model"], bare)
    nan = {name: value.clone().float() for name, value in content["model"].items()}
    nan["backbone.0.weight"].fill_(float("nan"))
    torch.save(nan, record.root / "nan.pth")
    config = ("--config-file", record.file("tiny.yml", tiny_config(record.root / "tiny").dump()))
    torch.save({f"student.{name}": value for name, value in content["model"].items()}, record.root / "student.pth")
    for argv in (
        (bare, record.root / "out.txt"),
        (bare, bare),
        (record.root / "nowhere.pth", record.root / "out.pth"),
        (bare, record.root / "out.pth", "--prefix", "student."),
        (bare, record.root / "out.pth", "MODEL.BACKBONE.NAME", "build_plain_backbone", "MODEL.BACKBONE.FEAT_DIM", "16"),
        (record.root / "nan.pth", record.root / "out.pth", *config),
        (bare, record.root / "out.pth", *config),
        (record.root / "student.pth", record.root / "out.pth", *config),
    ):
        record.fastamp("import", *argv)


def packages(record, checkpoint):
    """Package models with invalid arguments."""
    folder = record.root / "package"
    mit = License(name="mit")
    for values in ({"name": ""}, {"name": "MIT License"}, {"name": "other", "title": "x"}):
        with record(f"License({values})"):
            License(**values)
    with record("package to a folder that exists"):
        package(checkpoint, record.root, license=mit)
    content = torch.load(checkpoint, weights_only=True)
    for name, evaluation in {
        "other_weights": content["evaluation"] | {"weights": "ema"},
        "wrong_evaluation": {"weights": 1, "protocol": "", "metrics": {}},
        "incomplete_evaluation": {"weights": "model"},
    }.items():
        path = record.root / f"{name}.pth"
        torch.save(content | {"evaluation": evaluation}, path)
        with record(f"package {path.name}"):
            package(path, record.root / f"package_{name}", license=mit)
    with record("package with metrics that are not JSON"):
        package(checkpoint, folder, license=mit, metrics=record.file("metrics_eval.json", "no metrics"))
    metrics = {"weights": "x.pth", "weights_sha256": "", "config": content["config"], "protocol": "", "metrics": {}}
    with record("package with metrics of another file"):
        package(checkpoint, folder, license=mit, metrics=record.file("metrics_eval.json", json.dumps(metrics)))
    metrics["weights_sha256"] = file_sha256(checkpoint)
    metrics["config"] = content["config"].replace("SIZE_TEST:\n  - 64", "SIZE_TEST:\n  - 128")
    with record("package with metrics of another config"):
        package(checkpoint, folder, license=mit, metrics=record.file("metrics_eval.json", json.dumps(metrics)))
    package(checkpoint, folder, license=License(name="other", title="x", link="LICENSE"))
    with record("upload without the license file"):
        check_packaged(folder)
    (folder / "README.md").unlink()
    with record("upload without a model card"):
        check_packaged(folder)
