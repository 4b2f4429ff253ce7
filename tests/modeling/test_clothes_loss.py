"""The clothes-based adversarial loss: reference values, gradients, own optimizer and errors."""

import subprocess
import sys
from pathlib import Path

import clothes_ranks
import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F

from fastamp.amp import OptimizationStep
from fastamp.config import get_cfg
from fastamp.demo.variants import VARIANTS_VERSION, generate_variant
from fastamp.diagnostics.doctor import diagnose
from fastamp.engine import DefaultTrainer
from fastamp.modeling import build_heads, build_model
from fastamp.modeling.losses import CrossEntropyLoss
from fastamp.modeling.losses.build import check_shareable
from fastamp.modeling.losses.clothes import ClothesAdversarialLoss, clothes_adversarial_loss
from fastamp.modeling.losses.triplet import TripletLoss
from fastamp.utils.errors import ConfigError, DataError

RANKS = clothes_ranks.__file__
REFERENCE = np.load(Path(__file__).parents[1] / "reference" / "methods" / "cc_losses1.npz")


def tensors(dtype=torch.float32):
    features = torch.tensor(REFERENCE["features"], dtype=dtype, requires_grad=True)
    worn_by_identity = torch.tensor(REFERENCE["pid_to_clothes"][REFERENCE["pids"]]).bool()
    return (
        features,
        torch.tensor(REFERENCE["clothes_weight"], dtype=dtype),
        torch.tensor(REFERENCE["clothes"]),
        worn_by_identity,
    )


def cosines(features, weight):
    return 16 * F.normalize(features, dim=1) @ F.normalize(weight, dim=1).T


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_adversarial_loss_and_gradient_equal_reference(epsilon):
    features, weight, clothes, worn_by_identity = tensors()
    loss = clothes_adversarial_loss(cosines(features, weight), clothes, worn_by_identity, epsilon=epsilon)
    loss.backward()
    assert loss.item() == pytest.approx(float(REFERENCE[f"cal_s16_eps{epsilon}_loss"]), rel=1e-6)
    expected = torch.tensor(REFERENCE[f"cal_s16_eps{epsilon}_grad"])
    torch.testing.assert_close(features.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_adversarial_loss_equals_naive_loop(epsilon):
    features, weight, clothes, worn_by_identity = tensors(torch.float64)
    logits = cosines(features, weight).detach()
    total = 0.0
    for row, worn, mine in zip(logits.exp(), clothes.tolist(), worn_by_identity, strict=True):
        others = row[~mine].sum()
        for outfit in mine.nonzero().flatten().tolist():
            share = epsilon / mine.sum().item() + (1 - epsilon) * (outfit == worn)
            total -= share * torch.log(row[outfit] / (row[outfit] + others)).item()
    found = clothes_adversarial_loss(logits.float(), clothes, worn_by_identity, epsilon=epsilon)
    assert found.item() == pytest.approx(total / len(clothes), rel=1e-5)


def test_adversarial_loss_of_an_identity_that_owns_all_outfits_has_finite_gradients():
    logits = torch.randn(2, 3, requires_grad=True)
    worn_by_identity = torch.tensor([[True, True, True], [True, False, False]])
    loss = clothes_adversarial_loss(logits, torch.tensor([1, 0]), worn_by_identity)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def build(**options):
    loss = ClothesAdversarialLoss(num_clothes=58, feature_dim=32, **options)
    pids = [int(np.argmax(column)) for column in REFERENCE["pid_to_clothes"].T]
    loss.set_training_columns(np.array(pids), {"clothes": np.arange(58)})
    if loss.memory == "none":
        loss.weight.copy_(torch.tensor(REFERENCE["clothes_weight"]))
    return loss


def batch(scale=0.0, dtype=torch.float32):
    features = (torch.tensor(REFERENCE["features"], dtype=dtype) + scale).requires_grad_()
    return {"features": features, "clothes": torch.tensor(REFERENCE["clothes"])}, torch.tensor(REFERENCE["pids"])


def test_classifier_is_updated_before_the_adversarial_loss_as_in_a_loop_with_torch_adam():
    loss, (outputs, targets) = build(lr=0.01), batch()
    classifier = torch.nn.Parameter(torch.tensor(REFERENCE["clothes_weight"]))
    adam = torch.optim.Adam([classifier], lr=0.01, weight_decay=5e-4)
    worn_by_identity = torch.tensor(REFERENCE["pid_to_clothes"])[targets].bool()
    for number in range(4):
        features = outputs["features"].detach().clone().requires_grad_()
        classification = F.cross_entropy(cosines(features.detach(), classifier), outputs["clothes"])
        adam.zero_grad()
        classification.backward()
        adam.step()
        expected = clothes_adversarial_loss(
            cosines(features, classifier.detach()), outputs["clothes"], worn_by_identity
        )
        expected.backward()
        outputs["features"].grad = None
        found = loss(outputs, targets)
        found.backward()
        if number == 0:
            reference = float(REFERENCE["clothes_cosface_s16_m0_loss"])
            assert classification.item() == pytest.approx(reference, rel=1e-6)
        assert found.item() == pytest.approx((classification + expected).item(), rel=1e-6)
        torch.testing.assert_close(outputs["features"].grad, features.grad, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(loss.weight, classifier.detach(), rtol=1e-5, atol=1e-6)


def test_classifier_without_learning_rate_gives_the_reference_losses():
    loss, (outputs, targets) = build(lr=0.0, weight_decay=0.0), batch()
    loss(outputs, targets).backward()
    expected = REFERENCE["clothes_cosface_s16_m0_loss"] + REFERENCE["cal_s16_eps0.1_loss"]
    assert loss(outputs, targets).item() == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(
        outputs["features"].grad, torch.tensor(REFERENCE["cal_s16_eps0.1_grad"]), rtol=1e-4, atol=1e-6
    )


def state(loss):
    return {name: value.clone() for name, value in loss.named_buffers()}


def assert_unchanged(loss, before):
    for name, value in loss.named_buffers():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("memory", ["none", "mean", "last"])
def test_only_training_passes_from_the_start_epoch_on_update_the_classifier(memory):
    loss, (outputs, targets) = build(memory=memory, start_epoch=2), batch()
    before = state(loss)
    loss.set_epoch(1)
    zero = loss(outputs, targets)
    zero.backward()
    assert zero.item() == 0 and not outputs["features"].grad.any()
    assert_unchanged(loss, before)
    loss.set_epoch(2)
    assert loss(outputs, targets).item() > 0
    after = state(loss)
    assert not torch.equal(after["weight"], before["weight"])
    with torch.no_grad():
        assert loss(outputs, targets).isfinite()
    assert loss.eval()(outputs, targets).isfinite()
    assert_unchanged(loss, after)


def test_memory_of_the_last_image_equals_reference():
    loss = build(memory="last")
    found = []
    for scale in (0, 0.1, 0.2):
        value = loss(*batch(scale))
        found.append(value.item())
    np.testing.assert_allclose(found, REFERENCE["cal_memory_losses"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(loss.weight.numpy(), REFERENCE["cal_memory_bank3"], rtol=1e-6)
    np.testing.assert_array_equal(loss.seen.numpy(), REFERENCE["cal_memory_labels"] >= 0)


@pytest.mark.parametrize("memory", ["mean", "last"])
def test_memory_equals_naive_loop(memory):
    loss = build(memory=memory, momentum=0.25)
    bank, generator = {}, torch.Generator().manual_seed(3)
    owners = REFERENCE["pid_to_clothes"].argmax(0)
    for _ in range(3):
        clothes = torch.randint(6, (8,), generator=generator)
        features, targets = torch.randn(8, 32, generator=generator), torch.tensor(owners[clothes])
        for outfit in sorted(set(clothes.tolist())):
            rows = features[clothes == outfit]
            new = rows.mean(0) if memory == "mean" else rows[-1]
            bank[outfit] = 0.25 * bank[outfit] + 0.75 * new if outfit in bank else new
        total = 0.0
        for feature, worn, identity in zip(features, clothes.tolist(), targets.tolist(), strict=True):
            values = {c: (16 * F.cosine_similarity(feature, bank[c], dim=0)).exp().item() for c in bank}
            others = sum(value for c, value in values.items() if owners[c] != identity)
            mine = [c for c in bank if owners[c] == identity]
            for c in mine:
                total -= (0.1 / len(mine) + 0.9 * (c == worn)) * np.log(values[c] / (values[c] + others))
        assert loss({"features": features, "clothes": clothes}, targets).item() == pytest.approx(total / 8, rel=1e-4)
    for outfit, feature in bank.items():
        torch.testing.assert_close(loss.weight[outfit], feature)


@pytest.mark.parametrize("memory", ["none", "last"])
def test_skipped_step_restores_the_classifier_and_applied_step_keeps_it(memory):
    loss = build(memory=memory)
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(32, 32), "loss": loss})
    step = OptimizationStep(model, [torch.optim.SGD(model.parameters(), lr=0.1)])

    def run(factor):
        outputs, targets = batch()
        step.zero_grad()
        outputs["features"] = model["layer"](outputs["features"]) * factor
        step.scale({"loss_cal": loss(outputs, targets)}).backward()
        return step.finish().ok

    before = state(loss)
    assert not run(float("nan"))
    assert_unchanged(loss, before)
    assert run(1.0)
    kept = state(loss)
    assert not torch.equal(kept["weight"], before["weight"])
    assert not run(float("inf"))
    assert_unchanged(loss, kept)


@pytest.fixture
def clothes(tmp_path, monkeypatch):
    """Set FASTAMP_DATASETS to a data root with a small dataset of people in several outfits."""
    folder = tmp_path / "data" / f"fastamp-demo-clothes-v{VARIANTS_VERSION}"
    generate_variant("clothes", folder, train_identities=8, test_identities=4, image_size=(64, 32))
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "data"))


def cal_config(root, *opts):
    names = ("MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'ClothesAdversarialLoss')")
    data = ("DATASETS.NAMES", "('DemoClothes',)", "DATASETS.TESTS", "('DemoClothes',)", "MODEL.HEADS.NUM_CLASSES", "0")
    start = ("MODEL.LOSSES.CAL.START_EPOCH", "1")
    return tiny.tiny_config(root, *names, *data, *start, *opts)


@pytest.mark.integration
@pytest.mark.parametrize("memory", ["none", "mean"])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(tmp_path, clothes, memory):
    def train(folder, epochs, resume=False):
        opts = ("SOLVER.MAX_EPOCH", str(epochs), "SOLVER.ACCUM_STEPS", "2", "MODEL.LOSSES.CAL.MEMORY", memory)
        torch.manual_seed(0)
        trainer = DefaultTrainer(cal_config(tmp_path / folder, *opts, "SOLVER.CHECKPOINT_PERIOD", "1"))
        trainer.resume_or_load(resume)
        trainer.train()
        return trainer.model

    whole = train("whole", 3)
    train("part", 2)
    resumed = train("part", 3, resume=True)
    assert whole.losses["loss_cal"].epoch == resumed.losses["loss_cal"].epoch == 2
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.integration
def test_new_run_with_weights_of_a_run_starts_the_loss_at_its_own_start_epoch(tmp_path, clothes):
    first = DefaultTrainer(cal_config(tmp_path / "first", "SOLVER.MAX_EPOCH", "2"))
    first.train()
    weights = str(tmp_path / "first" / "model_final.pth")
    second = DefaultTrainer(cal_config(tmp_path / "second", "SOLVER.MAX_EPOCH", "1", "MODEL.WEIGHTS", weights))
    second.resume_or_load(resume=False)
    second.train()
    before, after = first.model.losses["loss_cal"], second.model.losses["loss_cal"]
    assert before.steps.max() > 0 and torch.equal(before.weight, after.weight)


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
    with pytest.raises(ConfigError, match=r"'clothes'.*side"):
        ClothesAdversarialLoss.from_config(cfg)
    cfg.DATASETS.NUM_CATEGORIES = {"clothes": 9}
    assert ClothesAdversarialLoss.from_config(cfg).weight.shape[0] == 9


def load_recipe(name):
    cfg = get_cfg()
    cfg.merge_from_file(str(Path(__file__).parents[2] / "configs" / name))
    return cfg


def test_label_smoothing_over_all_classes_equals_reference():
    cfg = load_recipe("LTCC/cal_R50.yml")
    features = torch.tensor(REFERENCE["features"], requires_grad=True)
    logits = features @ torch.tensor(REFERENCE["id_weight"]).T
    loss = CrossEntropyLoss.from_config(cfg)({"cls_outputs": logits}, torch.tensor(REFERENCE["pids"]))
    loss.backward()
    assert loss.item() == pytest.approx(float(REFERENCE["id_ce_smooth0.1_loss"]), rel=1e-6)
    torch.testing.assert_close(features.grad, torch.tensor(REFERENCE["id_ce_smooth0.1_grad"]), rtol=1e-4, atol=1e-6)


def test_triplet_loss_of_the_last_recipe_equals_cosine_reference():
    features = torch.tensor(REFERENCE["features"], requires_grad=True)
    loss = TripletLoss.from_config(load_recipe("LaST/cal_R50.yml"))
    value = loss({"features": features}, torch.tensor(REFERENCE["pids"]))
    value.backward()
    assert value.item() == pytest.approx(float(REFERENCE["pair_triplet_cosine_m0.3_loss"]), rel=1e-5)
    expected = torch.tensor(REFERENCE["pair_triplet_cosine_m0.3_grad"])
    torch.testing.assert_close(features.grad, expected, rtol=1e-4, atol=1e-6)


def test_recipe_has_the_head_of_the_program():
    cfg = load_recipe("LTCC/cal_R50.yml")
    cfg.MODEL.HEADS.NUM_CLASSES = 3
    cfg.DATASETS.NUM_CATEGORIES = {"clothes": 5}
    head = build_heads(cfg)
    maps = torch.rand(4, 2048, 3, 2)
    outputs = head(maps, torch.tensor([0, 0, 1, 2]))
    pooled = torch.cat((maps.amax((2, 3)), maps.mean((2, 3))), 1)
    torch.testing.assert_close(outputs["features"], F.batch_norm(pooled, None, None, training=True))
    assert head.bottleneck[-1].bias.requires_grad and head.weight.shape == (3, 4096)
    assert ClothesAdversarialLoss.from_config(cfg).weight.shape == (5, 4096)


def test_recipe_of_ccvid_has_one_feature_and_outfit_for_each_tracklet():
    cfg = load_recipe("CCVID/cal_R50.yml")
    cfg.merge_from_list(["MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.DEVICE", "cpu"])
    cfg.merge_from_list(["MODEL.BACKBONE.PRETRAIN", "False", "DATALOADER.TRACKLET.FRAMES", "3"])
    cfg.MODEL.HEADS.NUM_CLASSES, cfg.DATASETS.NUM_CATEGORIES = 2, {"clothes": 3}
    model = build_model(cfg).train()
    loss = model.losses["loss_cal"]
    labels = {"targets": torch.tensor([0, 0, 1, 1]), "clothes": torch.tensor([0, 1, 2, 2])}
    loss.set_training_columns(labels["targets"].numpy(), {"clothes": labels["clothes"].numpy()})
    loss.set_epoch(50)
    batch = {name: values.repeat_interleave(3) for name, values in (labels | {"tracklet": torch.arange(4)}).items()}
    batch |= {"images": torch.randint(256, (12, 3, 32, 16), dtype=torch.uint8), "camids": torch.zeros(12).long()}
    found = []
    loss.register_forward_pre_hook(lambda _, inputs: found.append(inputs))
    assert torch.isfinite(model(batch)["loss_cal"])
    (outputs, targets), = found  # fmt: skip
    assert outputs["features"].shape == (4, 512) and targets.tolist() == [0, 0, 1, 1]
    assert outputs["clothes"].tolist() == [0, 1, 2, 2] and loss.steps.tolist() == [1, 1, 1]


@pytest.mark.integration
def test_two_processes_train_the_same_classifier_as_one(tmp_path):
    subprocess.run([sys.executable, RANKS, tmp_path], check=True, timeout=120)
    ranks = [torch.load(tmp_path / f"{rank}.pth") for rank in range(2)]
    for memory in clothes_ranks.MEMORIES:
        one, (first, second) = clothes_ranks.three_passes(memory), (rank[memory] for rank in ranks)
        for name, expected in one["buffers"].items():
            assert torch.equal(first["buffers"][name], second["buffers"][name]), name
            torch.testing.assert_close(first["buffers"][name], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.mean([first["losses"], second["losses"]], axis=0), one["losses"], rtol=1e-5)
        for step, expected in enumerate(one["gradients"]):  # each process averages over half of the images
            found = torch.cat([first["gradients"][step], second["gradients"][step]]) / 2
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_doctor_analyzes_the_loss_with_the_outfits_of_the_training_set(tmp_path, clothes):
    report = diagnose(cal_config(tmp_path / "run"), dtypes=[torch.bfloat16], batch_size=8, max_images=20)
    assert not report.problem and report.low


def test_outputs_with_different_features_cannot_share_the_classifier():
    with pytest.raises(ConfigError, match="ClothesAdversarialLoss"):
        check_shareable(torch.nn.ModuleDict({"loss_cal": build()}), "the branches of MGN")
