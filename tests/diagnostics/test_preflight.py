"""Tests of the pre-flight: findings, messages, fallback, crash dumps, and bit-identical training."""

import itertools

import amp_replay
import pytest
import tiny
import torch
import train_net
from conv_net import Hungry, Net, make_batch, policy

from fastamp.amp import LossScaler, PrecisionFailure
from fastamp.amp.device_errors import is_out_of_memory
from fastamp.diagnostics.crash import CrashDump
from fastamp.diagnostics.precision_check import DOCTOR_MIN_COSINE, check_float32, check_precision
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.diagnostics.preflight import preflight
from fastamp.engine import DefaultTrainer, SimpleTrainer
from fastamp.modeling import BACKBONE_REGISTRY, META_ARCH_REGISTRY
from fastamp.modeling.meta_arch import Baseline
from fastamp.utils.errors import TrainingError

LOW = [torch.bfloat16, torch.float16]
SAVED = ("model", "optimizer", "random")


def test_normal_model_passes_the_preflight_with_any_image_shape(subtests):
    for channels, size, dtype in itertools.product([1, 3, 4], [(12, 10), (33, 7), (64, 64)], [*LOW, torch.float32]):
        with subtests.test(channels=channels, size=size, dtype=dtype):
            report = preflight(Net(channels), make_batch(channels, size), policy=policy(dtype), scaler=LossScaler())
            assert report.problem == "" and report.unreached == []
            assert report.losses["loss_cls"][0] == pytest.approx(report.losses["loss_cls"][1], rel=0.02)
            assert report.describe().startswith("pre-flight passed in ")
            if dtype != torch.float32:
                assert report.cosine[0] > 0.99


def naive_preflight(model):
    """Check AMP as other projects do: with random RGB images, counting every exception as an AMP failure."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.eval()({"images": torch.rand(1, 3, 32, 32)})
        return "AMP checks passed"
    except Exception:
        return "AMP checks failed"


def test_preflight_checks_a_one_channel_model_with_one_channel_images():
    assert naive_preflight(Net(1)) == "AMP checks failed"  # although the model is correct
    assert preflight(Net(1), make_batch(1), policy=policy(torch.bfloat16)).problem == ""


@pytest.mark.parametrize("dtype", LOW)
def test_preflight_raises_if_images_have_a_wrong_number_of_channels(dtype):
    with pytest.raises(TrainingError) as error:
        preflight(Net(1), make_batch(3), policy=policy(dtype))
    text = str(error.value)
    assert "float32" in text and "body.0 (Conv2d)" in text and "expected 1 channels, got 3" in text
    assert "INPUT.CHANNELS" in text and "images (8, 3, 12, 10)" in text
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_preflight_reports_a_float32_failure_as_independent_of_precision(dtype):
    report = preflight(Net(3, gain=float("nan")), make_batch(), policy=policy(dtype), scaler=LossScaler())
    assert report.in_float32 and "in float32" in report.problem and "loss_cls" in report.problem
    assert preflight(Net(3), make_batch(), policy=policy(dtype)).problem == ""  # the negative control


def test_preflight_finds_the_largest_loss_scale_with_finite_gradients():
    scaler = LossScaler(init_scale=65536.0)
    model, batch = Net(3, gain=100.0), make_batch()
    report = preflight(model, batch, policy=policy(torch.float16), scaler=scaler)
    assert (
        report.problem == ""
        and 1 < report.loss_scale < 65536
        and f"loss scale {report.loss_scale:g}" in report.describe()
    )

    def finite(scale):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch)["loss_cls"]
        gradients = torch.autograd.grad(loss * scale, [p for p in model.parameters() if p.requires_grad])
        return all(torch.isfinite(g).all() for g in gradients)

    assert finite(report.loss_scale) and not finite(2 * report.loss_scale)
    assert scaler.scale == 65536.0  # the pre-flight does not change it
    assert preflight(model, batch, policy=policy(torch.float16), scaler=LossScaler(init_scale=4)).loss_scale == 4


def test_preflight_fails_if_gradients_overflow_at_every_loss_scale():
    report = preflight(Net(3, gain=1e7), make_batch(), policy=policy(torch.float16), scaler=LossScaler())
    assert "SOLVER.AMP.MIN_SCALE" in report.problem and report.location.kind == "backward overflow"
    assert preflight(Net(3, gain=1e7), make_batch(), policy=policy(torch.bfloat16)).problem == ""


def test_preflight_lists_trainable_parameters_without_a_gradient():
    model = Net(3)
    model.unused.requires_grad_(True)
    report = preflight(model, make_batch(), policy=policy(torch.bfloat16))
    assert report.problem == "" and report.unreached == ["unused.weight", "unused.bias"]
    assert "2 trainable parameters have no gradient: unused.weight, unused.bias" in report.describe()


def test_preflight_fails_if_embeddings_become_zero_in_float16():
    """L2 normalization in float16: norms overflow, and all features become zero without Inf or NaN."""

    class Normalizing(Net):
        def forward(self, batch):
            out = super().forward(batch)
            if self.training:
                return out
            return out * 3e4 / (out * 3e4).square().sum(dim=1, keepdim=True).sqrt()

    report = preflight(Normalizing(3), make_batch(), policy=policy(torch.float16))
    assert "float16 embeddings differ from float32" in report.problem


def test_preflight_uses_fewer_float32_images_if_memory_is_insufficient():
    batch = {"images": torch.rand(16, 3, 12, 10), "targets": torch.arange(16) % 4}
    report = preflight(Hungry(4, in_low_too=False), batch, policy=policy(torch.bfloat16))
    assert report.problem == "" and report.images == (4, 16) and "4 of 16 images" in report.describe()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_preflight_raises_if_memory_runs_out(dtype):
    with pytest.raises(TrainingError, match=r"pre-flight(?s:.)*SOLVER.IMS_PER_BATCH"):
        preflight(Hungry(4, in_low_too=True), make_batch(), policy=policy(dtype))


def run(output, *opts):
    torch.manual_seed(0)
    trainer = DefaultTrainer(tiny.tiny_config(output, "SOLVER.MAX_EPOCH", "2", *opts))
    trainer.resume_or_load(resume=False)
    trainer.train()
    return torch.load(output / "model_final.pth", weights_only=True)


@pytest.mark.integration
@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("channels", ["1", "3", "4"])
def test_training_is_bit_identical_with_and_without_preflight(demo, tmp_path, caplog, precision, channels):
    """Compare weights, statistics, optimizer and random states of a model with dropout and batch norm."""
    colors = [
        "MODEL.PIXEL_MEAN",
        "(1, 2, 3, 4)",
        "MODEL.PIXEL_STD",
        "(60, 60, 60, 60)",
        "INPUT.REA.VALUE",
        "(0, 0, 0, 0)",
    ]
    opts = ["SOLVER.AMP", precision, "INPUT.CHANNELS", channels, *(colors if channels == "4" else [])]
    opts += ["SOLVER.AMP.INIT_SCALE", "256"]  # low enough that the pre-flight does not change it
    checked = run(tmp_path / "on", *opts)
    assert "pre-flight passed" in caplog.text
    caplog.clear()
    unchecked = run(tmp_path / "off", *opts, "SOLVER.AMP.PREFLIGHT", "off")
    assert "pre-flight" not in caplog.text
    flat = [torch.utils._pytree.tree_leaves({key: c[key] for key in SAVED}) for c in (checked, unchecked)]
    assert len(flat[0]) == len(flat[1]) > 50
    for a, b in zip(*flat, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@BACKBONE_REGISTRY.register()
def build_planted_backbone(cfg):
    """Build the tiny backbone with a second convolution that overflows in float16."""
    net = tiny.build_tiny_backbone(cfg)
    with torch.no_grad():
        net[4].weight.mul_(1e6)
    return net


def planted(output, *opts):
    return tiny.tiny_options(output, "MODEL.BACKBONE.NAME", "build_planted_backbone", "SOLVER.MAX_EPOCH", "1", *opts)


@pytest.mark.integration
def test_preflight_overflow_writes_a_crash_dump_that_can_be_replayed(demo, tmp_path, input_error, capfd):
    error = input_error(train_net.cli, planted(tmp_path, "SOLVER.AMP", "fp16"))
    assert "forward overflow in backbone.4 (Conv2d)" in error and "FORCE_FP32 \"['backbone.4']\"" in error
    assert f"fastamp replay {tmp_path}/amp_crash/iteration_1_rank_0.pth" in error and "Traceback" not in error
    assert not (tmp_path / "last_checkpoint").exists()
    # The replay command reproduces the failure, and tests a fix on the same step.
    crash = str(tmp_path / "amp_crash")
    assert amp_replay.cli([crash]) == 1
    out = capfd.readouterr().out
    assert "reproduced" in out and "forward overflow in backbone.4" in out
    assert amp_replay.cli([crash, "SOLVER.AMP.FORCE_FP32", "['backbone.4']"]) == 0
    assert amp_replay.cli([crash, "SOLVER.AMP", "bf16"]) == 0
    assert train_net.cli(planted(tmp_path, "SOLVER.AMP", "fp16", "SOLVER.AMP.FORCE_FP32", "['backbone.4']")) == 0


@pytest.mark.integration
def test_preflight_fallback_trains_in_another_dtype_after_a_failure(demo, tmp_path, capfd):
    assert train_net.cli(planted(tmp_path, "SOLVER.AMP", "fp16", "SOLVER.AMP.PREFLIGHT", "fallback")) == 0
    log = (tmp_path / "log.txt").read_text()
    assert "pre-flight failed in float16" in log and "SOLVER.AMP.PREFLIGHT is fallback" in log
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert saved["policy"]["dtype"] in ("bfloat16", "float32") and saved["trainer"]["step"]["scaler"] is None
    assert "float16" in saved["policy"]["reason"]


@pytest.mark.integration
def test_preflight_falls_back_to_float32_without_native_bfloat16(demo, tmp_path, monkeypatch):
    from fastamp.diagnostics import precision_diagnostics

    monkeypatch.setattr(precision_diagnostics, "native_bfloat16", lambda device: (False, "not here"))
    assert train_net.cli(planted(tmp_path, "SOLVER.AMP", "fp16", "SOLVER.AMP.PREFLIGHT", "fallback")) == 0
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["policy"]["dtype"] == "float32"


@pytest.mark.integration
def test_training_continues_after_a_failed_preflight_if_preflight_is_warn(demo, tmp_path, input_error):
    opts = ("SOLVER.AMP", "fp16", "SOLVER.AMP.PREFLIGHT", "warn", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "2")
    error = input_error(train_net.cli, planted(tmp_path, *opts))
    log = (tmp_path / "log.txt").read_text()
    assert "WARNING: pre-flight failed in float16" in log
    assert "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS (2)" in error and "forward overflow in backbone.4" in error
    crash = CrashDump.read(tmp_path / "amp_crash")
    assert [path.name for path in (tmp_path / "amp_crash").iterdir()] == ["iteration_3_rank_0.pth"]  # from 1
    assert crash.iteration == 2 and crash.location["module"] == "backbone.4" and crash.loss_scale == 16384
    assert amp_replay.cli([str(tmp_path / "amp_crash")]) == 1


@pytest.mark.integration
def test_preflight_lowers_an_initial_loss_scale_that_overflows(demo, tmp_path):

    @META_ARCH_REGISTRY.register()
    class Loud(Baseline):
        def forward(self, batch):
            out = super().forward(batch)
            return {name: 100 * loss for name, loss in out.items()} if self.training else out

    opts = ("SOLVER.AMP", "fp16", "MODEL.META_ARCHITECTURE", "Loud", "SOLVER.MAX_EPOCH", "1")
    assert train_net.cli(tiny.tiny_options(tmp_path, *opts)) == 0
    log = (tmp_path / "log.txt").read_text()
    assert "initial loss scale " in log
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)["trainer"]["step"]
    assert saved["scaler"]["scale"] < 65536 and saved["skipped_total"] == 0
    # The negative control: without the pre-flight, steps are skipped until the scale is low enough.
    assert train_net.cli(tiny.tiny_options(tmp_path / "off", *opts, "SOLVER.AMP.PREFLIGHT", "off")) == 0
    saved = torch.load(tmp_path / "off" / "model_final.pth", weights_only=True)["trainer"]["step"]
    assert saved["skipped_total"] > 0


@BACKBONE_REGISTRY.register()
def build_rgb_backbone(cfg):
    """Build the tiny backbone for three channels regardless of INPUT.CHANNELS."""
    return tiny.build_tiny_backbone(cfg.with_values({"INPUT.CHANNELS": 3}))


@pytest.mark.integration
@pytest.mark.parametrize("precision", ["off", "bf16"])
def test_train_exits_with_2_if_image_channels_do_not_match_the_model(demo, tmp_path, input_error, precision):
    opts = ("MODEL.BACKBONE.NAME", "build_rgb_backbone", "INPUT.CHANNELS", "1", "SOLVER.AMP", precision)
    error = input_error(train_net.cli, tiny.tiny_options(tmp_path, *opts))
    assert "expected 3 channels, got 1" in error and "INPUT.CHANNELS" in error and "Traceback" not in error


def test_amp_replay_exits_with_2_without_a_valid_crash_dump(tmp_path, input_error):
    for content, expected in ((None, str(tmp_path)), ({"a": 1}, "x.pth")):
        if content:
            torch.save(content, tmp_path / "x.pth")
        assert expected in input_error(amp_replay.cli, [str(tmp_path)])
    assert amp_replay.cli([str(tmp_path / "missing.pth")]) == 2
    (tmp_path / "x.pth").write_bytes(b"PK nonsense")
    assert amp_replay.cli([str(tmp_path / "x.pth")]) == 2


class Structured(Net):
    """Net whose output in evaluation mode is in a list, tuple or dict."""

    kind = tuple

    def forward(self, batch):
        out = super().forward(batch)
        return out if self.training else {tuple: (out, "x"), list: [out], dict: {"features": out}}[self.kind]


def test_preflight_raises_if_evaluation_output_is_not_a_tensor(monkeypatch):
    monkeypatch.setattr(Structured, "kind", dict)
    with pytest.raises(TrainingError, match=r"evaluation.* dict"):
        preflight(Structured(3), make_batch(), policy=policy(torch.bfloat16))


@pytest.mark.parametrize("kind", [tuple, list])
def test_preflight_compares_the_first_of_several_evaluation_outputs(kind, monkeypatch):
    monkeypatch.setattr(Structured, "kind", kind)
    assert preflight(Structured(3), make_batch(), policy=policy(torch.bfloat16)).cosine[0] > 0.9


def test_preflight_raises_if_amp_has_no_effect():
    class Off(Net):
        def forward(self, batch):
            with torch.autocast("cpu", enabled=False):
                return super().forward(batch)

    with pytest.raises(TrainingError, match=r"SOLVER.AMP .*bfloat16"):
        preflight(Off(3), make_batch(), policy=policy(torch.bfloat16))


class WritesIntoItsBatch(Net):
    def forward(self, batch):
        batch["images"].sub_(0.5)
        return super().forward(batch)


def test_crash_dump_contains_the_batch_before_in_place_changes(tmp_path):
    """The model modifies its batches in place."""
    model = WritesIntoItsBatch(3)
    good, bad = make_batch(), make_batch()
    bad["images"][0] = float("inf")
    expected = bad["images"].clone()
    batches = [good, *({**bad, "images": bad["images"].clone()} for _ in range(3))]
    diagnostics = PrecisionDiagnostics(trace_nonfinite=True, folder=tmp_path)
    trainer = SimpleTrainer(
        model, batches, [torch.optim.SGD(model.parameters(), 0.1)], policy=policy(torch.bfloat16),
        precision_diagnostics=diagnostics, max_consecutive_skips=1,
    )  # fmt: skip
    with pytest.raises(PrecisionFailure, match="batch not finite"):
        trainer.train(0, 1, 4)
    assert torch.equal(CrashDump.read(tmp_path).micro_batch.batch["images"], expected)


def test_out_of_memory_errors_of_device_and_host_are_recognized():
    yes = [
        MemoryError(),
        torch.OutOfMemoryError("x"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
    ]
    assert all(is_out_of_memory(error) for error in yes)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))


@pytest.mark.parametrize("dtype", LOW)
def test_preflight_passes_if_embeddings_are_zero_in_float32(dtype):
    model, batch = Net(3), make_batch()
    model(batch)  # sets the running statistics, as in a trained model
    torch.nn.init.zeros_(model.body[3].weight)
    torch.nn.init.zeros_(model.body[3].bias)
    report = preflight(model, batch, policy=policy(dtype), scaler=LossScaler())
    assert report.problem == "" and report.cosine == (1, 1)
    reference = check_float32(model, batch, policy(dtype))
    assert not reference.features.any()
    check = check_precision(model, batch, policy(dtype), reference=reference, min_cosine=DOCTOR_MIN_COSINE)
    assert not check.problem
