"""Precision check: comparison of a low precision with float32 on one batch: layers, training and evaluation."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.amp.step import LossScaler
from fastamp.diagnostics.error_context import run_passes
from fastamp.diagnostics.isolated_passes import IsolatedPasses, TrainPass, slice_batch
from fastamp.diagnostics.layer_check import LayerError, check_layers
from fastamp.diagnostics.nan_location import NonFiniteLocation
from fastamp.diagnostics.nan_locator import largest_finite_scale, locate_in_evaluation, locate_in_training, try_locate
from fastamp.diagnostics.tensors import all_finite, embedding_cosine
from fastamp.utils.errors import TrainingError

PREFLIGHT_MIN_COSINE = 0.9
"""Smallest mean cosine between low-precision and float32 embeddings of a trained model that passes the pre-flight.
Below it the ranking changes."""

DOCTOR_MIN_COSINE = 0.99
"""Smallest mean embedding cosine of a trained model in the doctor, which below it forces more layers to float32."""

_CHECKED_IMAGES = 16
"""Number of images for the check of single layers; the repeated training pass uses the whole batch."""

_LARGEST_REPEAT = 0.1
"""Largest allowed relative L2 difference between the gradients of two passes from the same state. Differences from the
order of summation, e.g. of CUDA atomics, are far smaller."""


@dataclass(frozen=True)
class Float32Check:
    """Result of the passes in float32, the reference for low precision.

    Attributes:
        problem: message if the model fails in float32; else empty.
        location: first non-finite value, if there is one.
        losses: loss name -> value.
        unreached: names of trainable parameters without a gradient.
        features: (B, D), float32, output in evaluation mode.
        images: number of images of the batch that were used.
    """

    problem: str
    location: NonFiniteLocation | None
    losses: dict[str, float]
    unreached: list[str]
    features: torch.Tensor
    images: int


@dataclass
class PrecisionCheck:
    """Findings of the precision check on one batch. Messages are empty if nothing was found.

    Attributes:
        layers: layers that are not deterministic, or differ from float32 by more than rounding explains.
        unrepeatable: message if two training passes from the same state have different gradients.
        overflow: message if losses, gradients (at every loss scale) or features are not finite.
        location: first non-finite value; None if it was not located.
        imprecise: message if the embeddings differ too much from float32. For an untrained model (see
            ``IsolatedPasses.untrained``), only set if all embeddings are zero.
        losses: loss name -> value.
        loss_scale: largest power of two with finite gradients, at most the scale of the scaler; None without loss
            scaling.
        cosine: ``(mean, lowest)`` cosine similarity between embeddings in low precision and in float32; None if not
            compared.
    """

    layers: list[LayerError] = field(default_factory=list)
    unrepeatable: str = ""
    overflow: str = ""
    location: NonFiniteLocation | None = None
    imprecise: str = ""
    losses: dict[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    cosine: tuple[float, float] | None = None

    @property
    def kernel(self) -> bool:
        """True if layers or passes are not deterministic, or differ from float32 by more than rounding explains."""
        return bool(self.layers or self.unrepeatable)

    @property
    def problem(self) -> str:
        """First finding in the order layers, repeatability, overflow, embeddings; empty if the precision passes."""
        return self._wrong_layers() or self.unrepeatable or self.overflow or self.imprecise

    def _wrong_layers(self) -> str:
        if not self.layers:
            return ""
        others = [error.name for error in self.layers[1:]]
        more = f"\n  also:  {', '.join(others[:5])}" + (", ..." if len(others) > 5 else "") if others else ""
        return self.layers[0].describe() + more


def check_float32(
    model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy, *, frozen: tuple[str, ...] = ()
) -> Float32Check:
    """Run training and evaluation passes in float32.

    Args:
        model: model in training mode.
        batch: a training batch. If ``policy`` is a low precision, the batch is halved until it fits into memory in
            float32.
        policy: the precision to check later.
        frozen: names of frozen modules.

    Raises:
        TrainingError: if ``check_losses`` fails, memory runs out, or the model raises an exception.
    """
    float32 = policy.in_float32()

    def run(passes: IsolatedPasses) -> tuple[TrainPass, torch.Tensor]:
        return passes.train(float32), passes.evaluate(float32)

    halve_from = 8 if policy.enabled else None
    (trained, features), count = run_passes(
        model, batch, run, precision="float32", frozen=frozen, halve_from=halve_from
    )
    if not isinstance(features, torch.Tensor):
        raise TrainingError(
            f"in evaluation mode the model must return a tensor of (B, D) features, got {type(features).__name__}.\n"
            "  fix: return the features if self.training is False"
        )
    unreached = [name for name, p in model.named_parameters() if p.requires_grad and name not in trained.gradients]
    trained.gradients.clear()  # frees memory for the NaN locator
    problem, location = "", None
    if not (trained.finite and all_finite(features)):
        find = locate_in_evaluation if trained.finite else locate_in_training
        location, note = try_locate(model, slice_batch(batch, count), lambda copy: find(copy, float32), frozen=frozen)
        cause = "the features in evaluation are not finite" if trained.finite else _not_finite(trained)
        problem = (
            "the model fails on the first training batch in float32: an error in the model or the data, not in mixed "
            f"precision.\n  found: {cause}\n{_describe_location(location, note)}"
        )
    return Float32Check(problem, location, trained.losses, unreached, features, count)


def check_precision(
    model: nn.Module,
    batch: dict[str, Any],
    policy: PrecisionPolicy,
    *,
    reference: Float32Check,
    eval_policy: PrecisionPolicy | None = None,
    scaler: LossScaler | None = None,
    frozen: tuple[str, ...] = (),
    min_cosine: float = PREFLIGHT_MIN_COSINE,
    checked_images: int = _CHECKED_IMAGES,
    first_problem_only: bool = False,
) -> PrecisionCheck:
    """Check a low precision on one batch, in training and evaluation.

    Layers must be deterministic and match float32 up to rounding (see ``check_layers``). Losses must be finite, and
    gradients must be finite at some loss scale. A second training pass must produce the same gradients. Embeddings must
    be finite and have a high cosine similarity with float32.

    Args:
        model, frozen: as in ``check_float32``.
        batch: training uses the whole batch, evaluation the first ``reference.images`` images.
        policy: precision of training. Float32 always passes and is not checked.
        reference: result of ``check_float32``, without a problem.
        eval_policy: precision of evaluation. Default: ``policy``.
        scaler: loss scaler, which is not changed. None (default) checks with a loss scale of 1.
        min_cosine: smallest mean cosine with float32 for embeddings of a trained model. Default 0.9.
        checked_images: number of images for the check of single layers. Default 16.
        first_problem_only: stop after the first finding. Default False.

    Raises:
        TrainingError: if no operation computes in low precision, memory runs out, or the model raises an exception.
    """
    check = PrecisionCheck()
    if not policy.enabled:
        return check
    part = slice_batch(batch, reference.images)
    (check.layers, _), _ = run_passes(
        model,
        slice_batch(part, min(reference.images, checked_images)),
        lambda passes: check_layers(passes, policy),
        precision=dtype_name(policy.dtype),
        frozen=frozen,
        halve_from=2,
    )
    if check.layers and first_problem_only:
        return check
    _check_training(check, model, batch, policy, scaler, frozen)
    if check.overflow or (check.problem and first_problem_only):
        return check
    eval_policy = eval_policy or policy
    if eval_policy.enabled:
        _check_embeddings(check, model, part, eval_policy, reference.features, frozen, min_cosine)
    return check


def _check_training(
    check: PrecisionCheck,
    model: nn.Module,
    batch: dict[str, Any],
    policy: PrecisionPolicy,
    scaler: LossScaler | None,
    frozen: tuple[str, ...],
) -> None:
    """Check losses, gradients and their repeatability; store the findings in ``check``."""
    scale = scaler.scale if scaler else 1.0
    precision = dtype_name(policy.dtype)

    def run(passes: IsolatedPasses) -> tuple[TrainPass, float | None]:
        low = passes.train(policy, scale=scale, checked=True)
        if low.finite:
            check.unrepeatable = _not_repeatable(passes, policy, scale, low)
        low.gradients.clear()  # frees memory
        finite_scale = scale if low.finite else None
        if scaler and not low.finite and not low.bad_losses:
            finite_scale = largest_finite_scale(passes, policy, scale)
        return low, finite_scale

    (low, finite_scale), _ = run_passes(model, batch, run, precision=precision, frozen=frozen)
    check.losses = low.losses
    if low.finite or (scaler and finite_scale is not None and finite_scale >= scaler.min_scale):
        check.loss_scale = finite_scale if scaler else None
        return
    check.location, note = try_locate(
        model, batch, lambda candidate: locate_in_training(candidate, policy, scale=scale), frozen=frozen
    )
    all_scales = " at every loss scale down to SOLVER.AMP.MIN_SCALE" if scaler and not low.bad_losses else ""
    check.overflow = (
        f"{_not_finite(low, f' in {precision}{all_scales}')}; all are finite in float32.\n"
        f"{_describe_location(check.location, note)}"
    )


def _check_embeddings(
    check: PrecisionCheck,
    model: nn.Module,
    batch: dict[str, Any],
    policy: PrecisionPolicy,
    features: torch.Tensor,
    frozen: tuple[str, ...],
    min_cosine: float,
) -> None:
    """Compare the embeddings with those in float32; store the findings in ``check``."""
    name = dtype_name(policy.dtype)
    (low, untrained), _ = run_passes(
        model,
        batch,
        lambda passes: (passes.evaluate(policy), passes.untrained),
        precision=name,
        frozen=frozen,
    )
    if not all_finite(low):
        find = locate_in_evaluation
        check.location, note = try_locate(model, batch, lambda candidate: find(candidate, policy), frozen=frozen)
        check.overflow = (
            f"in evaluation the features are not finite in {name}, but finite in float32.\n"
            f"{_describe_location(check.location, note)}\n"
            "  or:    set SOLVER.AMP.EVAL_DTYPE to float32 to evaluate in float32"
        )
    elif low.dim() == 2:
        cosine = embedding_cosine(low, features)
        check.cosine = (float(cosine.mean()), float(cosine.min()))
        vanished = bool((~low.any(dim=1) & features.any(dim=1)).any())
        if vanished or (check.cosine[0] < min_cosine and not untrained):
            cause = (
                "some embeddings are all zero"
                if vanished
                else f"mean cosine {check.cosine[0]:.3f}, expected at least {min_cosine}"
            )
            check.imprecise = (
                f"{name} embeddings differ from float32: {cause}.\n  cause: some layers lose too much precision."
            )


def _not_repeatable(passes: IsolatedPasses, policy: PrecisionPolicy, scale: float, first: TrainPass) -> str:
    """Describe the difference between the gradients of two training passes from the same state; empty if they agree.

    A model whose gradients differ in float32 too is not reported, because such a model draws new random numbers in each
    pass, e.g. with a seed from the clock.
    """
    difference, name = _difference(first, passes.train(policy, scale=scale))
    if difference <= _LARGEST_REPEAT:
        return ""
    first.gradients.clear()  # frees memory
    repeats = [passes.train(policy.in_float32()) for _ in range(2)]
    if _difference(*repeats)[0] > _LARGEST_REPEAT:
        return ""
    dtype = dtype_name(policy.dtype)
    return (
        f"two training passes in {dtype} from the same state have different gradients: relative difference "
        f"{difference:.2g}, most of it in {name}; in float32 they agree.\n"
        "  cause: a kernel of this device or PyTorch version is not deterministic.\n"
        f"  fix:   set SOLVER.AMP.FORCE_FP32 \"['{name.rpartition('.')[0]}']\" or SOLVER.AMP False, or use another "
        "version of PyTorch"
    )


def _difference(first: TrainPass, second: TrainPass) -> tuple[float, str]:
    """Return ``(difference, name)``: relative L2 difference of all gradients, and the parameter that differs most."""
    if not second.finite:
        return float("inf"), (second.bad_gradients or second.bad_losses)[0]
    names = [name for name in first.gradients if name in second.gradients]
    if not names:
        return 0.0, ""
    before, after = ([passes.gradients[name] for name in names] for passes in (first, second))
    changes = torch.stack(torch._foreach_norm(torch._foreach_sub(after, before))).double()
    sizes = torch.stack(torch._foreach_norm(before)).double()
    total = float(torch.linalg.vector_norm(sizes))
    return (float(torch.linalg.vector_norm(changes)) / total if total else 0.0), names[int(changes.argmax())]


def _not_finite(result: TrainPass, where: str = "") -> str:
    """Describe the non-finite losses; if all losses are finite, describe the non-finite gradients."""
    names = result.bad_losses or result.bad_gradients
    kind = "losses" if result.bad_losses else "gradients"
    total = len(result.losses) if result.bad_losses else result.reached
    return f"{len(names)} of {total} {kind} are not finite{where}, e.g. {', '.join(names[:3])}"


def _describe_location(location: NonFiniteLocation | None, note: str) -> str:
    return location.describe() if location else note
