"""A trial of the first batch before the first step: is the model sound in float32, and does the precision hold it?"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.amp.refusal import IN_TRAINING, first_line, is_out_of_memory, refusal, shapes_of
from fastamp.amp.step import LossScaler
from fastamp.diagnostics.layer_check import check_layers, embedding_cosine
from fastamp.diagnostics.locate import Location, all_finite, largest_finite_scale, locate, locate_in_evaluation, search
from fastamp.diagnostics.rehearsal import Rehearsal, TrainPass, apart, batch_size, part_of
from fastamp.utils import comm
from fastamp.utils.compiled import uncompiled
from fastamp.utils.errors import TrainingError, UserError

LOWEST_COSINE = 0.9
"""A mean cosine between a trained model's embeddings in the two precisions below this is a failure: ranking would be
another one."""

_CHECKED_IMAGES = 16
"""Images on which layers are checked one by one; the training pass that is repeated has all."""

_LARGEST_REPEAT = 0.1
"""Relative L2 difference between the gradients of two passes in low precision from the same state above this is a
failure. Sums in another order, as CUDA's atomics have them, stay far below."""


@dataclass
class PreflightReport:
    """What the trial of one batch has shown.

    Attributes:
        policy: the precision that was tried.
        problem: why the run should not begin; empty when it can.
        in_float32: whether the problem is one of float32 too, so that the precision is not to blame.
        location: where the first value that is not finite was made, if there was one.
        losses: loss name -> (value in float32, value under the policy).
        loss_scale: the largest one up to the first with finite gradients; None without loss scaling.
        cosine: (mean, lowest) cosine between the embeddings under the policy and in float32; None when not compared.
        unreached: trainable parameters that no loss reaches.
        images: how many were compared with float32, and how many the batch has.
        kernel: whether the problem is a layer or a pass that differs from itself, or from float32 on the same input,
            by more than rounding explains.
    """

    policy: PrecisionPolicy
    problem: str = ""
    in_float32: bool = False
    location: Location | None = None
    losses: dict[str, tuple[float, float]] = field(default_factory=dict)
    loss_scale: float | None = None
    cosine: tuple[float, float] | None = None
    unreached: list[str] = field(default_factory=list)
    images: tuple[int, int] = (0, 0)
    kernel: bool = False

    def describe(self) -> str:
        """Return a line or a few for the log."""
        parts = [f"{name} {low:.4g} (float32 {reference:.4g})" for name, (reference, low) in self.losses.items()]
        if not self.policy.enabled or self.in_float32:
            parts = [f"{name} {reference:.4g}" for name, (reference, _) in self.losses.items()]
        if self.loss_scale is not None:
            parts.append(f"loss scale {self.loss_scale:g}")
        if self.cosine is not None:
            parts.append(f"embedding cosine to float32 {self.cosine[0]:.5f} (lowest {self.cosine[1]:.5f})")
        if self.images[0] != self.images[1]:
            parts.append(f"float32 on {self.images[0]} of {self.images[1]} images, for want of memory")
        verdict = "failed" if self.problem else "passed"
        name = "float32" if self.in_float32 else dtype_name(self.policy.dtype)
        text = f"pre-flight {verdict} in {name}: {', '.join(parts)}".removesuffix(": ")
        if self.unreached:
            text += f"\nno loss reaches {len(self.unreached)} trainable parameters: {', '.join(self.unreached[:5])}"
            text += ", ..." if len(self.unreached) > 5 else ""
        return text + (f"\n{self.problem}" if self.problem else "")


def preflight(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    policy: PrecisionPolicy,
    eval_policy: PrecisionPolicy | None = None,
    scaler: LossScaler | None = None,
    frozen: tuple[str, ...] = (),
) -> PreflightReport:
    """Try one batch: in float32 first, then under the policy; in training, then in evaluation.

    A model that fails in float32 is reported as that. Under the policy losses and gradients must be finite, the latter
    at some loss scale, and the embeddings must point where float32's do. Each layer must return the same values again
    for the same input, and those of float32 up to rounding, whether the model is trained or not (see
    ``check_layers``). Buffers, gradients, modes and random states are afterwards what they were, bit for bit.

    Args:
        model: in training mode, with what is frozen frozen.
        batch: a real one of the run.
        policy, eval_policy: the precision of training and that of evaluation; None is the same.
        scaler: the loss scaling of float16; nothing is changed in it.
        frozen: modules that are frozen on purpose.

    Raises:
        TrainingError: the losses could train nothing; memory ran out; the model raised an error in float32.
        UserError: the model's own.
    """
    error, report = None, PreflightReport(policy)
    try:
        with apart(model):
            _try_here(report, model, batch, eval_policy or policy, scaler, frozen)
    except UserError as raised:
        error = raised
    # Among several processes what one finds is everybody's.
    found = comm.first_text(str(error) if error else "")
    if found:
        raise error or TrainingError(found)
    order = report.location.order if report.location else 0
    report.problem = comm.first_text(report.problem, order)
    report.in_float32 = comm.any_rank(report.in_float32)
    report.kernel = comm.any_rank(report.kernel)
    if report.loss_scale is not None:
        report.loss_scale = -comm.largest(-report.loss_scale)
    return report


def _try_here(
    report: PreflightReport,
    model: nn.Module,
    batch: dict[str, Any],
    eval_policy: PrecisionPolicy,
    scaler: LossScaler | None,
    frozen: tuple[str, ...],
) -> None:
    """Fill in the report of this process's batch."""
    policy, size = report.policy, batch_size(batch)
    count, reference, features = _in_float32(model, batch, policy, frozen)
    report.images = (count, size)
    report.losses = {name: (value, value) for name, value in reference.losses.items()}
    report.unreached = [
        name for name, p in model.named_parameters() if p.requires_grad and name not in reference.gradients
    ]
    reference.gradients.clear()  # their memory is wanted
    part = part_of(batch, count)
    if not (reference.finite and all_finite(features)):
        report.in_float32 = True
        find = locate_in_evaluation if reference.finite else locate
        report.location, note = search(model, part, lambda each: find(each, policy.in_float32()), frozen=frozen)
        found = "the features in evaluation are not finite" if reference.finite else _not_finite(reference)
        report.problem = (
            "on the first training batch the model is broken in float32 already: an error of the model or of the data, "
            f"not of mixed precision.\n  found: {found}\n{_place(report.location, note)}"
        )
        return
    if policy.enabled:
        _check_layers(report, model, part_of(part, min(count, _CHECKED_IMAGES)), frozen)
    if policy.enabled and not report.problem:
        _try_training(report, model, batch, scaler, frozen)
    if eval_policy.enabled and not report.problem:
        _compare_embeddings(report, model, part, eval_policy, features, frozen)


def _place(location: Location | None, note: str) -> str:
    return location.describe() if location else note


def _in_float32(
    model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy, frozen: tuple[str, ...]
) -> tuple[int, TrainPass, Any]:
    """Return on how many images float32 was run, its training pass, and what it returned in evaluation.

    A batch that fits into memory in low precision alone is cut in half until it fits in float32 too.
    """
    count = batch_size(batch)
    while True:
        with Rehearsal(model, part_of(batch, count), frozen=frozen) as rehearsal, _Stage(model, "float32") as stage:
            try:
                reference = rehearsal.train(policy.in_float32())
                features = rehearsal.evaluate(policy.in_float32())
            except Exception as error:
                if not (is_out_of_memory(error) and policy.enabled and count >= 8):
                    stage.explain(error, rehearsal.batch)
            else:
                if isinstance(features, torch.Tensor):
                    return count, reference, features
                raise TrainingError(
                    f"in evaluation mode the model returned a {type(features).__name__}, not a tensor of (B, D) "
                    "features.\n  fix: return the features when self.training is False"
                )
        count //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _check_layers(report: PreflightReport, model: nn.Module, batch: dict[str, Any], frozen: tuple[str, ...]) -> None:
    """Note the first layer that differs from itself or from float32, on half of the images if memory is short."""
    policy, count = report.policy, batch_size(batch)
    while True:
        with (
            Rehearsal(model, part_of(batch, count), frozen=frozen) as rehearsal,
            _Stage(model, dtype_name(policy.dtype)) as stage,
        ):
            try:
                wrong, _ = check_layers(rehearsal, policy)
            except Exception as error:
                if not (is_out_of_memory(error) and count >= 2):
                    stage.explain(error, rehearsal.batch)
            else:
                if wrong:
                    report.kernel = True
                    others = [error.name for error in wrong[1:]]
                    report.problem = wrong[0].describe()
                    if others:
                        report.problem += f"\n  too:   {', '.join(others[:5])}" + (", ..." if len(others) > 5 else "")
                return
        count //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _compare_embeddings(
    report: PreflightReport,
    model: nn.Module,
    batch: dict[str, Any],
    policy: PrecisionPolicy,
    features: torch.Tensor,
    frozen: tuple[str, ...],
) -> None:
    """Note how far the embeddings under the evaluation's policy are from float32's."""
    name = dtype_name(policy.dtype)
    with Rehearsal(model, batch, frozen=frozen) as rehearsal, _Stage(model, name) as stage:
        try:
            low = rehearsal.evaluate(policy)
        except Exception as error:
            stage.explain(error, rehearsal.batch)
        untrained = rehearsal.untrained
    if not all_finite(low):
        report.location, note = search(model, batch, lambda each: locate_in_evaluation(each, policy), frozen=frozen)
        report.problem = (
            f"in evaluation the model's features are not finite in {name}; in float32 they are.\n"
            f"{_place(report.location, note)}\n"
            "  or:    SOLVER.AMP.EVAL_DTYPE float32, to evaluate in float32"
        )
    elif low.dim() == 2:
        cosine = embedding_cosine(low, features)
        report.cosine = (float(cosine.mean()), float(cosine.min()))
        vanished = bool((~low.any(dim=1) & features.any(dim=1)).any())
        if vanished or (report.cosine[0] < LOWEST_COSINE and not untrained):
            found = "some are all zero" if vanished else f"mean cosine {report.cosine[0]:.3f}, below {LOWEST_COSINE}"
            report.problem = (
                f"the embeddings in {name} are others than float32's: {found}.\n"
                "  cause: some layers lose too much precision.\n"
                "  fix:   tools/amp_doctor.py shows which ones, and the SOLVER.AMP.FORCE_FP32 that they need"
            )


def _try_training(
    report: PreflightReport,
    model: nn.Module,
    batch: dict[str, Any],
    scaler: LossScaler | None,
    frozen: tuple[str, ...],
) -> None:
    """Note the losses under the policy, and the largest loss scale with finite gradients."""
    policy = report.policy
    scale = scaler.scale if scaler else 1.0
    with Rehearsal(model, batch, frozen=frozen) as rehearsal, _Stage(model, dtype_name(policy.dtype)) as stage:
        try:
            low = rehearsal.train(policy, scale=scale, checked=True)
            if low.finite:
                report.problem = _not_repeatable(rehearsal, policy, scale, low)
                report.kernel = bool(report.problem)
            low.gradients.clear()
            found = scale if low.finite else None
            if scaler and not low.finite and not low.bad_losses:
                found = largest_finite_scale(rehearsal, policy, scale)
        except Exception as error:
            stage.explain(error, rehearsal.batch)
    report.losses = {name: (value, low.losses[name]) for name, (value, _) in report.losses.items()}
    if report.problem:
        return
    if found is not None and (low.finite or found >= scaler.min_scale):
        report.loss_scale = found if scaler else None
        return
    report.location, note = search(model, batch, lambda each: locate(each, policy, scale=scale), frozen=frozen)
    whatever = ", whatever the loss scale from SOLVER.AMP.MIN_SCALE on" if scaler and not low.bad_losses else ""
    report.problem = (
        f"in {dtype_name(policy.dtype)} {_not_finite(low)}{whatever}; in float32 all are.\n"
        f"{_place(report.location, note)}"
    )


def _not_repeatable(rehearsal: Rehearsal, policy: PrecisionPolicy, scale: float, first: TrainPass) -> str:
    """Return what is wrong where a second training pass from the same state has other gradients; empty if nothing.

    A model whose float32 passes differ as well draws other random numbers each time, e.g. with a seed from the clock.
    """
    difference, name = _difference(first, rehearsal.train(policy, scale=scale))
    if difference <= _LARGEST_REPEAT:
        return ""
    first.gradients.clear()  # frees their memory
    passes = [rehearsal.train(policy.in_float32()) for _ in range(2)]
    if _difference(*passes)[0] > _LARGEST_REPEAT:
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


class _Stage:
    """Knows in which module an error was raised.

    Args:
        model: the model.
        precision: name of the dtype that it computes in.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.model = model
        self.precision = precision
        self._inside: list[tuple[str, nn.Module, Any]] = []
        self._handles = ExitStack()

    def __enter__(self) -> "_Stage":
        self._handles.enter_context(uncompiled(self.model))
        for name, module in self.model.named_modules():
            for handle in (
                module.register_forward_pre_hook(self._enter(name)),
                module.register_forward_hook(self._leave),
            ):
                self._handles.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self._inside.append((name, module, args))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def explain(self, error: Exception, batch: dict[str, Any]) -> None:
        """Raise what a user should read instead of ``error``, or ``error`` itself where it is for users already.

        Raises:
            TrainingError: always, but for a ``UserError``.
        """
        if isinstance(error, UserError):
            raise error
        name, module, args = self._inside[-1] if self._inside else ("", self.model, ())
        where = f"{name or 'the model itself'} ({type(module).__name__})" if self._inside else "the backward pass"
        refused = refusal(error, f"the pre-flight, in {self.precision}, in {where}", batch, IN_TRAINING)
        if refused is not None:
            raise refused from error
        blame = "an error of the model or of the data, not of mixed precision"
        if self.precision != "float32":
            blame = "and not in float32: a part of the model does not take this precision"
        raise TrainingError(
            f"the model fails on the first training batch in {self.precision}: {blame}.\n"
            f"  found: {first_line(error)}\n"
            f"  where: {where}, {_line_of(error)}\n"
            f"  batch: {shapes_of(batch)}\n"
            f"{_channels_hint(module, args)}"
            "  (SOLVER.AMP.PREFLIGHT off shows the whole traceback)"
        ) from error


def _channels_hint(module: nn.Module, args: Any) -> str:
    """Return a line when a convolution was given another number of channels than it takes."""
    image = args[0] if args and isinstance(args[0], torch.Tensor) else None
    takes = getattr(module, "in_channels", None)
    if image is None or takes is None or image.dim() != 4 or image.shape[1] == takes:
        return ""
    return (
        f"  cause: it takes {takes} channels and was given {image.shape[1]}.\n"
        "  fix:   INPUT.CHANNELS is what images are read as: it and the model's first convolution must agree\n"
    )


def _line_of(error: Exception) -> str:
    """Return the innermost line that is not PyTorch's own."""
    frame, found = error.__traceback__, None
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if "/torch/" not in path.replace("\\", "/"):
            found = f"{path}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found or "an unknown line"
