"""Lists of images in arrays: the same items, labels and batches as lists of tuples, and missing files found first."""

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from fastamp.config import get_cfg
from fastamp.data.build import build_reid_test_loader, build_reid_train_loader

REFERENCE = json.loads((Path(__file__).parent / "batches.json").read_text())
"""Digests of batches, made when images were held in lists of tuples."""

SAMPLERS = (
    "TrainingSampler",
    "NaiveIdentitySampler",
    "BalancedIdentitySampler",
    "SetReWeightSampler",
    "ImbalancedDatasetSampler",
)


def write_sets(folder):
    """Write two CSV files and a folder of identities; the images are empty files unless ``pixels``."""
    rng = np.random.default_rng(0)
    lines = {"mine.csv": ["path,pid,camid,split,x0,y0,x1,y1"], "other.csv": ["camid;path;pid"]}
    for number in range(240):
        pid = ["ann", "bob", "-1", "7", "10", "é 人"][number % 6] if number % 5 else str(rng.integers(1, 30))
        split = ("train", "query", "gallery")[min(int(rng.integers(0, 6)), 5) % 4 % 3]
        left, top = rng.integers(0, 9, 2).tolist()
        path = f"images/{number % 3}/{number:03d} ü.png"
        lines["mine.csv"].append(f"{path},{pid},{rng.integers(0, 4)},{split},{left},{top},{left + 9}.4,{top + 7}")
        lines["other.csv"].append(
            f"{['west', 'east', '3'][number % 3]};./images//{number % 3}/x{number}.png;p{number % 11}"
        )
    for name, text in lines.items():
        (folder / name).write_text("\n".join(text) + "\n", encoding="utf-8")
        for line in text[1:]:
            path = folder / line.split(";" if ";" in line else ",")[1 if ";" in line else 0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for identity, image in itertools.product(range(9), range(5)):
        path = folder / f"people/p{identity}/c{image % 2}_{image}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def config(*options):
    cfg = get_cfg()
    cfg.merge_from_list(
        [
            "DATASETS.NAMES",
            "('csv:mine.csv',)",
            "SOLVER.IMS_PER_BATCH",
            "8",
            "DATALOADER.NUM_INSTANCE",
            "2",
            "DATALOADER.NUM_WORKERS",
            "0",
            "DATASETS.FOLDER.CAMERA",
            r"c(\d)",
            "SEED",
            "5",
            *options,
        ]
    )
    return cfg


CASES = {
    **{f"one set, {name}": ("DATALOADER.SAMPLER_TRAIN", name, "DATALOADER.SET_WEIGHT", "(1,)") for name in SAMPLERS},
    **{
        f"three sets, {name}": (
            "DATASETS.NAMES",
            "('csv:mine.csv', 'folder:people', 'csv:other.csv')",
            "DATALOADER.SAMPLER_TRAIN",
            name,
            "DATALOADER.SET_WEIGHT",
            "(1, 2, 1)",
        )
        for name in SAMPLERS
    },
    "one set, all splits": ("DATASETS.COMBINEALL", "True"),
    "two sets, all splits": ("DATASETS.COMBINEALL", "True", "DATASETS.NAMES", "('csv:mine.csv', 'folder:people')"),
    "cameras of text": ("DATASETS.NAMES", "('csv:other.csv',)"),
}


def digest(rows):
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode()).hexdigest()[:16]


def described(dataset, keys):
    """Return what a batch holds for each key, but for the pixels."""
    rows = []
    for epoch, position, index in keys:
        item = dataset.items[index]
        box = None if item.box is None else [int(each) for each in item.box]
        names = [each if isinstance(each, str) else int(each) for each in (item.pid, item.camid)]
        rows.append(
            [
                int(epoch),
                int(position),
                int(index),
                item.path,
                *names,
                int(item.viewid),
                box,
                int(dataset.labels[index]),
                int(dataset.camids[index]),
            ]
        )
    return rows


def batches_of(case):
    """Return a digest of each of 40 training batches, and of their test set."""
    loader = build_reid_train_loader(config(*CASES[case]))
    keys = itertools.islice(iter(loader.batch_sampler), 40)
    training = [described(loader.dataset, batch) for batch in keys]
    loader, queries = build_reid_test_loader(config(), "csv:mine.csv")
    return digest(training), digest([queries, *(described(loader.dataset, batch) for batch in loader.batch_sampler)])


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_lists_of_tuples(tmp_path, monkeypatch, case):
    write_sets(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert list(batches_of(case)) == REFERENCE[case]
