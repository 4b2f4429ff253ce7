"""After too many skipped steps, SOLVER.AMP.ON_FAILURE selects an error or a fallback to another dtype."""

import json

import pytest
import tiny
import torch
import train_net
from torch import nn

from fastamp.engine import DefaultTrainer, HookBase
from fastamp.modeling import BACKBONE_REGISTRY
from fastamp.utils.command_line import TrainingInterrupted


class Times(nn.Module):
    """Multiply the input by a factor; a factor of 1e6 overflows in float16 but not in bfloat16."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


@BACKBONE_REGISTRY.register()
def build_overflowing_backbone(cfg):
    """Build the tiny backbone with a ``Times`` layer; its factor is ``MODEL.BACKBONE.SIE_COE``."""
    net = tiny.build_tiny_backbone(cfg)
    overflowing = nn.Sequential(net[0], Times(cfg.MODEL.BACKBONE.SIE_COE), *list(net)[1:])
    overflowing.feature_dim = net.feature_dim
    return overflowing


def options(output, precision, on_failure, factor="1e6"):
    return tiny.tiny_options(
        output, "MODEL.BACKBONE.NAME", "build_overflowing_backbone", "MODEL.BACKBONE.SIE_COE", factor,
        "SOLVER.AMP", precision, "SOLVER.AMP.ON_FAILURE", on_failure, "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "3",
        "SOLVER.MAX_EPOCH", "2", "SOLVER.AMP.PREFLIGHT", "off",
    )  # fmt: skip


def checkpoint(output):
    return torch.load(output / "model_final.pth", weights_only=True)


@pytest.mark.integration
@pytest.mark.parametrize("precision, factor", [("fp16", "1e6"), ("bf16", "inf")])
def test_train_exits_with_2_if_on_failure_is_error(demo, tmp_path, input_error, precision, factor):
    stderr = input_error(train_net.cli, options(tmp_path, precision, "error", factor))
    assert "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS (3)" in stderr


@pytest.mark.parametrize(
    "on_failure",
    [
        pytest.param("bfloat16", marks=pytest.mark.end_to_end),
        pytest.param("float32", marks=pytest.mark.integration),
    ],
)
def test_on_failure_continues_training_in_another_dtype_after_repeated_skips(demo, tmp_path, on_failure):
    assert train_net.cli(options(tmp_path, "fp16", on_failure)) == 0
    log = (tmp_path / "log.txt").read_text()
    assert "SOLVER.AMP.ON_FAILURE" in log
    saved = checkpoint(tmp_path)
    assert saved["policy"]["dtype"] == on_failure and "from float16 at iteration 4" in log
    assert saved["trainer"]["steps_taken"] == 12 - 4
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [row["skipped_in_a_row"] for row in rows if "total_loss" in row][-1] == 0
    assert all(torch.isfinite(t).all() for t in saved["model"].values())
    # Skipped steps do not change the model: only the 8 applied steps count.
    assert saved["model"]["backbone.2.num_batches_tracked"] == 8


@pytest.mark.integration
def test_train_exits_with_2_if_fallback_dtype_is_the_current_dtype(demo, tmp_path, capfd):
    assert train_net.cli(options(tmp_path, "bf16", "bfloat16", "inf")) == 2
    assert "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS" in capfd.readouterr().err


@pytest.mark.integration
def test_train_exits_with_2_if_steps_fail_again_after_fallback(demo, tmp_path, capfd):
    assert train_net.cli(options(tmp_path, "fp16", "float32", "inf")) == 2
    assert "SOLVER.AMP.ON_FAILURE" in (tmp_path / "log.txt").read_text()
    assert "backbone.1 (Times)" in capfd.readouterr().err


class Interrupt(HookBase):
    def before_step(self):
        if self.trainer.iter == 7:
            next(h for h in self.trainer._hooks if type(h).__name__ == "StopOnSignal").received = 15


@pytest.mark.integration
def test_resume_after_fallback_is_bit_identical(demo, tmp_path):
    def run(output, *hooks, resume=False):
        torch.manual_seed(0)
        cfg = tiny.tiny_config(output)
        cfg.merge_from_list(options(output, "fp16", "bfloat16"))
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=resume)
        trainer.register_hooks(hooks)
        trainer.train()
        return trainer

    run(tmp_path / "straight")
    with pytest.raises(TrainingInterrupted):
        run(tmp_path / "resumed", Interrupt())
    trainer = run(tmp_path / "resumed", resume=True)
    assert trainer.policy.dtype == torch.bfloat16
    first, second = (checkpoint(tmp_path / which)["model"] for which in ("straight", "resumed"))
    assert all(torch.equal(first[name], second[name]) for name in first)
