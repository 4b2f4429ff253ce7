import gzip
import json
import re
import shutil
import time
from functools import partial

import pytest
import tiny
import torch
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fastamp.amp import PrecisionPolicy
from fastamp.config import get_cfg
from fastamp.data import decode
from fastamp.data.decode import decode_image
from fastamp.data.image_decoder import image_decoder
from fastamp.data.transforms.base import Augmentation
from fastamp.engine import DefaultTrainer, SimpleTrainer, speed
from fastamp.engine.hooks import HookBase, Priority, Profile, SpeedMonitor
from fastamp.engine.speed import input_fix, peak_flops
from fastamp.engine.unreached import find_unreached_events
from fastamp.utils.errors import ConfigError


class Model(nn.Linear):
    def __init__(self):
        super().__init__(8, 8, bias=False)

    def forward(self, batch):
        return {"loss": super().forward(batch).float().sum()}


class Seconds(HookBase):
    """Replace the measured times of each step."""

    def __init__(self, step, data):
        self.step, self.data = step, data

    def after_step(self):
        self.trainer.step_seconds, self.trainer.data_seconds = self.step, self.data


class Interrupt(HookBase):
    """Raise an error at a moment of the second iteration; ``priority`` is that of ``StopOnSignal``."""

    priority = Priority.LOW

    def __init__(self, moment):
        vars(self)[moment] = self.interrupt

    def interrupt(self, *_):
        if self.trainer.iter == 1:
            raise InterruptedError


class OwnStep(SimpleTrainer):
    """Loop without the metrics and times of ``SimpleTrainer``."""

    def run_step(self):
        self.model(self.next_batch())["loss"].backward()


class FallBack(HookBase):
    """Replace the policy by float32 after ten steps."""

    def after_step(self):
        if self.trainer.iter == 9:
            self.trainer.set_policy(self.trainer.policy.fall_back("float32", "test"))


def train(model, *hooks, steps=20, kind=SimpleTrainer, start=0, dtype=torch.float32):
    """Train on batches of 4 images."""
    batches = iter(partial(torch.ones, 4, 8), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = kind(model, batches, [optimizer], policy=PrecisionPolicy("cpu", dtype))
    trainer.set_data(steps, images_per_batch=4)
    trainer.register_hooks(hooks)
    trainer.train(start, 1, steps)
    return trainer


def test_a_run_that_waits_for_images_says_so_with_a_fix(caplog):
    caplog.set_level("INFO")
    model = Model()
    train(model, Seconds(0.5, 0.19), SpeedMonitor(model, lambda: "more workers"))
    (summary,) = (record for record in caplog.records if "images/s" in record.message)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "8 images/s" in summary.message and "38 % of the time" in summary.message
    assert "input-bound: 38 %" in warning.message and "fix: more workers" in warning.message


@pytest.mark.parametrize("steps, data", [(20, 0.04), (5, 0.4)])
def test_a_run_that_does_not_wait_or_is_short_gets_no_warning(steps, data, caplog):
    caplog.set_level("INFO")
    model = Model()
    train(model, Seconds(0.5, data), SpeedMonitor(model, lambda: pytest.fail("asked for a fix")), steps=steps)
    assert ["images/s" in record.message for record in caplog.records].count(True) == (steps == 20)


def test_loops_measure_the_time_waiting_for_batches():
    class Slow:
        def __iter__(self):
            while True:
                time.sleep(0.02)
                yield torch.ones(4, 8)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, Slow(), [optimizer], policy=PrecisionPolicy("cpu", torch.float32))
    trainer.run_step()
    assert 0.02 <= trainer.data_seconds <= trainer.step_seconds


def test_flops_utilization_is_that_of_the_matrix_products(caplog):
    caplog.set_level("INFO")
    model = Model()
    trainer = train(model, Seconds(0.5, 0), SpeedMonitor(model, str, peak=lambda policy: 1e6))
    # Forward pass, and the gradient of the weights; 2 operations for each product.
    operations = 2 * (2 * 4 * 8 * 8)
    assert trainer.metrics.flush()["flops_utilization"] == pytest.approx(operations / 0.5 / 1e6)
    assert any("TFLOP/s" in record.message for record in caplog.records)
    assert "flops_utilization" not in train(model, SpeedMonitor(model, str)).metrics.flush()


def test_flops_utilization_after_a_fallback_is_that_of_the_new_precision(caplog):
    caplog.set_level("INFO")
    model = Model()
    monitor = SpeedMonitor(model, str, peak=lambda policy: 4e12 if policy.enabled else 1e12)
    trainer = train(model, Seconds(0.5, 0), monitor, FallBack(), dtype=torch.bfloat16, steps=30)
    utilization = 2 * (2 * 4 * 8 * 8) / 0.5 / 1e12
    # The first two of ten steps are not measured.
    assert trainer.metrics.flush()["flops_utilization"] == pytest.approx(utilization * (8 / 4 + 20) / 28)
    assert any("4 and 1 TFLOP/s" in record.message for record in caplog.records)


def test_counting_operations_does_not_change_the_training():
    weights = []
    for peak in (None, 1e12):
        torch.manual_seed(0)
        model = Model()
        train(model, SpeedMonitor(model, str, peak=lambda policy, peak=peak: peak))
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_a_loop_that_measures_no_time_trains(caplog):
    caplog.set_level("INFO")
    model = Model()
    trainer = train(model, SpeedMonitor(model, str, peak=lambda policy: 1e12), kind=OwnStep)
    assert trainer.iter == 19 and "flops_utilization" not in trainer.metrics.flush()
    assert not any("images/s" in record.message for record in caplog.records)


@pytest.mark.parametrize("moment", ["before_step", "before_forward", "after_step"])
def test_an_interrupted_run_stops_counting_and_profiling(moment, tmp_path, monkeypatch):
    stopped = []
    monkeypatch.setattr(torch.profiler.profile, "stop", lambda profiler: stopped.append(profiler))
    monkeypatch.setattr(torch.profiler.profile, "start", lambda profiler: None)
    model = Model()
    with pytest.raises(InterruptedError):
        train(
            model,
            SpeedMonitor(model, str, peak=lambda policy: 1e12),
            Profile((1, 3), tmp_path / "profile"),
            Interrupt(moment),
        )
    assert len(stopped) == 1 and not list(tmp_path.iterdir())
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    "name, dtype, tf32, tera",
    [
        ("NVIDIA H200", torch.bfloat16, False, 989),
        ("NVIDIA H100 80GB HBM3", torch.float32, True, 494),
        ("NVIDIA H100 PCIe", torch.float16, False, 756),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5),
        ("NVIDIA A10", torch.bfloat16, False, 125),
        ("NVIDIA A10G", torch.bfloat16, False, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, False, None),
        ("NVIDIA GeForce RTX 4090", torch.float16, False, 165.2),
        ("AMD Instinct MI300X", torch.bfloat16, False, None),
    ],
)
def test_peak_of_a_gpu(name, dtype, tf32, tera, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_flops(PrecisionPolicy("cuda", dtype, tf32=tf32)) == (tera and 1e12 * tera)
    assert peak_flops(PrecisionPolicy("cpu", dtype)) is None


def test_the_fix_of_a_slow_input_is_one_that_is_not_yet_applied(monkeypatch):
    monkeypatch.setattr(speed, "available_cores", lambda: 8)
    monkeypatch.setattr(speed, "loading_device", lambda cfg: device)
    cfg, device = get_cfg(), torch.device("cuda")
    found = []
    for key, value in (
        ("DATALOADER.NUM_WORKERS", "2"),
        ("DATALOADER.NUM_WORKERS", "8"),
        ("INPUT.SIZE_TRAIN", "(256,)"),
        ("DATALOADER.CACHE", "ram"),
        ("INPUT.AUGMENT_ON", "device"),
    ):
        cfg.merge_from_list([key, value])
        found.append(input_fix(cfg))
    for text, key in zip(
        found, ("NUM_WORKERS to 8", "DATALOADER.CACHE", "INPUT.SIZE_TRAIN", "INPUT.AUGMENT_ON", "cores"), strict=True
    ):
        assert key in text
    assert len(set(found)) == len(found)
    device = torch.device("cpu")  # also with the default of MODEL.DEVICE
    cfg.merge_from_list(["INPUT.AUGMENT_ON", "worker"])
    assert input_fix(cfg) == found[-1]


def test_processes_on_a_machine_share_its_cores_for_workers(monkeypatch):
    monkeypatch.setattr(speed, "available_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cfg = get_cfg()
    for workers, expected in (("1", "NUM_WORKERS to 2"), ("2", "DATALOADER.CACHE")):
        cfg.merge_from_list(["DATALOADER.NUM_WORKERS", workers])
        assert expected in input_fix(cfg)


def test_profile_writes_the_trace_of_the_chosen_iterations(tmp_path, caplog):
    caplog.set_level("INFO")
    train(Model(), Profile((3, 4), tmp_path / "profile"), steps=6)
    with gzip.open(tmp_path / "profile/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::linear" for event in events) == 2
    assert "aten::" in (tmp_path / "profile/operators.txt").read_text()
    assert any(str(tmp_path / "profile") in record.message for record in caplog.records)


def test_a_resumed_run_profiles_the_remaining_iterations(tmp_path, caplog):
    for start, count in ((3, 2), (5, 0)):
        folder = tmp_path / str(start)
        train(Model(), Profile((2, 5), folder), steps=6, start=start)
        trace = folder / "trace.json.gz"
        found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if count else []
        assert sum(event.get("name") == "aten::linear" for event in found) == count
        assert trace.exists() == bool(count)
        assert any("SOLVER.PROFILE" in record.message for record in caplog.records) == (not count)
    caplog.clear()
    train(Model(), Profile((2, 5), tmp_path / "3"), steps=6, start=5)  # has its trace
    assert not caplog.records


def test_a_profile_of_many_iterations_is_limited(tmp_path, caplog):
    for iterations, count in (((3, 22), 20), ((3, 23), 20), ((22, 10_000), 4)):
        caplog.clear()
        folder = tmp_path / str(iterations)
        train(Model(), Profile(iterations, folder), steps=25)
        events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "aten::linear" for event in events) == count
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert ["SOLVER.PROFILE" in text and "fix: " in text for text in warnings] == [True] * (iterations != (3, 22))


@pytest.mark.parametrize("iterations", [(3,), (0, 2), (5, 4), (1, 2, 3)])
def test_profile_of_invalid_iterations_is_an_error(iterations, tmp_path):
    with pytest.raises(ConfigError, match=r"SOLVER\.PROFILE(.|\n)*fix:"):
        Profile(iterations, tmp_path)


def test_a_profile_after_the_end_is_an_unreached_event():
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.PROFILE", "(500, 600)", "SOLVER.MAX_EPOCH", "2"])
    assert any("SOLVER.PROFILE" in event for event in find_unreached_events(cfg, 200))
    assert not any("SOLVER.PROFILE" in event for event in find_unreached_events(cfg, 250))


@pytest.mark.integration
def test_a_run_writes_its_profile_and_says_how_fast_it_was(demo, tmp_path):
    opts = ("SOLVER.PROFILE", "(2, 3)", "SOLVER.MAX_EPOCH", "3", "SOLVER.IMS_PER_BATCH", "8")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *opts))
    trainer.train()
    assert (tmp_path / "profile/trace.json.gz").stat().st_size
    assert "% of the time waiting for images" in (tmp_path / "log.txt").read_text()


def slowed(function, seconds):
    """Return ``function`` with a pause before each call."""

    def call(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return call


class Compute(HookBase):
    """Let each step compute for some seconds."""

    def __init__(self, seconds):
        self.before_forward = slowed(lambda batch: None, seconds)


@pytest.fixture
def hint(demo, tmp_path, caplog, monkeypatch):
    """Function that trains 12 steps and returns the keys that the fix of a warning about the input names."""
    caplog.set_level("INFO")
    monkeypatch.setattr(speed, "available_cores", lambda: 2)

    def train(*opts, compute):
        caplog.clear()
        size = ("SOLVER.MAX_EPOCH", "1", "SOLVER.IMS_PER_BATCH", "8", "TEST.REPORT", "False")
        trainer = DefaultTrainer(tiny.tiny_config(tmp_path / str(len(opts)), *size, *opts))
        trainer.register_hooks([Compute(compute)])
        trainer.train()
        texts = [record.message for record in caplog.records if "of the time waiting" in record.message]
        assert len(texts) in (1, 2)
        return re.findall(r"[A-Z]+\.[A-Z_]+", texts[-1].partition("fix:")[2])

    return train


WORKERS = ("DATALOADER.NUM_WORKERS", "2")
CACHE = ("DATALOADER.CACHE", "ram")


@pytest.mark.integration
def test_the_fixes_of_a_run_with_slow_files_lead_to_one_that_does_not_wait(hint, monkeypatch):
    real = image_decoder("auto")
    slow = real._replace(decode=slowed(real.decode or partial(decode_image, decoder="pil"), 0.03))
    monkeypatch.setattr(decode, "image_decoder", lambda name: slow)
    assert hint(compute=0.05) == ["DATALOADER.NUM_WORKERS"]
    assert hint(*WORKERS, compute=0.05) == ["DATALOADER.CACHE"]
    assert hint(*WORKERS, *CACHE, compute=0.6) == []


@pytest.mark.integration
def test_the_fix_of_a_run_with_large_files_of_any_shape(hint, demo, tmp_path, monkeypatch):
    shutil.copytree(demo, tmp_path / "large")
    for file in (tmp_path / "large").rglob("bounding_box_train/*.jpg"):
        with Image.open(file) as image:
            image.resize((1024, 2048)).save(file)
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "large"))
    options = ("INPUT.SIZE_TRAIN", "(64,)", "INPUT.CROP.ENABLED", "True", "INPUT.CROP.SIZE", "(64, 32)")
    assert hint(*WORKERS, *options, compute=0) == ["INPUT.SIZE_TRAIN"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "device, key", [("cpu", "INPUT.SIZE_TRAIN"), pytest.param("cuda", "INPUT.AUGMENT_ON", marks=pytest.mark.cuda)]
)
def test_the_fix_of_a_run_with_slow_transforms(device, key, hint, monkeypatch):
    monkeypatch.setattr(Augmentation, "apply", slowed(Augmentation.apply, 0.3))
    assert hint(*WORKERS, *CACHE, "MODEL.DEVICE", device, compute=0) == [key]
