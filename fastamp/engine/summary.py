"""Summary at the end of a training run, and comparison of results with the baselines."""

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastamp.config import CfgNode
from fastamp.engine.run_state import read_best
from fastamp.utils.progress import format_duration

logger = logging.getLogger(__name__)


def summarize_run(cfg: CfgNode, results: Mapping[str, Mapping[str, Any]], *, seconds: float, resumed: bool) -> None:
    """Log the summary of a run that has ended: best and last result, files, duration and next commands.

    Args:
        cfg: config of the run.
        results: dataset name -> metrics of the last evaluation; may be empty.
        seconds: duration of the training in this process.
        resumed: whether the run was resumed, so that ``seconds`` is not its total duration.
    """
    output_dir = Path(cfg.OUTPUT_DIR)
    final, report = output_dir / "model_final.pth", output_dir / "report.html"
    path = output_dir / "model_best.pth"
    best = read_best(path)
    lines = [f"training finished in {format_duration(seconds)}{' since the resume' if resumed else ''}"]
    if best is not None:
        lines.append(f"best:   {path} ({best['metric']}: {best['value']:.2f}, after iteration {best['iteration']})")
    else:
        path = final
    last = "; ".join(text for name, metrics in results.items() if (text := _headline(name, metrics)))
    if final.exists():
        lines.append(f"last:   {final}" + (f" ({last})" if last else ""))
    if cfg.TEST.REPORT and report.exists():
        lines.append(f"report: {report}")
    if path.exists():
        quoted = shlex.quote(str(path))
        plugin = "".join(f" --plugin {shlex.quote(file)}" for file in cfg.PLUGINS)
        lines.append(f"next:   fastamp eval {quoted} DATASETS.TESTS {shlex.quote(cfg.DATASETS.TESTS[0])}{plugin}")
        lines.append(f"        fastamp extract {quoted} FOLDER -o features.npz{plugin}")
    logger.info("%s", "\n  ".join(lines))
    warn_below_baselines(results)


def warn_below_baselines(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Log a warning for each test set on which the mAP is below that of a baseline; requires ``TEST.BASELINES``."""
    for name, metrics in results.items():
        baselines = {title: scores["mAP"] for title, scores in metrics.get("baselines", {}).items() if "mAP" in scores}
        if not baselines or "mAP" not in metrics:
            continue
        best = max(baselines, key=lambda baseline: baselines[baseline])
        if metrics["mAP"] < baselines[best]:
            logger.warning(
                "%s: mAP %.2f is below the baseline %s (%.2f), which is not trained.\n"
                "  fix: train longer or with another SOLVER.BASE_LR, and check the data with fastamp check-data",
                name,
                metrics["mAP"],
                best,
                baselines[best],
            )


def _headline(name: str, metrics: Mapping[str, Any]) -> str:
    """Return mAP and Rank-1 of a test set as text; empty if the evaluator reports neither."""
    values = ", ".join(f"{metric} {metrics[metric]:.2f}" for metric in ("mAP", "Rank-1") if metric in metrics)
    return f"{name}: {values}" if values else ""
