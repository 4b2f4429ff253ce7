"""Figures that show the results of a model on test sets, for ``fastamp visualize``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastamp.data import build_reid_test_loader
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.evaluation import ReidEvaluator, ReportOptions, inference_on_dataset
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.retrieval_examples import RankList
from fastamp.inference.predictor import Predictor
from fastamp.report import EvaluatedSet, evaluated_set
from fastamp.report.curves import cmc_panel, roc_panel, score_panel
from fastamp.report.figures import panel_figure, rank_list_figure, similarity_figure, write_figure
from fastamp.report.panel import Panel
from fastamp.report.sections import images_of
from fastamp.report.similarity_map import similarity_map


def draw_set(
    predictor: Predictor,
    name: str,
    kinds: set[str],
    report_options: ReportOptions,
    folder: Path,
    *,
    file_format: str = "png",
    dpi: int = 120,
) -> None:
    """Evaluate a test set and draw the requested figures.

    Args:
        predictor: trained model.
        name: test set.
        kinds: kinds of figures.
        report_options: number and length of the rank lists.
        folder: output folder.
        file_format: png, pdf or svg. Default: png.
        dpi: see ``write_figure``. Default: 120.
    """

    def save(figure: Any, stem: str) -> None:
        write(figure, folder / f"{stem}.{file_format}", dpi=dpi)

    cfg = predictor.cfg
    loader, num_query = build_reid_test_loader(cfg, name)
    evaluator = ReidEvaluator(cfg, num_query, report_options=report_options)
    metrics = inference_on_dataset(
        predictor.model,
        loader,
        evaluator,
        cfg.TEST.FLIP.ENABLED,
        policy=predictor.policy,
        locate=describe_evaluation,
    )
    test_set = evaluated_set(name, metrics, evaluator, loader, num_query)
    result = test_set.result
    assert result is not None and result.examples is not None  # because of report_options
    examples, protocol = result.examples, result.protocol
    print(f"{name}: mAP {metrics['mAP']:.2f}, Rank-1 {metrics['Rank-1']:.2f}")
    if "rank-lists" in kinds:
        queries, gallery = images_of(test_set)
        for kind, lists in examples.lists.items():
            if lists:
                title = f"{kind} queries on {name}"
                figure = rank_list_figure(lists, queries, gallery, protocol, title=title, names=test_set, dpi=dpi)
                save(figure, f"rank_list_{kind}")
    panels: dict[str, Callable[[], Panel | None]] = {
        "cmc": lambda: cmc_panel(result),
        "roc": lambda: roc_panel(examples),
        "histogram": lambda: score_panel(examples, protocol),
    }
    for kind, make in panels.items():
        if kind in kinds:
            panel = make()
            if panel is None:
                print(f"{name}: {kind} is not drawn, because there are no genuine or no impostor pairs")
                continue
            save(panel_figure([panel]), kind)
    if "grad-cam" in kinds:
        shown = [one for one in examples.lists["random"] if len(one.gallery)]
        first_frames = evaluator.first_frames
        frames = range(len(test_set.images)) if first_frames is None else first_frames.tolist()
        pairs = _similar_pairs(predictor, test_set, loader.dataset, shown, protocol, frames)
        save(similarity_figure(pairs, test_set), "grad_cam")


def _similar_pairs(
    predictor: Predictor,
    test_set: EvaluatedSet,
    dataset: Any,
    shown: list[RankList],
    protocol: Protocol,
    frames: Sequence[int],
) -> list[tuple[Any, ...]]:
    """Return ``(query, nearest gallery image, similarity map)`` for random queries.

    Args:
        predictor: trained model.
        test_set: evaluated test set.
        dataset: dataset of the test loader.
        shown: rank lists.
        protocol: evaluation protocol.
        frames: index in ``dataset`` of each image of ``test_set``: for tracklets, of the first frame.
    """
    pairs = []
    offset = 0 if protocol.rule.all_images else len(test_set.query)
    for one in shown:
        numbers = one.query, offset + int(one.gallery[0])
        batch = dataset.__getitems__([(0, place, int(frames[number])) for place, number in enumerate(numbers)])
        batch = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        first, second = (test_set.images[number] for number in numbers)
        pairs.append((first, second, similarity_map(predictor.model, batch)))
    return pairs


def write(figure: Any, path: Path, *, dpi: int = 120) -> None:
    """Write a figure and print its file name; see ``write_figure``."""
    write_figure(figure, path, dpi=dpi)
    print(f"wrote {path}", flush=True)
