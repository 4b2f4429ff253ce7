"""Out-of-memory errors, and errors of operations without a deterministic implementation."""

import os
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest
import tiny
import torch
from loops import Net, make_batch, make_net, make_trainer, sgd

from fastamp.amp import PrecisionPolicy
from fastamp.diagnostics.preflight import preflight
from fastamp.engine import default_setup
from fastamp.evaluation import inference_on_dataset
from fastamp.evaluation.evaluator import DatasetEvaluator
from fastamp.utils.errors import TrainingError

RANKS = Path(__file__).parents[1] / "helpers/ranks.py"
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
]


class Failing(Net):
    """Net that raises ``error`` in the third training pass and in every evaluation pass."""

    def __init__(self, error):
        super().__init__()
        self.error, self.passes = error, 0

    def forward(self, batch):
        self.passes += 1
        if self.passes == 3 or not self.training:
            raise self.error
        return super().forward(batch)


@pytest.mark.parametrize("error", NO_MEMORY)
def test_out_of_memory_error_in_training_lists_batch_shapes_and_config_keys(error):
    model = Failing(error)
    trainer = make_trainer(model, [sgd(model)], [make_batch()] * 5, torch.bfloat16)
    with pytest.raises(TrainingError) as raised:
        trainer.train(0, 1, 5)
    message = str(raised.value)
    assert "iteration 3" in message and "images (8, 8) float32, targets (8,) int64" in message
    assert str(error) in message
    assert ("cause:" in message) == ("engine" in str(error))
    for key in ("SOLVER.IMS_PER_BATCH", "SOLVER.ACCUM_STEPS", "INPUT.SIZE_TRAIN", "MODEL.BACKBONE.CHECKPOINTING"):
        assert key in message


@pytest.mark.parametrize("error", NO_MEMORY)
def test_out_of_memory_error_in_evaluation_lists_batch_shapes_and_config_keys(error):
    with pytest.raises(TrainingError, match=r"images \(8, 8\)") as raised:
        inference_on_dataset(Failing(error), [make_batch()], DatasetEvaluator())
    assert "TEST.IMS_PER_BATCH" in str(raised.value) and "INPUT.SIZE_TEST" in str(raised.value)


def test_shape_errors_in_training_are_not_converted_to_training_error():
    model = Failing(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        make_trainer(model, [sgd(model)], [make_batch()] * 5, torch.float32).train(0, 1, 5)


class Nondeterministic(Net):
    """Net with an operation that has no deterministic implementation on any device."""

    def forward(self, batch):
        images = batch["images"].clone().put_(torch.zeros(1, dtype=torch.int64), torch.ones(1))
        return super().forward(batch | {"images": images})


@pytest.fixture
def reset_deterministic():
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False


def test_nondeterministic_operation_raises_if_deterministic_is_true(
    demo, tmp_path, reset_deterministic, monkeypatch, capsys
):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    model = make_net(Nondeterministic)
    train = make_trainer(model, [sgd(model)], [make_batch()] * 4, torch.float32).train
    train(0, 1, 1)
    default_setup(tiny.tiny_config(tmp_path, "DETERMINISTIC", "True", "CUDNN_BENCHMARK", "True"))
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUDNN_BENCHMARK=True has no effect" in capsys.readouterr().out
    with pytest.raises(TrainingError, match=r"DETERMINISTIC is True.* put_ .*\(iteration 2\)"):
        train(1, 1, 2)
    with pytest.raises(TrainingError, match=r"DETERMINISTIC is True.* put_ .*\(the pre-flight"):
        preflight(model, make_batch(), policy=PrecisionPolicy("cpu", torch.float32, "test"))
    default_setup(tiny.tiny_config(tmp_path, "CUDNN_BENCHMARK", "True"))
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    assert torch.backends.cudnn.benchmark
    train(1, 1, 2)


@pytest.mark.integration
def test_deterministic_runs_with_the_same_seed_are_bit_identical(demo_root, tmp_path):
    options = ["DETERMINISTIC", "True", "SOLVER.AMP", "bf16", "DATALOADER.NUM_WORKERS", "2", "SOLVER.MAX_EPOCH", "1"]
    root, names = {"FASTAMP_DATASETS": str(demo_root)}, ("first", "second", "other")
    # A new process has another hash seed.
    command = [sys.executable, str(RANKS), str(tmp_path / "first"), "1", *options, "SEED", "3"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | root)
    runs = [
        preloaded.start(RANKS, tmp_path / name, "1", *options, "SEED", seed, **root)
        for name, seed in (("second", "3"), ("other", "4"))
    ]
    assert [run.finish().returncode for run in runs] == [0, 0] and first.wait(timeout=300) == 0
    first, second, other = (torch.load(tmp_path / name / "model_final.pth", weights_only=True) for name in names)
    assert first["model"].keys() == second["model"].keys()
    assert all(torch.equal(tensor, second["model"][name]) for name, tensor in first["model"].items())
    assert not all(torch.equal(tensor, other["model"][name]) for name, tensor in first["model"].items())
