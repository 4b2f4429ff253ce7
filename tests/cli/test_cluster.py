"""`fastamp cluster`: CSV, page, purity and NMI, and degenerate results."""

import csv
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fastamp.cli import cluster as command
from fastamp.cli import main
from fastamp.evaluation.clustering import (
    Clustering,
    better_settings,
    cluster_features,
    cluster_quality,
    dominant_cluster,
    separation,
)
from fastamp.retrieval.npz import write_arrays


def extraction(path, *, identities=6, images=8, noise=0.2, pids=None, features=None, **columns):
    """Write an extraction of generated features, with image files for the first identity."""
    random = np.random.default_rng(0)
    names = np.repeat(np.arange(identities), images)
    if features is None:
        features = random.standard_normal((identities, 16))[names] + noise * random.standard_normal((len(names), 16))
    paths = [str(path.parent / f"{number}.jpg") for number in range(len(names))]
    for file in paths[:images]:
        Image.new("RGB", (20, 40), "red").save(file)
    arrays = {"paths": np.array(paths), "pids": names if pids is None else pids, "camids": np.full(len(names), -1)}
    arrays |= {"config_hash": np.array("0"), "checkpoint": np.array("x"), "metric": np.array("cosine")} | columns
    with path.open("wb") as file:
        write_arrays(file, arrays | {"features": features.astype(np.float32)})
    return path


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_cluster_writes_a_csv_and_prints_purity_and_nmi(tmp_path, capsys):
    source = extraction(tmp_path / "x.npz")
    assert main(["cluster", str(source), "--k1", "8", "--k2", "3", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "6 clusters, 0 of 48 images are outliers, purity 1.000, NMI 1.000" in out
    rows = read(tmp_path / "x_clusters.csv")
    assert [row["cluster"] for row in rows] == [str(number) for number in range(6) for _ in range(8)]
    assert rows[0] == {"path": str(tmp_path / "0.jpg"), "cluster": "0"}


def test_cluster_of_unknown_identities_with_boxes(tmp_path, capsys):
    boxes = np.tile([1, 2, 11, 22], (48, 1))
    source = extraction(tmp_path / "x.npz", pids=np.full(48, -1), boxes=boxes)
    assert main(["cluster", str(source), "--k1", "8", "-o", str(tmp_path / "y.csv"), "--device", "cpu"]) == 0
    assert "purity" not in capsys.readouterr().out
    row = read(tmp_path / "y.csv")[-1]
    assert (row["x0"], row["y0"], row["x1"], row["y1"]) == ("1", "2", "11", "22")


def test_quality_is_of_the_known_identities_only(tmp_path, capsys):
    pids = np.repeat([*"abcde", ""], 8)
    pids[0] = "b"
    assert main(["cluster", str(extraction(tmp_path / "x.npz", pids=pids)), "--k1", "8", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "6 clusters, 0 of 48" in out and "purity 0.975" in out and "1 identities split, 1 clusters with" in out


def test_page_shows_the_images_that_can_be_read(tmp_path):
    page = tmp_path / "page.html"
    pids = np.repeat(["<script>", *"bcdef"], 8)
    pids[8] = "<script>"
    source = str(extraction(tmp_path / "x.npz", pids=pids))
    assert main(["cluster", source, "--k1", "8", "--page", str(page), "--device", "cpu"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<img") == 14 and "<script>" not in text and "&lt;script&gt; (8)" in text
    assert text.index("Cluster 1") < text.index("Cluster 0")  # clusters with several identities first
    assert "Split identity &lt;script&gt;" in text and "in 2 clusters: 0 (8), 1 (1)" in text


def test_hdbscan_finds_the_identities_without_eps(tmp_path, capsys):
    source = str(extraction(tmp_path / "x.npz"))
    assert main(["cluster", source, "--method", "hdbscan", "--k1", "8", "--k2", "3", "--device", "cpu"]) == 0
    assert "6 clusters, 0 of 48 images are outliers, purity 1.000" in capsys.readouterr().out
    source = str(extraction(tmp_path / "y.npz", noise=9.0))
    assert main(["cluster", source, "--method", "hdbscan", "--min-samples", "40", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert "no cluster found" in error and "--eps" not in error


def test_hdbscan_without_scikit_learn(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    source = str(extraction(tmp_path / "x.npz"))
    assert main(["cluster", source, "--method", "hdbscan", "--device", "cpu"]) == 2
    assert 'pip install "fastamp[cluster]"' in capsys.readouterr().err


def test_folder_of_images_with_a_model(tmp_path, run_folder, input_error, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(12):
        pixels = np.full((64, 32, 3), 80 * (number % 3) + 20) + random.integers(0, 20, (64, 32, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(photos / f"{number:02d}.png")
    (photos / "broken.jpg").write_bytes(b"no image")
    options = ["--k1", "4", "--k2", "2", "--min-samples", "2", "--device", "cpu"]
    code = main(["cluster", "photos", "--model", str(run_folder), "--page", "page.html", *options])
    out = capsys.readouterr().out
    assert code in (0, 1) and "skipped 1 unreadable image" in out and "wrote photos_clusters.npz" in out
    assert len(read(tmp_path / "photos_clusters.csv")) == 12 and (tmp_path / "page.html").exists()
    assert "add --model" in input_error(main, ["cluster", "photos", *options])


@pytest.mark.parametrize(
    "options, message",
    [
        (["--eps", "0.01"], "no cluster found: all 48 images are outliers (--eps 0.01"),
        (["--eps", "0.999", "--k1", "48"], "only one cluster found"),
    ],
)
def test_fewer_than_two_clusters(tmp_path, capsys, options, message):
    source = extraction(tmp_path / "x.npz", noise=3.0)
    assert main(["cluster", str(source), *options, "--device", "cpu"]) == 1
    assert message in capsys.readouterr().err and (tmp_path / "x_clusters.csv").exists()


@pytest.mark.parametrize(
    "options",
    [["--eps", "1"], ["-o", "no/folder.csv"], ["-o", "x.npz"], ["--page", "."], ["--device", "tpu"], ["--k1", "0"]],
)
def test_unusable_arguments(tmp_path, capsys, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    extraction(tmp_path / "x.npz")
    try:
        code = main(["cluster", "x.npz", *options])
    except SystemExit as end:  # of argparse
        code = end.code
    assert code == 2 and "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "x_clusters.csv").exists()


def test_missing_file_and_nan(tmp_path, capsys):
    assert main(["cluster", str(tmp_path / "x.npz")]) == 2
    assert main(["cluster", str(extraction(tmp_path / "y.npz", noise=np.nan)), "--device", "cpu"]) == 2
    assert "not finite" in capsys.readouterr().err


def test_defaults_are_those_of_the_clustering():
    options = Clustering()
    found = Clustering(eps=command.EPS, min_samples=command.MIN_SAMPLES, k1=command.K1, k2=command.K2)
    assert found == options


def test_dominant_cluster_is_a_warning_with_settings_that_separate_the_identities(tmp_path, capsys):
    random = np.random.default_rng(0)
    directions = np.linalg.qr(random.standard_normal((64, 64)))[0]
    # Twelve similar identities and ten others, with eight images each.
    centers = np.concatenate((directions[0] + 0.3 * directions[1:13], directions[13:23]))
    names = np.repeat(np.arange(22), 8)
    features = (centers[names] + 0.06 * random.standard_normal((len(names), 64))).astype(np.float32)
    inputs = torch.from_numpy(features)
    labels = cluster_features(inputs, Clustering())
    assert dominant_cluster(labels) == (0, 96)
    settings, found = better_settings(inputs, Clustering())
    assert dominant_cluster(found) is None and cluster_quality(found, names).purity > 0.9
    assert separation(inputs, names) > separation(inputs, found)
    assert np.array_equal(cluster_features(inputs, settings), found)
    source = extraction(tmp_path / "x.npz", identities=22, features=features, pids=names)
    page = tmp_path / "page.html"
    assert main(["cluster", str(source), "--device", "cpu", "--page", str(page)]) == 0
    err = capsys.readouterr().err
    assert "96 of 176" in err and f"--eps {settings.eps:g} --k1 {settings.k1}" in err and "fix:" in err
    text = page.read_text(encoding="utf-8")
    assert "96 images, 8 of them shown" in text and "0.jpg<br>" in text


def test_separation_is_that_of_a_naive_loop():
    random = np.random.default_rng(0)
    features = random.standard_normal((30, 5))
    labels = random.integers(-1, 3, 30)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    means = [unit[labels == number].mean(0) for number in range(3)]
    values = []
    for feature, label in zip(unit, labels, strict=True):
        distances = [1 - feature @ mean / np.linalg.norm(mean) for mean in means]
        within = distances.pop(label) if label >= 0 else 0
        values.append((min(distances) - within) / max(min(distances), within) if label >= 0 else 0)
    assert separation(torch.from_numpy(features), labels) == pytest.approx(np.mean(values), abs=1e-5)


def test_clusters_of_similar_sizes_are_not_dominant():
    assert dominant_cluster(np.repeat([0, 1, 2], 8)) is None and dominant_cluster(np.zeros(9, dtype=np.int64)) is None
    assert dominant_cluster(np.full(9, -1)) is None
    assert dominant_cluster(np.repeat([0, 1, 2, 3], [40, 4, 4, 4])) == (0, 40)
