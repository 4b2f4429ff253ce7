"""Draw a trained model's rank lists, curves, score histograms and similarity maps as PNG files."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastamp.data import build_reid_test_loader
from fastamp.diagnostics.locate import describe_evaluation
from fastamp.engine.reporting import EvaluatedSet, evaluated_set
from fastamp.evaluation import ReidEvaluator, Wanted, inference_on_dataset
from fastamp.inference import Predictor
from fastamp.report import read_history
from fastamp.report.curves import cmc_panel, health_panels, roc_panel, score_panel, training_panels
from fastamp.report.figures import new_figure, panel_figure, rank_list_figure, similarity_figure, write_figure
from fastamp.report.panel import Panel
from fastamp.report.similarity_map import similarity_map
from fastamp.utils.errors import ConfigError, WeightsError

KINDS = ("rank-lists", "cmc", "roc", "histogram", "grad-cam", "curves")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("source", metavar="RUN", help="a checkpoint of a run, or its OUTPUT_DIR (model_best.pth)")
    parser.add_argument("--data", metavar="NAME", help="test set, as in DATASETS.TESTS (default: those of the run)")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="(default: all)")
    parser.add_argument("--num", type=int, default=6, metavar="N", help="queries in a picture (default: %(default)s)")
    parser.add_argument("--length", type=int, default=10, metavar="K", help="images a query (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random (default: %(default)s)")
    parser.add_argument("--output", metavar="DIR", help="(default: RUN's folder/pictures)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values over the run's own")


def run(args: argparse.Namespace) -> int:
    """Draw what was asked for, and print the files' names.

    Raises:
        UserError: matplotlib is missing, the run, data or weights are wrong, or a file cannot be written.
    """
    if args.num < 1 or args.length < 1:
        raise ConfigError(f"--num {args.num} and --length {args.length}: both are 1 at least")
    new_figure(1, 1)  # fails before the work, where matplotlib is missing
    checkpoint = checkpoint_of(Path(args.source))
    folder = Path(args.output) if args.output else checkpoint.parent / "pictures"
    kinds = set(args.kind)
    if "curves" in kinds:
        metrics = checkpoint.parent / "metrics.json"
        # Without a wish for curves their absence is no fault: a checkpoint alone is enough for the others.
        if metrics.exists() or kinds != set(KINDS):
            history = read_history(metrics)
            _write(panel_figure(training_panels(history) + health_panels(history)), folder / "curves.png")
    if kinds - {"curves"}:
        predictor = Predictor(checkpoint, device=args.device, opts=args.opts)
        for name in [args.data] if args.data else predictor.cfg.DATASETS.TESTS:
            wanted = Wanted(kinds=("best", "worst", "random"), lists=args.num, length=args.length, seed=args.seed)
            _draw_set(predictor, name, kinds, wanted, folder / re.sub(r"[^\w.-]+", "_", name))
    return 0


def checkpoint_of(source: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the best, else the final one in a folder.

    Raises:
        WeightsError: the folder has neither.
    """
    if not source.is_dir():
        return source
    for name in ("model_best.pth", "model_final.pth"):
        if (source / name).is_file():
            return source / name
    found = sorted(path.name for path in source.glob("*.pth"))
    raise WeightsError(
        f"{source} has neither model_best.pth nor model_final.pth.\n  found: {', '.join(found) or 'no .pth file'}\n"
        "  fix: name a checkpoint"
    )


def _draw_set(predictor: Predictor, name: str, kinds: set[str], wanted: Wanted, folder: Path) -> None:
    """Evaluate a test set, and draw what of it was asked for."""
    cfg = predictor.cfg
    loader, num_query = build_reid_test_loader(cfg, name)
    evaluator = ReidEvaluator(cfg, num_query, wanted=wanted)
    metrics = inference_on_dataset(
        predictor.model,
        loader,
        evaluator,
        cfg.TEST.FLIP.ENABLED,
        policy=predictor.policy,
        locate=describe_evaluation,
    )
    each = evaluated_set(name, metrics, evaluator, loader, num_query)
    result, details, protocol = each.result, each.result.details, each.result.protocol
    print(f"{name}: mAP {metrics['mAP']:.2f}, Rank-1 {metrics['Rank-1']:.2f}")
    if "rank-lists" in kinds:
        queries, gallery = _sides(each)
        for kind, lists in details.lists.items():
            if lists:
                title = f"{kind} queries on {name}"
                figure = rank_list_figure(lists, queries, gallery, protocol, title=title)
                _write(figure, folder / f"rank_list_{kind}.png")
    panels: dict[str, Callable[[], Panel | None]] = {
        "cmc": lambda: cmc_panel(result),
        "roc": lambda: roc_panel(details),
        "histogram": lambda: score_panel(details, protocol),
    }
    for kind, make in panels.items():
        if kind in kinds:
            panel = make()
            if panel is None:
                print(f"{name}: no {kind}: there are no genuine or no impostor pairs of a query and a gallery image")
                continue
            _write(panel_figure([panel]), folder / f"{kind}.png")
    if "grad-cam" in kinds:
        _write(similarity_figure(_similar_pairs(predictor, each, loader.dataset)), folder / "grad_cam.png")


def _similar_pairs(predictor: Predictor, each: EvaluatedSet, dataset: Any) -> list[tuple]:
    """Return random queries and the nearest gallery image of each, with their maps."""
    protocol, pairs = each.result.protocol, []
    offset = 0 if protocol.draws_queries else len(each.query)
    for one in each.result.details.lists["random"]:
        if len(one.gallery):
            numbers = one.query, offset + int(one.gallery[0])
            batch = dataset.__getitems__([(0, place, number) for place, number in enumerate(numbers)])
            batch = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
            first, second = (each.images[number] for number in numbers)
            pairs.append((first, second, similarity_map(predictor.model, batch)))
    return pairs


def _sides(each: EvaluatedSet) -> tuple[list, list]:
    """Return what the numbers of rank lists stand for."""
    if each.result.protocol.draws_queries:
        return each.images, each.images
    return list(each.query), list(each.gallery)


def _write(figure: Any, path: Path) -> None:
    write_figure(figure, path)
    print(f"wrote {path}", flush=True)
