"""Figures that show the results of a model on test sets, for ``fastamp visualize``."""

from pathlib import Path
from typing import Any

import torch

from fastamp.data import build_reid_test_loader
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.evaluation import ReidEvaluator, ReportOptions, inference_on_dataset
from fastamp.inference.predictor import Predictor
from fastamp.report import evaluated_set
from fastamp.report.curves import cmc_panel, roc_panel, score_panel
from fastamp.report.figures import panel_figure, rank_list_figure, similarity_figure, write_figure
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
    options: dict[str, Any] = {"policy": predictor.policy, "locate": describe_evaluation}
    metrics = inference_on_dataset(predictor.model, loader, evaluator, cfg.TEST.FLIP.ENABLED, **options)
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
    panels = {"cmc": cmc_panel(result), "roc": roc_panel(examples), "histogram": score_panel(examples, protocol)}
    for kind, panel in panels.items():
        if kind in kinds and panel is not None:
            save(panel_figure([panel]), kind)
        elif kind in kinds:
            print(f"{name}: {kind} is not drawn, because there are no genuine or no impostor pairs")
    if "grad-cam" in kinds:
        shown = [one for one in examples.lists["random"] if len(one.gallery)]
        frames = range(len(test_set.images)) if evaluator.first_frames is None else evaluator.first_frames.tolist()
        pairs = []
        for one in shown:
            offset = 0 if protocol.rule.all_images else len(test_set.query)
            both = one.query, offset + int(one.gallery[0])
            batch = loader.dataset.__getitems__([(0, place, frames[number]) for place, number in enumerate(both)])
            batch = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
            first, second = (test_set.images[number] for number in both)
            pairs.append((first, second, similarity_map(predictor.model, batch)))
        save(similarity_figure(pairs, test_set), "grad_cam")


def write(figure: Any, path: Path, *, dpi: int = 120) -> None:
    """Write a figure and print its file name; see ``write_figure``."""
    write_figure(figure, path, dpi=dpi)
    print(f"wrote {path}", flush=True)
