"""Report of the mixed-precision doctor: tables, a verdict, recommended config values as YAML, and a figure."""

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from tabulate import tabulate

from fastamp.amp import PrecisionPolicy
from fastamp.amp.policy import dtype_name
from fastamp.diagnostics.profiling import Cost, LayerReport
from fastamp.utils.errors import ConfigError, optional_package
from fastamp.utils.files import write_atomically

logger = logging.getLogger(__name__)

FOLDER = "amp_doctor"

LARGEST_MAP_DIFFERENCE = 1.0
"""Largest allowed difference in mAP between a precision and float32, in percentage points, up or down."""

_SHOWN_LAYERS = 8


@dataclass
class PrecisionReport:
    """Results for one precision.

    Attributes:
        dtype: name of the dtype.
        refused: reason why the device does not support the dtype; empty if it does.
        failure: message of the failed precision check or evaluation; empty if there was no failure.
        force_fp32: modules to force to float32 in addition to those in the config; None if no short list of modules is
            sufficient.
        cosine: mean cosine similarity to the float32 embeddings, if the modules in ``force_fp32`` compute in float32.
        loss_scale: largest loss scale with finite gradients, a power of two; None without loss scaling.
        zero_share: fraction of the gradient elements that are 0 in this precision but not in float32, 0..1.
        cost: time and memory of a training pass.
        metrics: ``mAP`` and ``Rank-1`` in percent.
        layers: measurements of each layer with the config as given, in call order.
    """

    dtype: str
    refused: str = ""
    failure: str = ""
    force_fp32: list[str] | None = field(default_factory=list)
    cosine: float | None = None
    loss_scale: float | None = None
    zero_share: float | None = None
    cost: Cost | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)

    def ranking_matches(self, reference: "PrecisionReport") -> bool:
        """Return True if the mAP differs from that in float32 by at most ``LARGEST_MAP_DIFFERENCE``."""
        return bool(self.metrics) and abs(self.metrics["mAP"] - reference.metrics["mAP"]) <= LARGEST_MAP_DIFFERENCE

    def usable(self, reference: "PrecisionReport") -> bool:
        """Return True if a run can use this precision, with ``force_fp32`` if necessary."""
        return not self.refused and self.force_fp32 is not None and self.ranking_matches(reference)

    def verdict(self, reference: "PrecisionReport") -> str:
        """Summarize the result compared with float32 in one to three words, e.g. ``"ranking differs"``."""
        if self.refused:
            return "unsupported"
        if self.force_fp32 is None:
            return "fails"
        if not self.ranking_matches(reference):
            return "ranking differs"
        return "ok with FORCE_FP32" if self.force_fp32 else "ok"


@dataclass
class AmpReport:
    """Results of the mixed-precision doctor in float32 and in each low precision, with a recommendation.

    Attributes:
        policy: precision of the config; if AMP is off, the precision that ``SOLVER.AMP True`` selects.
        asked: True if the config enables AMP.
        problem: message if the model fails in float32, in which case there are no other results; else empty.
        float32: reference results.
        low: results in each low precision.
        force_fp32: ``SOLVER.AMP.FORCE_FP32`` of the config.
        init_scale: ``SOLVER.AMP.INIT_SCALE`` of the config.
        images: number of ranked images, and number of images in the test set.
        untrained: True if the model has no trained weights.
        machine: result of ``EnvironmentReport.as_dict``.
    """

    policy: PrecisionPolicy
    asked: bool
    problem: str
    float32: PrecisionReport
    low: list[PrecisionReport]
    force_fp32: list[str]
    init_scale: float
    images: tuple[int, int]
    untrained: bool
    machine: dict[str, Any]

    @property
    def configured(self) -> PrecisionReport | None:
        """Results for the precision of the config; None if the config computes in float32."""
        return next((report for report in self.low if report.dtype == dtype_name(self.policy.dtype)), None)

    @property
    def healthy(self) -> bool:
        """True if the config can be used without changes."""
        if self.problem:
            return False
        return self.configured is None or (self.configured.usable(self.float32) and not self.configured.force_fp32)

    @property
    def recommended(self) -> PrecisionReport | None:
        """Results for the recommended precision, preferably that of the config; None if only float32 is usable."""
        ranked = sorted(
            self.low, key=lambda report: (report is not self.configured, bool(report.force_fp32), report.dtype)
        )
        return next((report for report in ranked if report.usable(self.float32)), None)

    def yaml(self) -> str:
        """Format the recommended config as YAML."""
        best = self.recommended
        amp: dict[str, Any] = {"ENABLED": best is not None}
        if best:
            amp["DTYPE"] = best.dtype
            if best.loss_scale is not None and best.loss_scale < self.init_scale:
                amp["INIT_SCALE"] = best.loss_scale
            if modules := [*self.force_fp32, *(best.force_fp32 or ())]:
                amp["FORCE_FP32"] = modules
        return yaml.safe_dump({"SOLVER": {"AMP": amp}}, sort_keys=False)

    def conclusion(self) -> str:
        """Describe whether the config works, and list the recommended values; or describe a failure in float32."""
        if self.problem:
            return f"the model fails in float32; mixed precision was not analyzed:\n{self.problem}"
        name = dtype_name(self.policy.dtype)
        amp = f"SOLVER.AMP ({name})" if self.asked else f"SOLVER.AMP True ({name})"
        if self.configured is None:
            head = f"{amp} computes in float32 on this device: {self.policy.reason}."
        elif self.healthy:
            head = f"{amp} works for this model."
        elif self.configured.usable(self.float32):
            head = f"{amp} fails with this config, but works if the modules below compute in float32."
        elif self.configured.force_fp32 is not None and not self.configured.refused:
            head = f"{amp} changes the ranking: mAP {self._difference(self.configured, 'mAP')}."
        else:
            reason = self.configured.refused or "forcing a few modules to float32 is not sufficient"
            head = f"{amp} does not work for this model: {reason}."
        return f"{head} Recommended config:\n{self.yaml()}"

    def table(self) -> str:
        """Format a table of all precisions."""
        rows = []
        for report in [self.float32, *self.low]:
            low = report is not self.float32
            if report.refused:
                rows.append([report.dtype, report.verdict(self.float32), report.refused, *[""] * 6])
                continue
            scale = "" if report.loss_scale is None else f"{report.loss_scale:g}"
            rows.append([
                report.dtype,
                report.verdict(self.float32) if low else "reference",
                "" if report.cosine is None or not low else f"{report.cosine:.5f}",
                *(self._difference(report, key) if report.metrics else "" for key in ("mAP", "Rank-1")),
                scale,
                "" if report.zero_share is None else f"{100 * report.zero_share:.2f} %",
                "" if report.cost is None else f"{report.cost.relative:.2f}",
                "" if report.cost is None else f"{report.cost.memory:.1f}",
            ])  # fmt: skip
        headers = ["precision", "verdict", "cosine", "mAP", "Rank-1", "loss scale", "zero gradients", "time", "MiB"]
        return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)

    def layer_table(self, report: PrecisionReport) -> str:
        """Format a table of the layers with the largest errors or with values close to the dtype's limit."""
        erring = [layer for layer in report.layers if layer.own_error > 0]
        notable = sorted(erring, key=lambda layer: -layer.own_error)[:_SHOWN_LAYERS]
        notable += [
            layer
            for layer in sorted(report.layers, key=lambda layer: -layer.limit_share)[:_SHOWN_LAYERS]
            if layer not in notable and layer.limit_share > 0.01
        ]
        rows = [
            (
                layer.name, layer.kind, f"{layer.own_error:.1e}", f"{layer.error:.1e}", f"{layer.magnitude:.3g}",
                f"{100 * layer.limit_share:.2g} %" if layer.limit_share > 1e-9 else "0 %",
                "" if layer.zero_gradients is None else f"{100 * layer.zero_gradients:.2g} %",
            )
            for layer in notable
        ]  # fmt: skip
        headers = ["layer", "", "layer error", "total error", "largest value", "of limit", "zero gradients"]
        return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)

    def _difference(self, report: PrecisionReport, key: str) -> str:
        value = report.metrics[key]
        if report is self.float32:
            return f"{value:.2f}"
        return f"{value:.2f} ({value - self.float32.metrics[key]:+.2f})"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON; non-finite numbers become None."""
        verdicts = {report.dtype: report.verdict(self.float32) for report in self.low} if not self.problem else {}
        content = {
            "healthy": self.healthy,
            "policy": self.policy.state_dict(),
            "asked": self.asked,
            "problem": self.problem,
            "verdicts": verdicts,
            "recommended": yaml.safe_load(self.yaml()) if not self.problem else None,
            "float32": dataclasses.asdict(self.float32),
            "low": [dataclasses.asdict(report) for report in self.low],
            "ranked_images": self.images[0],
            "test_images": self.images[1],
            "untrained": self.untrained,
            "machine": self.machine,
        }
        return _finite(content)


def write_amp_report(report: AmpReport, folder: Path) -> list[Path]:
    """Write ``report.json``, and ``layers.png`` if matplotlib is installed; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.as_dict(), indent=1, allow_nan=False)
    paths = [folder / "report.json"]
    write_atomically(paths[0], lambda file: file.write(text.encode()))
    analyzed = [low for low in report.low if low.layers]
    if analyzed:
        try:
            draw_layers(analyzed, folder / "layers.png")
            paths.append(folder / "layers.png")
        except ConfigError as error:
            logger.warning("layers.png was not written: %s", error)
    return paths


def draw_layers(reports: Sequence[PrecisionReport], path: Path) -> None:
    """Plot the error and the largest output value of each layer in each precision.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    with optional_package("figures require matplotlib", "vis"):
        from matplotlib.figure import Figure
    layers = reports[0].layers
    figure = Figure(figsize=(max(8, min(30, 0.22 * len(layers))), 9), layout="constrained")
    errors, sizes = figure.subplots(2, 1, sharex=True)
    positions = range(len(layers))
    for color, report in zip(("tab:blue", "tab:orange"), reports, strict=False):
        layer_errors = [_drawable(layer.own_error) for layer in report.layers]
        total_errors = [_drawable(layer.error) for layer in report.layers]
        errors.plot(positions, layer_errors, ".", color=color, label=f"{report.dtype}: layer")
        errors.plot(positions, total_errors, "-", color=color, label=f"{report.dtype}: total")
    errors.set(yscale="log", ylabel="relative error", title="error compared with float32; gaps: overflow or exact")
    errors.legend()
    sizes.plot(positions, [_drawable(layer.magnitude) for layer in layers], "k.-", label="largest value, float32")
    limit = torch.finfo(torch.float16).max
    sizes.axhline(limit, color="tab:red", linestyle="--", label=f"largest float16 number, {limit:g}")
    sizes.set(yscale="log", ylabel="magnitude", xticks=list(positions))
    sizes.set_xticklabels([layer.name for layer in layers], rotation=90, fontsize=6)
    sizes.legend()
    figure.savefig(path, dpi=120)


def _drawable(value: float) -> float:
    return value if 0 < value < float("inf") else float("nan")


def _finite(value: Any) -> Any:
    """Replace non-finite numbers in a nested structure with None, because JSON does not support them."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
