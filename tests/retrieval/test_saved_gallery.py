"""Tests that saved files keep loading with the same features and search results.

``tests/reference/saved_gallery`` contains a checkpoint, an extraction of 30 images, an index of each kind, and their
results. Never regenerate these files after the release of 0.1.0: they represent files that users have.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from fastamp import Predictor
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.open_gallery import open_gallery
from fastamp.retrieval.search import search
from fastamp.utils.errors import WeightsError

FILES = Path(__file__).parents[1] / "reference/saved_gallery"
EXPECTED = json.loads((FILES / "expected.json").read_text())
IMAGES = torch.arange(2 * 3 * 64 * 32).reshape(2, 3, 64, 32).remainder(251).to(torch.uint8)
QUERIES = np.stack([np.linspace(-1, 1, tiny.WIDTH), np.linspace(1, -1, tiny.WIDTH)]).astype(np.float32)


def test_predictor_features_from_saved_checkpoint_are_unchanged():
    features = Predictor(FILES / "model_final.pth", device="cpu").features(list(IMAGES))
    torch.testing.assert_close(features, torch.tensor(EXPECTED["features"]), rtol=1e-3, atol=1e-4)


def test_saved_checkpoint_contains_entries_for_resume():
    content = read_checkpoint(FILES / "model_final.pth")
    assert {"model", "optimizer", "trainer", "random", "config"} <= content.keys()
    assert content["trainer"]["iteration"] > 0


def test_saved_extraction_can_be_read():
    extraction = read_features(FILES / "gallery.npz")
    np.testing.assert_allclose(extraction.matrix.astype(float).sum(0), EXPECTED["extraction_sum"], atol=1e-6)
    assert extraction.images.pids.tolist() == EXPECTED["pids"] and len(extraction) == 30
    assert set(extraction.images.split.tolist()) == {"query", "gallery"}


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_search_results_from_saved_index_are_unchanged(kind):
    gallery = open_gallery(FILES / ("gallery.npz" if kind == "flat" else f"{kind}.index"))
    found = search(QUERIES, gallery, 3)
    assert (gallery.kind, len(gallery), gallery.model.width) == (kind, 30, tiny.WIDTH)
    assert found.rows.tolist() == EXPECTED[kind]["rows"] and found.images.paths.tolist() == EXPECTED[kind]["paths"]
    np.testing.assert_allclose(found.scores, EXPECTED[kind]["scores"], atol=1e-5)


def test_saved_index_is_used_without_rebuilding(tmp_path):
    """The hashes in the gallery and the index match the model, so neither file is computed again."""
    shutil.copy(FILES / "gallery.npz", tmp_path / "gallery.npz")
    shutil.copy(FILES / "hnsw.index", tmp_path / "gallery.index")
    before = (tmp_path / "gallery.index").read_bytes()
    model = Predictor(FILES / "model_final.pth", device="cpu")
    found = model.search(list(IMAGES), open_gallery(tmp_path / "gallery.npz", of=model), k=3)
    assert found.rows.shape == (2, 3) and (tmp_path / "gallery.index").read_bytes() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": []},
        {"policy": {"dtype": 3}},
        {"policy": {"a": 1}},
        {"pairs": [1]},
        {"pairs": {"Demo": {"metric": 1}}},
    ],
)
def test_predictor_raises_if_checkpoint_entries_are_malformed(tmp_path, changes):
    torch.save(read_checkpoint(FILES / "model_final.pth") | changes, tmp_path / "changed.pth")
    with pytest.raises(WeightsError, match=rf"changed\.pth(.|\n)*{next(iter(changes))}"):
        _ = Predictor(tmp_path / "changed.pth", device="cpu").pairs
