#!/usr/bin/env python
"""Compare float32, bfloat16 and float16 on the demo, then train with a planted overflow and the doctor's fix.

Prints two tables of mAP by seed. The exit code is 1 if a claim of the README does not hold.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from fastamp.config import CfgNode, read_config
from fastamp.diagnostics.doctor import diagnose
from fastamp.engine import DefaultTrainer, default_setup, run_command_line
from fastamp.utils.errors import TrainingError
from fastamp.utils.files import ignore_closed_stdout

HERE = Path(__file__).parent
PLANTED = ("MODEL.BACKBONE.PLANTED", "1e6")


def config(output: Path, *opts: str) -> CfgNode:
    """Build the config from small.yml and the given options, and call ``default_setup``."""
    cfg = read_config(str(HERE / "small.yml"), ["OUTPUT_DIR", str(output), *opts], plugin=str(HERE / "plugin.py"))
    default_setup(cfg)
    return cfg


def train(output: Path, *opts: str) -> tuple[float, int]:
    """Train once; return ``(mAP in percent, number of skipped steps)``."""
    trainer = DefaultTrainer(config(output, *opts))
    trainer.resume_or_load(resume=False)
    return trainer.train()["mAP"], trainer.trainer.step.skipped_total


def train_seeds(output: Path, seeds: int, name: str, *opts: str) -> list[tuple[float, int]]:
    """Train with each seed; return ``(mAP in percent, number of skipped steps)`` for each seed."""
    results = []
    for seed in range(seeds):
        print(f"== {name}: seed {seed}, {seed + 1} of {seeds}", flush=True)
        results.append(train(output / f"{name}_{seed}".replace(" ", "_"), "SEED", str(seed), *opts))
    return results


def show(rows: dict[str, list[tuple[float, int]]], reference: str) -> dict[str, float]:
    """Print a table of the runs; return the mean mAP of each setting: name -> percent."""
    means = {name: statistics.mean(score for score, _ in results) for name, results in rows.items()}
    lines = [
        (
            name,
            ", ".join(f"{score:.2f}" for score, _ in results),
            f"{means[name]:.2f} ({means[name] - means[reference]:+.2f})",
            ", ".join(str(skipped) for _, skipped in results),
        )
        for name, results in rows.items()
    ]
    print(tabulate(lines, headers=["", "mAP by seed", "mean", "skipped steps"], tablefmt="github"), flush=True)
    return means


def main(output: Path, seeds: int) -> None:
    """Run all trainings and check the claims of the README.

    Raises:
        TrainingError: if a claim does not hold.
    """
    run = partial(train_seeds, output, seeds)
    precisions = {"float32": "off", "bfloat16": "bf16", "float16": "fp16"}
    unplanted = {name: run(name, "SOLVER.AMP", precision) for name, precision in precisions.items()}

    print("== a planted overflow: training in float16", flush=True)
    try:
        train(output / "planted", "SOLVER.AMP", "fp16", *PLANTED)
    except TrainingError as error:
        message = str(error)
        print(message)
    else:
        raise TrainingError("expected the planted overflow to stop the training in float16, got a finished training")
    print("== the doctor", flush=True)
    diagnosis = diagnose(config(output / "doctor", "SOLVER.AMP", "fp16", *PLANTED), dtypes=[torch.float16])
    print(f"{diagnosis.table()}\n\n{diagnosis.conclusion()}")
    if diagnosis.configured is None or not diagnosis.configured.force_fp32:
        raise TrainingError(f"expected the doctor to suggest SOLVER.AMP.FORCE_FP32, got: {diagnosis.conclusion()}")
    fix = ("SOLVER.AMP.FORCE_FP32", str(diagnosis.configured.force_fp32))
    planted = {
        "float32, planted": run("float32, planted", "SOLVER.AMP", "off", *PLANTED),
        "float16, planted, fixed": run("float16, planted, fixed", "SOLVER.AMP", "fp16", *PLANTED, *fix),
    }

    print("\nmAP on the demo, with a network of two convolutions:")
    means = show(unplanted, "float32")
    print("\nmAP on the demo, with the planted overflow; float16 with the doctor's suggestion:")
    fixed_means = show(planted, "float32, planted")
    claims = {
        "training names the layer": "backbone.4 (Times)" in message,
        "the doctor suggests that layer": "backbone.4" in diagnosis.configured.force_fp32,
        "no step is skipped with the fix": not any(n for _, n in planted["float16, planted, fixed"]),
        "mean mAP with the fix within 1 of float32": abs(
            fixed_means["float16, planted, fixed"] - fixed_means["float32, planted"]
        ) <= 1.0,
        "mean mAP of all precisions within 1.5 of each other": max(means.values()) - min(means.values()) <= 1.5,
    }  # fmt: skip
    for claim, holds in claims.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    if not all(claims.values()):
        raise TrainingError("at least one claim of the README does not hold; see the lines with NO above")


if __name__ == "__main__":
    with ignore_closed_stdout():
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--output", type=Path, default=Path("logs/planted_overflow"))
        args = parser.parse_args()
        sys.exit(run_command_line(lambda: main(args.output, args.seeds)))
