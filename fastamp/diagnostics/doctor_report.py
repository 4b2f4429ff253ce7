"""What the examination of a model's mixed precision found: tables, a verdict, the YAML lines to paste, a picture."""

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
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import write_atomically
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "Examination": "fastamp.diagnostics.doctor_report.PrecisionReport",
        "Diagnosis": "fastamp.diagnostics.doctor_report.AmpReport",
        "write_diagnosis": "fastamp.diagnostics.doctor_report.write_amp_report",
    },
)

logger = logging.getLogger(__name__)

FOLDER = "amp_doctor"

LARGEST_MAP_DIFFERENCE = 1.0
"""Points of mAP by which a precision may differ from float32, up or down."""

_SHOWN_LAYERS = 8


@dataclass
class PrecisionReport:
    """One precision.

    Attributes:
        dtype: its name.
        refused: why the device does not compute in it; empty when it does.
        failure: what goes wrong with the config as it is; empty when nothing does.
        force_fp32: modules to force besides the config's; None when no short list helps.
        cosine: mean embedding cosine to float32, with these forced.
        loss_scale: the largest power of two with finite gradients; None without loss scaling.
        zero_share: share of the gradients' elements that are 0 in this precision alone.
        cost: of a training pass.
        metrics: ``mAP`` and ``Rank-1`` in percent.
        layers: of the model as the config has it, in the order in which they are called.
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

    def ranks_as(self, reference: "PrecisionReport") -> bool:
        """Whether its mAP is near enough to float32's, in both directions: rounding can raise a score too."""
        return bool(self.metrics) and abs(self.metrics["mAP"] - reference.metrics["mAP"]) <= LARGEST_MAP_DIFFERENCE

    def usable(self, reference: "PrecisionReport") -> bool:
        """Whether a run can use it, with ``force_fp32`` where that is needed."""
        return not self.refused and self.force_fp32 is not None and self.ranks_as(reference)

    def verdict(self, reference: "PrecisionReport") -> str:
        """Return it in a word or a few."""
        if self.refused:
            return "not on this device"
        if self.force_fp32 is None:
            return "fails"
        if not self.ranks_as(reference):
            return "ranks otherwise"
        return "sound with FORCE_FP32" if self.force_fp32 else "sound"


@dataclass
class AmpReport:
    """All that was found.

    Attributes:
        policy: the precision that the config asks for; where it asks for none, the one that ``SOLVER.AMP on`` takes.
        asked: whether it asks for one.
        problem: why float32 itself is broken; empty when it is not, else there is nothing more.
        float32: the reference.
        low: the precisions examined.
        force_fp32: the config's own.
        init_scale: the config's.
        images: how many were ranked, and how many the test set has.
        untrained: whether the ranking is that of a model without trained weights.
        machine: ``EnvironmentReport.as_dict``.
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
    def own(self) -> PrecisionReport | None:
        """The examination of the policy's precision; None where that is float32."""
        return next((each for each in self.low if each.dtype == dtype_name(self.policy.dtype)), None)

    @property
    def healthy(self) -> bool:
        """Whether the config can be run as it is."""
        if self.problem:
            return False
        return self.own is None or (self.own.usable(self.float32) and not self.own.force_fp32)

    @property
    def recommended(self) -> PrecisionReport | None:
        """The precision to use: the config's own where it can be, else another one; None is float32."""
        ranked = sorted(self.low, key=lambda each: (each is not self.own, bool(each.force_fp32), each.dtype))
        return next((each for each in ranked if each.usable(self.float32)), None)

    def yaml(self) -> str:
        """Return the config lines to paste."""
        best = self.recommended
        amp: dict[str, Any] = {"ENABLED": best is not None}
        if best:
            amp["DTYPE"] = best.dtype
            if best.loss_scale is not None and best.loss_scale < self.init_scale:
                amp["INIT_SCALE"] = best.loss_scale
            if modules := [*self.force_fp32, *best.force_fp32]:
                amp["FORCE_FP32"] = modules
        return yaml.safe_dump({"SOLVER": {"AMP": amp}}, sort_keys=False)

    def conclusion(self) -> str:
        """Return the verdict in words, with the lines to paste."""
        if self.problem:
            return f"the model is broken in float32, which comes before any mixed precision:\n{self.problem}"
        name = dtype_name(self.policy.dtype)
        how = f"SOLVER.AMP ({name})" if self.asked else f"SOLVER.AMP on ({name})"
        if self.own is None:
            head = f"{how} computes in float32 here: {self.policy.reason}."
        elif self.healthy:
            head = f"{how} is sound for this model."
        elif self.own.usable(self.float32):
            head = f"{how} fails as the config is, and is sound with the modules below in float32."
        elif self.own.force_fp32 is not None and not self.own.refused:
            head = f"{how} ranks otherwise than float32: mAP {self._difference(self.own, 'mAP')}."
        else:
            head = f"{how} cannot hold this model: {self.own.refused or 'no short list of float32 modules helps'}."
        return f"{head} To paste into the config:\n{self.yaml()}"

    def table(self) -> str:
        """Return the precisions side by side."""
        rows = []
        for each in [self.float32, *self.low]:
            low = each is not self.float32
            if each.refused:
                rows.append([each.dtype, each.verdict(self.float32), each.refused, *[""] * 6])
                continue
            scale = "" if each.loss_scale is None else f"{each.loss_scale:g}"
            rows.append([
                each.dtype,
                each.verdict(self.float32) if low else "reference",
                "" if each.cosine is None or not low else f"{each.cosine:.5f}",
                *(self._difference(each, key) if each.metrics else "" for key in ("mAP", "Rank-1")),
                scale,
                "" if each.zero_share is None else f"{100 * each.zero_share:.2f} %",
                "" if each.cost is None else f"{each.cost.relative:.2f}",
                "" if each.cost is None else f"{each.cost.memory:.1f}",
            ])  # fmt: skip
        headers = ["precision", "verdict", "cosine", "mAP", "Rank-1", "loss scale", "lost gradients", "time", "MiB"]
        return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)

    def layer_table(self, each: PrecisionReport) -> str:
        """Return the layers that stand out: the largest errors of their own, and the nearest to the dtype's limit."""
        erring = [layer for layer in each.layers if layer.own_error > 0]
        notable = sorted(erring, key=lambda layer: -layer.own_error)[:_SHOWN_LAYERS]
        notable += [
            layer
            for layer in sorted(each.layers, key=lambda layer: -layer.limit_share)[:_SHOWN_LAYERS]
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
        headers = ["layer", "", "own error", "error so far", "largest value", "of the limit", "lost gradients"]
        return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)

    def _difference(self, each: PrecisionReport, key: str) -> str:
        value = each.metrics[key]
        if each is self.float32:
            return f"{value:.2f}"
        return f"{value:.2f} ({value - self.float32.metrics[key]:+.2f})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; what is not finite is None."""
        verdicts = {each.dtype: each.verdict(self.float32) for each in self.low} if not self.problem else {}
        content = {
            "healthy": self.healthy,
            "policy": self.policy.state_dict(),
            "asked": self.asked,
            "problem": self.problem,
            "verdicts": verdicts,
            "recommended": yaml.safe_load(self.yaml()) if not self.problem else None,
            "float32": dataclasses.asdict(self.float32),
            "low": [dataclasses.asdict(each) for each in self.low],
            "ranked_images": self.images[0],
            "test_images": self.images[1],
            "untrained": self.untrained,
            "machine": self.machine,
        }
        return _finite(content)


def write_amp_report(diagnosis: AmpReport, folder: Path) -> list[Path]:
    """Write ``report.json``, and ``layers.png`` where matplotlib is installed; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(diagnosis.as_dict(), indent=1, allow_nan=False)
    paths = [folder / "report.json"]
    write_atomically(paths[0], lambda file: file.write(text.encode()))
    examined = [each for each in diagnosis.low if each.layers]
    if examined:
        try:
            draw_layers(examined, folder / "layers.png")
            paths.append(folder / "layers.png")
        except ConfigError as error:
            logger.warning("no picture: %s", error)
    return paths


def draw_layers(examined: Sequence[PrecisionReport], path: Path) -> None:
    """Draw each layer's error and largest value against the limits of the precisions.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('it needs matplotlib: pip install "fastamp[vis]"') from error
    layers = examined[0].layers
    figure = Figure(figsize=(max(8, min(30, 0.22 * len(layers))), 9), layout="constrained")
    errors, sizes = figure.subplots(2, 1, sharex=True)
    places = range(len(layers))
    for colour, each in zip(("tab:blue", "tab:orange"), examined, strict=False):
        own = [_drawable(layer.own_error) for layer in each.layers]
        so_far = [_drawable(layer.error) for layer in each.layers]
        errors.plot(places, own, ".", color=colour, label=f"{each.dtype}: the layer alone")
        errors.plot(places, so_far, "-", color=colour, label=f"{each.dtype}: so far")
    errors.set(yscale="log", ylabel="relative error to float32", title="error by layer; gaps overflow or are exact")
    errors.legend()
    sizes.plot(places, [_drawable(layer.magnitude) for layer in layers], "k.-", label="largest value, float32")
    limit = torch.finfo(torch.float16).max
    sizes.axhline(limit, color="tab:red", linestyle="--", label=f"float16 ends at {limit:g}")
    sizes.set(yscale="log", ylabel="magnitude", xticks=list(places))
    sizes.set_xticklabels([layer.name for layer in layers], rotation=90, fontsize=6)
    sizes.legend()
    figure.savefig(path, dpi=120)


def _drawable(value: float) -> float:
    return value if 0 < value < float("inf") else float("nan")


def _finite(value: Any) -> Any:
    """Return ``value`` with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
