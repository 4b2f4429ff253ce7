"""Center loss and the optimizer of its centers."""

import pytest
import tiny
import torch

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.engine import DefaultTrainer
from fastamp.modeling import build_model
from fastamp.modeling.losses.center import CenterLoss, center_loss
from fastamp.solver import build_optimizer, build_own_optimizers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_center_loss_equals_naive_loop(dtype):
    features, centers, targets = torch.randn(6, 5).to(dtype), torch.randn(4, 5), torch.tensor([0, 3, 3, 1, 0, 2])
    distances = [sum((features[n].double() - centers[t].double()) ** 2) for n, t in enumerate(targets)]
    loss = center_loss(features, targets, centers)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((sum(distances) / 6).item(), rel=1e-5)


@pytest.mark.parametrize("scale", [0.0005, 0.1])
def test_center_loss_weight_does_not_change_center_updates(scale):
    features, targets = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    loss = CenterLoss(num_classes=3, feature_dim=3, scale=scale, lr=0.5)
    before = loss.centers.detach().clone()
    optimizer = loss.build_optimizer()
    loss({"features": features}, targets).backward()
    optimizer.step()
    # Gradient for two of four images: lr * 2 * 2/4 * (mean of their features - center).
    expected = before[0] + 0.5 * (features[:2].mean(0) - before[0])
    torch.testing.assert_close(loss.centers[0].detach(), expected)
    assert torch.equal(loss.centers[2].detach(), before[2])


def config(*opts):
    return read_config("", [
        "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.NAME", "build_tiny_backbone", "MODEL.BACKBONE.FEAT_DIM", str(tiny.WIDTH),
        "MODEL.HEADS.NUM_CLASSES", "3", "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'CenterLoss')", *opts,
    ])  # fmt: skip


@pytest.mark.parametrize("neck_feat, width", [("before", tiny.WIDTH), ("after", 8)])
def test_center_width_equals_feature_width_selected_by_neck_feat(neck_feat, width):
    cfg = config("MODEL.HEADS.EMBEDDING_DIM", "8", "MODEL.HEADS.NECK_FEAT", neck_feat)
    model = build_model(cfg).train()
    assert model.losses["loss_center"].centers.shape == (3, width)
    losses = model({"images": torch.zeros(4, 3, 64, 32), "targets": torch.tensor([0, 0, 1, 2])})
    assert torch.isfinite(losses["loss_center"])


def test_only_center_loss_optimizer_contains_centers():
    model = build_model(config())
    optimizers = build_own_optimizers(model)
    assert list(optimizers) == ["losses.loss_center.optimizer"]
    main = {id(p) for group in build_optimizer(config(), model).param_groups for p in group["params"]}
    centers = {id(p) for group in optimizers["losses.loss_center.optimizer"].param_groups for p in group["params"]}
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert centers == {id(model.losses["loss_center"].centers)}
    assert main | centers == trainable and not main & centers


@pytest.mark.integration
def test_centers_are_trained_and_resumed_but_not_changed_by_skipped_steps(demo, tmp_path):
    def trainer(epochs):
        opts = ["MODEL.HEADS.NUM_CLASSES", "0", "MODEL.LOSSES.CENTER.LR", "0.3", "SOLVER.MAX_EPOCH", str(epochs)]
        return DefaultTrainer(
            tiny.tiny_config(tmp_path, "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'CenterLoss')", *opts)
        )

    first = trainer(1)
    centers = first.model.losses["loss_center"].centers
    before = centers.detach().clone()
    first.train()
    assert not torch.equal(before, centers.detach())
    assert first.trainer.optimizers[1].param_groups[0]["lr"] == pytest.approx(0.3 / 0.0005)
    second = trainer(2)
    second.resume_or_load(resume=True)
    assert torch.equal(second.model.losses["loss_center"].centers.detach(), centers.detach())
    # A step with an infinite loss is skipped and does not change the centers.
    kept = centers.detach().clone()
    step = first.trainer.step
    step.zero_grad()
    step.scale({"loss_bad": centers.sum() * float("inf") + first.model.heads.weight.sum()}).backward()
    assert not step.finish().ok
    assert torch.equal(kept, centers.detach())


def test_model_without_classes_loads_checkpoint_with_centers(tmp_path):
    trained = build_model(config())
    report = load_model_state(build_model(config("MODEL.HEADS.NUM_CLASSES", "0")), trained.state_dict(), source="x")
    assert sorted(report.other_shape) == ["heads.weight", "losses.loss_center.centers"]
