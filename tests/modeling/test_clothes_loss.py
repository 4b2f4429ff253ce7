"""The clothes-based adversarial loss: reference values, gradients, own optimizer and errors."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastamp.config import get_cfg
from fastamp.modeling.losses import ClothesAdversarialLoss, clothes_adversarial_loss
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = np.load(Path(__file__).parents[1] / "reference" / "methods" / "cc_losses1.npz")


def tensors(dtype=torch.float32):
    features = torch.tensor(REFERENCE["features"], dtype=dtype, requires_grad=True)
    own = torch.tensor(REFERENCE["pid_to_clothes"][REFERENCE["pids"]]).bool()
    return features, torch.tensor(REFERENCE["clothes_weight"], dtype=dtype), torch.tensor(REFERENCE["clothes"]), own


def cosines(features, weight):
    return 16 * F.normalize(features, dim=1) @ F.normalize(weight, dim=1).T


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_adversarial_loss_and_gradient_equal_reference(epsilon):
    features, weight, clothes, own = tensors()
    loss = clothes_adversarial_loss(cosines(features, weight), clothes, own, epsilon=epsilon)
    loss.backward()
    assert loss.item() == pytest.approx(float(REFERENCE[f"cal_s16_eps{epsilon}_loss"]), rel=1e-6)
    expected = torch.tensor(REFERENCE[f"cal_s16_eps{epsilon}_grad"])
    torch.testing.assert_close(features.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_adversarial_loss_equals_naive_loop(epsilon):
    features, weight, clothes, own = tensors(torch.float64)
    logits = cosines(features, weight).detach()
    total = 0.0
    for row, worn, mine in zip(logits.exp(), clothes.tolist(), own, strict=True):
        others = row[~mine].sum()
        for outfit in mine.nonzero().flatten().tolist():
            share = epsilon / mine.sum().item() + (1 - epsilon) * (outfit == worn)
            total -= share * torch.log(row[outfit] / (row[outfit] + others)).item()
    found = clothes_adversarial_loss(logits.float(), clothes, own, epsilon=epsilon)
    assert found.item() == pytest.approx(total / len(clothes), rel=1e-5)


def test_adversarial_loss_of_an_identity_that_owns_all_outfits_has_finite_gradients():
    logits = torch.randn(2, 3, requires_grad=True)
    own = torch.tensor([[True, True, True], [True, False, False]])
    loss = clothes_adversarial_loss(logits, torch.tensor([1, 0]), own)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def build(**options):
    loss = ClothesAdversarialLoss(num_clothes=58, feature_dim=32, **options)
    with torch.no_grad():
        loss.weight.copy_(torch.tensor(REFERENCE["clothes_weight"]))
    pids = [int(np.argmax(column)) for column in REFERENCE["pid_to_clothes"].T]
    loss.set_training_columns(np.array(pids), {"clothes": np.arange(58)})
    return loss


def test_gradients_are_separate_and_the_start_is_delayed():
    loss = build(start_epoch=1, batch_size=58)
    features, _, clothes, _ = tensors()
    outputs, targets = {"features": features, "clothes": clothes}, torch.tensor(REFERENCE["pids"])
    first = loss(outputs, targets)
    assert first.item() == pytest.approx(float(REFERENCE["clothes_cosface_s16_m0_loss"]), rel=1e-6)
    first.backward()
    assert not features.grad.any() and loss.weight.grad.any()
    second = loss(outputs, targets)
    second.backward()
    expected = REFERENCE["clothes_cosface_s16_m0_loss"] + REFERENCE["cal_s16_eps0.1_loss"]
    assert second.item() == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(features.grad, torch.tensor(REFERENCE["cal_s16_eps0.1_grad"]), rtol=1e-4, atol=1e-6)
    assert loss.eval()(outputs, targets).isfinite() and loss.passes == 2


def test_classifier_has_its_own_optimizer():
    loss = build(lr=0.01)
    (group,) = loss.build_optimizer().param_groups
    assert group["lr"] == 0.01 and group["scheduled"] is False and group["params"][0] is loss.weight


@pytest.mark.parametrize(
    ("labels", "clothes", "message"),
    [([0, 0, 1], [0, -1, 1], "1 of 3 training images have no value"), ([0, 1, 1], [0, 0, 1], "several identities")],
)
def test_missing_and_shared_clothes_are_errors(labels, clothes, message):
    loss = ClothesAdversarialLoss(num_clothes=2, feature_dim=4)
    with pytest.raises(DataError, match=message):
        loss.set_training_columns(np.array(labels), {"clothes": np.array(clothes)})


def test_training_without_clothes_is_an_error_and_evaluation_needs_none():
    cfg = get_cfg()
    assert ClothesAdversarialLoss.from_config(cfg) is None
    cfg.MODEL.HEADS.NUM_CLASSES = 4
    cfg.DATASETS.NUM_CATEGORIES = {"side": 2}
    with pytest.raises(ConfigError, match=r"text column 'clothes'.*training set: side"):
        ClothesAdversarialLoss.from_config(cfg)
    cfg.DATASETS.NUM_CATEGORIES = {"clothes": 9}
    assert ClothesAdversarialLoss.from_config(cfg).weight.shape[0] == 9
