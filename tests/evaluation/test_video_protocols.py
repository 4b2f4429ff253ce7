"""Protocols of the video datasets, from the files of a dataset to the metrics, against loops over the published rules.

Each test draws tracklets, writes them in the layout of the dataset, and evaluates random features of the frames. The
loops use only the drawn tracklets: the mean feature of the frames, cosine similarity, and the rule of

- MARS: Zheng et al. 2016, "MARS: a video benchmark for large-scale person re-identification", ECCV, sec. 5, and the
  evaluation program of the authors: queries are ranked among all test tracklets; those of identity -1 and those of the
  query's identity and camera are skipped; AP is the area under the precision-recall curve by the trapezoidal rule.
- iLIDS-VID: Wang et al. 2014, "Person re-identification by video ranking", ECCV, sec. 5: half of the people for the
  test, queries from the first camera, gallery from the second one, average CMC over ten random splits.
- DukeMTMC-VideoReID: Wu et al. 2018, "Exploit the unknown gradually: one-shot video-based person re-identification by
  stepwise learning", CVPR, sec. 4: the rule of Market-1501 (same identity and camera skipped) over tracklets.
"""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from dataset_trees import mat, write
from naive_ranking import protocol_of
from PIL import Image

from fastamp.config import read_config
from fastamp.data.build import build_reid_test_loader
from fastamp.evaluation import Identities, ReidEvaluator, compute_metrics

RANKS = (1, 5, 10)


class Track(NamedTuple):
    """Tracklet: identity, camera from 1, paths of the frames, and their features."""

    pid: int
    camera: int
    paths: list
    features: np.ndarray

    def mean(self):
        """Return the mean feature of the frames, of length 1."""
        mean = self.features.mean(0)
        return mean / np.linalg.norm(mean)


def draw(random, pid, camera, paths):
    """Draw features of frames, around a center for each identity."""
    center = np.random.default_rng(1000 + pid).standard_normal(8)
    return Track(pid, camera, paths, center + 2.5 * random.standard_normal((len(paths), 8)))


def evaluate(root, name, tracks, monkeypatch, *options):
    """Write images of the tracks, and evaluate the dataset with their features."""
    monkeypatch.setenv("FASTAMP_DATASETS", str(root))
    features = {}
    for track in tracks:
        for path, feature in zip(track.paths, track.features, strict=True):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 16)).save(root / path)
            features[str(root / path)] = feature
    cfg = read_config("", ["DATALOADER.NUM_WORKERS", 0, "MODEL.DEVICE", "cpu", "INPUT.SIZE_TEST", (16, 8), *options])
    loader, num_query = build_reid_test_loader(cfg, name)
    evaluator = ReidEvaluator(cfg, num_query)
    evaluator.protocol = protocol_of(cfg.TEST.PROTOCOL, ranks=RANKS, resamples=0)
    for batch in loader:
        evaluator.process(batch, torch.from_numpy(np.stack([features[path] for path in batch["img_paths"]])))
    return evaluator.evaluate()


def walk(query, gallery, is_skipped):
    """Yield True for each correct and False for each wrong tracklet, in order of similarity, without skipped ones."""
    for other in sorted(gallery, key=lambda other: -float(query.mean() @ other.mean())):
        if not is_skipped(query, other):
            yield query.pid == other.pid


def same_camera(query, other):
    return query.pid == other.pid and query.camera == other.camera


def trapezoid_area(hits):
    """Return the area under the precision-recall curve, which starts at recall 0 and precision 1."""
    found = np.cumsum(hits)
    recall, precision = np.append(0, found / found[-1]), np.append(1, found / np.arange(1, len(hits) + 1))
    return float(np.sum(np.diff(recall) * (precision[1:] + precision[:-1]) / 2))


def mean_precision(hits):
    return float(np.mean([sum(hits[: rank + 1]) / (rank + 1) for rank, hit in enumerate(hits) if hit]))


def expect(metrics, rows, average_precision):
    """Compare the metrics with those of the rows of correct and wrong tracklets; rows without a match do not count."""
    rows = [row for row in rows if any(row)]
    assert metrics["mAP"] / 100 == pytest.approx(np.mean([average_precision(row) for row in rows]), abs=1e-9)
    for rank in RANKS:
        assert metrics[f"Rank-{rank}"] / 100 == pytest.approx(np.mean([any(row[:rank]) for row in rows]), abs=1e-9)


@pytest.fixture
def mars(tmp_path):
    """Write the lists of MARS; return the test tracklets and the queries."""
    random, tracks, names, info = np.random.default_rng(0), [], [], []
    people = [(-1, 2), (0, 3), *((pid, camera) for pid in range(1, 9) for camera in (1, 2, 2, 5))]
    for number, (pid, camera) in enumerate(people):
        prefix = "00-1" if pid < 0 else f"{pid:04d}"
        files = [f"{prefix}C{camera}T{number:04d}F{frame:03d}.jpg" for frame in range(1, 2 + number % 4)]
        info.append((len(names) + 1, len(names) + len(files), pid, camera))
        names += files
        tracks.append(draw(random, pid, camera, [f"mars/bbox_test/{prefix}/{file}" for file in files]))
    queries = [2 + 4 * person + camera for person, camera in enumerate((0, 1, 3, 0, 2, 3, 0, 1))]
    lists = {
        "bbox_train/0001/0001C1T0001F001.jpg": "",
        "info/train_name.txt": "0001C1T0001F001.jpg\n",
        "info/tracks_train_info.mat": mat(track_train_info=[[1, 1, 1, 1]]),
        "info/test_name.txt": "\n".join(names) + "\n",
        "info/tracks_test_info.mat": mat(track_test_info=info),
        "info/query_IDX.mat": mat(query_IDX=[[number + 1 for number in queries]]),
    }
    write(tmp_path, {f"mars/{path}": text for path, text in lists.items()})
    return tracks, queries


def is_mars_junk(query, other):
    return other.pid == -1 or same_camera(query, other)


def test_mars_equals_the_published_rule(tmp_path, mars, monkeypatch):
    tracks, queries = mars
    metrics = evaluate(tmp_path, "MARS", tracks, monkeypatch, "TEST.PROTOCOL", "mars")
    rows = [list(walk(tracks[number], tracks, is_mars_junk)) for number in queries]
    assert len({len(row) for row in rows}) > 1  # some queries have two tracklets from their camera
    expect(metrics, rows, trapezoid_area)


def test_mars_without_queries_in_the_gallery_equals_the_rule_of_torchreid(tmp_path, mars, monkeypatch):
    tracks, queries = mars
    options = ("TEST.PROTOCOL", "market1501", "DATASETS.MARS.QUERIES_IN_GALLERY", "False")
    metrics = evaluate(tmp_path, "MARS", tracks, monkeypatch, *options)
    gallery = [track for number, track in enumerate(tracks) if number not in queries]
    rows = [list(walk(tracks[number], gallery, is_mars_junk)) for number in queries]
    expect(metrics, rows, mean_precision)


def test_duke_video_equals_the_published_rule(tmp_path, monkeypatch):
    random, sides = np.random.default_rng(1), {"train": [], "query": [], "gallery": []}
    for pid in range(1, 10):
        for number, camera in enumerate((1, 1, 3, 8)[: 4 - pid % 3]):
            side = "query" if number == 0 and pid < 8 else "gallery"  # 8 and 9 are only in the gallery
            folder = f"dukemtmc-vidreid/DukeMTMC-VideoReID/{side}/{pid:04d}/{number:04d}"
            paths = [f"{folder}/{pid:04d}C{camera}F{frame:04d}X1.jpg" for frame in range(1, 2 + (pid + number) % 4)]
            sides[side].append(draw(random, pid, camera, paths))
    folder = "dukemtmc-vidreid/DukeMTMC-VideoReID/train/0100/0000"
    sides["train"].append(draw(random, 100, 1, [f"{folder}/0100C1F0001X1.jpg"]))
    metrics = evaluate(tmp_path, "DukeMTMCVideo", itertools.chain(*sides.values()), monkeypatch)
    expect(metrics, [list(walk(query, sides["gallery"], same_camera)) for query in sides["query"]], mean_precision)


def test_ilids_vid_equals_the_published_rule_in_each_split_and_in_the_mean(tmp_path, monkeypatch):
    random, people = np.random.default_rng(2), 12
    splits = [random.permutation(people) + 1 for _ in range(10)]
    file = "ilids-vid/train-test people splits/train_test_splits_ilidsvid.mat"
    write(tmp_path, {file: mat(ls_set=np.array(splits))})
    tracks = {
        (person, camera): draw(
            random,
            person,
            camera,
            [
                f"ilids-vid/i-LIDS-VID/sequences/cam{camera}/person{person:03d}/cam{camera}_{frame:05d}.png"
                for frame in range(1, 3 + person % 3)
            ],
        )
        for person in range(1, people + 1)
        for camera in (1, 2)
    }
    found, ranks = [], []
    for number, order in enumerate(splits):
        options = ("TEST.PROTOCOL", "no_camera", "DATASETS.ILIDSVID.SPLIT", number)
        metrics = evaluate(tmp_path, "iLIDSVID", tracks.values(), monkeypatch, *options)
        test = order[: people // 2].tolist()
        gallery = [tracks[person, 2] for person in test]
        rows = [list(walk(tracks[person, 1], gallery, lambda *_: False)) for person in test]
        expect(metrics, rows, mean_precision)
        found.append([metrics["mAP"], metrics["Rank-1"]])
        ranks.append([row.index(True) + 1 for row in rows])
    # One match for each query: AP is the reciprocal rank.
    expected = [100 * np.mean(1 / np.array(ranks)), 100 * np.mean(np.array(ranks) == 1)]
    assert np.mean(found, 0) == pytest.approx(expected, abs=1e-9)
    assert len({tuple(row) for row in found}) > 1


@pytest.mark.parametrize(
    ("rule", "pids", "cameras", "ap", "first"),
    [
        # Junk of the camera, match, other, match: precision 1 at recall 1/2; 1/2, then 2/3 at recall 1.
        ("mars", [1, 1, 2, 1], [0, 1, 1, 2], 1 / 2 + (1 / 2 + 2 / 3) / 4, 1),
        # Identity -1 is skipped, 0 is wrong: precision 0, then 1/2.
        ("mars", [-1, 0, 1, 2], [1, 1, 1, 1], (0 + 1 / 2) / 2, 0),
        # The same under the rule of Market-1501, without the trapezoidal rule: (1 + 2/3) / 2, and 1/3.
        ("market1501", [1, 1, 2, 1], [0, 1, 1, 2], 5 / 6, 1),
        ("market1501", [2, 0, 1, 2], [1, 1, 1, 1], 1 / 3, 0),
        # iLIDS-VID: one match, at rank 3.
        ("no_camera", [3, 2, 1, 4], [1, 1, 1, 1], 1 / 3, 0),
    ],
)
def test_rules_by_hand(rule, pids, cameras, ap, first):
    similarity = torch.tensor([0.9, 0.8, 0.6, 0.3], dtype=torch.float64)
    gallery = torch.stack((similarity, (1 - similarity**2).sqrt()), 1)
    ids = Identities(torch.tensor([1]), torch.tensor(pids), torch.tensor([0]), torch.tensor(cameras))
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    metrics = compute_metrics(query, gallery, ids, protocol_of(rule, resamples=0)).metrics()
    assert metrics["mAP"] / 100 == pytest.approx(ap, abs=1e-12) and metrics["Rank-1"] == 100 * first
