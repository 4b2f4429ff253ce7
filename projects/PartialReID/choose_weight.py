#!/usr/bin/env python
"""Choose the weight of the reconstruction distance on held-out training identities, and write it to the checkpoint.

The queries of the held-out identities are parts of images. The weight with the highest Rank-1 is chosen; of equal ones
the smallest. No test image is used.

example:
  python projects/PartialReID/choose_weight.py logs/partial_market
"""

import argparse
import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path

from fastamp.checkpoint.entries import checkpoint_of
from fastamp.checkpoint.weights_file import read_checkpoint, write_checkpoint
from fastamp.config import CfgNode
from fastamp.data import build_reid_test_loader
from fastamp.data.build import build_dataset
from fastamp.data.datasets.base import ImageItem
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.engine import run_command_line
from fastamp.evaluation import EVALUATOR_REGISTRY, inference_on_dataset
from fastamp.modeling.load import load_model
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.files import write_atomically
from fastamp.utils.logger import setup_logger

KEY = "TEST.DSR.WEIGHT"


def check_held_out(cfg: CfgNode, name: str) -> None:
    """Check that no query or gallery image of a dataset is a training image, or an image of ``DATASETS.TESTS``.

    Raises:
        DataError: if an image was used for training, or is used for testing.
    """
    images = paths(*build_dataset(name, cfg).test_items())
    used = {"were used for training": paths(*(build_dataset(name, cfg).train for name in cfg.DATASETS.NAMES))}
    for test in cfg.DATASETS.TESTS:
        with contextlib.suppress(DataError):  # a test set that is not on this machine
            used[f"are test images of {test}"] = paths(*build_dataset(test, cfg).test_items())
    for use, others in used.items():
        if shared := sorted(images & others):
            raise DataError(
                f"{len(shared)} of {len(images)} images of {name} {use}, such as {shared[0]}.\n"
                "  fix: train on a dataset that holds out identities, e.g. DATASETS.NAMES Market1501HeldOut, and "
                "choose the weight on it"
            )


def paths(*splits: Iterable[ImageItem]) -> set[str]:
    """Return the paths of the images of several splits."""
    return {item.path for items in splits for item in items}


def choose(run: str, name: str = "", opts: list[str] | None = None) -> tuple[Path, float, list[float]]:
    """Choose the weight for a model.

    Args:
        run: run folder or checkpoint.
        name: dataset with held-out identities. Default: the first training set of the run.
        opts: KEY VALUE pairs.

    Returns:
        ``(checkpoint, weight, rates)``: rates are the Rank-1 in percent of the weights 0, 0.01 .. 1.

    Raises:
        ConfigError: if the model is not evaluated by reconstruction.
        DataError: if the dataset has no queries, or its images are used for training or testing.
    """
    checkpoint = checkpoint_of(run)
    loaded = load_model(checkpoint, opts=opts or ())
    cfg = loaded.cfg
    enabled = "DSR" in cfg.TEST and cfg.TEST.DSR.ENABLED
    from partialreid.dsr_evaluation import best_weight
    from partialreid.partialbaseline import PartialBaseline

    if not enabled or not isinstance(loaded.model, PartialBaseline):
        raise ConfigError(
            f"{run} is not evaluated by reconstruction: MODEL.META_ARCHITECTURE is {cfg.MODEL.META_ARCHITECTURE}, "
            f"TEST.DSR.ENABLED is {enabled}.\n  fix: choose a run of PartialBaseline with TEST.DSR.ENABLED"
        )
    name = name or cfg.DATASETS.NAMES[0]
    check_held_out(cfg, name)
    loader, num_query = build_reid_test_loader(cfg, name)
    evaluator = EVALUATOR_REGISTRY.build("DsrEvaluator", cfg, num_query=num_query, output_dir=None)
    inference_on_dataset(loaded.model, loader, evaluator, policy=loaded.policy, locate=describe_evaluation)
    return checkpoint, best_weight(evaluator.rates), evaluator.rates


def write_weight(checkpoint: Path, weight: float) -> list[Path]:
    """Write the weight to the config in a checkpoint and to ``config.yaml`` next to it; return the changed files."""
    content = read_checkpoint(checkpoint)
    write_checkpoint(checkpoint, content | {"config": _with_weight(content["config"], weight)})
    changed, file = [checkpoint], checkpoint.with_name("config.yaml")
    if file.is_file():
        text = _with_weight(file.read_text(encoding="utf-8"), weight)
        write_atomically(file, lambda stream: stream.write(text.encode()))
        changed.append(file)
    return changed


def _with_weight(text: str, weight: float) -> str:
    return CfgNode.load_cfg(text).with_values({KEY: weight}).dump()


def main(args: argparse.Namespace) -> None:
    """Choose the weight, print Rank-1 for some weights and write it."""
    setup_logger()
    checkpoint, weight, rates = choose(args.run, args.data, args.opts)
    print("weight  Rank-1 of the held-out identities")
    for number in sorted({*range(0, 101, 10), round(100 * weight)}):
        print(f"{number / 100:6.2f}  {rates[number]:6.2f}{'  chosen' if number == round(100 * weight) else ''}")
    for path in write_weight(checkpoint, weight):
        print(f"wrote {KEY} {weight:g} to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="run folder or checkpoint (.pth)")
    parser.add_argument("--data", default="", help="dataset with held-out identities (default: the first training set)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values")
    args = parser.parse_args()
    sys.exit(run_command_line(lambda: main(args)))
