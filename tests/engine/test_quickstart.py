"""The quickstart network overfits one batch and updates every parameter, with and without AMP."""

import itertools
from pathlib import Path

import pytest
import torch

from fastamp.config import read_config
from fastamp.engine import TRAINER_REGISTRY
from fastamp.modeling import build_model
from fastamp.solver import build_optimizer

QUICKSTART = Path(__file__).parents[2] / "configs/Demo/quickstart.yml"


@pytest.mark.integration
@pytest.mark.parametrize("trainer_name, amp", [("SimpleTrainer", "off"), ("AMPTrainer", "bf16")])
def test_quickstart_network_overfits_one_batch(trainer_name, amp):
    cfg = read_config(QUICKSTART, [
        "SOLVER.AMP", amp, "MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "4", "MODEL.LOSSES.CE.EPSILON", "0.0",
    ])  # fmt: skip
    model = build_model(cfg)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (8, 3, 128, 64), dtype=torch.uint8, generator=generator)
    trainer = TRAINER_REGISTRY.build(
        trainer_name,
        cfg,
        model=model,
        data_loader=itertools.repeat({"images": images, "targets": torch.arange(8) // 2}),
        optimizers=[build_optimizer(cfg, model)],
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer.train(0, 25, 1)
    trainer.metrics.flush()
    trainer.train(25, 26, 1)
    metrics = trainer.metrics.flush()
    assert metrics["loss_cls"] < 0.1
    assert [name for name, p in model.named_parameters() if name in before and torch.equal(before[name], p)] == []
