"""Data for a report, with names, paths and values that attempt HTML injection."""

import json

import numpy as np
import torch
from naive_ranking import protocol_of, random_set
from PIL import Image

from fastamp.amp import PrecisionPolicy
from fastamp.config import read_config
from fastamp.data.datasets.base import ImageItem
from fastamp.evaluation import ReportOptions, compute_metrics
from fastamp.report import EvaluatedSet, Run, read_history

SCRIPT = "<script>console.error('broken out')</script>"
HOSTILE = f"\"'>{SCRIPT}<img src=http://127.0.0.1:9/x onerror=console.error(1)>\x00\ud800\u202e&amp;"
IN_CONFIG = HOSTILE.replace("\x00", "").replace("\ud800", "")  # a config rejects these characters


def hostile_run(folder, *, sets=2, **protocol):
    """Create a run with ``sets`` test sets; the images are written to ``folder``."""
    queries, gallery, ids = random_set(3, queries=24, gallery=60, cameras=5)
    result = compute_metrics(queries, gallery, ids, protocol_of(**protocol), ReportOptions())
    rng = np.random.default_rng(0)
    names = [f"{number}<b>.png" for number in range(4)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (96, 48, 3), dtype=np.uint8)).save(folder / name)
    items = [ImageItem(str(folder / names[number % 4]), f"{HOSTILE}{number}", HOSTILE) for number in range(84)]
    items[30] = items[30]._replace(path=str(folder / f"gone{SCRIPT}.jpg"))
    metrics = result.metrics() | {"baselines": {HOSTILE: {"mAP": 1.0, "Rank-1": 2.0}}}
    cfg = read_config("", ["OUTPUT_DIR", f"logs/{IN_CONFIG}", "DATASETS.TESTS", (IN_CONFIG,)])
    lines = [
        {
            "iteration": step,
            "total_loss": 1 / (1 + step),
            f"loss_{HOSTILE}": 2.0,
            "lr": 1e-3,
            "loss_scale": 2.0**-step,
            "grad_norm": None if step == 3 else 1.0 + step,
            "skipped_total": step // 3,
            f"{HOSTILE}/mAP": 4.0 * step,
            "words": HOSTILE,
        }
        for step in range(12)
    ]
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 12, "to')
    names = [f"{HOSTILE} {number}" for number in range(sets)]
    return Run(
        cfg=cfg,
        weights=f"weights {HOSTILE}",
        protocol=f"{result.protocol.describe()} {HOSTILE}",
        policy=PrecisionPolicy("cpu", torch.float32, HOSTILE),
        device=torch.device("cpu"),
        sets=[EvaluatedSet(name, metrics, result, items[:24], items[24:]) for name in names],
        train=items,
        history=read_history(folder / "metrics.json"),
    )
