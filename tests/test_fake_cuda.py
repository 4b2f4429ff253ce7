"""Tests of CUDA code paths on fake tensors: all tensors are on the device, and each step reads it only once.

The tests that train or transform images also run on a CUDA device, with the mark cuda.
"""

import itertools

import every_backbone
import numpy as np
import pml_components
import pytest
import tiny
import torch
from benchmark.device_waits import count_device_waits
from fake_cuda import DEVICE, HostOperand, fake_cuda, to_fake_cuda
from pml_components import pml_options
from torch import nn

from fastamp.amp import LossScaler, PrecisionPolicy
from fastamp.data.transforms import TRANSFORM_REGISTRY, Augmentation, BatchTransform, build_transforms
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.engine import SimpleTrainer
from fastamp.engine.hooks import EMA
from fastamp.evaluation import ReidEvaluator, inference_on_dataset
from fastamp.evaluation.precise_bn import update_bn_statistics
from fastamp.evaluation.trials import count_nearer_identities, select_block
from fastamp.layers.classifier import CLS_LAYER_REGISTRY
from fastamp.layers.norm import NORM_REGISTRY
from fastamp.layers.pooling import POOL_LAYER_REGISTRY
from fastamp.modeling import HEADS_REGISTRY, LOSS_REGISTRY, META_ARCH_REGISTRY, build_model
from fastamp.modeling.losses import build_losses
from fastamp.modeling.losses.build import feature_dim
from fastamp.solver import WeightAverage, build_gradient_clipping, build_optimizers

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9),
        reason="PyTorch 2.6 to 2.8 abort the process at operations on fake CUDA tensors",
    ),
]

IMAGES, CLASSES, STEPS = 8, 4, 3
LOW = [torch.float16, torch.bfloat16]


def make_batch(size=(64, 32)):
    return {
        "images": torch.randint(256, (IMAGES, 3, *size), dtype=torch.uint8),
        "targets": torch.arange(IMAGES) // 2,
        "camids": torch.arange(IMAGES) % 2,
        "viewids": torch.zeros(IMAGES, dtype=torch.int64),
        "img_paths": [f"{number}.jpg" for number in range(IMAGES)],
    }


class Batches:
    """Iterable over copies of one batch: ``count`` of them, or an unlimited number if it is None."""

    def __init__(self, size=(64, 32), count=None):
        self.batch, self.count = make_batch(size), count

    def __len__(self):
        return self.count

    def __iter__(self):
        while self.count is None:
            yield dict(self.batch)
        for _ in range(self.count):
            yield dict(self.batch)


def tiny_config(*opts):
    return tiny.tiny_config("unused", "MODEL.HEADS.NUM_CLASSES", str(CLASSES), *opts)


def make_trainer(cfg, model, dtype=torch.bfloat16, init_scale=65536.0, **options):
    policy, batches = PrecisionPolicy("cuda", dtype), Batches(tuple(cfg.INPUT.SIZE_TRAIN))
    batches.batch["images"] = batches.batch["images"].to(DEVICE)  # as the data loader does
    return SimpleTrainer(
        model,
        batches,
        list(build_optimizers(cfg, model).values()),
        policy=policy,
        scaler=LossScaler(init_scale=init_scale) if policy.needs_loss_scaling else None,
        clip=build_gradient_clipping(cfg),
        **options,
    )


def train(cfg, monkeypatch, dtype=torch.bfloat16, answer=lambda count: [1.0] * count, hooks=lambda model: ()):
    """Train on fake tensors, and return the trainer and the number of device reads."""
    model = build_model(cfg)
    with fake_cuda(monkeypatch, answer) as reads:
        trainer = make_trainer(cfg, to_fake_cuda(model), dtype)
        trainer.register_hooks(hooks(model))
        uploads = reads.uploads
        trainer.train(0, 1, STEPS)
        assert reads.uploads - uploads == STEPS  # the targets
        return trainer, reads.count


ON_DEVICE = [False, pytest.param(True, marks=pytest.mark.cuda)]


@pytest.fixture(params=ON_DEVICE, ids=["fake", "device"])
def check_reads(request, monkeypatch):
    """Function that trains, and checks that each step reads the device once: on fake tensors, or on a CUDA device."""

    def on_fake_tensors(cfg, dtype=torch.bfloat16, **options):
        trainer, reads = train(cfg, monkeypatch, dtype, **options)
        assert (trainer.steps_taken, reads) == (STEPS, STEPS)

    def on_device(cfg, dtype=torch.bfloat16, hooks=lambda model: ()):
        model = build_model(cfg).to(DEVICE)
        trainer = make_trainer(cfg, model, dtype, init_scale=64.0)
        trainer.register_hooks(hooks(model))
        trainer.train(0, 1, STEPS)  # some losses move their constants to the device once
        with count_device_waits() as waits:
            trainer.train(STEPS, 2, STEPS)
        assert (trainer.steps_taken, waits.count) == (2 * STEPS, STEPS), waits.messages

    return on_device if request.param else on_fake_tensors


# ---- the method itself


@pytest.mark.parametrize("dtype", LOW)
def test_autocast_sets_the_dtype_of_fake_cuda_tensors(dtype, monkeypatch):
    model = nn.Conv2d(3, 4, 3)
    with fake_cuda(monkeypatch):
        to_fake_cuda(model)
        images = torch.zeros(2, 3, 8, 8, device=DEVICE)
        with PrecisionPolicy("cuda", dtype).autocast():
            assert model(images).dtype == dtype
        assert model(images).dtype == torch.float32


class HostTensor(nn.Module):
    """Loss with a tensor on the CPU."""

    loss_name = "loss_host"

    def forward(self, outputs, targets):
        return (outputs["features"] * torch.ones(outputs["features"].shape)).sum()


class ReadingLoss(nn.Module):
    """Loss that reads its value from the device."""

    loss_name = "loss_read"

    def forward(self, outputs, targets):
        loss = outputs["features"].square().sum()
        return loss / max(loss.item(), 1.0)


class SelectingLoss(nn.Module):
    """Loss with value-dependent tensor shapes."""

    loss_name = "loss_selecting"

    def forward(self, outputs, targets):
        return outputs["features"][targets > 1].sum()


def test_fake_cuda_training_raises_if_a_loss_uses_a_cpu_tensor(monkeypatch):
    model = build_model(tiny_config())
    model.losses["loss_host"] = HostTensor()
    with fake_cuda(monkeypatch), pytest.raises(RuntimeError, match="cuda:0(,| and) cpu"):
        make_trainer(tiny_config(), to_fake_cuda(model)).train(0, 1, 1)


def test_fake_cuda_counts_device_reads_in_a_loss(monkeypatch):
    model = build_model(tiny_config())
    model.losses["loss_read"] = ReadingLoss()
    with fake_cuda(monkeypatch) as reads:
        make_trainer(tiny_config(), to_fake_cuda(model)).train(0, 1, STEPS)
        assert reads.count == 2 * STEPS


def test_fake_cuda_training_raises_if_a_loss_has_value_dependent_shapes(monkeypatch):
    model = build_model(tiny_config())
    model.losses["loss_selecting"] = SelectingLoss()
    with fake_cuda(monkeypatch), pytest.raises(Exception, match="nonzero"):
        make_trainer(tiny_config(), to_fake_cuda(model)).train(0, 1, 1)


def test_loss_on_fake_cuda_has_the_same_value_as_on_the_cpu(monkeypatch):
    outputs, targets = {"features": torch.randn(IMAGES, 16)}, torch.arange(IMAGES) // 2
    expected = SelectingLoss()(outputs, targets)
    with fake_cuda(monkeypatch, values=True) as reads:
        loss = SelectingLoss()({"features": outputs["features"].to(DEVICE)}, targets.to(DEVICE))
        assert loss.device == DEVICE and reads.count == 1  # for the number of selected elements
        assert loss.item() == expected.item() and reads.count == 2


# ---- training: one read of the device per step


def of_fastamp(registry):
    """List the components of a registry that are part of fastamp; other tests register their own."""
    return [name for name in registry if registry.get(name).__module__.startswith("fastamp.")]


# ClothesAdversarialLoss needs a dataset with a column of clothes.
LOSSES = [name for name in of_fastamp(LOSS_REGISTRY) if name != "ClothesAdversarialLoss"]
META_OPTIONS = {
    "MGN": "MODEL.BACKBONE.DEPTH 50x MODEL.BACKBONE.FEAT_DIM 2048 MODEL.HEADS.EMBEDDING_DIM 32 "
    "INPUT.SIZE_TRAIN (192,64) INPUT.SIZE_TEST (192,64)",
    "LightMBN": "MODEL.BACKBONE.NAME build_osnet_backbone MODEL.BACKBONE.DEPTH x0_25 MODEL.BACKBONE.FEAT_DIM 128 "
    "MODEL.HEADS.EMBEDDING_DIM 32",
    "MoCo": "MODEL.QUEUE_SIZE 64",
    "Distiller": "KD.EMA.ENABLED True",
}
# Name of a case -> name of a backbone ("" for the tiny one), and KEY VALUE pairs.
CASES = {name: (name, "MODEL.LOSSES.NAME ('CrossEntropyLoss','TripletLoss')") for name in every_backbone.BACKBONES}
CASES |= {name: ("", f"MODEL.LOSSES.NAME ('{name}',)") for name in LOSSES}
CASES |= {
    f"TRI {key}": ("", f"MODEL.LOSSES.TRI.{key}") for key in ("HARD_MINING False", "NORM_FEAT True", "MARGIN 0.0")
}
CASES |= {f"CE {key}": ("", f"MODEL.LOSSES.CE.{key}") for key in ("EPSILON 0.1", "ALPHA 0.2")}
CASES |= {name: ("", f"MODEL.HEADS.NAME {name} MODEL.HEADS.EMBEDDING_DIM 32") for name in of_fastamp(HEADS_REGISTRY)}
CASES |= {
    name: ("vit deit_small", f"MODEL.HEADS.NAME {name} MODEL.BACKBONE.PART_TOKENS {tokens}")
    for name, tokens in (("JPMHead", 0), ("PartTokenHead", 3))
}
CASES |= {name: ("", f"MODEL.HEADS.POOL_LAYER {name}") for name in POOL_LAYER_REGISTRY if name != "Flatten"}
CASES |= {"Identity": ("vit deit_small", "MODEL.HEADS.POOL_LAYER Identity")}
CASES |= {name: ("", f"MODEL.HEADS.CLS_LAYER {name} MODEL.HEADS.MARGIN 0.3") for name in CLS_LAYER_REGISTRY}
CASES |= {name: ("resnet 18x", f"MODEL.BACKBONE.NORM {name}") for name in NORM_REGISTRY}
CASES |= {
    name: ("resnet 18x", f"MODEL.META_ARCHITECTURE {name} {META_OPTIONS.get(name, '')}")
    for name in of_fastamp(META_ARCH_REGISTRY)
}
CLIPPING = "SOLVER.CLIP_GRADIENTS.ENABLED True SOLVER.CLIP_GRADIENTS.CLIP_TYPE"
CASES |= {
    f"{optimizer} {clip}": ("", f"SOLVER.OPT {optimizer} {CLIPPING} {clip}")
    for optimizer in ("SGD", "Adam", "AdamW", "Lamb")
    for clip in ("value", "norm", "global_norm")
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in CASES]
    + [(case, dtype) for case in LOSSES for dtype in (torch.float16, torch.float32)],
)
def test_training_with_each_component_reads_the_device_once_per_step(case, dtype, check_reads):
    backbone, options = CASES[case]
    if backbone.startswith("timm/"):
        pytest.importorskip("timm")
    opts = options.split()
    check_reads(every_backbone.config(backbone, *opts) if backbone else tiny_config(*opts), dtype)


@pytest.mark.parametrize("memory", ["none", "mean", "last"])
def test_training_with_a_clothes_classifier_reads_the_device_once_per_step(memory, monkeypatch):
    cfg = tiny_config("MODEL.LOSSES.NAME", "ClothesAdversarialLoss", "MODEL.LOSSES.CAL.MEMORY", memory)
    cfg.merge_from_list(["MODEL.LOSSES.CAL.START_EPOCH", "0"])
    cfg.DATASETS.NUM_CATEGORIES = {"clothes": CLASSES}
    model = build_model(cfg)
    with fake_cuda(monkeypatch, lambda count: [1.0] * count) as reads:
        trainer = make_trainer(cfg, to_fake_cuda(model))
        trainer.data_loader.batch["clothes"] = trainer.data_loader.batch["targets"]
        trainer.train(0, 1, STEPS)
        assert (trainer.steps_taken, reads.count) == (STEPS, STEPS)


PML = [(name, "") for name in pml_components.LOSSES] + [("TripletMarginLoss", name) for name in pml_components.MINERS]


@pytest.mark.parametrize(("loss", "miner"), PML)
def test_pml_losses_and_miners_train_on_fake_cuda_tensors(loss, miner, monkeypatch):
    cfg = tiny_config(*pml_options(loss, miner))
    model = build_model(cfg)
    with fake_cuda(monkeypatch, values=True) as reads:
        trainer = make_trainer(cfg, to_fake_cuda(model))
        trainer.train(0, 1, STEPS)
        # The package selects pairs by masks, which waits for the device.
        assert trainer.steps_taken == STEPS and reads.count >= STEPS


def count_host_operands(options, monkeypatch, *, values, positions):
    """Compute a loss repeatedly, each time with a host tensor as operand of another operation.

    Args:
        options: config options of the loss.
        values: see ``fake_cuda``.
        positions: function that selects the indices of the operations to change, given the number of operations.

    Returns:
        The number of changed operations, and the indices of those that neither failed nor copied the tensor.
    """
    cfg = tiny_config(*options)
    torch.manual_seed(0)
    with fake_cuda(monkeypatch, values=values) as reads:
        (loss,) = to_fake_cuda(build_losses(cfg)).values()
        outputs = {"features": torch.randn(IMAGES, feature_dim(cfg)), "cls_outputs": torch.randn(IMAGES, CLASSES)}
        outputs = {name: value.to(DEVICE).requires_grad_() for name, value in outputs.items()}
        targets = (torch.arange(IMAGES) // 2).to(DEVICE)

        def uploads_with(operand):
            before = reads.uploads
            with operand:
                loss(outputs, targets)
            return reads.uploads - before

        uploads_with(HostOperand())  # some losses move their constants to the device once
        usual, total = uploads_with(unchanged := HostOperand()), unchanged.count
        assert values or usual == 0
        missed = []
        for position in positions(total):
            try:
                if uploads_with(HostOperand(position)) <= usual:
                    missed.append(position)
            except RuntimeError as error:
                assert "device" in str(error) and "cpu" in str(error)
        return len(positions(total)), missed


@pytest.mark.parametrize("name", LOSSES)
def test_fake_cuda_detects_a_host_tensor_in_any_operation_of_a_loss(name, monkeypatch):
    count, missed = count_host_operands(
        ["MODEL.LOSSES.NAME", f"('{name}',)"], monkeypatch, values=False, positions=range
    )
    assert count > 1 and missed == []


@pytest.mark.parametrize(("loss", "miner"), PML)
def test_fake_cuda_detects_a_host_tensor_in_a_pml_loss(loss, miner, monkeypatch):
    options = pml_options(loss, miner)
    count, missed = count_host_operands(
        options, monkeypatch, values=True, positions=lambda total: sorted({0, total // 2, total - 1})
    )
    assert count > 1 and missed == []


def test_skipped_step_reads_the_device_again_to_name_non_finite_gradients(monkeypatch):
    reads = itertools.count()

    def answer(count):
        return [0.0, *[float("nan")] * (count - 1)] if next(reads) == 1 else [1.0] * count

    trainer, count = train(tiny_config(), monkeypatch, torch.float16, answer)
    assert (trainer.step.skipped_total, trainer.step.scaler.scale, count) == (1, 32768, STEPS + 1)


def test_ema_update_does_not_read_the_device(check_reads):
    check_reads(tiny_config(), hooks=lambda model: [EMA(WeightAverage(model, "ema"), 0.9)])


def test_preflight_keeps_all_tensors_on_the_device(monkeypatch, tmp_path):
    cfg = tiny_config("OUTPUT_DIR", str(tmp_path), "SOLVER.AMP.PREFLIGHT", "warn")
    model = build_model(cfg)
    with fake_cuda(monkeypatch):
        trainer = make_trainer(cfg, to_fake_cuda(model), precision_diagnostics=PrecisionDiagnostics.from_config(cfg))
        trainer.train(0, 1, 1)
        assert trainer.steps_taken == 1


# ---- around the step


def test_precise_batch_norm_does_not_read_the_device(monkeypatch):
    model = build_model(tiny_config())
    with fake_cuda(monkeypatch) as reads:
        to_fake_cuda(model).train()
        policy = PrecisionPolicy("cuda", torch.bfloat16)
        assert update_bn_statistics(model, Batches(count=2), 2, policy=policy) > 0
        assert reads.count == 0


@pytest.mark.parametrize("flip", [False, True])
def test_evaluation_reads_the_device_once_per_batch_and_once_at_the_end(flip, monkeypatch):
    cfg = tiny_config()
    model = build_model(cfg)
    evaluator = ReidEvaluator(cfg, num_query=IMAGES)
    monkeypatch.setattr(evaluator, "evaluate", dict)  # ranks on the host
    policy = PrecisionPolicy("cuda", torch.bfloat16)
    with fake_cuda(monkeypatch) as reads:
        inference_on_dataset(to_fake_cuda(model), Batches(count=3), evaluator, flip, policy=policy)
        assert reads.count == 3 + 1


def test_parts_of_a_gallery_on_fake_cuda_equal_those_on_the_cpu(monkeypatch):
    random = np.random.default_rng(0)
    distances = torch.from_numpy(random.integers(0, 4, (6, 20)).astype(np.float32))
    distances[0, 1:7] = torch.nan
    rows, columns = np.array([0, 2, 5]), np.sort(random.permutation(20)[:9])
    starts, own_identity = np.array([0, 4, 9, 15]), np.array([0, 3, 1, 2, -1, 0])
    part, counts = select_block(distances, rows, columns), count_nearer_identities(distances, starts, own_identity)
    with fake_cuda(monkeypatch, values=True) as reads:
        block = select_block(distances.to(DEVICE), rows, columns)
        assert block.device == DEVICE and reads.count == 0
        found = count_nearer_identities(distances.to(DEVICE), starts, own_identity)
        assert reads.count == 1
        assert block.cpu().nan_to_num(-1).tolist() == part.nan_to_num(-1).tolist()
    assert found[own_identity >= 0].tolist() == counts[own_identity >= 0].tolist()


def device_transforms(*names):
    """Build the transforms of the sections ``names``, applied to every image."""
    cfg = tiny_config(*[word for name in names for word in (f"INPUT.{name}.ENABLED", "True")])
    cfg.INPUT.CROP.SIZE = (64, 32)
    for name in names:
        if "PROB" in cfg.INPUT[name]:
            cfg.INPUT[name].PROB = 1.0
    return build_transforms(cfg, is_train=True).augment


@pytest.mark.parametrize("names", [*[(name,) for name in TRANSFORM_REGISTRY], tuple(TRANSFORM_REGISTRY)], ids="+".join)
def test_transforms_copy_random_parameters_to_the_device_once(names, monkeypatch):
    augment = device_transforms(*names)
    images = torch.zeros(IMAGES, 3, 64, 32, dtype=torch.uint8)
    parameters = augment.draw([0] * IMAGES, range(IMAGES), (64, 32))
    with fake_cuda(monkeypatch) as reads:
        images = images.to(DEVICE)
        uploads, blocking = reads.uploads, reads.blocking_uploads
        images = augment.apply(images, parameters)
        assert images.device == DEVICE and images.shape == (IMAGES, 3, 64, 32)
        assert (reads.uploads - uploads, reads.blocking_uploads - blocking) == (1, 0)
        assert (reads.count, reads.device_draws) == (0, 0)


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(TRANSFORM_REGISTRY))
def test_transforms_do_not_wait_for_the_device(name):
    augment = device_transforms(name)
    images = torch.randint(256, (IMAGES, 3, 64, 32), dtype=torch.uint8).to(DEVICE)
    parameters = augment.draw([0] * IMAGES, range(IMAGES), (64, 32))
    with count_device_waits() as waits:
        assert augment.apply(images, parameters).device == DEVICE
    assert waits.messages == []


class UploadingTransform(BatchTransform):
    """Transform that copies from pageable memory, indexes with host tensors, and draws on the device."""

    draws = 1

    def parameters(self, uniforms, size):
        return {"factor": torch.from_numpy(uniforms[:, 0])}

    def apply(self, images, parameters):
        images = images * parameters["factor"].to(images.device).view(-1, 1, 1, 1)
        return images[torch.arange(len(images))] + torch.rand_like(images)


def test_fake_cuda_counts_copies_and_device_draws_of_a_transform(monkeypatch):
    augment = Augmentation(transforms=[UploadingTransform()], seed=0)
    parameters = augment.draw([0] * IMAGES, range(IMAGES), (64, 32))
    with fake_cuda(monkeypatch) as reads:
        augment.apply(torch.zeros(IMAGES, 3, 64, 32, device=DEVICE), parameters)
        assert (reads.uploads, reads.blocking_uploads, reads.device_draws) == (3, 2, 1)
