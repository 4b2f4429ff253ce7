"""Pre-flight: checks on the first batch before the first step, in float32 and in the precision of the run."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.amp.step import LossScaler
from fastamp.diagnostics.isolated_passes import batch_size, without_collectives
from fastamp.diagnostics.nan_location import NonFiniteLocation
from fastamp.diagnostics.precision_check import check_float32, check_precision
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError, UserError


@dataclass
class PreflightReport:
    """Result of the pre-flight.

    Attributes:
        policy: the precision that was checked.
        problem: message if the run should not start; else empty.
        in_float32: True if the problem also occurs in float32, so that the precision is not the cause.
        location: first non-finite value, if there is one.
        losses: loss name -> (value in float32, value under the policy).
        loss_scale: largest loss scale up to the initial one with finite gradients; None without loss scaling.
        cosine: ``(mean, lowest)`` cosine similarity between embeddings under the policy and in float32; None if not
            compared.
        unreached: names of trainable parameters without a gradient.
        images: ``(compared, total)``: number of images compared with float32, and number of images in the batch.
        kernel: True if the problem is a layer or pass that is not deterministic, or differs from float32 by more than
            rounding explains.
    """

    policy: PrecisionPolicy
    problem: str = ""
    in_float32: bool = False
    location: NonFiniteLocation | None = None
    losses: dict[str, tuple[float, float]] = field(default_factory=dict)
    loss_scale: float | None = None
    cosine: tuple[float, float] | None = None
    unreached: list[str] = field(default_factory=list)
    images: tuple[int, int] = (0, 0)
    kernel: bool = False

    def describe(self) -> str:
        """Format the result for the log, in one or more lines."""
        parts = [f"{name} {low:.4g} (float32 {reference:.4g})" for name, (reference, low) in self.losses.items()]
        if not self.policy.enabled or self.in_float32:
            parts = [f"{name} {reference:.4g}" for name, (reference, _) in self.losses.items()]
        if self.loss_scale is not None:
            parts.append(f"loss scale {self.loss_scale:g}")
        if self.cosine is not None:
            parts.append(f"embedding cosine to float32: mean {self.cosine[0]:.5f}, lowest {self.cosine[1]:.5f}")
        if self.images[0] != self.images[1]:
            parts.append(f"float32 on {self.images[0]} of {self.images[1]} images because of limited memory")
        verdict = "failed" if self.problem else "passed"
        name = "float32" if self.in_float32 else dtype_name(self.policy.dtype)
        text = f"pre-flight {verdict} in {name}: {', '.join(parts)}".removesuffix(": ")
        if self.unreached:
            text += f"\n{len(self.unreached)} trainable parameters have no gradient: {', '.join(self.unreached[:5])}"
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
    """Check one batch in float32, then under the policy, in training and evaluation.

    If the model fails in float32, the report has ``in_float32`` set. See ``check_precision`` for the checks under the
    policy. Buffers, gradients, training modes and random states are restored bit for bit. With several processes, all
    of them report the same problem.

    Args:
        model: model in training mode, in which ``MODEL.FREEZE_LAYERS`` are already frozen.
        batch: first batch of the run.
        policy: precision of training.
        eval_policy: precision of evaluation. Default: ``policy``.
        scaler: loss scaler for float16, which is not changed.
        frozen: names of frozen modules.

    Raises:
        TrainingError: if ``check_losses`` fails, memory runs out, or the model raises an exception.
        UserError: if the model raises a UserError, which is passed on unchanged.
    """
    error, report = None, PreflightReport(policy)
    try:
        with without_collectives(model):
            _check_batch(report, model, batch, eval_policy or policy, scaler, frozen)
    except UserError as raised:
        error = raised
    # All processes must report the same problem, or some would start training.
    message = comm.select_message(str(error) if error else "")
    if message:
        raise error or TrainingError(message)
    order = report.location.order if report.location else 0
    report.problem = comm.select_message(report.problem, order)
    report.in_float32 = comm.any_across_ranks(report.in_float32)
    report.kernel = comm.any_across_ranks(report.kernel)
    if scaler is not None:  # a collective: all ranks take part, with or without a result
        smallest = -comm.max_over_ranks(-math.inf if report.loss_scale is None else -report.loss_scale)
        report.loss_scale = None if report.loss_scale is None else smallest
    return report


def _check_batch(
    report: PreflightReport,
    model: nn.Module,
    batch: dict[str, Any],
    eval_policy: PrecisionPolicy,
    scaler: LossScaler | None,
    frozen: tuple[str, ...],
) -> None:
    """Check the batch of this process; store the result in ``report``."""
    policy = report.policy
    reference = check_float32(model, batch, policy, frozen=frozen)
    report.images = (reference.images, batch_size(batch))
    report.losses = {name: (value, value) for name, value in reference.losses.items()}
    report.unreached = reference.unreached
    if reference.problem:
        report.in_float32, report.problem, report.location = True, reference.problem, reference.location
        return
    if not policy.enabled:
        return
    check = check_precision(
        model,
        batch,
        policy,
        reference=reference,
        eval_policy=eval_policy,
        scaler=scaler,
        frozen=frozen,
        first_problem_only=True,
    )
    report.problem, report.kernel = check.problem, check.kernel
    if check.imprecise and check.problem == check.imprecise:
        report.problem += (
            "\n  fix:   run `fastamp doctor`, which lists these layers and suggests a value of SOLVER.AMP.FORCE_FP32"
        )
    report.location = None if check.kernel else check.location
    report.losses = {name: (value, check.losses.get(name, value)) for name, value in reference.losses.items()}
    report.loss_scale, report.cosine = check.loss_scale, check.cosine
