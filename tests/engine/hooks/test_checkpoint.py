"""Periodic checkpoints: schedule, content and deletion."""

import pytest
import torch
from torch import nn

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine import HookBase, Priority, TrainerBase
from fastamp.engine.hooks.checkpoint import PeriodicCheckpointer

EPOCH = 4  # iterations


class Counting(TrainerBase):
    def run_step(self):
        self.done = self.iter + 1


class Killed(Exception):
    pass


class KillAfter(HookBase):
    """Raise ``Killed`` after the given number of iterations, when all other hooks have been called."""

    priority = Priority.LOW

    def __init__(self, iteration):
        self.iteration = iteration

    def after_step(self):
        if self.trainer.iter + 1 == self.iteration:
            raise Killed


class CountSteps(HookBase):
    """Custom hook whose state is the number of completed iterations."""

    count = 0

    def after_step(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def make(folder, *hooks, period=1, **options):
    trainer = Counting()
    trainer.iters_per_epoch = EPOCH
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, trainer=trainer)
    trainer.register_hooks([PeriodicCheckpointer(checkpointer, period, **options), *hooks])
    return trainer, checkpointer


def train(folder, *hooks, epochs=3, resume=False, **options):
    trainer, checkpointer = make(folder, *hooks, **options)
    if resume:
        checkpointer.resume(checkpointer.last_checkpoint())
    trainer.train(trainer.start_iter, epochs, EPOCH)
    return trainer


def names(folder):
    return sorted(path.stem.removeprefix("model_") for path in folder.glob("model_*.pth"))


def iteration_in(path):
    return torch.load(path, weights_only=True)["trainer"]["iteration"]


def test_checkpoints_are_saved_every_n_epochs_and_iterations(tmp_path):
    train(tmp_path, iterations=3)
    assert names(tmp_path) == ["0000", "0001", "final", "iter_0000003", "iter_0000006", "iter_0000009"]
    assert iteration_in(tmp_path / "model_iter_0000006.pth") == 6
    assert iteration_in(tmp_path / "model_0001.pth") == 8
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"


def test_end_of_epoch_saves_one_checkpoint_after_the_evaluation(tmp_path):
    class Evaluate(HookBase):
        evaluated = 0

        def after_epoch(self):
            self.evaluated += 1

        def state_dict(self):
            return {"evaluated": self.evaluated}

    train(tmp_path, Evaluate(), period=2, iterations=2)
    assert names(tmp_path) == [
        "0001", "final", "iter_0000002", "iter_0000004", "iter_0000006", "iter_0000010",
    ]  # fmt: skip
    for name, evaluated in (("iter_0000002", 0), ("iter_0000004", 1), ("0001", 2), ("iter_0000010", 2)):
        content = torch.load(tmp_path / f"model_{name}.pth", weights_only=True)
        assert content["trainer"]["hooks"]["Evaluate"]["evaluated"] == evaluated, name


def test_checkpoints_are_saved_every_n_minutes(tmp_path):
    seconds = iter(range(0, 10**6, 20))  # the clock advances by 20 s per call
    train(tmp_path, period=2, minutes=1.0, clock=lambda: float(next(seconds)))
    # Called at the start, after each step and after each save; three calls are one minute.
    assert names(tmp_path) == ["0001", "final", "iter_0000003", "iter_0000006", "iter_0000011"]


@pytest.mark.parametrize("minutes", [0.0, 5.0])
def test_checkpoint_period_in_minutes_adds_one_number_to_the_verdict_reduction(tmp_path, minutes):
    class SaveLater(HookBase):
        """Store the reduced maxima before the step, as the verdict does in real training."""

        def before_step(self):
            self.trainer.rank_maxima.discard = lambda: None
            self.trainer.rank_maxima.store([1.0])

    trainer = train(tmp_path, SaveLater(), epochs=1, minutes=minutes)
    assert names(tmp_path) == ["final"] + ["iter_0000001", "iter_0000002", "iter_0000003"] * (minutes > 0)
    assert len(trainer.rank_maxima._numbers) == (minutes > 0)


def test_checkpoint_contains_the_state_of_hooks_registered_later(tmp_path):
    train(tmp_path, CountSteps(), iterations=1)
    for iteration in (1, 2, 3, 5):
        content = torch.load(tmp_path / f"model_iter_{iteration:07d}.pth", weights_only=True)
        assert content["trainer"]["hooks"]["CountSteps"]["count"] == iteration == content["trainer"]["iteration"]


def test_keep_limit_deletes_only_older_periodic_checkpoints(tmp_path):
    others = ("model_best", "model_interrupted", "model_final", "model_unevaluated", "model_0099", "model_iter_x")
    for name in others:
        (tmp_path / f"{name}.pth").write_text("of before")
    train(tmp_path, iterations=3, keep=2)
    assert names(tmp_path) == sorted([*(name.removeprefix("model_") for name in others), "0001", "iter_0000009"])


@pytest.mark.parametrize("keep", [1, 3])
def test_keep_limit_counts_checkpoints_saved_before_a_resume(tmp_path, keep):
    with pytest.raises(Killed):
        train(tmp_path, KillAfter(7), iterations=1, period=9, keep=0)
    assert len(names(tmp_path)) == 7
    train(tmp_path, resume=True, iterations=1, period=9, keep=keep)
    assert names(tmp_path) == ["final", *(f"iter_{n:07d}" for n in range(12 - keep, 12))]


def test_old_checkpoint_is_deleted_after_the_new_one_is_tagged(tmp_path, monkeypatch):
    seen = []

    def delete(self, doomed):
        seen.append((list(doomed), (self.save_dir / "last_checkpoint").read_text()))

    monkeypatch.setattr(Checkpointer, "delete", delete)
    train(tmp_path, keep=1)
    assert seen == [([], "model_0000.pth"), (["model_0000"], "model_0001.pth")]


def test_hook_state_from_checkpoint_cannot_delete_unrelated_files(tmp_path):
    (tmp_path / "run").mkdir()
    for path in ("precious.pth", "run/model_best.pth"):
        (tmp_path / path).write_text("precious")
    trainer, _ = make(tmp_path / "run", keep=1)
    hook = trainer._hooks[0]
    hook.load_state_dict({"names": ["../precious", "model_best", f"{tmp_path}/precious", "model_0000\n", "model_0001"]})
    assert hook.state_dict() == {"names": ["model_0001"]}
    trainer.train(0, 3, EPOCH)
    assert (tmp_path / "precious.pth").exists() and (tmp_path / "run/model_best.pth").exists()
