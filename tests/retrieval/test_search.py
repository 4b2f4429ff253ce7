"""Tests of the search: equality with exact search for each kind of index, files, and errors for invalid arguments."""

import json

import numpy as np
import pytest
import torch
from command import run_command

from fastamp import Predictor
from fastamp.cli import search as command
from fastamp.data.build import build_dataset
from fastamp.inference.extract import extract
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.gallery import Conditions
from fastamp.retrieval.indices import ProductCodes, choose_kind
from fastamp.retrieval.npz import write_arrays
from fastamp.retrieval.open_gallery import open_gallery, with_index
from fastamp.retrieval.search import search
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
        write_arrays(file, {"features": features} | columns | {name: np.array(text) for name, text in texts.items()})
    queries = centers[:40] + random.standard_normal((40, width))
    return read_features(path), queries.astype(np.float32)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_every_kind_of_index_finds_nearest_neighbors(tmp_path, metric):
    extraction, queries = clustered(tmp_path / "a.npz", metric)
    features, sought = torch.tensor(extraction.matrix).double(), torch.tensor(queries).double()
    if metric == "cosine":
        scores = torch.nn.functional.normalize(sought) @ torch.nn.functional.normalize(features).T
    else:
        scores = torch.cdist(sought, features, compute_mode="donot_use_mm_for_euclid_dist")
    expected, rows = scores.topk(10, largest=metric == "cosine")
    for kind in ("flat", "ivf", "hnsw", ProductCodes.kind):
        gallery = with_index(extraction, tmp_path / f"{kind}.index", kind)
        assert (gallery.kind, gallery.model.metric, len(gallery), gallery.model.width) == (kind, metric, 1500, 24)
        assert (gallery.recall is None) if kind == "flat" else gallery.recall >= 0.95
        exact = search(queries, gallery, 10, exact=True)
        assert np.array_equal(exact.rows, rows.numpy())
        assert np.allclose(exact.scores, expected.numpy(), atol=1e-5)
        assert np.array_equal(exact.images.paths, rows.numpy().astype(str)) and np.array_equal(
            exact.images.pids, rows.numpy() // 10
        )
        found = search(torch.tensor(queries), gallery, 10)
        recall = np.mean([len(set(a) & set(b)) for a, b in zip(found.rows, exact.rows, strict=True)]) / 10
        assert recall >= 0.95
        # k larger than one IVF list, and larger than the gallery.
        assert search(queries[:2], gallery, 1000, effort=1).rows.min() >= 0
        assert search(queries[:1], gallery, 5000).rows.shape == (1, 1500)


def test_ivf_index_search_with_lower_effort_has_lower_recall(tmp_path):
    extraction, queries = clustered(tmp_path / "a.npz", "cosine")
    gallery = with_index(extraction, tmp_path / "ivf.index", "ivf")
    exact = search(queries, gallery, 10, exact=True).rows
    recall = [np.isin(search(queries, gallery, 10, effort=effort).rows, exact).mean() for effort in (1, 128)]
    assert recall[0] < recall[1] == 1


def test_search_without_effort_has_that_with_which_the_recall_was_measured(tmp_path):
    extraction, queries = clustered(tmp_path / "a.npz", "cosine")
    gallery = with_index(extraction, tmp_path / "ivf.index", "ivf")
    gallery.index.effort = 1
    found, expected = search(queries, gallery, 10), search(queries, gallery, 10, effort=1)
    assert np.array_equal(found.rows, expected.rows)
    assert not np.array_equal(found.rows, search(queries, gallery, 10, effort=128).rows)


def test_empty_conditions_are_none(tmp_path):
    extraction, queries = clustered(tmp_path / "a.npz", "cosine")
    gallery = with_index(extraction, tmp_path / "ivf.index", "ivf")
    approximate = search(queries, gallery, 10, effort=1).rows
    assert np.array_equal(search(queries, gallery, 10, effort=1, where=Conditions([], [])).rows, approximate)
    assert not np.array_equal(search(queries, gallery, 10, effort=1, where=Conditions(["0"])).rows, approximate)


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
    assert [path.name for path in tmp_path.iterdir()] == ["gallery.npz"]  # exact search needs no index
    assert result.images.paths[0, 0] == query.path and result.scores[0, 0] == pytest.approx(1, abs=1e-5)
    assert result.images.pids[0, 0] == query.pid and result.images.camids[0, 0] == query.camid
    assert result.scores.shape == result.rows.shape == (1, 3) and result.images.boxes is None
    arrays = np.zeros((2, 8, 8, 3), np.uint8)
    opened = open_gallery(gallery.path)
    assert np.array_equal(predictor.search(arrays, opened).rows, predictor.search(list(arrays), gallery.path).rows)


def test_index_is_built_once_and_again_for_another_kind_or_other_features(gallery, tmp_path):
    path = tmp_path / "gallery.index"
    assert open_gallery(gallery.path, kind="ivf").kind == "ivf"
    written = path.stat().st_mtime_ns
    for source in (gallery.path, path):
        assert open_gallery(source).kind == "ivf" and path.stat().st_mtime_ns == written
    assert open_gallery(gallery.path, kind="flat").kind == "flat" and path.stat().st_mtime_ns == written
    assert open_gallery(gallery.path, kind="hnsw").kind == open_gallery(gallery.path).kind == "hnsw"
    with np.load(gallery.path) as archive:
        arrays = dict(archive)
    np.savez(gallery.path, **arrays | {"features": arrays["features"] + 1})
    assert open_gallery(gallery.path, kind="hnsw").fingerprint != gallery.fingerprint
    gallery.path.unlink()
    with pytest.raises(DataError, match=r"gallery\.npz"):
        open_gallery(path)
    with pytest.raises(DataError, match="fastamp extract"):
        open_gallery(tmp_path)


def test_search_in_an_index_from_a_different_model_raises(predictor, gallery, checkpoint, tmp_path):
    other = Predictor(checkpoint, device="cpu", opts=["INPUT.SIZE_TEST", "(32, 32)"])
    opened = open_gallery(gallery.path, kind="ivf")
    for source in (gallery.path, tmp_path / "gallery.index", opened):
        with pytest.raises(DataError, match=f"{predictor.config_hash}(.|\n)*{other.config_hash}"):
            other.search(np.zeros((8, 8, 3), np.uint8), source)


def test_invalid_arguments_for_index_search_and_build_raise(gallery, tmp_path):
    opened = with_index(gallery, tmp_path / "a.index")
    for k, effort in ((0, None), (1, 0)):
        with pytest.raises(ConfigError, match="k=|effort="):
            search(np.zeros((1, 16)), opened, k, effort=effort)
    for features in (np.zeros((1, 15)), np.full((1, 16), np.nan), np.zeros(16)):
        with pytest.raises(DataError, match=r"\(N, 16\)"):
            search(features, opened)
    with pytest.raises(ConfigError, match="auto, flat, hnsw, ivf"):
        open_gallery(gallery.path, kind="tree")


def test_search_command_prints_text_or_json(gallery, checkpoint, tmp_path, capsys):
    query = build_dataset("Demo").query[0].path
    arguments = (checkpoint, query, "--gallery", gallery.path, "-k", 2, "--device", "cpu", "--opts", "SEED", 3)
    assert run_command(command, *arguments, "--index", tmp_path / "b.index", "--kind", "ivf", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["query"] == query and [row["rank"] for row in found["found"]] == [1, 2]
    assert found["found"][0]["path"] == query and (tmp_path / "b.index").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        run_command(command, checkpoint, tmp_path / "empty", "--gallery", gallery.path, "--device", "cpu")
    assert run_command(command, *arguments) == 0
    assert query in capsys.readouterr().out
