"""Messages of fastamp/amp: devices, precision policies, loss scaling, and checks of losses and optimizers."""

import copy
from types import SimpleNamespace

import pytest
import torch
from loops import Net, make_batch, make_net, make_trainer, sgd, spoil
from messages import Recorder
from tiny import tiny_config
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.amp.checks import (
    check_communication,
    check_finite,
    check_losses,
    check_optimizers,
    warn_of_foreign_leaves,
)
from fastamp.amp.fp32 import apply_force_fp32
from fastamp.amp.policy import resolve_device

SITES = ["fastamp/amp"]


class _Float32Layer(nn.Linear):
    """Linear layer that disables autocast."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    devices(record)
    policies(record)
    optimizers(record)
    losses(record)
    steps(record)
    out_of_memory(record)


def devices(record):
    """Trigger the messages about MODEL.DEVICE."""
    for name in ("gpu", "xla", "cuda", "mps"):
        with record(f"MODEL.DEVICE {name}"):
            resolve_device(name)
    with record("MODEL.DEVICE cuda:7 with 2 devices"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        resolve_device("cuda:7")


def policies(record):
    """Trigger the messages about SOLVER.AMP."""
    with record("SOLVER.AMP on, without native bfloat16"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.amp.policy.native_bfloat16", lambda device: (False, "this CPU has no native bfloat16"))
        PrecisionPolicy.from_config(tiny_config(record.root, "SOLVER.AMP", "on"), torch.device("cpu"))
    with record("SOLVER.AMP bf16, without native bfloat16"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.amp.policy.native_bfloat16", lambda device: (False, "this CPU has no native bfloat16"))
        PrecisionPolicy.from_config(tiny_config(record.root, "SOLVER.AMP", "bf16"), torch.device("cpu"))
    for opts in (
        ("SOLVER.AMP", "bf16"),
        ("SOLVER.AMP", "fp16"),
        ("SOLVER.AMP", "fp16", "SOLVER.AMP.INIT_SCALE", "1e30"),
        ("SOLVER.AMP", "on"),
    ):
        with record(" ".join(opts)):
            cfg = tiny_config(record.root, *opts)
            policy = PrecisionPolicy.from_config(cfg, torch.device("cpu"))
            LossScaler.from_config(cfg, policy)
    for found in (RuntimeError("not implemented for 'Half'"), None):
        with record(f"SOLVER.AMP fp16, a product {found or 'is infinite'}"), pytest.MonkeyPatch.context() as patch:

            def product(*_, found=found):
                if found:
                    raise found
                return torch.tensor(float("inf"))

            patch.setattr(torch.Tensor, "__matmul__", product)
            PrecisionPolicy.from_config(tiny_config(record.root, "SOLVER.AMP", "fp16"), torch.device("cpu"))
    bf16 = PrecisionPolicy("cpu", torch.bfloat16, "test")
    model = nn.Sequential(nn.Linear(4, 4), _Float32Layer())
    with record("a child module that disables autocast"), bf16.checked_autocast(model):
        model(torch.ones(2, 4))
    with record("a forward pass without low precision"), bf16.checked_autocast():
        torch.ones(3).exp()
    with record("model.half()"):
        bf16.check_model(nn.Linear(2, 2).half())
    with record("a policy of another device"):
        PrecisionPolicy("cuda", torch.bfloat16, "test").check_model(nn.Linear(2, 2))
    with record("SOLVER.AMP.FORCE_FP32 ['secnd']"):
        apply_force_fp32(nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)}), ["secnd"])
    with record("evaluating in another precision"):
        bf16.compare({"dtype": "float16", "reason": "x"}, "the checkpoint was trained")


def optimizers(record):
    """Check optimizers without the model's parameters, and models with non-finite buffers."""
    model = make_net()
    with record("the optimizer of a copy"):
        check_optimizers(model, [sgd(copy.deepcopy(model))])
    with record("a head that was replaced"):
        optimizer = sgd(model)
        model.head = nn.Linear(16, 4)
        check_optimizers(model, [optimizer])
    with record("a head without an optimizer"):
        check_optimizers(model, [torch.optim.SGD(model.body.parameters(), lr=0.1)])
    with record("NaN in a buffer"):
        model = make_net(normalize=True)
        model.body[1].running_mean[0] = float("nan")
        check_finite(model)
    with record("gradients sent in float16"):
        parallel = SimpleNamespace(modules=lambda: [SimpleNamespace(_comm_hooks=[(fp16_compress_hook, None)])])
        check_communication(parallel, scaled=True)


def fp16_compress_hook():
    """Replace PyTorch's hook of the same name."""


class Weighted(Net):
    """Network with a modified loss."""

    def __init__(self, change, **options):
        super().__init__(**options)
        self.change = change

    def losses(self, logits, batch):
        return self.change(super().losses(logits, batch))


def losses(record):
    """Train with invalid losses and with frozen modules."""
    changes = {
        "a tensor": lambda found: found["loss_cls"],
        "no loss": lambda found: {},
        "a loss of each image": lambda found: {"loss_cls": found["loss_cls"] * torch.ones(8)},
        "a number": lambda found: {"loss_cls": 1.0},
        "a loss in float16": lambda found: {"loss_cls": found["loss_cls"].half()},
        "a detached loss": lambda found: {"loss_cls": found["loss_cls"].detach()},
        "a loss in a new tensor": lambda found: {"loss_cls": torch.tensor(1.0, requires_grad=True)},
    }
    for title, change in changes.items():
        with record(f"a model that returns {title}"):
            model = make_net(Weighted, change=change)
            make_trainer(model, [sgd(model)], [make_batch()], torch.float32).train(0, 1, 1)
    with record("a loss of frozen layers only"):
        check_losses({"loss_cls": torch.tensor(1.0)}, frozen=["body"])
    with record("a loss with a tensor that is not a parameter"):
        model, tensor = make_net(), torch.ones(3, requires_grad=True)
        warn_of_foreign_leaves({"loss_cls": model(make_batch())["loss_cls"] * tensor.sum()}, model)
    with record("a part that is frozen without MODEL.FREEZE_LAYERS"):
        model = make_net()
        model.body.requires_grad_(False)
        make_trainer(model, [sgd(model)], [make_batch()] * 3, torch.float32).train(0, 1, 3)
    with record("a part without gradients"):
        model = make_net(Weighted, change=lambda found: {"loss_cls": found["loss_cls"] + 0 * model.spare(batch).sum()})
        model.spare, batch = nn.Linear(3, 3), torch.ones(1, 3)
        make_trainer(model, [sgd(model)], [make_batch()] * 20, torch.float32).train(0, 1, 20)
    with record("every layer frozen"):
        model = make_net()
        optimizer = sgd(model)
        model.requires_grad_(False)
        make_trainer(model, [optimizer], [make_batch()], torch.float32).train(0, 1, 1)


def steps(record):
    """Run optimizer steps that are skipped, change nothing or are called in the wrong order."""
    for title, lr, change in (
        ("a tiny learning rate", 1e-12, lambda found: found),
        ("learning rate 0", 0.0, lambda found: found),
        ("a loss weight of 0", 0.1, lambda found: {"loss_cls": found["loss_cls"] * 0}),
    ):
        with record(title):
            model = make_net(Weighted, change=change)
            make_trainer(model, [sgd(model, lr=lr)], [make_batch()] * 10, torch.float32).train(0, 1, 10)
    for dtype in (torch.float16, torch.float32):
        with record(f"{dtype}: infinite images in every batch"):
            model = make_net()
            make_trainer(model, [sgd(model)], [spoil(make_batch())] * 40, dtype).train(0, 1, 40)
    model = make_net()
    step = OptimizationStep(model, [sgd(model)])
    with record("unscale() before backward()"):
        step.unscale()
    with record("gradients that were cleared"):
        step.scale(model(make_batch())).backward()
        model.zero_grad(set_to_none=True)
        step.unscale()
    with record("begin()"):
        step.begin()
    with record("backward()"):
        step.backward(model(make_batch()))

    class Old(OptimizationStep):
        def begin(self):
            pass

    with record("a step that overrides begin()"):
        Old(model, [sgd(model)]).check_overrides()
    scaled = OptimizationStep(model, [sgd(model)], scaler=LossScaler())
    with record("resume with loss scaling, from a checkpoint without"):
        scaled.load_state_dict(step.state_dict())
    with record("resume without loss scaling, from a checkpoint with"):
        step.load_state_dict(OptimizationStep(model, [sgd(model)], scaler=LossScaler()).state_dict())


def out_of_memory(record):
    """Raise device errors, to which the trainer adds an explanation."""

    class Failing(Net):
        def forward(self, batch):
            raise self.error

    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("not deterministic because it uses CuBLAS ... CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    ):
        with record(f"{type(error).__name__}: {error}"):
            model = make_net(Failing)
            model.error = error
            make_trainer(model, [sgd(model)], [make_batch()], torch.float32).train(0, 1, 1)
