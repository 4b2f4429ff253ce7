"""Mixed-precision doctor: compare low precisions with float32, using the model and the datasets of a config."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, requested_device
from fastamp.amp.device_errors import is_out_of_memory
from fastamp.amp.policy import dtype_name
from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.config import CfgNode
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.build import with_num_categories, with_num_classes
from fastamp.data.subset import subsample_identities
from fastamp.diagnostics.doctor_report import AmpReport, PrecisionReport
from fastamp.diagnostics.environment import inspect_environment
from fastamp.diagnostics.fp32_search import forced, search_force_fp32
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.diagnostics.precision_check import (
    DOCTOR_MIN_COSINE,
    Float32Check,
    PrecisionCheck,
    check_float32,
    check_precision,
)
from fastamp.diagnostics.profiling import lost_gradients, measure_cost, measure_layers, safe_loss_scale
from fastamp.evaluation import ReidEvaluator, inference_on_dataset
from fastamp.modeling import adapt_to_training_set, build_model
from fastamp.modeling.training_state import set_class_counts, set_epoch
from fastamp.utils.errors import TrainingError
from fastamp.utils.progress import ProgressBar, format_duration
from fastamp.zoo import warn_of_differences, with_local_files

logger = logging.getLogger(__name__)


T = TypeVar("T")


def diagnose(cfg: CfgNode, *, dtypes: Sequence[torch.dtype], batch_size: int = 16, max_images: int = 512) -> AmpReport:
    """Analyze mixed precision for the model of ``cfg``, with ``MODEL.WEIGHTS`` if set, on the datasets of ``cfg``.

    Args:
        cfg: config that has passed ``check_config``.
        dtypes: low precisions to analyze.
        batch_size: number of images to use from the first training batch. Default 16.
        max_images: maximum number of test images to rank; 0 for all. If the test set is larger, only some of its
            identities are used. Default 512.

    Returns:
        Results in float32 and in each low precision.

    Raises:
        UserError: if the config, the data or the weights are invalid, or memory runs out.
    """
    warn_of_differences(cfg)
    cfg = with_local_files(cfg)
    loader = build_reid_train_loader(cfg)
    training_set: Any = loader.dataset
    cfg = with_num_categories(with_num_classes(*adapt_to_training_set(cfg, training_set)), training_set)
    test_loader, num_query = build_reid_test_loader(cfg, cfg.DATASETS.TESTS[0], requires_gallery=False)
    model = build_model(cfg)
    with_contract: Any = loader  # its dataset has adopted the contract
    set_class_counts(model, with_contract)
    set_epoch(model, cfg.SOLVER.MAX_EPOCH - 1)  # includes the losses that start later
    if cfg.MODEL.WEIGHTS:
        Checkpointer(model, min_match=cfg.MODEL.WEIGHTS_MIN_MATCH).load(cfg.MODEL.WEIGHTS)
    model.train()
    device = next(model.parameters()).device
    asked = bool(cfg.SOLVER.AMP.ENABLED)
    policy = PrecisionPolicy.from_config(cfg.with_values({"SOLVER.AMP.ENABLED": True}), device)
    policy.check_model(model)
    if policy.enabled and policy.dtype not in dtypes:
        dtypes = [policy.dtype, *dtypes]  # the verdict is about this dtype
    machine = inspect_environment(device, asked=requested_device(cfg), decoder=cfg.INPUT.DECODER)
    batch = {key: value[:batch_size] for key, value in next(iter(loader)).items()}
    progress = _Progress(2 + 5 * len(dtypes))
    reference = progress("float32: first batch", lambda: check_float32(model, batch, policy.in_float32()))
    report = AmpReport(
        policy=policy,
        asked=asked,
        problem=reference.problem,
        float32=PrecisionReport("float32"),
        low=[],
        force_fp32=list(cfg.SOLVER.AMP.FORCE_FP32),
        init_scale=cfg.SOLVER.AMP.INIT_SCALE,
        images=(0, 0),
        untrained=not (cfg.MODEL.WEIGHTS or cfg.MODEL.BACKBONE.PRETRAIN),
        machine=machine.as_dict(),
    )
    if reference.problem:
        return report
    with IsolatedPasses(model, batch) as passes:
        report.float32.cost = dataclasses.replace(measure_cost(passes, policy.in_float32()), relative=1.0)
        statistics = passes.initial_statistics()
    with torch.no_grad():
        # Rank an untrained model with the same statistics.
        for buffer, value in statistics:
            if buffer.is_floating_point():
                buffer.copy_(value)
    batches, queries, report.images = subsample_identities(test_loader, num_query, max_images, cfg.TEST.IMS_PER_BATCH)

    def rank(precision: PrecisionPolicy) -> dict[str, float]:
        # A model may write into its batch.
        copies = [
            {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in batch.items()} for batch in batches
        ]
        metrics = inference_on_dataset(
            model, copies, ReidEvaluator(cfg, queries), policy=precision, locate=describe_evaluation
        )
        return {key: metrics[key] for key in ("mAP", "Rank-1")}

    report.float32.metrics = progress("float32: ranking", lambda: rank(policy.in_float32()))
    for dtype in dtypes:
        low = dataclasses.replace(policy, dtype=dtype, reason="analyzed")
        support = machine.support.get(dtype_name(dtype))
        if support and support.state == "no":
            report.low.append(PrecisionReport(dtype_name(dtype), refused=support.reason))
            continue
        report.low.append(_analyze(model, batch, low, reference, cfg, rank, progress))
    progress.close()
    return report


def _analyze(
    model: nn.Module,
    batch: dict[str, Any],
    policy: PrecisionPolicy,
    reference: Float32Check,
    cfg: CfgNode,
    rank: Callable[[PrecisionPolicy], dict[str, float]],
    progress: "_Progress",
) -> PrecisionReport:
    """Analyze the model in one low precision."""
    report = PrecisionReport(dtype_name(policy.dtype))
    amp = cfg.SOLVER.AMP
    policies = policy, policy.for_evaluation(amp.EVAL_DTYPE)

    def check() -> PrecisionCheck:
        return check_precision(
            model,
            batch,
            policy,
            reference=reference,
            eval_policy=policies[1],
            min_cosine=DOCTOR_MIN_COSINE,
            checked_images=reference.images,
        )

    try:
        state = progress(f"{report.dtype}: first batch", check)
    except TrainingError as error:  # no operation computes in this precision, or a module does not support it
        if error.__cause__ is not None and is_out_of_memory(error.__cause__):
            raise
        report.failure, report.force_fp32 = str(error), None
        return report
    if state.problem:
        report.failure = state.problem
        logger.info("%s: %s", report.dtype, report.failure)
    report.force_fp32 = progress(
        f"{report.dtype}: search for modules that need float32",
        lambda: search_force_fp32(model, batch, policy, check=check, current=state, report=logger.info),
    )
    with forced(model, report.force_fp32 or []):
        with IsolatedPasses(model, batch) as passes:
            report.cost = measure_cost(passes, policy)
            report.loss_scale = progress(
                f"{report.dtype}: gradients", lambda: safe_loss_scale(passes, policy, up_to=amp.MAX_SCALE)
            )
            scale = min(amp.INIT_SCALE, report.loss_scale) if report.loss_scale else 1.0
            lost = lost_gradients(passes, policy, scale=scale)
        report.zero_share = sum(n for n, _ in lost.values()) / max(1, sum(total for _, total in lost.values()))
        if state.problem:
            state = check()
        report.cosine = state.cosine[0] if state.cosine else None
    with IsolatedPasses(model, batch) as passes:
        report.layers = progress(f"{report.dtype}: layers", lambda: measure_layers(passes, policy, lost=lost))
    if report.force_fp32 is not None:
        with forced(model, report.force_fp32):
            try:
                report.metrics = progress(f"{report.dtype}: ranking", lambda: rank(policies[1]))
            except TrainingError as error:  # images beyond the first batch can fail
                report.failure, report.force_fp32 = str(error), None
                logger.info("%s: %s", report.dtype, report.failure)
    return report


class _Progress:
    """Progress bar and log lines that show the current step of the analysis and the estimated remaining time.

    Args:
        total: number of steps.
    """

    def __init__(self, total: int) -> None:
        self._bar = ProgressBar(total, "doctor")

    def __call__(self, title: str, work: Callable[[], T]) -> T:
        left = self._bar.seconds_left()
        eta = f", about {format_duration(left)} left" if left < float("inf") else ""
        logger.info("[%d/%d] %s%s", self._bar.done + 1, self._bar.total, title, eta)
        result = work()
        self._bar.update(self._bar.done + 1)
        return result

    def close(self) -> None:
        """Remove the progress bar."""
        self._bar.close()
