"""Tracing: the module to export, which maps images to features on the CPU, and its program of torch.export."""

import contextlib
import copy
import logging
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fastamp.amp import PrecisionPolicy, force_fp32
from fastamp.amp.fp16_export import to_float16
from fastamp.feature_pass import extract_features
from fastamp.inference.export.preprocessing import Preprocessing
from fastamp.inference.export.quiet import ExportError, quiet
from fastamp.inference.parity import exported_size
from fastamp.inference.predictor import Predictor
from fastamp.modeling.meta_arch.image_model import ImageModel
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Module to export.

    Attributes:
        module: module in evaluation mode on the CPU.
        inputs: example inputs, a batch of two images.
        program: the module traced by torch.export, with a dynamic batch size.
        opset: ONNX opset; None (default) for PyTorch's choice.
        quantized: int8 model of the module (``Format.quantize``); None for other precisions.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    program: ExportedProgram
    opset: int | None = None
    quantized: Any = None

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each input, with -1 for the dynamic dimensions."""
        nodes = [node for node in self.program.graph.nodes if node.op == "placeholder" and node.name in self.inputs]
        return {node.name: [size if isinstance(size, int) else -1 for size in node.meta["val"].shape] for node in nodes}


class FeatureExtractor(nn.Module):
    """Module to export, which maps images to features on the CPU."""

    def __init__(
        self,
        predictor: Predictor,
        preprocessing: Preprocessing | None,
        *,
        in_float16: bool,
        normalization: bool,
        l2: bool,
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        if not isinstance(predictor.model, ImageModel):
            raise ExportError(
                f"cannot export a {type(predictor.model).__name__}: expected an ImageModel.\n"
                "  fix: derive the model class from fastamp.modeling.meta_arch.image_model.ImageModel"
            )
        self.model = _to_deploy_form(predictor.model)
        if not normalization:
            self.model.take_normalized_images()
        if in_float16:
            for part in self.model.children():  # keeps the model's pixel mean and standard deviation in float32
                to_float16(part)
        self.flip, self.l2 = predictor.cfg.TEST.FLIP.ENABLED, l2
        self.modality_column = predictor.inputs.modality_column or "modality"
        # Compute in the dtype of the weights, because autocast would be traced into the file.
        self.policy = PrecisionPolicy("cpu", torch.float32)

    def forward(
        self,
        images: Tensor,
        camids: Tensor | None = None,
        viewids: Tensor | None = None,
        modality: Tensor | None = None,
    ) -> Tensor:
        """Compute (B, D) float32 features."""
        if self.preprocessing is not None:
            images = self.preprocessing(images)
        batch = {"images": images, "camids": camids, "viewids": viewids, self.modality_column: modality}
        if viewids is not None and camids is None:
            batch["camids"] = viewids  # required by the model, but not used
        batch = {name: tensor for name, tensor in batch.items() if tensor is not None}
        features = extract_features(self.model, batch, self.policy, self.flip)
        return normalized(features) if self.l2 else features


@force_fp32
def normalized(features: Tensor) -> Tensor:
    """L2-normalize features (B, D)."""
    return F.normalize(features, dim=1)


@runtime_checkable
class DeployableModule(Protocol):
    """Module that computes the same function with fewer operations after training."""

    def switch_to_deploy(self) -> None:
        """Convert the module, in place."""


def _to_deploy_form(model: ImageModel) -> ImageModel:
    """Copy the model to the CPU and convert the copy to deploy form, in which the branches of blocks are fused."""
    model = copy.deepcopy(model).to("cpu").to(memory_format=torch.contiguous_format).eval().requires_grad_(False)
    for name in model.training_only:
        setattr(model, name, None)
    before = len(model.state_dict())
    for module in list(model.modules()):
        if isinstance(module, DeployableModule):
            with contextlib.suppress(ConfigError):  # no deploy form without batch norm
                module.switch_to_deploy()
    if len(model.state_dict()) != before:
        logger.info("fused the branches of each block into one convolution (MODEL.BACKBONE.DEPLOY)")
    return model


def trace(extractor: FeatureExtractor, predictor: Predictor, opset: int | None) -> Source:
    """Trace the module with a dynamic batch size."""
    cfg = predictor.cfg
    height, width = exported_size(cfg)
    # Two images, because torch.export specializes on a batch size of 1.
    inputs = {"images": torch.zeros(2, cfg.INPUT.CHANNELS, height, width)}
    inputs |= {name: torch.zeros(2, dtype=torch.int64) for name in label_inputs(predictor)}
    batch = Dim("batch", min=1, max=2**31 - 1)  # PyTorch 2.6 requires an upper bound
    dynamic = {name: {0: batch} for name in inputs}
    if extractor.preprocessing is not None:
        inputs["images"] = torch.zeros(2, height + 3, width + 5, cfg.INPUT.CHANNELS, dtype=torch.uint8)
        dynamic["images"] |= {1: Dim("height", min=1, max=2**16), 2: Dim("width", min=1, max=2**16)}
    with quiet("torch.export cannot trace the model"), torch.no_grad():
        program = torch.export.export(extractor, (), inputs, dynamic_shapes=dynamic, strict=False)
    return Source(extractor, inputs, program, opset)


def label_inputs(predictor: Predictor) -> dict[str, str]:
    """Return the inputs of the exported model in addition to the images, with their names in a batch."""
    inputs = {name: name for name in predictor.inputs.counts}
    if predictor.inputs.required_modality:
        inputs["modality"] = predictor.inputs.required_modality
    return inputs
