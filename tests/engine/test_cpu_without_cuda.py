"""With MODEL.DEVICE cpu, no command initializes CUDA or pins memory, even on a machine with a GPU."""

import types
from pathlib import Path

import pytest
import tiny
import torch

from fastamp.cli import main
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.diagnostics.error_context import run_passes
from fastamp.engine import DefaultTrainer, default_setup
from fastamp.inference import Predictor
from fastamp.utils.env import random_state, set_random_state

# These do not create a CUDA context. PyTorch's optimizers call is_current_stream_capturing, and torch.manual_seed calls
# manual_seed_all, which stores the seed until CUDA is initialized.
ALLOWED = {
    "is_available",
    "device_count",
    "is_initialized",
    "is_current_stream_capturing",
    "manual_seed",
    "manual_seed_all",
    "get_arch_list",
}


@pytest.fixture
def gpu_not_to_be_used(monkeypatch):
    """Simulate a machine with a GPU on which each use of CUDA and of pinned memory fails."""

    def forbid(name):
        def raise_error(*args, **kwargs):
            raise AssertionError(f"torch.cuda.{name} was called")

        return raise_error

    def pin_memory(*args, **kwargs):
        raise AssertionError("memory was pinned")

    names = [name for name, value in vars(torch.cuda).items() if isinstance(value, types.FunctionType)]
    names += ["Stream", "Event"]
    forbidden = [name for name in names if name not in ALLOWED and name != "_lazy_call" and not name.startswith("_is")]
    for name in forbidden:
        monkeypatch.setattr(torch.cuda, name, forbid(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr("fastamp.data.loader.pin_memory", pin_memory)
    return forbidden


def test_forbidden_functions_include_those_that_create_a_context(gpu_not_to_be_used):
    """Negative control."""
    used = {"init", "_lazy_init", "set_device", "current_device", "synchronize", "empty_cache", "get_rng_state"}
    used |= {"get_rng_state_all", "set_rng_state", "mem_get_info", "memory_reserved", "reset_peak_memory_stats"}
    assert used <= set(gpu_not_to_be_used)
    with pytest.raises(AssertionError, match=r"torch\.cuda\."):
        torch.cuda.synchronize()


@pytest.mark.integration
@pytest.mark.parametrize("workers", ["0", "2"])
def test_training_and_resuming_on_a_cpu_do_not_use_cuda(workers, demo, tmp_path, gpu_not_to_be_used):
    options = ["DATALOADER.NUM_WORKERS", workers, "SOLVER.AMP", "bf16", "SOLVER.EMA.ENABLED", "True"]
    options += [
        "TEST.PRECISE_BN.ENABLED",
        "True",
        "TEST.PRECISE_BN.DATASET",
        "Demo",
        "TEST.REPORT",
        "True",
        "SOLVER.MAX_EPOCH",
        "1",
    ]
    cfg = tiny.tiny_config(tmp_path, *options)
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    assert not trainer.data_loader._loader.pin_memory
    assert trainer.train()["mAP"] > 0
    checkpoint = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert "cuda" not in checkpoint["random"]
    resumed = DefaultTrainer(tiny.tiny_config(tmp_path, *options, "SOLVER.MAX_EPOCH", "2"))
    resumed.resume_or_load(resume=True)
    resumed.train()
    assert Predictor(tmp_path / "model_final.pth", device="cpu").features(list(demo.rglob("*.jpg"))[:2]).shape[0] == 2


def test_random_state_of_a_gpu_is_ignored_on_a_cpu(gpu_not_to_be_used):
    state = random_state()
    assert "cuda" not in state
    set_random_state(state | {"cuda": torch.zeros(16, dtype=torch.uint8)})


def test_loaders_pin_memory_only_for_cuda(demo, tmp_path, gpu_not_to_be_used, monkeypatch):
    cfg = tiny.tiny_config(tmp_path, "MODEL.DEVICE", "cpu")
    test_loader, _ = build_reid_test_loader(cfg, cfg.DATASETS.TESTS[0])
    for loader in (build_reid_train_loader(cfg), test_loader):
        assert not loader._loader.pin_memory
    cfg = tiny.tiny_config(tmp_path, "MODEL.DEVICE", "cuda")
    assert build_reid_train_loader(cfg)._loader.pin_memory


def test_only_modules_that_choose_a_device_ask_for_a_gpu():
    """Other modules use the device of the config, or ask whether CUDA is initialized."""
    package = Path(__file__).parents[2] / "fastamp"
    asking = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if "cuda.is_available" in file.read_text()
    }
    assert asking == {"amp/policy.py", "diagnostics/environment_queries.py", "engine/launch.py"}


def test_out_of_memory_on_a_cpu_does_not_use_cuda(gpu_not_to_be_used):
    model = torch.nn.Linear(1, 1)
    sizes = []

    def run(passes):
        sizes.append(len(passes.batch["images"]))
        if len(sizes) == 1:
            raise MemoryError
        return "done"

    batch = {"images": torch.zeros(4, 1)}
    assert run_passes(model, batch, run, precision="float32", halve_from=2) == ("done", 2)
    assert sizes == [4, 2]


def test_doctor_on_a_cpu_does_not_use_cuda(demo, tmp_path, gpu_not_to_be_used, capsys):
    file = tmp_path / "tiny.yml"
    file.write_text(tiny.tiny_config(tmp_path / "run").dump())
    code = main(["doctor", "--env", "--config-file", str(file), "--dtypes", "bf16", "--images", "8", "--batch", "8"])
    assert code in (0, 1) and "AssertionError" not in capsys.readouterr().out
