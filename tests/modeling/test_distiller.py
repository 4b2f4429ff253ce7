"""Distillation: loss, teachers from files, moving average of the student, and invalid teachers."""

import math
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from loops import make_trainer
from torch import nn

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import get_cfg
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.modeling import META_ARCH_REGISTRY, build_model
from fastamp.modeling.losses.distillation import distillation_loss
from fastamp.modeling.meta_arch.mgn import HEADS
from fastamp.solver import build_optimizer
from fastamp.utils.errors import ConfigError, WeightsError

BATCH = {"images": torch.arange(8 * 3 * 64 * 32).view(8, 3, 64, 32) * 37 % 251, "targets": torch.arange(8) // 2}
CLASSES = ("MODEL.HEADS.NUM_CLASSES", "4")
EMA = ("MODEL.META_ARCHITECTURE", "Distiller", "KD.EMA.ENABLED", "True")


def tensors(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def write_teacher(folder, *opts, name="teacher", state=None):
    """Write the config and weights of a teacher; return the KEY VALUE pairs that select the files, and the teacher."""
    cfg = tiny.tiny_config(folder / "unused", *CLASSES, *opts)
    (folder / f"{name}.yml").write_text(cfg.dump())
    torch.manual_seed(7)
    model = build_model(cfg)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        for _ in range(40):
            model(BATCH)  # to update the statistics of batch norm
    torch.save({"model": model.state_dict() if state is None else state}, folder / f"{name}.pth")
    return ("KD.MODEL_CONFIG", f"{folder / name}.yml", "KD.MODEL_WEIGHTS", f"{folder / name}.pth"), model.eval()


def make(folder, *opts):
    torch.manual_seed(0)
    return build_model(tiny.tiny_config(folder, *CLASSES, "MODEL.META_ARCHITECTURE", "Distiller", *opts))


def logits_of(model, batch):
    """Compute the class logits of a model in evaluation mode from its layers."""
    with torch.no_grad():
        maps = model.backbone((batch["images"] - model.pixel_mean) / model.pixel_std)
        return model.heads.bottleneck(maps.mean((2, 3), keepdim=True)).flatten(1) @ model.heads.weight.t()


# ---- the loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 16.0])
def test_distillation_loss_equals_naive_loop(dtype, temperature):
    student, teacher = 5 * torch.randn(6, 4, dtype=dtype), 5 * torch.randn(6, 4, dtype=dtype)

    def soften(row):
        exponentials = [math.exp(value / temperature) for value in row]
        return [value / sum(exponentials) for value in exponentials]

    total = 0.0
    for s, t in ((soften(a), soften(b)) for a, b in zip(student.tolist(), teacher.tolist(), strict=True)):
        total += sum(q * math.log(q / p) + p * math.log(p / q) for p, q in zip(s, t, strict=True)) / 2
    loss = distillation_loss(student, teacher, temperature=temperature)
    assert loss.dtype == dtype and loss.item() == pytest.approx(temperature**2 * total / 6, rel=1e-4)
    s, t = (F.log_softmax(logits / temperature, 1) for logits in (student, teacher))
    by_pytorch = F.kl_div(s, t, reduction="batchmean", log_target=True) + F.kl_div(
        t, s, reduction="batchmean", log_target=True
    )
    torch.testing.assert_close(loss, temperature**2 * by_pytorch / 2)


def test_distillation_loss_is_finite_for_extreme_logits_and_zero_for_equal_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    loss = distillation_loss(logits, torch.tensor([[-1e4, 1e4, 0.0], [0.0, 0.0, 0.0]]))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    assert distillation_loss(logits, logits.detach()).item() == 0
    assert distillation_loss(torch.randn(4, 1), torch.randn(4, 1)).item() == 0
    with torch.autocast("cpu", dtype=torch.float16):
        low = distillation_loss(logits.clamp(-9, 9).half(), -logits.clamp(-9, 9).half())
    assert low.dtype == torch.float32


# ---- teachers from files


def test_distiller_averages_loss_over_teachers_and_excludes_teacher_parameters(tmp_path):
    first, teacher = write_teacher(tmp_path)
    _, other = write_teacher(tmp_path, "MODEL.PIXEL_MEAN", "(0., 0., 0.)", name="other")
    files = ["KD.MODEL_CONFIG", f"[{first[1]}, {tmp_path}/other.yml]"]
    files += ["KD.MODEL_WEIGHTS", f"[{first[3]}, {tmp_path}/other.pth]"]
    model, plain = make(tmp_path, *files), build_model(tiny.tiny_config(tmp_path, *CLASSES))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    before = [tensors(teacher) for teacher in model._teachers]
    captured = {}
    hook = model.heads.register_forward_hook(lambda module, args, outputs: captured.update(outputs))
    model.train()
    assert not any(part.training for teacher in model._teachers for part in teacher.modules())
    losses = model(BATCH)
    hook.remove()
    assert list(losses) == ["loss_cls", "loss_triplet", "loss_jsdiv"]
    teacher_logits = [logits_of(network, BATCH) for network in (teacher, other)]
    assert not torch.allclose(*teacher_logits)
    expected = [distillation_loss(captured["pred_class_logits"], logits) for logits in teacher_logits]
    torch.testing.assert_close(losses["loss_jsdiv"], sum(expected) / 2)
    losses["loss_jsdiv"].backward()
    assert model.backbone[0].weight.grad.abs().sum() > 0
    assert all(p.grad is None and not p.requires_grad for teacher in model._teachers for p in teacher.parameters())
    for network, kept in zip(model._teachers, before, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in network.state_dict().items())
    assert model.eval()(BATCH).shape == (8, tiny.WIDTH)


def test_distillation_loss_decreases_during_bfloat16_training(tmp_path):
    files, _ = write_teacher(tmp_path)
    model = make(tmp_path, *files, "MODEL.LOSSES.NAME", "CrossEntropyLoss", "MODEL.LOSSES.CE.SCALE", "0")
    cfg = tiny.tiny_config(tmp_path, "SOLVER.BASE_LR", "0.02")
    values = []

    class Watch(HookBase):
        def after_step(self):
            values.append(self.trainer.metrics.flush()["loss_jsdiv"])

    trainer = make_trainer(model, [build_optimizer(cfg, model)], [BATCH] * 30, torch.bfloat16)
    trainer.register_hooks([Watch()])
    trainer.train(0, 1, 30)
    assert values[-1] < 0.5 * values[0]


def test_converting_distiller_to_float64_converts_teachers(tmp_path):
    files, _ = write_teacher(tmp_path)
    model = make(tmp_path, *files).to(torch.float64)
    assert model._teachers[0].heads.weight.dtype == torch.float64


@pytest.mark.parametrize("arch", ["MoCo", "Distiller"])
def test_teacher_with_moco_or_distiller_config_is_built_as_baseline(tmp_path, arch):
    files, _ = write_teacher(tmp_path, *EMA[2:], "MODEL.META_ARCHITECTURE", arch)
    teacher = make(tmp_path, *files)._teachers[0]
    assert type(teacher).__name__ == "Baseline"
    state = torch.load(tmp_path / "teacher.pth", weights_only=True)["model"]
    assert all(torch.equal(value, state[name]) for name, value in teacher.state_dict().items())


def test_mgn_teacher_logits_are_mean_over_heads(tmp_path):
    cfg = get_cfg()
    cfg.merge_from_list([
        "MODEL.META_ARCHITECTURE", "MGN", "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.DEPTH", "18x",
        "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.HEADS.EMBEDDING_DIM", "8", *CLASSES,
    ])  # fmt: skip
    mgn = build_model(cfg).eval()
    (tmp_path / "mgn.yml").write_text(cfg.dump())
    torch.save(mgn.state_dict(), tmp_path / "mgn.pth")
    batch = {"images": torch.randint(256, (4, 3, 96, 32)), "targets": torch.arange(4)}
    captured = {}
    for name in HEADS:
        head = mgn.get_submodule(f"{name}_head")
        head.register_forward_hook(
            lambda module, args, out, name=name: captured.__setitem__(name, out @ module.weight.t())
        )
    with torch.no_grad():
        mgn(batch)
        expected = torch.stack(list(captured.values())).mean(0)
        model = make(tmp_path, "KD.MODEL_CONFIG", f"{tmp_path}/mgn.yml", "KD.MODEL_WEIGHTS", f"{tmp_path}/mgn.pth")
        torch.testing.assert_close(model._teacher_logits(batch)[0], expected)
    assert torch.isfinite(model(batch)["loss_jsdiv"])


@pytest.mark.integration
def test_distilled_model_can_be_evaluated_without_teacher_files(demo, tmp_path):
    files, _ = write_teacher(tmp_path, "MODEL.HEADS.NUM_CLASSES", "16")
    options = ("MODEL.META_ARCHITECTURE", "Distiller", *files, "SOLVER.AMP", "bf16", "SOLVER.MAX_EPOCH", "1")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path / "run", *options))
    results = trainer.train()
    (tmp_path / "teacher.pth").unlink()
    weights = ("MODEL.WEIGHTS", str(tmp_path / "run/model_final.pth"))
    evaluated = DefaultTrainer.test_weights(tiny.tiny_config(tmp_path / "eval", *options, *weights))
    assert evaluated == results
    assert not any(name.startswith("ema") for name in tiny.weights(tmp_path / "run/model_final.pth"))


# ---- the moving average of the student


def test_distiller_moving_average_includes_weights_and_batch_norm_statistics(tmp_path):
    model = make(tmp_path, *EMA[2:], "KD.EMA.MOMENTUM", "0.9")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {name: value for name, value in tensors(model).items() if not name.startswith("ema.")}
    for _ in range(3):
        now = tensors(model)
        for name, value in expected.items():
            expected[name] = 0.9 * value + 0.1 * now[name] if value.is_floating_point() else now[name]
        losses = model(BATCH)
        for name, value in expected.items():
            torch.testing.assert_close(model.ema.state_dict()[name], value)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    assert not any(part.training for part in model.ema.modules()) and not list(model.ema.parameters())
    assert model.ema.backbone[1].running_mean.abs().sum() > 0


def test_distiller_moving_average_computes_logits_in_evaluation_mode(tmp_path):
    model = make(tmp_path, *EMA[2:], "KD.EMA.MOMENTUM", "1")
    start = build_model(tiny.tiny_config(tmp_path, *CLASSES))
    start.load_state_dict({name: value for name, value in model.state_dict().items() if not name.startswith("ema.")})
    with torch.no_grad():
        model.heads.weight.add_(torch.randn_like(model.heads.weight))
    captured = {}
    model.heads.register_forward_hook(lambda module, args, outputs: captured.update(outputs))
    loss = model(BATCH)["loss_jsdiv"]
    expected = distillation_loss(captured["pred_class_logits"], logits_of(start.eval(), BATCH))
    torch.testing.assert_close(loss, expected)


def test_skipped_step_restores_distiller_moving_average(tmp_path):
    model = make(tmp_path, *EMA[2:], "KD.EMA.MOMENTUM", "0.5")
    bad = BATCH | {"images": BATCH["images"] + torch.tensor([0.0] * 7 + [float("inf")]).view(8, 1, 1, 1)}
    seen = []

    class Keep(HookBase):
        def after_step(self):
            seen.append(tensors(model))

    trainer = make_trainer(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [BATCH, bad, BATCH], torch.float32)
    trainer.register_hooks([Keep()])
    trainer.train(0, 1, 3)
    assert trainer.step.skipped_total == 1
    assert all(torch.equal(value, seen[1][name]) for name, value in seen[0].items())
    assert not torch.equal(seen[2]["ema.heads.weight"], seen[1]["ema.heads.weight"])
    assert all(torch.isfinite(value).all() for value in seen[2].values())


def test_distiller_moving_average_is_initialized_from_loaded_student_weights(tmp_path):
    model, other = make(tmp_path, *EMA[2:]), build_model(tiny.tiny_config(tmp_path, *CLASSES))
    report = load_model_state(model, other.state_dict(), source="test")
    assert not report.missing
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value) and torch.equal(model.state_dict()[f"ema.{name}"], value)
    report = load_model_state(other, model.state_dict(), source="test")
    assert not report.missing and all(name.startswith("ema.") for name in report.dropped)


@pytest.mark.integration
def test_resumed_distiller_weights_and_moving_average_equal_uninterrupted_training(demo, tmp_path):
    finals = []
    for name, epochs in (("straight", ("2",)), ("resumed", ("1", "2"))):
        for number, epoch in enumerate(epochs):
            torch.manual_seed(0)
            options = (*EMA, "KD.EMA.MOMENTUM", "0.8", "SOLVER.MAX_EPOCH", epoch, "SOLVER.SCHED", "ConstantLR")
            trainer = DefaultTrainer(tiny.tiny_config(tmp_path / name, *options))
            trainer.resume_or_load(resume=number > 0)
            trainer.train()
        finals.append(tiny.weights(tmp_path / name / "model_final.pth"))
    assert finals[0].keys() == finals[1].keys() and any(name.startswith("ema.") for name in finals[0])
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())


# ---- invalid teachers


def test_distiller_raises_if_teacher_config_is_missing_or_does_not_match(tmp_path):
    files, _ = write_teacher(tmp_path)
    with pytest.raises(ConfigError, match="KD.EMA.ENABLED"):
        make(tmp_path)
    with pytest.raises(ConfigError, match="KD.MODEL_CONFIG and KD.MODEL_WEIGHTS.*1 and 0"):
        make(tmp_path, *files[:2])
    with pytest.raises(ConfigError, match=r"nowhere\.yml"):
        make(tmp_path, "KD.MODEL_CONFIG", f"{tmp_path}/nowhere.yml", *files[2:])
    for key, value, message in (
        ("MODEL.HEADS.NUM_CLASSES", "9", "NUM_CLASSES.*4.*9"),
        ("INPUT.CHANNELS", "1", "INPUT.CHANNELS.*3.*1"),
        ("MODEL.BACKBONE.NAME", "build_tinny_backbone", "'build_tiny_backbone'"),
    ):
        cfg = tiny.tiny_config(tmp_path, key, value)
        (tmp_path / "wrong.yml").write_text(cfg.dump())
        with pytest.raises(ConfigError, match=r"KD.MODEL_CONFIG '.*wrong.yml': [\s\S]*" + message):
            make(tmp_path, "KD.MODEL_CONFIG", f"{tmp_path}/wrong.yml", *files[2:])


def test_teacher_without_class_logits_raises(tmp_path):
    class Mute(nn.Linear):
        pass

    META_ARCH_REGISTRY.register("Mute")(lambda cfg: Mute(1, 1))
    try:
        cfg = tiny.tiny_config(tmp_path, "MODEL.META_ARCHITECTURE", "Mute")
        (tmp_path / "mute.yml").write_text(cfg.dump())
        with pytest.raises(ConfigError, match="KD.MODEL_CONFIG.*Mute"):
            make(tmp_path, "KD.MODEL_CONFIG", f"{tmp_path}/mute.yml", "KD.MODEL_WEIGHTS", "x.pth")
    finally:
        del META_ARCH_REGISTRY._components["Mute"]


def test_distiller_raises_if_teacher_weights_are_missing_or_do_not_match(tmp_path):
    files, teacher = write_teacher(tmp_path)
    state = teacher.state_dict()
    with pytest.raises(WeightsError, match=r"KD.MODEL_WEIGHTS '.*gone.pth'"):
        make(tmp_path, *files[:2], "KD.MODEL_WEIGHTS", f"{tmp_path}/gone.pth")
    for wrong, message in (
        (state | {"heads.weight": torch.zeros(9, tiny.WIDTH)}, "1 in total, e.g. heads.weight"),
        ({name: value for name, value in state.items() if name != "heads.weight"}, "heads.weight"),
        ({name: value for name, value in state.items() if "heads" in name}, "MODEL.WEIGHTS_MIN_MATCH"),
    ):
        torch.save(wrong, tmp_path / "wrong.pth")
        with pytest.raises(WeightsError, match=r"KD.MODEL_WEIGHTS '.*wrong.pth'[\s\S]*" + message):
            make(tmp_path, *files[:2], "KD.MODEL_WEIGHTS", f"{tmp_path}/wrong.pth")


def test_teacher_config_may_contain_config_keys_defined_by_project(tmp_path):
    files, _ = write_teacher(tmp_path)
    path = Path(files[1])
    path.write_text(path.read_text() + "OWN:\n  KEY: 3\n")
    with pytest.raises(ConfigError, match="'OWN.KEY'|'OWN'"):
        make(tmp_path, *files)
    cfg = tiny.tiny_config(tmp_path, *CLASSES, "MODEL.META_ARCHITECTURE", "Distiller", *files)
    cfg.define("OWN.KEY", 1, "Key of a project.")
    assert build_model(cfg)._teachers


def test_teacher_loads_weights_file_without_loss_parameters(tmp_path):
    opts = ("MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'CenterLoss')")
    files, teacher = write_teacher(tmp_path, *opts)
    state = {name: value for name, value in teacher.state_dict().items() if not name.startswith("losses.")}
    torch.save({"model": state}, files[3])
    (found,) = make(tmp_path, *files)._teachers
    torch.testing.assert_close(found.class_logits(BATCH), teacher.class_logits(BATCH))


@pytest.mark.parametrize("opts", [(), ("MODEL.META_ARCHITECTURE", "MoCo", *CLASSES)])
def test_kd_config_keys_without_distiller_log_a_warning(opts, tmp_path, caplog):
    build_model(tiny.tiny_config(tmp_path, "KD.EMA.ENABLED", "True", *opts))
    assert "KD.*" in caplog.text
