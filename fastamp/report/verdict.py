"""Headline of a report: the result with its interval, compared with the baselines and with the previous run."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fastamp.config import CfgNode
from fastamp.report.history import read_history
from fastamp.utils.errors import DataError

# Settings of TEST that change the metrics of equal features.
_COMPARED = ("METRIC", "PROTOCOL", "AP_METHOD", "RERANK", "AQE", "FLIP")
_MAX_RUNS = 50


@dataclass(frozen=True)
class PreviousRun:
    """Earlier run with results on the same test set.

    Attributes:
        folder: its OUTPUT_DIR.
        date: day of its last evaluation.
        mean_ap: mAP of its last evaluation, in percent.
    """

    folder: Path
    date: str
    mean_ap: float


@dataclass(frozen=True)
class Verdict:
    """Result on one test set.

    Attributes:
        kind: ``"good"``: above all baselines; ``"bad"``: not above; ``"open"``: not compared with baselines.
        headline: short statement.
        sentences: result, comparison with the baselines, comparison with the previous run.
    """

    kind: str
    headline: str
    sentences: list[str]


def verdict(metrics: dict[str, Any], previous: PreviousRun | None) -> Verdict | None:
    """Compare a result with its baselines and the previous run; None without mAP."""
    if "mAP" not in metrics:
        return None
    value, interval = metrics["mAP"], metrics.get("intervals", {}).get("mAP")
    text = f"mAP {value:.1f} %"
    if interval:
        text += f" (95 % confidence interval {interval[0]:.1f} to {interval[1]:.1f})"
    if "Rank-1" in metrics:
        text += f", Rank-1 {metrics['Rank-1']:.1f} %"
    sentences, kind, headline = [f"{text}."], "open", "Not compared with baselines"
    baselines = {name: scores["mAP"] for name, scores in metrics.get("baselines", {}).items() if "mAP" in scores}
    if baselines:
        name = max(baselines, key=lambda name: baselines[name])
        best = baselines[name]
        difference = f"{abs(value - best):.1f} points {'above' if value > best else 'below'}"
        if value <= best:
            kind, headline = "bad", "Below a baseline without learning"
        elif interval and interval[0] <= best:
            kind, headline = "bad", "Not distinguishable from a baseline without learning"
        else:
            kind, headline = "good", "Above the baselines without learning"
        sentences.append(f"{difference} the best baseline ({name}, {best:.1f} %).")
    else:
        sentences.append("No baselines: TEST.BASELINES True computes them.")
    if previous is None:
        sentences.append("No previous run with this test set in the same folder.")
    else:
        change = value - previous.mean_ap
        noise = ""
        if interval:
            inside = interval[0] <= previous.mean_ap <= interval[1]
            noise = f", {'within' if inside else 'outside'} the confidence interval"
        sentences.append(
            f"Previous run ({previous.folder.name}, {previous.date}): mAP {previous.mean_ap:.1f} %; "
            f"difference {change:+.1f} points{noise}."
        )
    return Verdict(kind, headline, sentences)


def previous_run(cfg: CfgNode, name: str) -> PreviousRun | None:
    """Find the newest other run with results on the test set ``name`` and the same evaluation settings.

    Earlier runs in OUTPUT_DIR (``previous-<n>``) are searched first, then the folders next to it, at most 50. The
    folder of the evaluated weights ``MODEL.WEIGHTS`` is that of the same run, not of an earlier one.
    """
    output = Path(cfg.OUTPUT_DIR).absolute()
    evaluated = Path(cfg.MODEL.WEIGHTS).absolute().parent if cfg.MODEL.WEIGHTS else output
    try:
        files = [
            *_newest_first(output.glob("previous-*/metrics.json")),
            *_newest_first(file for file in output.parent.glob("*/metrics.json") if file.parent != output),
        ]
    except (OSError, ValueError):
        return None
    for file in files[:_MAX_RUNS]:
        if file.parent == evaluated:
            continue
        try:
            value = read_history(file).latest(f"{name}/mAP")
            if value is not None and _same_evaluation(cfg, file.parent / "config.yaml"):
                date = time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))
                return PreviousRun(file.parent, date, value)
        except (DataError, OSError, yaml.YAMLError):
            continue
    return None


def _newest_first(files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: -file.stat().st_mtime)


def _same_evaluation(cfg: CfgNode, file: Path) -> bool:
    """Return True if the config of a run has the evaluation settings of ``cfg``."""
    evaluation = yaml.safe_load(file.read_text(encoding="utf-8"))
    test = evaluation.get("TEST") if isinstance(evaluation, dict) else None
    expected = yaml.safe_load(cfg.dump())["TEST"]
    return isinstance(test, dict) and all(test.get(key) == expected[key] for key in _COMPARED)
