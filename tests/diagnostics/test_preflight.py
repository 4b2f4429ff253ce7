"""The trial before the first step: on the run's own batch, blaming the right thing, leaving no trace."""

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


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(12, 10), (33, 7), (64, 64)])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_any_batch_of_a_healthy_model_passes(channels, size, dtype):
    report = preflight(Net(channels), make_batch(channels, size), policy=policy(dtype), scaler=LossScaler())
    assert report.problem == "" and report.unreached == []
    assert report.losses["loss_cls"][0] == pytest.approx(report.losses["loss_cls"][1], rel=0.02)
    assert report.describe().startswith("pre-flight passed in ")
    if dtype != torch.float32:
        assert report.cosine[0] > 0.99


def naive_preflight(model):
    """What others do: images of their own, and any exception is mixed precision's fault."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.eval()({"images": torch.rand(1, 3, 32, 32)})
        return "AMP checks passed"
    except Exception:
        return "AMP checks failed"


def test_a_grey_model_is_tried_with_grey_images():
    assert naive_preflight(Net(1)) == "AMP checks failed"  # though nothing is wrong with it
    assert preflight(Net(1), make_batch(1), policy=policy(torch.bfloat16)).problem == ""


@pytest.mark.parametrize("dtype", LOW)
def test_a_model_for_other_channels_is_an_error_of_the_model(dtype):
    with pytest.raises(TrainingError) as error:
        preflight(Net(1), make_batch(3), policy=policy(dtype))
    text = str(error.value)
    assert "fails on the first training batch in float32: an error of the model or of the data" in text
    assert "body.0 (Conv2d)" in text and "takes 1 channels and was given 3" in text and "INPUT.CHANNELS" in text
    assert "images (8, 3, 12, 10)" in text
    assert isinstance(error.value.__cause__, RuntimeError)  # nothing is swallowed


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_a_model_broken_in_float32_is_reported_as_that(dtype):
    report = preflight(Net(3, gain=float("nan")), make_batch(), policy=policy(dtype), scaler=LossScaler())
    assert report.in_float32 and "broken in float32 already" in report.problem
    assert "loss_cls" in report.problem and "mixed precision is not the cause" in report.problem
    assert preflight(Net(3), make_batch(), policy=policy(dtype)).problem == ""  # the negative control


def test_the_first_loss_scale_is_one_whose_gradients_are_finite():
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
    assert scaler.scale == 65536.0  # it is the caller's
    assert preflight(model, batch, policy=policy(torch.float16), scaler=LossScaler(init_scale=4)).loss_scale == 4


def test_gradients_that_no_loss_scale_makes_finite():
    report = preflight(Net(3, gain=1e7), make_batch(), policy=policy(torch.float16), scaler=LossScaler())
    assert "whatever the loss scale" in report.problem and report.location.kind == "backward overflow"
    assert preflight(Net(3, gain=1e7), make_batch(), policy=policy(torch.bfloat16)).problem == ""


def test_parameters_that_no_loss_reaches_are_listed():
    model = Net(3)
    model.unused.requires_grad_(True)
    report = preflight(model, make_batch(), policy=policy(torch.bfloat16))
    assert report.problem == "" and report.unreached == ["unused.weight", "unused.bias"]
    assert "no loss reaches 2 trainable parameters: unused.weight, unused.bias" in report.describe()


def test_embeddings_that_vanish_without_an_infinity():
    """Normalizing in float16, as plain code does: lengths overflow, and every feature becomes zero."""

    class Normalizing(Net):
        def forward(self, batch):
            out = super().forward(batch)
            if self.training:
                return out
            return out * 3e4 / (out * 3e4).square().sum(dim=1, keepdim=True).sqrt()

    report = preflight(Normalizing(3), make_batch(), policy=policy(torch.float16))
    assert "embeddings in float16 are others than float32's" in report.problem


def test_a_batch_that_fits_into_memory_in_low_precision_alone():
    batch = {"images": torch.rand(16, 3, 12, 10), "targets": torch.arange(16) % 4}
    report = preflight(Hungry(4, in_low_too=False), batch, policy=policy(torch.bfloat16))
    assert report.problem == "" and report.images == (4, 16) and "for want of memory" in report.describe()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_running_out_of_memory_is_reported_as_that(dtype):
    with pytest.raises(TrainingError, match=r"out of memory in the pre-flight.*(?s:.)*SOLVER.IMS_PER_BATCH"):
        preflight(Hungry(4, in_low_too=True), make_batch(), policy=policy(dtype))


def run(output, *opts):
    torch.manual_seed(0)
    trainer = DefaultTrainer(tiny.tiny_config(output, "SOLVER.MAX_EPOCH", "2", *opts))
    trainer.resume_or_load(resume=False)
    trainer.train()
    return torch.load(output / "model_final.pth", weights_only=True)


@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("channels", ["1", "3", "4"])
def test_a_run_is_the_same_with_and_without_it(demo, tmp_path, caplog, precision, channels):
    """Bit for bit: weights, statistics, optimizer, random states. Dropout draws, and batch norm counts."""
    colours = [
        "MODEL.PIXEL_MEAN",
        "(1, 2, 3, 4)",
        "MODEL.PIXEL_STD",
        "(60, 60, 60, 60)",
        "INPUT.REA.VALUE",
        "(0, 0, 0, 0)",
    ]
    opts = ["SOLVER.AMP", precision, "INPUT.CHANNELS", channels, *(colours if channels == "4" else [])]
    opts += ["SOLVER.AMP.INIT_SCALE", "256"]  # which the pre-flight leaves as it is
    caplog.set_level("INFO")
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
    """Return the tiny backbone whose second convolution only float16 cannot hold."""
    net = tiny.build_tiny_backbone(cfg)
    with torch.no_grad():
        net[4].weight.mul_(1e6)
    return net


def planted(output, *opts):
    return tiny.tiny_options(output, "MODEL.BACKBONE.NAME", "build_planted_backbone", "SOLVER.MAX_EPOCH", "1", *opts)


def test_training_names_the_layer_and_leaves_a_file(demo, tmp_path, capfd):
    assert train_net.cli(planted(tmp_path, "SOLVER.AMP", "fp16")) == 2
    error = capfd.readouterr().err
    assert "forward overflow in backbone.4 (Conv2d)" in error and "FORCE_FP32 \"['backbone.4']\"" in error
    assert (
        f"python tools/amp_replay.py {tmp_path}/amp_crash/iteration_0_rank_0.pth" in error and "Traceback" not in error
    )
    assert not (tmp_path / "last_checkpoint").exists()
    # One command shows it again, and tries a cure on the very step.
    crash = str(tmp_path / "amp_crash")
    assert amp_replay.cli([crash]) == 1
    out = capfd.readouterr().out
    assert "reproduced" in out and "forward overflow in backbone.4" in out
    assert amp_replay.cli([crash, "SOLVER.AMP.FORCE_FP32", "['backbone.4']"]) == 0
    assert amp_replay.cli([crash, "SOLVER.AMP", "bf16"]) == 0
    assert train_net.cli(planted(tmp_path, "SOLVER.AMP", "fp16", "SOLVER.AMP.FORCE_FP32", "['backbone.4']")) == 0


def test_fallback(demo, tmp_path, capfd):
    assert train_net.cli(planted(tmp_path, "SOLVER.AMP", "fp16", "SOLVER.AMP.PREFLIGHT", "fallback")) == 0
    log = (tmp_path / "log.txt").read_text()
    assert "pre-flight failed in float16" in log and "SOLVER.AMP.PREFLIGHT fallback: training in" in log
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert saved["policy"]["dtype"] in ("bfloat16", "float32") and saved["trainer"]["step"]["scaler"] is None
    assert "the pre-flight failed in float16" in saved["policy"]["reason"]


def test_fallback_where_bfloat16_is_not_native(demo, tmp_path, monkeypatch):
    from fastamp.diagnostics import precision_diagnostics

    monkeypatch.setattr(precision_diagnostics, "native_bfloat16", lambda device: (False, "not here"))
    assert train_net.cli(planted(tmp_path, "SOLVER.AMP", "fp16", "SOLVER.AMP.PREFLIGHT", "fallback")) == 0
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["policy"]["dtype"] == "float32"


def test_warn_goes_on(demo, tmp_path, capfd):
    opts = ("SOLVER.AMP", "fp16", "SOLVER.AMP.PREFLIGHT", "warn", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "2")
    assert train_net.cli(planted(tmp_path, *opts)) == 2
    log, error = (tmp_path / "log.txt").read_text(), capfd.readouterr().err
    assert "WARNING: pre-flight failed in float16" in log
    assert "3 optimizer steps in a row were skipped" in error and "forward overflow in backbone.4" in error
    crash = CrashDump.read(tmp_path / "amp_crash")
    assert crash.iteration == 2 and crash.location["module"] == "backbone.4" and crash.loss_scale == 16384
    assert amp_replay.cli([str(tmp_path / "amp_crash")]) == 1


def test_the_first_scale_of_a_run(demo, tmp_path):
    """Logged, taken over, and no failure; a run that is resumed keeps its own."""

    @META_ARCH_REGISTRY.register()
    class Loud(Baseline):
        def forward(self, batch):
            out = super().forward(batch)
            return {name: 100 * loss for name, loss in out.items()} if self.training else out

    opts = ("SOLVER.AMP", "fp16", "MODEL.META_ARCHITECTURE", "Loud", "SOLVER.MAX_EPOCH", "1")
    assert train_net.cli(tiny.tiny_options(tmp_path, *opts)) == 0
    log = (tmp_path / "log.txt").read_text()
    assert "first loss scale " in log and "above it gradients overflow on the first batch" in log
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)["trainer"]["step"]
    assert saved["scaler"]["scale"] < 65536 and saved["skipped_total"] == 0
    # The negative control: without it, steps are skipped until the scale is down.
    assert train_net.cli(tiny.tiny_options(tmp_path / "off", *opts, "SOLVER.AMP.PREFLIGHT", "off")) == 0
    saved = torch.load(tmp_path / "off" / "model_final.pth", weights_only=True)["trainer"]["step"]
    assert saved["skipped_total"] > 0


@BACKBONE_REGISTRY.register()
def build_rgb_backbone(cfg):
    """Return the tiny backbone for three channels, whatever the config says."""
    return tiny.build_tiny_backbone(cfg.with_values({"INPUT.CHANNELS": 3}))


@pytest.mark.parametrize("precision", ["off", "bf16"])
def test_channels_that_do_not_fit_by_the_command_line(demo, tmp_path, capfd, precision):
    opts = ("MODEL.BACKBONE.NAME", "build_rgb_backbone", "INPUT.CHANNELS", "1", "SOLVER.AMP", precision)
    assert train_net.cli(tiny.tiny_options(tmp_path, *opts)) == 2
    error = capfd.readouterr().err
    assert "takes 3 channels and was given 1" in error and "INPUT.CHANNELS" in error and "Traceback" not in error


def test_a_damaged_crash_file(tmp_path, capfd):
    for content, words in ((None, "holds no crash file"), ({"a": 1}, "is no crash file")):
        if content:
            torch.save(content, tmp_path / "x.pth")
        assert amp_replay.cli([str(tmp_path)]) == 2
        assert words in capfd.readouterr().err
    assert amp_replay.cli([str(tmp_path / "missing.pth")]) == 2
    (tmp_path / "x.pth").write_bytes(b"PK nonsense")
    assert amp_replay.cli([str(tmp_path / "x.pth")]) == 2


def test_a_model_that_returns_no_features():
    class Tuple(Net):
        def forward(self, batch):
            out = super().forward(batch)
            return out if self.training else (out, out)

    with pytest.raises(TrainingError, match="in evaluation mode the model returned a tuple"):
        preflight(Tuple(3), make_batch(), policy=policy(torch.bfloat16))


def test_amp_without_effect_is_found_before_the_first_step():
    class Off(Net):
        def forward(self, batch):
            with torch.autocast("cpu", enabled=False):
                return super().forward(batch)

    with pytest.raises(TrainingError, match="ran no operation in bfloat16"):
        preflight(Off(3), make_batch(), policy=policy(torch.bfloat16))


class WritesIntoItsBatch(Net):
    def forward(self, batch):
        batch["images"].sub_(0.5)
        return super().forward(batch)


def test_a_failed_step_is_kept_as_it_was_given(tmp_path):
    """Though the model writes into its batches."""
    model = WritesIntoItsBatch(3)
    good, bad = make_batch(), make_batch()
    bad["images"][0] = float("inf")
    kept = bad["images"].clone()
    batches = [good, *({**bad, "images": bad["images"].clone()} for _ in range(3))]
    diagnostics = PrecisionDiagnostics(locate=True, folder=tmp_path)
    trainer = SimpleTrainer(
        model, batches, [torch.optim.SGD(model.parameters(), 0.1)], policy=policy(torch.bfloat16),
        precision_diagnostics=diagnostics, max_consecutive_skips=1,
    )  # fmt: skip
    with pytest.raises(PrecisionFailure, match="batch not finite"):
        trainer.train(0, 1, 4)
    assert torch.equal(CrashDump.read(tmp_path).micro_batch.batch["images"], kept)


def test_out_of_memory_is_recognized():
    yes = [
        MemoryError(),
        torch.OutOfMemoryError("x"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ]
    assert all(is_out_of_memory(error) for error in yes)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.parametrize("dtype", LOW)
def test_a_model_whose_embeddings_are_zero_in_float32_too_is_not_blamed_on_the_precision(dtype):
    model, batch = Net(3), make_batch()
    model(batch)  # statistics of a model that is trained
    torch.nn.init.zeros_(model.body[3].weight)
    torch.nn.init.zeros_(model.body[3].bias)
    report = preflight(model, batch, policy=policy(dtype), scaler=LossScaler())
    assert report.problem == "" and report.cosine == (1, 1)
    reference = check_float32(model, batch, policy(dtype))
    assert not reference.features.any()
    check = check_precision(model, batch, policy(dtype), reference=reference, min_cosine=DOCTOR_MIN_COSINE)
    assert not check.problem
