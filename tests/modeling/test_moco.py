"""MoCo: memory bank loss, queue, key encoder, skipped steps and checkpoints."""

import copy
import math
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from loops import make_trainer

from fastamp.amp.fp32 import forced_modules
from fastamp.checkpoint.load_state import load_model_state
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.engine.hooks.freeze import FreezeLayers
from fastamp.evaluation import update_bn_statistics
from fastamp.modeling import build_model
from fastamp.modeling.meta_arch.moco import MemoryBank
from fastamp.solver import WeightAverage, build_optimizer
from fastamp.utils.errors import ConfigError

BATCH = {"images": torch.arange(8 * 3 * 64 * 32).view(8, 3, 64, 32) * 37 % 251, "targets": torch.arange(8) // 2}


def make(*opts):
    options = ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.HEADS.NUM_CLASSES", "4", "MODEL.QUEUE_SIZE", "20", *opts)
    torch.manual_seed(0)
    return build_model(tiny.tiny_config(Path("unused"), *options))


def tensors(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---- memory bank


def naive(queries, keys, labels, targets, own_slots, margin, gamma):
    total = 0.0
    for i in range(len(queries)):
        positives, negatives = [], []
        for slot, label in enumerate(labels):
            if label < 0 or slot == own_slots[i]:
                continue
            cosine = F.cosine_similarity(queries[i], keys[slot], dim=0).item()
            if label == targets[i]:
                positives.append(math.exp(-gamma * cosine))
            else:
                negatives.append(math.exp(gamma * (cosine + margin)))
        total += math.log1p(sum(positives) * sum(negatives))
    return total / len(queries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_bank_loss_equals_naive_loop_when_bank_wraps_around(dtype):
    """With batches of 6 and a bank of 10, the bank is first partly empty and then wraps within a batch."""
    bank = MemoryBank(feature_dim=5, size=10, margin=0.25, gamma=8.0).to(dtype)
    kept, labels = torch.zeros(10, 5, dtype=dtype), [-1] * 10
    for step in range(4):
        queries, keys = torch.randn(6, 5, dtype=dtype), torch.randn(6, 5, dtype=dtype)
        targets = torch.randint(3, (6,))
        own_slots = [(6 * step + i) % 10 for i in range(6)]
        for i, slot in enumerate(own_slots):
            kept[slot], labels[slot] = keys[i], targets[i].item()
        expected = naive(queries, kept, labels, targets.tolist(), own_slots, 0.25, 8.0)
        assert bank(queries, keys, targets).item() == pytest.approx(expected, rel=1e-4)
        assert bank.queue_label.tolist() == [labels] and bank.queue_ptr.tolist() == [6 * (step + 1) % 10]
        torch.testing.assert_close(bank.queue.t(), F.normalize(kept, dim=1))


@pytest.mark.parametrize("targets", [[0, 0, 0], [0, 1, 2], [0]])
def test_memory_bank_loss_is_zero_without_positive_or_negative_pairs(targets):
    bank, queries = MemoryBank(feature_dim=5, size=8), torch.randn(len(targets), 5, requires_grad=True)
    loss = bank(queries, queries.detach(), torch.tensor(targets))
    loss.backward()
    assert loss.item() == 0 and torch.equal(queries.grad, torch.zeros_like(queries))


def test_memory_bank_is_float32_and_allows_two_forward_passes_before_backward():
    bank, queries = MemoryBank(feature_dim=5, size=20), torch.randn(6, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [bank(queries.bfloat16(), torch.randn(6, 5).bfloat16(), torch.arange(6) // 2) for _ in range(2)]
    sum(losses).backward()
    assert losses[0].dtype == bank.queue.dtype == torch.float32 and bank.queue_label.dtype == torch.int64


def test_moco_raises_if_batch_is_larger_than_memory_bank():
    with pytest.raises(ConfigError, match="MODEL.QUEUE_SIZE.*20.*21"):
        MemoryBank(feature_dim=5, size=20)(torch.randn(21, 5), torch.randn(21, 5), torch.zeros(21, dtype=torch.int64))


# ---- key encoder


def test_moco_key_encoder_is_moving_average_of_model_and_has_no_gradients():
    model = make("MODEL.MOCO.MOMENTUM", "0.9")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in model.backbone.named_parameters("backbone")} | {
        name for name, _ in model.heads.named_parameters("heads")
    }
    expected = {name: model.get_parameter(name).detach().clone() for name in names}
    for _ in range(3):
        for name in names:
            expected[name] = 0.9 * expected[name] + 0.1 * model.get_parameter(name).detach()
        losses = model(BATCH)
        buffers = dict(model.key_encoder.named_buffers())
        for name in names:
            torch.testing.assert_close(buffers[name], expected[name])
            assert not buffers[name].requires_grad
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    assert not torch.allclose(buffers["backbone.0.weight"], model.backbone[0].weight)
    assert buffers["backbone.1.num_batches_tracked"] == 3  # its batch norm has separate statistics


def test_moco_keys_are_model_features_if_momentum_is_0():
    model = make("MODEL.MOCO.MOMENTUM", "0")
    model.backbone[3].p = model.key_encoder.backbone[3].p = 0.0  # dropout
    captured = []
    model.heads.register_forward_hook(lambda module, args, outputs: captured.append(outputs["features"]))
    for _ in range(2):
        sum(model(BATCH).values()).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.memory.queue[:, 8:16].t(), F.normalize(captured[1].detach(), dim=1))


def test_gradient_accumulation_keeps_moco_key_encoder_momentum_per_step():
    model = make("MODEL.MOCO.MOMENTUM", "0.81", "SOLVER.ACCUM_STEPS", "2")
    start = model.backbone[0].weight.detach().clone()
    with torch.no_grad():
        model.backbone[0].weight += 1
    model(BATCH), model(BATCH)
    moved = dict(model.key_encoder.named_buffers())["backbone.0.weight"]
    torch.testing.assert_close(moved, 0.81 * start + 0.19 * (start + 1))


def test_moco_evaluation_ignores_key_encoder_and_memory_bank(tmp_path):
    model, plain = make(), build_model(tiny.tiny_config(tmp_path, "MODEL.HEADS.NUM_CLASSES", "4"))
    model(BATCH)
    report = load_model_state(plain, model.state_dict(), source="test")
    assert not report.missing and {name.split(".")[0] for name in report.dropped} == {"key_encoder", "memory"}
    before = tensors(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(BATCH), plain.eval()(BATCH))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_force_fp32_applies_to_moco_key_encoder():
    model = make("SOLVER.AMP.FORCE_FP32", "['backbone.4']")
    assert forced_modules(model) == ["backbone.4", "key_encoder.backbone.4"]
    model(BATCH)


@pytest.mark.integration
def test_compiling_moco_compiles_key_encoder():
    model = make("MODEL.COMPILE", "aot_eager")
    assert all(part.backbone._compiled_call_impl is not None for part in (model, model.key_encoder))
    assert torch.isfinite(model(BATCH)["loss_mb"])


def test_moco_key_encoder_copies_evaluation_mode_of_frozen_layers():
    model = make()
    hook = FreezeLayers(model, ["backbone"], 2)
    hook.trainer = make_trainer(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [BATCH], torch.float32)
    hook.trainer.iter = 0
    hook.before_step()
    model(BATCH)
    assert not model.key_encoder.backbone[1].training and model.key_encoder.heads.bottleneck[0].training
    hook.trainer.iter = 2
    hook.before_step()
    model(BATCH)
    assert model.key_encoder.backbone[1].training


def test_weight_average_and_batch_norm_update_exclude_moco_key_encoder():
    model = make()
    average = WeightAverage(model, "ema")
    model(BATCH)
    average.update(0.5)
    assert torch.equal(average.tensors()["memory.queue_label"], model.memory.queue_label)
    before = tensors(model.key_encoder)
    policy = make_trainer(model, [], [], torch.float32).policy
    update_bn_statistics(model, [BATCH], 1, policy=policy)
    assert all(torch.equal(value, before[name]) for name, value in model.key_encoder.state_dict().items())


# ---- skipped steps and checkpoints


class Keep(HookBase):
    """Store the tensors of the model after each step."""

    def __init__(self, seen):
        self.seen = seen

    def after_step(self):
        self.seen.append(tensors(self.trainer.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skipped_step_restores_moco_key_encoder_and_memory_bank(dtype):
    model = make("MODEL.MOCO.MOMENTUM", "0.5")
    bad = BATCH | {"images": BATCH["images"] + torch.tensor([0.0] * 7 + [float("inf")]).view(8, 1, 1, 1)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model, [optimizer], [BATCH, bad, BATCH], dtype)
    seen = []
    trainer.register_hooks([Keep(seen)])
    trainer.train(0, 1, 3)
    assert trainer.step.skipped_total == 1
    assert all(torch.equal(value, seen[1][name]) for name, value in seen[0].items())
    assert seen[2]["memory.queue_ptr"] == 16 and not torch.equal(seen[1]["memory.queue"], seen[2]["memory.queue"])
    moved = "key_encoder.backbone.0.weight"
    assert not torch.equal(seen[1][moved], seen[2][moved])
    assert all(torch.isfinite(value).all() for value in seen[2].values())


def test_skipped_step_restores_moco_memory_bank_after_several_micro_batches():
    """Three micro-batches overwrite the bank of 20 keys more than once."""
    model = make()
    bad = BATCH | {"images": BATCH["images"] + float("inf")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model, [optimizer], [BATCH] * 5 + [bad, BATCH], torch.float32, accum_steps=3)
    seen = []
    trainer.register_hooks([Keep(seen)])
    trainer.train(0, 1, 2)
    assert trainer.step.skipped_total == 1
    assert all(torch.equal(value, seen[1][name]) for name, value in seen[0].items())


def test_memory_bank_records_overwritten_keys_only_during_a_step():
    model = make()
    step = make_trainer(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [], torch.float32).step
    before = model.memory.queue.clone()
    step.zero_grad()
    step.scale(model(BATCH)).backward()
    (record,) = model.memory._overwritten
    assert record[1].shape == (tiny.WIDTH, 8)  # not the whole queue
    assert torch.equal(record[1], before[:, :8])
    step.finish()
    model(BATCH)
    assert model.memory._overwritten is None


def test_momentum_copy_updates_from_replaced_module():
    model = make("MODEL.MOCO.MOMENTUM", "0.5")
    model(BATCH)
    model.backbone[0].weight = torch.nn.Parameter(model.backbone[0].weight.detach() + 1)
    before = model.key_encoder.backbone[0].weight.clone()
    model(BATCH)
    expected = torch.lerp(before, model.backbone[0].weight.detach(), 0.5)
    torch.testing.assert_close(model.key_encoder.backbone[0].weight, expected)
    memo = {}
    copy.deepcopy(model.key_encoder, memo)
    assert id(model.backbone) not in memo  # a copy of the key encoder does not contain the model


def test_isolated_pass_does_not_change_moco_state():
    model = make()
    sum(model(BATCH).values()).backward()
    before = tensors(model)
    with IsolatedPasses(model, BATCH) as passes:
        passes.train(make_trainer(model, [], [], torch.float32).policy)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def fastreid_state(model, size=20, classes=4):
    """Create a state dict of FastReID's MoCo with a full bank."""
    state = {name: 2 * value for name, value in model.state_dict().items() if name.startswith(("backbone.", "heads."))}
    state["heads.weight"] = torch.randn(classes, tiny.WIDTH)
    bank = {"queue": F.normalize(torch.randn(tiny.WIDTH, size), dim=0), "queue_label": torch.randint(4, (1, size))}
    return state | {f"memory.{name}": value for name, value in (bank | {"queue_ptr": torch.tensor([8])}).items()}


def test_moco_loads_fastreid_checkpoint_and_copies_weights_to_key_encoder():
    model = make()
    state = fastreid_state(model)
    report = load_model_state(model, state, source="test")
    assert not report.missing and not report.dropped
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    for name in ("backbone.0.weight", "heads.weight", "backbone.1.running_mean"):
        assert torch.equal(loaded[f"key_encoder.{name}"], loaded[name])


@pytest.mark.parametrize("size, classes, note", [(16, 4, "16 x 16"), (20, 7, "other identities")])
def test_moco_discards_memory_bank_of_another_size_or_other_identities(size, classes, note):
    model = make()
    report = load_model_state(model, fastreid_state(model, size, classes), source="test")
    assert note in "".join(report.notes) and (model.memory.queue_label == -1).all()


@pytest.mark.integration
def test_resumed_moco_weights_equal_uninterrupted_training(demo, tmp_path):
    options = ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "40", "SOLVER.AMP", "bf16")
    options += ("SOLVER.EMA.ENABLED", "True", "SOLVER.MAX_EPOCH", "2")
    finals = []
    for name, epochs in (("straight", ("2",)), ("resumed", ("1", "2"))):
        for number, epoch in enumerate(epochs):
            torch.manual_seed(0)
            trainer = DefaultTrainer(
                tiny.tiny_config(tmp_path / name, *options, "SOLVER.MAX_EPOCH", epoch, "SOLVER.SCHED", "ConstantLR")
            )
            trainer.resume_or_load(resume=number > 0)
            trainer.train()
        finals.append(tiny.weights(tmp_path / name / "model_final.pth"))
    assert finals[0].keys() == finals[1].keys() and finals[0]["memory.queue_ptr"] == 12 * 16 % 40
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())


def test_optimizer_excludes_moco_key_encoder(tmp_path):
    cfg = tiny.tiny_config(tmp_path, "MODEL.META_ARCHITECTURE", "MoCo", "MODEL.HEADS.NUM_CLASSES", "4")
    model = build_model(cfg)
    held = {id(p) for group in build_optimizer(cfg, model).param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
