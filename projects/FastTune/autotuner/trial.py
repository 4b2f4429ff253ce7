"""Trial of a hyper-parameter search: a training run that reports its metrics to Ray Tune after each evaluation."""

import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from autotuner.settings import Search
from autotuner.split import register_split
from autotuner.tune_hooks import EPOCH, ROUND, SCORE, VALUES, Report, TuneReportHook, checkpoints
from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.config import CfgNode, get_cfg
from fastamp.engine import DefaultTrainer, HookBase, default_setup
from fastamp.engine.hooks import PeriodicCheckpointer
from fastamp.engine.loggers import in_group, without_trackers
from fastamp.engine.run_state import ConfigText
from fastamp.solver import OptimizerState, WeightAverage
from fastamp.utils.errors import UserError

PARENT, FAILURE = "parent", "failure"
_REPORTS, _LAST_REPORT = "reports.jsonl", "report.json"


class TrialTrainer(DefaultTrainer):
    """Trainer that saves the best weights without optimizer state; only ``TuneReportHook`` saves checkpoints.

    Args:
        cfg: see ``DefaultTrainer``.
        recipe: config to store in checkpoints instead of ``cfg``, because the datasets of ``cfg`` are only registered
            in this process.
    """

    def __init__(self, cfg: CfgNode, recipe: CfgNode | None = None) -> None:
        self.recipe = recipe
        super().__init__(cfg)

    def checkpoint_parts(self) -> dict[str, Any]:
        recipe = {"config": ConfigText(self.recipe)} if self.recipe is not None else {}
        return super().checkpoint_parts() | recipe

    def build_best_checkpointer(self) -> Checkpointer:
        parts = self.checkpoint_parts().items()
        return self.build_checkpointer({k: p for k, p in parts if not isinstance(p, OptimizerState | WeightAverage)})

    def build_hooks(self) -> list[HookBase]:
        return [hook for hook in super().build_hooks() if not isinstance(hook, PeriodicCheckpointer)]


def run_trial(
    cfg: CfgNode,
    report: Report,
    *,
    checkpoint: str | Path | None = None,
    with_other_values: bool = False,
    recipe: CfgNode | None = None,
    keep: int = 1,
) -> str:
    """Train from the beginning, or continue from the checkpoint of a trial.

    Args:
        cfg: config of this trial, with a separate OUTPUT_DIR.
        report: see ``TuneReportHook``; an exception that it raises ends the trial.
        checkpoint: file that a trial with the same model passed to ``report``; None to start from the beginning.
            Training continues with the learning rates of ``cfg``.
        with_other_values: True if the values of ``cfg`` differ from those of the checkpoint's trial; the best score of
            the checkpoint is then discarded.
        recipe: see ``TrialTrainer``.
        keep: see ``TuneReportHook``.

    Returns:
        First line of the UserError that ended the trial; empty if the trial finished.
    """
    try:
        default_setup(cfg)
        trainer = TrialTrainer(cfg, recipe)
        trainer.register_hooks([TuneReportHook(trainer, report, keep=keep)])
        if checkpoint is not None:
            trainer.checkpointer.resume(checkpoint)
            if with_other_values:
                trainer.eval_hook.reset_best()
        else:
            trainer.resume_or_load(resume=False)
        trainer.train()
    except UserError as failure:
        return str(failure).splitlines()[0]
    return ""


def ray_trial(sample: dict[str, Any], search: Search, here: str, resumed: bool) -> None:
    """Run one trial in a Ray process, which may be reused for several trials.

    Args:
        sample: sample of the search space.
        search: settings of the search.
        here: working directory, to which relative paths refer.
        resumed: True if the trial may have been killed in an earlier run of the search; it then continues from its own
            last checkpoint, which may be newer than the one that Ray recorded.
    """
    from ray import tune

    os.chdir(here)
    torch.set_num_threads(search.threads)
    _free_memory()
    get_cfg(search.plugin)  # registers the custom components
    trial = tune.get_context().get_trial_id()
    values = search.space.decoded(sample)
    output = str(run_dir(search.folder / f"trial_{trial}"))
    recipe = search.space.apply(search.cfg, values).with_values({"OUTPUT_DIR": output})
    cfg = in_group(recipe, search.folder.parent, trial) if recipe.TRACKING.TRIALS else without_trackers(recipe)
    if search.fraction:
        train, validation = register_split(recipe, search.fraction, search.seed)
        cfg = cfg.with_values(
            {"DATASETS.NAMES": (train,), "DATASETS.TESTS": (validation,), "MODEL.HEADS.NUM_CLASSES": 0}
        )

    start = _start(search, cfg.OUTPUT_DIR, resumed=resumed)
    if start and resumed:
        _report_to_ray(start)
    if start and (start[EPOCH] >= search.rounds.epochs or not start["file"]):
        return  # killed after its last evaluation, or a copy of a finished trial: no epoch is left to train
    parent = {}
    if start and start.get("trial", trial) != trial:
        parent = {PARENT: [start[EPOCH], start["trial"]]}

    def report(metrics: dict[str, Any], file: Path) -> None:
        metrics = metrics | {ROUND: search.rounds.at(metrics[EPOCH]), VALUES: values, "trial": trial, **parent}
        parent.clear()
        _append_report(metrics, cfg.OUTPUT_DIR)
        _report_to_ray(metrics | {"file": str(file)})

    failure = run_trial(
        cfg,
        report,
        checkpoint=start["file"] if start else None,
        with_other_values=bool(start) and start[VALUES] != values,
        recipe=recipe,
        # Other trials may still start from the previous checkpoint while this trial continues.
        keep=2 if search.is_population else 1,
    )
    if failure:
        metrics = {SCORE: 0.0, EPOCH: search.rounds.epochs, ROUND: search.rounds.total, FAILURE: failure}
        _append_report(metrics | {VALUES: values, "trial": trial}, cfg.OUTPUT_DIR)
        if not search.is_population:
            tune.report(metrics)


def _start(search: Search, folder: str, *, resumed: bool) -> dict[str, Any] | None:
    """Return the report with the checkpoint from which the trial continues; None to start from the beginning.

    The entry ``file`` of the report is the checkpoint. It is empty if the trial has finished and lost: the checkpoint
    was then deleted, possibly before Ray recorded the end of the trial.
    """
    from ray import tune

    rows = [row for row in read_reports(folder) if FAILURE not in row]
    files = checkpoints(folder)
    latest = rows[-1] | {"file": str(files[-1]) if files else ""} if rows else None
    if resumed and latest:
        return latest
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as content:
        recorded = json.loads((Path(content) / _LAST_REPORT).read_text(encoding="utf-8"))
    if Path(recorded["file"]).is_file() or recorded[EPOCH] >= search.rounds.epochs:
        return recorded
    # After a kill, Ray's records may be older than the remaining files.
    return latest if files else None


def _report_to_ray(metrics: dict[str, Any]) -> None:
    """Report metrics to Ray; the Ray checkpoint contains only the report, with the path of the checkpoint file."""
    from ray import tune

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _LAST_REPORT).write_text(json.dumps(metrics), encoding="utf-8")
        scalars = {name: value for name, value in metrics.items() if name not in (VALUES, "trial", "file", PARENT)}
        tune.report(scalars, checkpoint=tune.Checkpoint.from_directory(folder))


def run_dir(trial_dir: str | Path) -> Path:
    """Return the OUTPUT_DIR of a trial from the trial's folder in the search folder, ``trial_dir``."""
    return Path(trial_dir) / "run"


def read_reports(output_dir: str | Path) -> list[dict[str, Any]]:
    """Read the reports that a trial wrote; Ray's own records lack the reports of paused trials."""
    file = Path(output_dir) / _REPORTS
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _append_report(metrics: dict[str, Any], output_dir: str) -> None:
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _REPORTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def _free_memory() -> None:
    """Free the memory that earlier trials in this process used."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
