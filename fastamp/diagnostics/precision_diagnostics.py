"""What a run does about its precision besides its steps: a trial before the first, an inquest after the last."""

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastamp.amp.checks import check_optimizers
from fastamp.amp.policy import PrecisionPolicy, dtype_name, native_bfloat16
from fastamp.amp.step import OptimizationStep, PrecisionFailure
from fastamp.diagnostics.crash import FOLDER, MicroBatch, build_crash_dump, replay_failure
from fastamp.diagnostics.isolated_passes import without_collectives
from fastamp.diagnostics.preflight import PreflightReport, preflight
from fastamp.utils import comm
from fastamp.utils.env import random_state
from fastamp.utils.errors import TrainingError, WriteError
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(__name__, {"Precautions": "fastamp.diagnostics.precision_diagnostics.PrecisionDiagnostics"})

logger = logging.getLogger(__name__)


class PrecisionDiagnostics:
    """The pre-flight before the first step, and the location and the crash file when a precision fails.

    Args:
        preflight: ``SOLVER.AMP.PREFLIGHT``: off, warn, error or fallback (to bfloat16 where that is native, else to
            float32).
        eval_dtype: ``SOLVER.AMP.EVAL_DTYPE``.
        locate: search for the first module that made a value which is not finite.
        folder: where crash files go; None writes none.
        config: text of the whole config, for the crash file.
    """

    def __init__(
        self,
        *,
        preflight: str = "off",
        eval_dtype: str = "same",
        locate: bool = False,
        folder: Path | None = None,
        config: str = "",
    ) -> None:
        self.preflight = preflight
        self.eval_dtype = eval_dtype
        self.locate = locate
        self.folder = folder
        self.config = config
        self._micro_batches: list[MicroBatch] = []
        self._versions: list[int] = []
        self._copy = False

    @classmethod
    def from_config(cls, cfg: Any) -> "PrecisionDiagnostics":
        """Return those of ``SOLVER.AMP``."""
        amp = cfg.SOLVER.AMP
        return cls(
            preflight=amp.PREFLIGHT,
            eval_dtype=amp.EVAL_DTYPE,
            locate=amp.TRACE_NONFINITE == "on_failure",
            folder=Path(cfg.OUTPUT_DIR) / FOLDER,
            config=cfg.dump(),
        )

    def write_no_files(self) -> None:
        """Leave out crash files from now on."""
        self.folder = None

    def check(self, step: OptimizationStep, policy: PrecisionPolicy) -> None:
        """Check that the policy fits the model, and that the optimizers hold the model's own parameters.

        Raises:
            TrainingError: they do not.
        """
        policy.check_model(step.model)
        check_optimizers(step.model, step.optimizers)

    def before_first_step(
        self, step: OptimizationStep, batch: dict[str, Any], policy: PrecisionPolicy, *, iteration: int = 0
    ) -> PrecisionPolicy:
        """Try the first batch, and set the first loss scale of a run that starts.

        Args:
            step: with the model, in training mode.
            batch: the one of the first step.
            policy: the precision to try.
            iteration: of the first step; above 0 the run is a resumed one, whose loss scale stays.

        Returns:
            The policy to train under: another one after a fallback.

        Raises:
            TrainingError: the optimizers hold other tensors than the model's, the model is broken, or the precision
                fails and ``preflight`` is ``"error"``.
        """
        self.check(step, policy)
        if self.preflight == "off":
            return policy
        failed = None
        for candidate in self._fallback_policies(policy, step.model):
            report = self._try(step, batch, candidate)
            if not report.problem:
                logger.info("%s", report.describe())
                break
            if self.preflight != "error":  # where it ends the run it is said at the end
                goes_on = "\nSOLVER.AMP.PREFLIGHT warn: going on nevertheless" if self.preflight == "warn" else ""
                logger.warning("%s%s", report.describe(), goes_on)
            failed = failed or report
            if report.in_float32:
                break
        if failed is not None and ((report.problem and self.preflight != "warn") or self.preflight == "error"):
            raise TrainingError(self._verdict(failed, step, batch, iteration))
        if candidate is not policy and not report.problem:
            logger.warning("SOLVER.AMP.PREFLIGHT fallback: training in %s", dtype_name(candidate.dtype))
            step.disable_loss_scaling()
            return candidate
        if report.loss_scale is not None and report.loss_scale < step.scaler.scale and iteration == 0:
            logger.info("first loss scale %g: above it gradients overflow on the first batch", report.loss_scale)
            step.scaler.lower_to(report.loss_scale)
        return policy

    def begin_recording(self) -> None:
        """Drop the micro-batches of the step before."""
        # A model that writes into its batch would leave another one here than it was given.
        self._copy |= self._versions != [v for each in self._micro_batches for v in _versions(each.batch)]
        self._micro_batches, self._versions = [], []

    def remember(self, batch: dict[str, Any], *, first: bool = False) -> None:
        """Keep a micro-batch until the next step, before its forward pass; ``first`` is ``begin_recording`` before."""
        if first:
            self.begin_recording()
        if not self.locate:
            return
        if self._copy:
            batch = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        self._micro_batches.append(MicroBatch(dict(batch), random_state()))
        self._versions += _versions(batch)

    def check_skips(self, step: OptimizationStep, policy: PrecisionPolicy, *, iteration: int) -> None:
        """Do ``step.check_skips()``; where the precision fails, add to the message the place, and write the crash file.

        Raises:
            PrecisionFailure: too many steps in a row were skipped.
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
        """Return the failure's message with the place where it began and the command that shows it again."""
        scale = failure.verdict.loss_scale
        with without_collectives(step.model):
            location, note, micro_batch, losses = replay_failure(
                step.model, self._micro_batches, policy=policy, loss_scale=scale, frozen=tuple(step.frozen)
            )
        place = comm.select_message(location.describe() if location else "", location.order if location else 0)
        message = f"{failure.headline}\n{place}"
        if not place:
            message = f"{failure}\n{comm.select_message(note) or 'the failure did not show again when it was replayed'}"
        details = {"micro_batch": micro_batch, "losses": losses, "location": location}
        return self._with_file(message, step, iteration=iteration, policy=policy, loss_scale=scale, **details)

    def _fallback_policies(self, policy: PrecisionPolicy, model: nn.Module) -> list[PrecisionPolicy]:
        """Return the policies to try in turn."""
        ladder = [policy]
        if self.preflight == "fallback" and policy.enabled:
            reason = f"the pre-flight failed in {dtype_name(policy.dtype)}"
            native, _ = native_bfloat16(next(model.parameters()).device)
            names = ["bfloat16"] * native + ["float32"]
            ladder += [fallback for name in names if (fallback := policy.fall_back(name, reason))]
        return ladder

    def _try(self, step: OptimizationStep, batch: dict[str, Any], policy: PrecisionPolicy) -> PreflightReport:
        report = preflight(
            step.model,
            batch,
            policy=policy,
            eval_policy=policy.for_evaluation(self.eval_dtype),
            scaler=step.scaler if policy.needs_loss_scaling else None,
            frozen=tuple(step.frozen),
        )
        if policy.device_type == "cuda":
            # What float32 took is no part of the run's own figures, nor of its memory.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return report

    def _verdict(self, report: PreflightReport, step: OptimizationStep, batch: dict[str, Any], iteration: int) -> str:
        message = "pre-flight: " + report.problem
        if not report.in_float32:
            message += (
                "\n  or:    SOLVER.AMP off, or SOLVER.AMP.PREFLIGHT fallback, which goes on in a precision that holds"
            )
        if report.kernel:  # a replay of the training step would not show it
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
        """Write the crash file and append the command that replays it to ``message``."""
        if self.folder is None or not self.locate:
            return message
        crash = build_crash_dump(step.model, message=message, config=self.config, frozen=tuple(step.frozen), **details)
        try:
            outcome = f"see it again: python tools/amp_replay.py {crash.write(self.folder)}"
        except (OSError, WriteError) as error:  # what is to be said must not be lost with the file
            outcome = f"(no crash file: {error})"
        # All ranks say the same, the one whose find is said.
        found = details["location"]
        return f"{message}\n{comm.select_text(outcome, found.order if found else math.inf)[1]}"


def _versions(batch: dict[str, Any]) -> list[int]:
    """Return how often each tensor of a batch has been written to."""
    return [value._version for value in batch.values() if isinstance(value, torch.Tensor)]
