#!/usr/bin/env python
"""Compare HyperOpt in FastTune with random search, given the same number of full trainings and held-out identities.

The searches optimize seven keys of a network of two convolutions on a generated dataset of 80 training and 30 test
identities at 64x32 pixels. For each seed, the table shows the best score of each search, the mean of the five best
trials, and the score of the winner on the test set. Two searches of 24 trials take about ten minutes on two cores.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from fastamp.demo import DEMO_VERSION, generate_demo

TUNE_NET = Path(__file__).resolve().parents[2] / "projects/FastTune/tune_net.py"
PARTS = """
from torch import nn
from fastamp.modeling import BACKBONE_REGISTRY


def build_small_backbone(cfg):
    net = nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=4, padding=2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
    )
    net.feature_dim = 64
    return net


if "build_small_backbone" not in BACKBONE_REGISTRY:
    BACKBONE_REGISTRY.register()(build_small_backbone)
"""
CONFIG = """
MODEL:
  DEVICE: cpu
  BACKBONE: {NAME: build_small_backbone, FEAT_DIM: 64}
  HEADS: {WITH_BNNECK: True}
  LOSSES: {NAME: [CrossEntropyLoss, TripletLoss], CE: {EPSILON: 0.1}, TRI: {HARD_MINING: True, MARGIN: 0.3}}
INPUT: {SIZE_TRAIN: [64, 32], SIZE_TEST: [64, 32], FLIP: {ENABLED: True}}
DATASETS: {NAMES: Demo, TESTS: Demo}
DATALOADER: {SAMPLER_TRAIN: NaiveIdentitySampler, NUM_INSTANCE: 4, NUM_WORKERS: 0, CACHE: ram}
SOLVER: {OPT: Adam, BASE_LR: 3.0e-4, IMS_PER_BATCH: 32, MAX_EPOCH: 8, SCHED: CosineAnnealingLR, WARMUP_ITERS: 0}
TEST: {EVAL_PERIOD: 4}
TUNE: {VAL_FRACTION: 0.4}
"""
SPACE = """
SOLVER.BASE_LR: {loguniform: [1.0e-5, 1.0e-1]}
SOLVER.WEIGHT_DECAY: {loguniform: [1.0e-6, 1.0e-1]}
MODEL.LOSSES.TRI.MARGIN: {uniform: [0.0, 1.0]}
MODEL.LOSSES.CE.EPSILON: {uniform: [0.0, 0.5]}
INPUT.FLIP.PROB: {uniform: [0.0, 0.5]}
SOLVER.OPT: {choice: [Adam, SGD]}
IDENTITIES: {choice: [4, 8, 12]}
"""


def search(folder: Path, algorithm: str, seed: int, trials: int) -> list[object]:
    """Run one search and return its row of the table."""
    output = folder / f"{algorithm}-{seed}"
    words = ["--config-file", folder / "base.yml", "--space", folder / "space.yml", "--plugin", folder / "plugin.py"]
    words += ["--srch-algo", algorithm, "--scheduler", "none", "--seed", seed, "--num-trials", trials]
    environment = os.environ | {"FASTAMP_DATASETS": str(folder / "datasets")}
    command = [sys.executable, TUNE_NET, *words, "OUTPUT_DIR", output]
    subprocess.run([str(word) for word in command], env=environment, check=True, stdout=subprocess.DEVNULL)
    with (output / "trials.csv").open() as file:
        scores = sorted((float(row["score"] or 0) for row in csv.DictReader(file)), reverse=True)
    test = json.loads((output / "winner/metrics_eval.json").read_text())
    return [seed, algorithm, len(scores), scores[0], mean(scores[:5]), mean(scores), test["metrics"]["Demo"]["metric"]]


def main() -> None:
    """Run the searches and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the searches; it must not exist")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    folder = args.output.resolve()
    folder.mkdir(parents=True)
    for name, text in (("plugin.py", PARTS), ("base.yml", CONFIG), ("space.yml", SPACE)):
        (folder / name).write_text(text)
    generate_demo(
        folder / "datasets" / f"fastamp-demo-v{DEMO_VERSION}",
        train_identities=80,
        test_identities=30,
        images_per_identity=8,
        distractors=30,
        cameras=4,
        image_size=(64, 32),
        workers=1,
    )
    rows = [
        search(folder, algorithm, seed, args.trials)
        for seed in range(args.seeds)
        for algorithm in ("hyperopt", "random")
    ]
    headers = ["seed", "search", "trials", "best", "mean of best five", "mean of all", "winner on the test set"]
    print(tabulate(rows, headers=headers, tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    main()
