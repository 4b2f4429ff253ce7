"""Check whether a precision holds a model, against float32, on one batch: layers, training, evaluation."""

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
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "SOUND_COSINE": "fastamp.diagnostics.precision_check.DOCTOR_MIN_COSINE",
        "FAILING_COSINE": "fastamp.diagnostics.precision_check.PREFLIGHT_MIN_COSINE",
    },
)

PREFLIGHT_MIN_COSINE = 0.9
"""A mean cosine between a trained model's embeddings in the two precisions below this is a failure: ranking would be
another one."""

DOCTOR_MIN_COSINE = 0.99
"""A trained model whose mean embedding cosine to float32 is below this gets more layers forced to float32."""

_CHECKED_IMAGES = 16
"""Images on which layers are checked one by one; the training pass that is repeated has all."""

_LARGEST_REPEAT = 0.1
"""Relative L2 difference between the gradients of two passes in low precision from the same state above this is a
failure. Sums in another order, as CUDA's atomics have them, stay far below."""


@dataclass(frozen=True)
class Float32Check:
    """What a model does with a batch in float32, the reference for low precision.

    Attributes:
        problem: why it is broken in float32 already; empty if it is not.
        location: where the first value that is not finite was made, if there was one.
        losses: loss name -> value.
        unreached: trainable parameters that no loss reaches.
        features: (B, D) what it returns in evaluation mode.
        images: on how many images of the batch it was run.
    """

    problem: str
    location: NonFiniteLocation | None
    losses: dict[str, float]
    unreached: list[str]
    features: torch.Tensor
    images: int


@dataclass
class PrecisionCheck:
    """Whether a precision holds a model on one batch; each text is empty where that finding is not there.

    Attributes:
        layers: layers that differ from themselves, or from float32 by more than rounding explains.
        unrepeatable: two training passes from the same state have different gradients.
        overflow: losses, gradients (at any loss scale) or features are not finite.
        location: where the first of these was made; None where it was not found.
        imprecise: embeddings are too far from float32's; never those of an untrained model, see
            ``IsolatedPasses.untrained``, unless they vanish.
        losses: loss name -> value.
        loss_scale: the largest power of two up to the scaler's with finite gradients; None without loss scaling.
        cosine: (mean, lowest) cosine between the embeddings and float32's; None where they are not compared.
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
        """Whether a kernel of the device or of PyTorch is wrong."""
        return bool(self.layers or self.unrepeatable)

    @property
    def problem(self) -> str:
        """The first finding in the order of cause and effect, with its cause and fix; empty if the precision holds."""
        return self._wrong_layers() or self.unrepeatable or self.overflow or self.imprecise

    def _wrong_layers(self) -> str:
        if not self.layers:
            return ""
        others = [error.name for error in self.layers[1:]]
        more = f"\n  too:   {', '.join(others[:5])}" + (", ..." if len(others) > 5 else "") if others else ""
        return self.layers[0].describe() + more


def check_float32(
    model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy, *, frozen: tuple[str, ...] = ()
) -> Float32Check:
    """Run a batch in float32.

    Args:
        model: in training mode.
        batch: if ``policy`` is a low precision, a batch that fits into memory in that one alone is cut in half until it
            fits in float32 too.
        policy: the precision to be checked.
        frozen: modules that are frozen on purpose.

    Raises:
        TrainingError: the losses could train nothing; memory ran out; the model raised an error.
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
            f"in evaluation mode the model returned a {type(features).__name__}, not a tensor of (B, D) "
            "features.\n  fix: return the features when self.training is False"
        )
    unreached = [name for name, p in model.named_parameters() if p.requires_grad and name not in trained.gradients]
    trained.gradients.clear()  # frees their memory, which a search needs
    problem, location = "", None
    if not (trained.finite and all_finite(features)):
        find = locate_in_evaluation if trained.finite else locate_in_training
        location, note = try_locate(model, slice_batch(batch, count), lambda each: find(each, float32), frozen=frozen)
        found = "the features in evaluation are not finite" if trained.finite else _not_finite(trained)
        problem = (
            "on the first training batch the model is broken in float32 already: an error of the model or of the data, "
            f"not of mixed precision.\n  found: {found}\n{_place(location, note)}"
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
    """Check a low precision on one batch, in training and in evaluation.

    Each layer must return the same values again for the same input, and those of float32 up to rounding (see
    ``check_layers``). Losses must be finite, and gradients at some loss scale; a second training pass must have the
    same gradients. Embeddings must be finite, and point where float32's do.

    Args:
        model, frozen: as for ``reference``.
        batch: training runs on all of it, evaluation on what ``reference`` was run on.
        policy: the precision of training; nothing is checked if it is float32.
        reference: what ``check_float32`` returned, without a problem.
        eval_policy: the precision of evaluation; None is the same.
        scaler: the loss scaling; it is not changed. None checks at a loss scale of 1.
        min_cosine: of a trained model's embeddings to float32's, their mean.
        checked_images: images of the batch on which layers are compared.
        first_problem_only: end with the first finding; the passes behind it are not run.

    Raises:
        TrainingError: nothing computes in low precision; memory ran out; the model raised an error.
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
    """Note the losses, the largest loss scale with finite gradients, and whether a second pass has the same."""
    scale = scaler.scale if scaler else 1.0
    precision = dtype_name(policy.dtype)

    def run(passes: IsolatedPasses) -> tuple[TrainPass, float | None]:
        low = passes.train(policy, scale=scale, checked=True)
        if low.finite:
            check.unrepeatable = _not_repeatable(passes, policy, scale, low)
        low.gradients.clear()  # frees their memory
        found = scale if low.finite else None
        if scaler and not low.finite and not low.bad_losses:
            found = largest_finite_scale(passes, policy, scale)
        return low, found

    (low, found), _ = run_passes(model, batch, run, precision=precision, frozen=frozen)
    check.losses = low.losses
    if low.finite or (found is not None and found >= scaler.min_scale):
        check.loss_scale = found if scaler else None
        return
    check.location, note = try_locate(
        model, batch, lambda each: locate_in_training(each, policy, scale=scale), frozen=frozen
    )
    whatever = ", whatever the loss scale from SOLVER.AMP.MIN_SCALE on" if scaler and not low.bad_losses else ""
    check.overflow = f"in {precision} {_not_finite(low)}{whatever}; in float32 all are.\n{_place(check.location, note)}"


def _check_embeddings(
    check: PrecisionCheck,
    model: nn.Module,
    batch: dict[str, Any],
    policy: PrecisionPolicy,
    features: torch.Tensor,
    frozen: tuple[str, ...],
    min_cosine: float,
) -> None:
    """Note how far the embeddings under the evaluation's policy are from float32's."""
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
        check.location, note = try_locate(model, batch, lambda each: find(each, policy), frozen=frozen)
        check.overflow = (
            f"in evaluation the model's features are not finite in {name}; in float32 they are.\n"
            f"{_place(check.location, note)}\n"
            "  or:    SOLVER.AMP.EVAL_DTYPE float32, to evaluate in float32"
        )
    elif low.dim() == 2:
        cosine = embedding_cosine(low, features)
        check.cosine = (float(cosine.mean()), float(cosine.min()))
        vanished = bool((~low.any(dim=1) & features.any(dim=1)).any())
        if vanished or (check.cosine[0] < min_cosine and not untrained):
            found = "some are all zero" if vanished else f"mean cosine {check.cosine[0]:.3f}, below {min_cosine}"
            check.imprecise = (
                f"the embeddings in {name} are others than float32's: {found}.\n"
                "  cause: some layers lose too much precision."
            )


def _not_repeatable(passes: IsolatedPasses, policy: PrecisionPolicy, scale: float, first: TrainPass) -> str:
    """Return what is wrong where a second training pass from the same state has other gradients; empty if nothing.

    A model whose float32 passes differ as well draws other random numbers each time, e.g. with a seed from the clock.
    """
    difference, name = _difference(first, passes.train(policy, scale=scale))
    if difference <= _LARGEST_REPEAT:
        return ""
    first.gradients.clear()  # frees their memory
    repeats = [passes.train(policy.in_float32()) for _ in range(2)]
    if _difference(*repeats)[0] > _LARGEST_REPEAT:
        return ""
    dtype = dtype_name(policy.dtype)
    return (
        f"two training passes in {dtype} from the same state have different gradients: relative difference "
        f"{difference:.2g}, most of it in {name}; in float32 they agree.\n"
        "  cause: a kernel of this device or PyTorch version returns different values from call to call.\n"
        f"  fix:   SOLVER.AMP.FORCE_FP32 \"['{name.rpartition('.')[0]}']\", or SOLVER.AMP off, or another version of "
        "PyTorch"
    )


def _difference(first: TrainPass, second: TrainPass) -> tuple[float, str]:
    """Return the relative L2 difference of all gradients together, and the parameter that differs most."""
    if not second.finite:
        return float("inf"), (second.bad_gradients or second.bad_losses)[0]
    names = [name for name in first.gradients if name in second.gradients]
    if not names:
        return 0.0, ""
    before, after = ([each.gradients[name] for name in names] for each in (first, second))
    changes = torch.stack(torch._foreach_norm(torch._foreach_sub(after, before))).double()
    sizes = torch.stack(torch._foreach_norm(before)).double()
    total = float(torch.linalg.vector_norm(sizes))
    return (float(torch.linalg.vector_norm(changes)) / total if total else 0.0), names[int(changes.argmax())]


def _not_finite(result: TrainPass) -> str:
    """Return which losses, or else which gradients, are not finite."""
    names = result.bad_losses or result.bad_gradients
    what = "losses" if result.bad_losses else "gradients"
    total = len(result.losses) if result.bad_losses else result.reached
    return f"{len(names)} of {total} {what} are not finite, e.g. {', '.join(names[:3])}"


def _place(location: NonFiniteLocation | None, note: str) -> str:
    return location.describe() if location else note
