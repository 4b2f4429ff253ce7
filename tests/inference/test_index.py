"""Tests of the gallery index: equality with exact search, and errors for invalid files and arguments."""

import json

import numpy as np
import pytest
import torch
from command import run_command

from fastamp import Predictor
from fastamp.cli import search as command
from fastamp.data.build import build_dataset
from fastamp.inference import index as module
from fastamp.inference.extract import extract
from fastamp.inference.index import build_index, choose_kind, load_index, open_gallery
from fastamp.retrieval.features_file import read_extraction, write_arrays
from fastamp.utils.choices import INDEX_KINDS
from fastamp.utils.errors import ConfigError, DataError


@pytest.fixture
def gallery(demo, predictor, tmp_path):
    """Extraction of the query and gallery images of the demo dataset."""
    return extract(predictor, "Demo", tmp_path / "gallery.npz", splits=["query", "gallery"])[0]


def clustered(path, metric, count=1500, width=24):
    """Write an extraction with clustered features, and return it and 40 query features."""
    random = np.random.default_rng(0)
    centers = 3 * random.standard_normal((count // 10, width))
    features = (centers.repeat(10, 0) + random.standard_normal((count, width))).astype(np.float32)
    columns = {"paths": np.arange(count).astype(str), "pids": np.arange(count) // 10, "camids": np.zeros(count, int)}
    texts = {"config_hash": "a", "checkpoint": "a.pth", "metric": metric}
    with path.open("wb") as file:
        write_arrays(file, columns | {name: np.array(text) for name, text in texts.items()}, [features], features.shape)
    queries = centers[:40] + random.standard_normal((40, width))
    return read_extraction(path), queries.astype(np.float32)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_every_kind_of_index_finds_nearest_neighbors(tmp_path, metric):
    extraction, queries = clustered(tmp_path / "a.npz", metric)
    features, sought = torch.tensor(extraction.features).double(), torch.tensor(queries).double()
    if metric == "cosine":
        scores = torch.nn.functional.normalize(sought) @ torch.nn.functional.normalize(features).T
    else:
        scores = torch.cdist(sought, features, compute_mode="donot_use_mm_for_euclid_dist")
    expected, rows = scores.topk(10, largest=metric == "cosine")
    for kind in INDEX_KINDS:
        index = build_index(extraction, tmp_path / f"{kind}.index", kind=kind)
        assert (index.kind, index.metric, len(index), index.width) == (kind, metric, 1500, 24)
        exact = index.search(queries, 10, exact=True)
        assert np.array_equal(exact.rows, rows.numpy())
        assert np.allclose(exact.scores, expected.numpy(), atol=1e-5)
        assert np.array_equal(exact.paths, rows.numpy().astype(str)) and np.array_equal(exact.pids, rows.numpy() // 10)
        found = index.search(torch.tensor(queries), 10)
        recall = np.mean([len(set(a) & set(b)) for a, b in zip(found.rows, exact.rows, strict=True)]) / 10
        assert recall >= 0.95
        # k larger than one IVF list, and larger than the gallery.
        assert index.search(queries[:2], 1000, effort=1).rows.min() >= 0
        assert index.search(queries[:1], 5000).rows.shape == (1, 1500)


def test_ivf_index_search_with_lower_effort_has_lower_recall(tmp_path):
    extraction, queries = clustered(tmp_path / "a.npz", "cosine")
    index = build_index(extraction, tmp_path / "ivf.index", kind="ivf")
    exact = index.search(queries, 10, exact=True).rows
    recall = [np.isin(index.search(queries, 10, effort=effort).rows, exact).mean() for effort in (1, 128)]
    assert recall[0] < recall[1] == 1


def test_default_index_kind_depends_on_gallery_size():
    assert [choose_kind(count) for count in (1, 50_000, 50_001, 200_000, 10**6)] == [
        "flat",
        "flat",
        "hnsw",
        "hnsw",
        "ivf",
    ]


def test_predictor_search_returns_matching_gallery_images(predictor, gallery, tmp_path):
    query = build_dataset("Demo").query[0]
    result = predictor.search(query.path, gallery.path, 3)
    assert (tmp_path / "gallery.index").exists()
    assert result.paths[0, 0] == query.path and result.scores[0, 0] == pytest.approx(1, abs=1e-5)
    assert result.pids[0, 0] == query.pid and result.camids[0, 0] == query.camid
    assert result.scores.shape == result.rows.shape == (1, 3) and result.boxes is None
    index = load_index(tmp_path / "gallery.index")
    arrays = np.zeros((2, 8, 8, 3), np.uint8)
    assert np.array_equal(predictor.search(arrays, index).rows, predictor.search(list(arrays), index.path).rows)
    written = index.path.stat().st_mtime_ns
    assert open_gallery(gallery.path).path.stat().st_mtime_ns == written
    assert open_gallery(gallery.path, kind="hnsw").kind == "hnsw"


def test_search_in_an_index_from_a_different_model_raises(predictor, gallery, checkpoint, tmp_path):
    other = Predictor(checkpoint, device="cpu", opts=["INPUT.SIZE_TEST", "(32, 32)"])
    index = open_gallery(gallery.path)
    for source in (gallery.path, index.path, index):
        with pytest.raises(DataError, match=f"{predictor.config_hash}(.|\n)*{other.config_hash}"):
            other.search(np.zeros((8, 8, 3), np.uint8), source)


def test_loading_a_damaged_index_raises(gallery, tmp_path):
    for kind in INDEX_KINDS:
        path = tmp_path / f"{kind}.index"
        build_index(gallery, path, kind=kind)
        content = path.read_bytes()
        middle = len(content) // 3
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (content[:-5], content[: len(content) // 2], b"", b"text", flipped):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=f"{kind}.index"):
                load_index(path)
    with pytest.raises(DataError, match="nowhere"):
        load_index(tmp_path / "nowhere.index")
    with pytest.raises(DataError):
        load_index(gallery.path)
    with pytest.raises(DataError, match="fastamp extract"):
        open_gallery(tmp_path)


def test_failed_index_write_leaves_no_file(gallery, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no/a\.index"):
        build_index(gallery, tmp_path / "no" / "a.index")

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, part):
            raise OSError(28, "No space left on device")

        def tell(self):
            return self.file.tell()

    write = module._write
    monkeypatch.setattr(module, "_write", lambda file, *rest: write(Full(file), *rest))
    with pytest.raises(ConfigError, match=r"a\.index.*No space left"):
        build_index(gallery, tmp_path / "a.index")
    assert [path.name for path in tmp_path.iterdir()] == ["gallery.npz"]


def test_invalid_arguments_for_index_search_and_build_raise(gallery, tmp_path):
    index = build_index(gallery, tmp_path / "a.index")
    for k, effort in ((0, None), (1, 0)):
        with pytest.raises(ConfigError, match="k=|effort="):
            index.search(np.zeros((1, 16)), k, effort=effort)
    for features in (np.zeros((1, 15)), np.full((1, 16), np.nan), np.zeros(16)):
        with pytest.raises(DataError, match=r"\(Q, 16\)"):
            index.search(features)
    with pytest.raises(ConfigError, match="auto, flat, ivf, hnsw"):
        build_index(gallery, tmp_path / "b.index", kind="tree")


def test_search_command_prints_text_or_json(gallery, checkpoint, tmp_path, capsys):
    query = build_dataset("Demo").query[0].path
    arguments = (checkpoint, query, "--gallery", gallery.path, "-k", 2, "--device", "cpu", "--opts", "SEED", 3)
    assert run_command(command, *arguments, "--index", tmp_path / "b.index", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["query"] == query and [row["rank"] for row in found["found"]] == [1, 2]
    assert found["found"][0]["path"] == query and (tmp_path / "b.index").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        run_command(command, checkpoint, tmp_path / "empty", "--gallery", gallery.path, "--device", "cpu")
    assert run_command(command, *arguments) == 0
    assert query in capsys.readouterr().out
