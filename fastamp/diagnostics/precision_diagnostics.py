"""Precision diagnostics of a run: pre-flight before the first step, crash dump after a failure."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastamp.amp.checks import check_optimizers
from fastamp.amp.policy import PrecisionPolicy, dtype_name, native_bfloat16
from fastamp.amp.step import OptimizationStep, PrecisionFailure
from fastamp.config import CfgNode
from fastamp.diagnostics.crash import FOLDER, MicroBatch, build_crash_dump, replay_failure
from fastamp.diagnostics.isolated_passes import without_collectives
from fastamp.diagnostics.preflight import PreflightReport, preflight
from fastamp.utils import comm
from fastamp.utils.env import random_state
from fastamp.utils.errors import TrainingError, WriteError, summarize_error

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class PrecisionDiagnostics:
    """Run the pre-flight before the first step; locate the first non-finite value and write a crash dump on failure.

    Args:
        preflight: ``SOLVER.AMP.PREFLIGHT``: off, warn, error or fallback (to bfloat16 if it is native, else to
            float32). Default off.
        eval_dtype: ``SOLVER.AMP.EVAL_DTYPE``. Default same.
        trace_nonfinite: record the micro-batches of a step, so that the first module with a non-finite value can be
            located after a failure. Default False.
        folder: folder of crash dumps; None (default) disables them.
        config: YAML text of the config, for the crash dump.
    """

    preflight: str = "off"
    eval_dtype: str = "same"
    trace_nonfinite: bool = False
    folder: Path | None = None
    config: str = ""

    def __post_init__(self) -> None:
        self._micro_batches: list[MicroBatch] = []
        self._versions: list[int] = []
        self._copy = False

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "PrecisionDiagnostics":
        """Build the diagnostics from ``SOLVER.AMP``."""
        amp = cfg.SOLVER.AMP
        return cls(
            preflight=amp.PREFLIGHT,
            eval_dtype=amp.EVAL_DTYPE,
            trace_nonfinite=amp.TRACE_NONFINITE == "on_failure",
            folder=Path(cfg.OUTPUT_DIR) / FOLDER,
            config=cfg.dump(),
        )

    def disable_crash_dumps(self) -> None:
        """Stop writing crash dumps."""
        self.folder = None

    def check(self, step: OptimizationStep, policy: PrecisionPolicy) -> None:
        """Check the dtype and device type of the parameters, and that the optimizers contain these parameters.

        Raises:
            TrainingError: if ``PrecisionPolicy.check_model`` or ``check_optimizers`` fails.
        """
        policy.check_model(step.model)
        check_optimizers(step.model, step.optimizers)

    def before_first_step(
        self, step: OptimizationStep, batch: dict[str, Any], policy: PrecisionPolicy, *, iteration: int = 0
    ) -> PrecisionPolicy:
        """Run the pre-flight on the first batch, and set the initial loss scale of a new run.

        Args:
            step: optimizer step, with its model in training mode.
            batch: batch of the first step.
            policy: precision of the run.
            iteration: number of the first iteration. If it is above 0, the run was resumed and keeps its loss scale.

        Returns:
            The policy to train with; it differs from ``policy`` after a fallback.

        Raises:
            TrainingError: if ``check`` fails, the model fails in float32, or the precision fails and ``preflight`` is
                ``"error"``.
        """
        self.check(step, policy)
        if self.preflight == "off":
            return policy
        failed = None
        for candidate in self._fallback_policies(policy, step.model):
            report = self._run_preflight(step, batch, candidate)
            if not report.problem:
                logger.info("%s", report.describe())
                break
            if self.preflight != "error":  # the exception has the message
                note = "\nThe run continues because SOLVER.AMP.PREFLIGHT is warn." if self.preflight == "warn" else ""
                logger.warning("%s%s", report.describe(), note)
            failed = failed or report
            if report.in_float32:
                break
        if failed is not None and ((report.problem and self.preflight != "warn") or self.preflight == "error"):
            raise TrainingError(self._describe_failure(failed, step, batch, iteration))
        if candidate is not policy and not report.problem:
            logger.warning(
                "the pre-flight failed, so this run trains in %s (SOLVER.AMP.PREFLIGHT is fallback)",
                dtype_name(candidate.dtype),
            )
            step.disable_loss_scaling()
            return candidate
        scaler = step.scaler
        if scaler and report.loss_scale is not None and report.loss_scale < scaler.scale and iteration == 0:
            logger.info(
                "initial loss scale lowered to %g: with larger values, gradients of the first batch overflow",
                report.loss_scale,
            )
            scaler.lower_to(report.loss_scale)
        return policy

    def begin_recording(self) -> None:
        """Discard the micro-batches of the previous step."""
        # Batches are copied as soon as a model is found to write into them.
        self._copy |= self._versions != [v for batch in self._micro_batches for v in _versions(batch.batch)]
        self._micro_batches, self._versions = [], []

    def record(self, batch: dict[str, Any], *, first: bool = False) -> None:
        """Record a micro-batch before its forward pass, for a replay after a failure.

        Args:
            batch: the micro-batch.
            first: True for the first micro-batch of a step; the micro-batches of the previous step are discarded.
        """
        if first:
            self.begin_recording()
        if not self.trace_nonfinite:
            return
        if self._copy:
            batch = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        self._micro_batches.append(MicroBatch(dict(batch), random_state()))
        self._versions += _versions(batch)

    def check_skips(self, step: OptimizationStep, policy: PrecisionPolicy, *, iteration: int) -> None:
        """Run ``step.check_skips()``; on failure, locate the first non-finite value and write a crash dump.

        Raises:
            PrecisionFailure: if too many consecutive steps were skipped; the message contains the location and the
                command that replays the failure.
        """
        try:
            step.check_skips()
        except PrecisionFailure as failure:
            if not self._micro_batches:
                raise
            raise PrecisionFailure(self._explain(failure, step, policy, iteration), failure.verdict) from failure

    def _explain(
        self, failure: PrecisionFailure, step: OptimizationStep, policy: PrecisionPolicy, iteration: int
    ) -> str:
        """Replay a failed step, write a crash dump, and return a message with the module and the replay command."""
        scale = failure.verdict.loss_scale
        with without_collectives(step.model):
            location, note, micro_batch, losses = replay_failure(
                step.model, self._micro_batches, policy=policy, loss_scale=scale, frozen=tuple(step.frozen)
            )
        location_text = comm.select_message(location.describe() if location else "", location.order if location else 0)
        message = f"{failure.headline}\n{location_text}"
        if not location_text:
            message = f"{failure}\n{comm.select_message(note) or 'a replay did not reproduce the failure'}"
        details = {"micro_batch": micro_batch, "losses": losses, "location": location}
        return self._with_file(message, step, iteration=iteration, policy=policy, loss_scale=scale, **details)

    def _fallback_policies(self, policy: PrecisionPolicy, model: nn.Module) -> list[PrecisionPolicy]:
        """List the policies that the pre-flight tries, in this order."""
        policies = [policy]
        if self.preflight == "fallback" and policy.enabled:
            reason = f"the pre-flight failed in {dtype_name(policy.dtype)}"
            native, _ = native_bfloat16(next(model.parameters()).device)
            names = ["bfloat16"] * native + ["float32"]
            policies += [fallback for name in names if (fallback := policy.fall_back(name, reason))]
        return policies

    def _run_preflight(self, step: OptimizationStep, batch: dict[str, Any], policy: PrecisionPolicy) -> PreflightReport:
        report = preflight(
            step.model,
            batch,
            policy=policy,
            eval_policy=policy.for_evaluation(self.eval_dtype),
            scaler=step.scaler if policy.needs_loss_scaling else None,
            frozen=tuple(step.frozen),
        )
        if policy.device_type == "cuda":
            # The peak memory of the run excludes the float32 passes.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return report

    def _describe_failure(
        self, report: PreflightReport, step: OptimizationStep, batch: dict[str, Any], iteration: int
    ) -> str:
        message = "pre-flight: " + report.problem
        if not report.in_float32:
            message += "\n  or:    set SOLVER.AMP.PREFLIGHT to fallback, or SOLVER.AMP to False"
        if report.kernel:  # a replay of the training step would not reproduce it
            return message
        return self._with_file(
            message,
            step,
            iteration=iteration,
            policy=report.policy,
            loss_scale=step.scaler.scale if step.scaler else 1.0,
            micro_batch=MicroBatch(batch, random_state()),
            losses={name: low for name, (_, low) in report.losses.items()},
            location=report.location,
        )

    def _with_file(self, message: str, step: OptimizationStep, **details: Any) -> str:
        """Write a crash dump and append the command for its replay to ``message``."""
        if self.folder is None or not self.trace_nonfinite:
            return message
        crash = build_crash_dump(step.model, message=message, config=self.config, frozen=tuple(step.frozen), **details)
        try:
            outcome = f"replay: fastamp replay {crash.write(self.folder)}"
        except (OSError, WriteError) as error:  # the message is still raised
            outcome = f"(no crash dump was written: {summarize_error(error)})"
        # All ranks report the crash dump of the rank with the reported location.
        location = details["location"]
        return f"{message}\n{comm.select_text(outcome, location.order if location else math.inf)[1]}"


def _versions(batch: dict[str, Any]) -> list[int]:
    """Return the version counters of the tensors in a batch, which in-place operations increment."""
    return [value._version for value in batch.values() if isinstance(value, torch.Tensor)]
