"""Ensemble of files of features: distances, order of images, and bad input."""

import tracemalloc
from pathlib import Path

import ensemble
import numpy as np
import preloaded
import pytest
import torch

from fastamp.layers.distance import FeatureDistances
from fastamp.retrieval.columns import ImageColumns
from fastamp.retrieval.features import Features
from fastamp.retrieval.model_id import ModelId
from fastamp.utils.errors import ConfigError, DataError


def member(seed, *, width=8, count=20, order=None):
    """Extraction of 20 images of 5 identities, whose features are near those of their identity."""
    generator = np.random.default_rng(seed)
    pids = np.arange(count) % 5
    features = generator.normal(size=(5, width))[pids] + generator.normal(size=(count, width))
    order = np.arange(count) if order is None else order
    images = ImageColumns(
        paths=np.array([f"{number}.jpg" for number in range(count)]),
        pids=pids,
        camids=np.arange(count) % 2,
        split=np.where(np.arange(count) < 6, "query", "gallery"),
    )
    matrix, model = features.astype(np.float32)[order], ModelId(width, "cosine", "", "")
    return Features(Path(f"{seed}.npz"), matrix, images.take(order), model)


def distances(features, metric):
    blocks = FeatureDistances(torch.tensor(features[:6]), torch.tensor(features[6:]), metric=metric)
    return torch.cat([block.clone() for _, block in blocks.blocks()])


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_distances_of_the_ensemble_are_the_weighted_mean(tmp_path, metric):
    members = [member(0), member(1, width=5, order=np.random.default_rng(2).permutation(20))]
    ensemble.write_ensemble(members, [3.0, 1.0], tmp_path / "out.npz", metric=metric)
    both = np.load(tmp_path / "out.npz")
    assert both["features"].shape == (20, 13) and both["paths"].tolist() == members[0].images.paths.tolist()
    second = members[1].matrix[np.argsort([int(path[:-4]) for path in members[1].images.paths])]
    parts = [distances(members[0].matrix, metric), distances(second, metric)]
    expected = 3 * parts[0] + parts[1]
    if metric == "cosine":
        expected = expected / 4
    torch.testing.assert_close(distances(both["features"], metric), expected, atol=1e-4, rtol=1e-4)


def test_ensemble_is_written_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(ensemble, "_BLOCK", 100)
    members = [member(0, width=4096, count=4000)]
    tracemalloc.start()
    ensemble.write_ensemble(members, [1.0], tmp_path / "out.npz", metric="euclidean")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < members[0].matrix.nbytes * 2 / 3
    assert np.array_equal(np.load(tmp_path / "out.npz")["features"], members[0].matrix)
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]


def test_files_of_other_images_or_identities_are_data_errors(tmp_path):
    first = member(0)
    with pytest.raises(DataError, match=r"\b20 images, 1 .* 19\.jpg"):
        other = member(1)
        other.images.paths[19] = "x.jpg"
        ensemble.rows_of(first, other)
    with pytest.raises(DataError, match=r"\b20 and 10\b|\b10 and 20\b"):
        ensemble.rows_of(member(0, count=10), first)
    with pytest.raises(DataError, match=r"pids .*1\.npz.*0\.npz"):
        other = member(1)
        other.images.pids[3] += 1
        ensemble.rows_of(first, other)


def test_wrong_weights_are_config_errors(tmp_path):
    for text in ("1", "1,0", "1,x", "1,inf"):
        args = ensemble.parse(["a.npz", "b.npz", "-o", str(tmp_path / "out.npz"), f"--weights={text}"])
        with pytest.raises(ConfigError, match="--weights"):
            ensemble.main(args)


@pytest.mark.integration
def test_command_prints_the_metrics_of_each_file_and_of_the_ensemble(checkpoint, demo, tmp_path):
    from fastamp.cli import main

    for name in ("a", "b"):
        assert main(["extract", str(checkpoint), "Demo", "-o", str(tmp_path / f"{name}.npz")]) == 0
    script = Path(__file__).parents[2] / "tools/ensemble.py"
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    options = ("-o", tmp_path / "both.npz", "--weights", "2,1")
    process = preloaded.run(script, *options, *files, "TEST.PROTOCOL", "no_camera")
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stdout.splitlines() if line.startswith(("| a ", "| b ", "| ensemble"))]
    rows = [line.split("|")[1:] for line in lines]
    # The same features twice have the metrics of one file.
    assert len(rows) == 3 and rows[0][1:] == rows[1][1:] == rows[2][1:], process.stdout
