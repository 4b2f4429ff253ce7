"""A trial of the first batch before the first step: is the model sound in float32, and does the precision hold it?"""

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
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "LOWEST_COSINE": "fastamp.diagnostics.precision_check.PREFLIGHT_MIN_COSINE",
    },
)


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
    location: NonFiniteLocation | None = None
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
        with without_collectives(model):
            _try_here(report, model, batch, eval_policy or policy, scaler, frozen)
    except UserError as raised:
        error = raised
    # Among several processes what one finds is everybody's.
    found = comm.select_message(str(error) if error else "")
    if found:
        raise error or TrainingError(found)
    order = report.location.order if report.location else 0
    report.problem = comm.select_message(report.problem, order)
    report.in_float32 = comm.any_across_ranks(report.in_float32)
    report.kernel = comm.any_across_ranks(report.kernel)
    if scaler is not None:  # on all ranks, whatever each of them found
        smallest = -comm.all_reduce_max(-math.inf if report.loss_scale is None else -report.loss_scale)
        report.loss_scale = None if report.loss_scale is None else smallest
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
            "\n  fix:   tools/amp_doctor.py shows which ones, and the SOLVER.AMP.FORCE_FP32 that they need"
        )
    report.location = None if check.kernel else check.location
    report.losses = {name: (value, check.losses.get(name, value)) for name, value in reference.losses.items()}
    report.loss_scale, report.cosine = check.loss_scale, check.cosine
