"""Selection of the best model: metric, test sets and resume."""

import contextlib
import logging

import pytest
import tiny
import torch
from torch import nn

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine import DefaultTrainer, TrainerBase
from fastamp.engine.hooks.evaluation import BestMetric, EvalHook
from fastamp.utils.errors import ConfigError

METRICS = ["Rank-1", "mAP", "metric"]
REPORTED = {"A": METRICS, "csv:/b/c.csv": [*METRICS, "TAR@FAR=0.01"]}
RESULTS = {
    "A": {"Rank-1": 90.0, "mAP": 50.0, "metric": 70.0},
    "csv:/b/c.csv": {"Rank-1": 10.0, "mAP": 40.0, "metric": 25.0, "TAR@FAR=0.01": 3.0},
}


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("metric", 47.5, "metric (the mean of mAP and Rank-1), its mean over A, csv:/b/c.csv"),
        ("mAP", 45.0, "mAP, its mean over A, csv:/b/c.csv"),
        ("A/Rank-1", 90.0, "Rank-1 on A"),
        ("csv:/b/c.csv/mAP", 40.0, "mAP on csv:/b/c.csv"),
        ("csv:/b/c.csv/TAR@FAR=0.01", 3.0, "TAR@FAR=0.01 on csv:/b/c.csv"),
    ],
)
def test_best_metric_name_selects_metric_and_datasets(name, value, text):
    metric = BestMetric.by_name(name, REPORTED)
    assert metric.of(RESULTS) == value and str(metric) == text


@pytest.mark.parametrize(
    "name, suggestion", [("map", "mAP"), ("A/rank-1", "A/Rank-1"), ("TAR@FAR=0.01", ""), ("A", ""), ("", "")]
)
def test_unknown_best_metric_error_suggests_most_similar_metric(name, suggestion):
    with pytest.raises(ConfigError, match="SOLVER.BEST_METRIC") as error:
        BestMetric.by_name(name, REPORTED)
    assert f"Did you mean {suggestion!r}?" in str(error.value) if suggestion else True
    assert ("TEST.ROC.FAR" in str(error.value)) == ("FAR" in name)
    assert "choices: Rank-1, mAP, metric; or a metric of one test set, e.g. A/Rank-1" in str(error.value)


def test_undeclared_metric_missing_from_results_raises():
    assert BestMetric.by_name("A/purity", {"A": None, "B": METRICS}) == BestMetric("purity", ("A",))
    metric = BestMetric.by_name("purity", {"A": None})
    assert metric.of({"A": {"purity": 1.0}}) == 1.0
    with pytest.raises(ConfigError, match=r"SOLVER.BEST_METRIC: 'purity' .* A.\n  found: Rank-1, mAP, metric"):
        metric.of(RESULTS)


def hook_for(folder, metric, scores):
    """Build an ``EvalHook`` whose evaluations return ``scores`` as mAP, for a trainer with two iterations per epoch."""

    class Counting(TrainerBase):
        def run_step(self):
            pass

    trainer, scores = Counting(), iter(scores)
    checkpointer = Checkpointer(nn.Linear(1, 1), folder, trainer=trainer)

    def evaluate():
        return {"A": {"mAP": next(scores), "mINP": 5.0}}

    trainer.register_hooks([EvalHook(1, evaluate, checkpointer, [], BestMetric.by_name(metric, {"A": None}))])
    return trainer._hooks[0]


def best_in(folder):
    return torch.load(folder / "model_best.pth", weights_only=True)["best"]


@pytest.mark.parametrize(("scores", "worse"), [([30.0, 20.0], True), ([30.0, 31.0], False)])
def test_evaluation_before_the_first_step_is_kept_as_best_and_compared(tmp_path, caplog, scores, worse):
    hook = hook_for(tmp_path, "mAP", scores)
    hook.at_start = True
    hook.trainer.move_to(0, 1)
    hook.before_train()
    assert (best_in(tmp_path)["value"], best_in(tmp_path)["iteration"]) == (30.0, 0)
    hook.trainer.move_to(hook.trainer.max_iter - 1, 1)
    hook.after_epoch()
    assert best_in(tmp_path)["value"] == max(scores)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warned) == worse and all("30.00" in record.getMessage() for record in warned)


def test_best_checkpoint_stores_metric_value_and_iteration(tmp_path, caplog):
    logging.getLogger("fastamp").setLevel(logging.INFO)
    hook = hook_for(tmp_path, "mAP", [10.0, 30.0, 20.0])
    hook.trainer.train(0, 3, 2)
    assert best_in(tmp_path) == {"metric": "mAP on A", "value": 30.0, "iteration": 4}
    assert "30.00 (mAP on A)" in caplog.text and "20.00" not in caplog.text


def test_nan_score_never_replaces_the_best_model(tmp_path):
    hook = hook_for(tmp_path, "mAP", [float("nan"), 10.0, float("nan"), 20.0, float("nan")])
    hook.trainer.train(0, 5, 2)
    assert best_in(tmp_path) == {"metric": "mAP on A", "value": 20.0, "iteration": 8}


def test_tensor_score_is_stored_as_a_python_float(tmp_path):
    hook = hook_for(tmp_path, "mAP", [torch.tensor(30.0)])
    hook.trainer.train(0, 1, 2)
    hook.load_state_dict(hook.state_dict())
    assert type(hook.best) is float


def test_resume_keeps_the_best_score_unless_the_metric_changes(tmp_path, caplog):
    first = hook_for(tmp_path, "mAP", [30.0])
    first.trainer.train(0, 1, 2)
    same = hook_for(tmp_path, "A/mAP", [20.0])
    same.load_state_dict(first.state_dict())
    same.trainer.train(0, 1, 2)
    assert same.best == 30.0 and best_in(tmp_path)["value"] == 30.0 and "mAP on A (30.00)" not in caplog.text
    other = hook_for(tmp_path, "mINP", [99.0])
    other.load_state_dict(first.state_dict())
    assert "mAP on A (30.00) to mINP on A" in caplog.text
    other.trainer.train(0, 1, 2)
    assert best_in(tmp_path) == {"metric": "mINP on A", "value": 5.0, "iteration": 2}


@pytest.mark.integration
def test_metric_names_of_evaluator_match_its_results(demo, tmp_path):
    options = ("TEST.ROC.ENABLED", "True", "TEST.ROC.FAR", "[1e-1, 0.05]", "TEST.RANKS", "[3]", "SOLVER.MAX_EPOCH", "1")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *options, "SOLVER.BEST_METRIC", "Demo/TAR@FAR=0.05"))
    num_query = trainer.test_loaders["Demo"][1]
    names = trainer.build_evaluator(trainer.cfg, num_query).metric_names()
    assert names == ["Rank-1", "Rank-3", "Rank-5", "Rank-10", "mAP", "mINP", "metric", "TAR@FAR=0.05", "TAR@FAR=0.1"]
    results = trainer.train()
    counts = {"num_query", "num_gallery", "num_query_without_match", "intervals"}
    assert set(names) == results.keys() - counts
    assert trainer.eval_hook.best == results["TAR@FAR=0.05"] == best_in(tmp_path)["value"]


def test_unknown_best_metric_exits_with_2_before_training(demo, tmp_path, capfd):
    import train_net

    assert train_net.cli(tiny.tiny_options(tmp_path, "SOLVER.BEST_METRIC", "TAR@FAR=0.1")) == 2
    stderr = capfd.readouterr().err
    assert "SOLVER.BEST_METRIC" in stderr and "'TAR@FAR=0.1'" in stderr and "choices: Rank-1" in stderr
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt"}


@pytest.mark.integration
def test_failed_evaluation_of_ema_saves_the_unaveraged_weights(demo, tmp_path):
    """During the failed evaluation, the model contains the averaged weights."""
    options = ("SOLVER.EMA.ENABLED", "True", "SOLVER.EMA.DECAY", "0.9", "SOLVER.MAX_EPOCH", "1")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *options))
    name = "backbone.0.weight"

    def fail():
        assert torch.equal(trainer.model.state_dict()[name], trainer.average.state_dict()["model"][name])
        raise RuntimeError("no evaluation")

    trainer.eval_hook.evaluate = fail
    with contextlib.suppress(RuntimeError):
        trainer.train()
    content = torch.load(tmp_path / "model_unevaluated.pth", weights_only=True)
    assert not torch.equal(content["model"][name], content["average"]["model"][name])
    assert torch.equal(content["model"][name], trainer.model.state_dict()[name])
    assert torch.equal(content["average"]["model"][name], trainer.average.tensors()[name])
