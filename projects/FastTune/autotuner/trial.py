"""One trial of a search: an ordinary training under DefaultTrainer that reports as it goes."""

import gc
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotuner.space import Space
from autotuner.split import register_split
from autotuner.tune_hooks import EPOCH, ROUND, SCORE, VALUES, Report, Rounds, TuneReportHook, checkpoints
from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.config import CfgNode, get_cfg, load_plugin
from fastamp.engine import DefaultTrainer, HookBase, default_setup
from fastamp.engine.defaults import ConfigText
from fastamp.engine.hooks import PeriodicCheckpointer
from fastamp.solver import OptimizerState, WeightAverage
from fastamp.utils.errors import UserError

PARENT, FAILURE = "parent", "failure"
_REPORTS, _LAST_REPORT = "reports.jsonl", "report.json"


@dataclass(frozen=True)
class TrialSettings:
    """What all trials of a search have in common; goes to Ray's processes.

    Attributes:
        config: YAML of the config that values are put into.
        space: what is drawn.
        rounds: see ``Rounds``.
        fraction: of the training identities, held out to judge trials; 0 trains on all and judges on DATASETS.TESTS.
        seed: of that split.
        plugin: Python file that registers custom components; "" for none.
        here: folder that relative paths start from.
        folder: the search's.
        population: whether trials continue from the checkpoints of others, as in population based training.
        resumed: whether a trial that begins may be one that was killed, which goes on from what it saved last: that
            is later than what Ray knows of.
        threads: that a trial computes with.
    """

    config: str
    space: Space
    rounds: Rounds
    fraction: float
    seed: int
    plugin: str
    here: str
    folder: str
    population: bool
    resumed: bool
    threads: int


class TrialTrainer(DefaultTrainer):
    """Training that keeps the best weights without the optimizer, and no checkpoints but those of its report hook.

    Args:
        cfg: see ``DefaultTrainer``.
        recipe: config that checkpoints hold instead of ``cfg``, whose data sets other programs may not know.
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
    """Train by a config, from the beginning or on from a trial's checkpoint.

    Args:
        cfg: of this trial, with its own OUTPUT_DIR.
        report: see ``TuneReportHook``; what it raises ends the trial.
        checkpoint: a file that ``report`` was given, of a trial of the same model; learning rates are those of ``cfg``.
        with_other_values: whether ``cfg`` has other values than the checkpoint's trial: its best is none of this one's.
        recipe: see ``TrialTrainer``.
        keep: see ``TuneReportHook``.

    Returns:
        The headline of the failure when the config, mixed precision or the training fails in a way that fastamp knows;
        empty when the trial came to its end.
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


def ray_trial(sample: dict[str, Any], settings: TrialSettings) -> None:
    """Run one trial in a process of Ray's, which may have run others before."""
    from ray import tune

    os.chdir(settings.here)
    torch.set_num_threads(settings.threads)
    _forget_former_trials()
    cfg = get_cfg()
    if settings.plugin:
        load_plugin(settings.plugin, cfg)
    cfg.merge_from_other_cfg(CfgNode.load_cfg(settings.config))
    trial = tune.get_context().get_trial_id()
    recipe = settings.space.apply(cfg, settings.space.decoded(sample))
    cfg = recipe = recipe.with_values({"OUTPUT_DIR": str(output_dir(settings.folder, trial))})
    if settings.fraction:
        train, validation = register_split(recipe, settings.fraction, settings.seed)
        cfg = recipe.with_values(
            {"DATASETS.NAMES": (train,), "DATASETS.TESTS": (validation,), "MODEL.HEADS.NUM_CLASSES": 0}
        )

    values = plain_values(settings.space.decoded(sample))
    start = _start(settings, cfg.OUTPUT_DIR)
    if start and settings.resumed:
        _tell_ray(start)
    if start and (start[EPOCH] >= settings.rounds.epochs or not start["file"]):
        return  # it was killed after its last evaluation, or takes over the end of another: nothing is left to train
    parent = {}
    if start and start.get("trial", trial) != trial:
        parent = {PARENT: [start[EPOCH], start["trial"]]}

    def report(metrics: dict[str, Any], file: Path) -> None:
        metrics = metrics | {ROUND: settings.rounds.at(metrics[EPOCH]), VALUES: values, "trial": trial, **parent}
        parent.clear()
        _write_down(metrics, cfg.OUTPUT_DIR)
        _tell_ray(metrics | {"file": str(file)})

    failure = run_trial(
        cfg,
        report,
        checkpoint=start["file"] if start else None,
        with_other_values=bool(start) and start[VALUES] != values,
        recipe=recipe,
        # Others may still have to begin with the one before, when a trial has trained on.
        keep=2 if settings.population else 1,
    )
    if failure:
        metrics = {SCORE: 0.0, EPOCH: settings.rounds.epochs, ROUND: settings.rounds.total, FAILURE: failure}
        _write_down(metrics | {VALUES: values, "trial": trial}, cfg.OUTPUT_DIR)
        if not settings.population:
            tune.report(metrics)


def _start(settings: TrialSettings, folder: str) -> dict[str, Any] | None:
    """Return the report whose checkpoint, ``file``, a trial continues from; None begins.

    The file of a trial that has ended and lost is empty: its checkpoint has been deleted, even where the search was
    killed before Ray recorded the end.
    """
    from ray import tune

    own = [row for row in read_reports(folder) if FAILURE not in row]
    files = checkpoints(folder)
    latest = own[-1] | {"file": str(files[-1]) if files else ""} if own else None
    if settings.resumed and latest:
        return latest
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as content:
        told = json.loads((Path(content) / _LAST_REPORT).read_text(encoding="utf-8"))
    if Path(told["file"]).is_file() or told[EPOCH] >= settings.rounds.epochs:
        return told
    # After a kill Ray's records may be older than the files that are kept.
    return latest if files else None


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they are after they were written down."""
    return json.loads(json.dumps(values))


def _tell_ray(metrics: dict[str, Any]) -> None:
    """Report to Ray; its checkpoint holds the report, which names the file, and not the weights once more."""
    from ray import tune

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _LAST_REPORT).write_text(json.dumps(metrics), encoding="utf-8")
        told = {name: value for name, value in metrics.items() if name not in (VALUES, "trial", "file", PARENT)}
        tune.report(told, checkpoint=tune.Checkpoint.from_directory(folder))


def output_dir(folder: str | Path, trial_id: str) -> Path:
    """Return a trial's OUTPUT_DIR in the folder of its search."""
    return run_dir(Path(folder) / f"trial_{trial_id}")


def run_dir(trial_dir: str | Path) -> Path:
    """Return the OUTPUT_DIR in a trial's folder."""
    return Path(trial_dir) / "run"


def read_reports(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return what a trial has reported; Ray's own record loses lines of trials that are paused."""
    file = Path(output_dir) / _REPORTS
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def prune(output_dir: str | Path, *, keep_best: bool) -> None:
    """Delete the checkpoints of a trial that has ended, and unless ``keep_best`` its best weights."""
    for file in Path(output_dir).glob("model_*.pth"):
        if not (keep_best and file.name == "model_best.pth"):
            file.unlink(missing_ok=True)


def _write_down(metrics: dict[str, Any], output_dir: str) -> None:
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _REPORTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def _forget_former_trials() -> None:
    """Give back what the trials before this one left in the process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
