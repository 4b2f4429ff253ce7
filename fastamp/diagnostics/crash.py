"""Crash dump: saved state of a step that failed because of its precision, from which the step can be replayed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastamp.amp.policy import DTYPES, PrecisionPolicy
from fastamp.checkpoint.weights_file import read_checkpoint, write_checkpoint
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.nan_location import NonFiniteLocation
from fastamp.diagnostics.nan_locator import locate_in_training, try_locate
from fastamp.utils import comm
from fastamp.utils.errors import WeightsError
from fastamp.utils.plural import plural
from fastamp.utils.sharding import row_shards

FOLDER = "amp_crash"
_FORMAT = 1


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a step.

    Attributes:
        batch: input of the model.
        random: random state before the forward pass (``fastamp.utils.env.random_state``).
    """

    batch: dict[str, Any]
    random: dict[str, Any]


@dataclass
class CrashDump:
    """State of a failed step.

    Attributes:
        message: error message.
        iteration, rank: iteration, from 0, and rank of the failed step. The file name counts iterations from 1.
        config: complete config as YAML text.
        policy: precision of the step; result of ``PrecisionPolicy.state_dict``.
        loss_scale: loss scale of the step; 1 without loss scaling.
        micro_batch: the micro-batch with non-finite values.
        losses: loss name -> value under the policy; can be Inf or NaN.
        location: result of ``NonFiniteLocation.as_dict``; None if no non-finite value was located in this process.
        model: parameters and buffers, including non-persistent buffers.
        evaluating: names of the modules in evaluation mode, e.g. frozen ones.
        frozen: names of the parameters with ``requires_grad=False``.
        frozen_layers: ``MODEL.FREEZE_LAYERS``, if the layers were frozen in this step.
        counters: module name -> public numeric attributes of the module, e.g. the position in a queue.
        sharded: names of the parameters in ``row_shards``, of which ``model`` has the rows of this rank.
    """

    message: str
    iteration: int
    rank: int
    config: str
    policy: dict[str, Any]
    loss_scale: float
    micro_batch: MicroBatch
    losses: dict[str, float]
    location: dict[str, Any] | None
    model: dict[str, torch.Tensor]
    evaluating: list[str]
    frozen: list[str]
    frozen_layers: list[str]
    counters: dict[str, dict[str, float]]
    sharded: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Write the crash dump, which contains only tensors and plain values, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"iteration_{self.iteration + 1}_rank_{self.rank}.pth"
        content = vars(self) | {"micro_batch": vars(self.micro_batch), "fastamp_crash": _FORMAT}
        write_checkpoint(path, content)
        return path

    @classmethod
    def read(cls, path: str | Path) -> "CrashDump":
        """Read a crash dump.

        Args:
            path: a crash dump, or a folder from which the newest crash dump is read.

        Raises:
            WeightsError: if no crash dump was found, or the file is not a crash dump that this version can read.
        """
        path = Path(path)
        if path.is_dir():
            files = sorted(path.glob("*.pth"), key=lambda file: file.stat().st_mtime)
            if not files:
                raise WeightsError(
                    f"no crash dump (*.pth) found in {path}.\n"
                    f"  fix: pass the folder OUTPUT_DIR/{FOLDER} of a failed run"
                )
            path = files[-1]
        content = read_checkpoint(str(path))
        if not isinstance(content, dict) or content.pop("fastamp_crash", None) != _FORMAT:
            raise WeightsError(f"{path} is not a crash dump.\n  fix: use a file in OUTPUT_DIR/{FOLDER}/")
        try:
            return cls(**content | {"micro_batch": MicroBatch(**content["micro_batch"])})
        except (TypeError, KeyError) as error:
            raise WeightsError(
                f"{path} is not a crash dump of this version of fastamp: {error}.\n"
                "  fix: replay it with the version that wrote it"
            ) from error

    def restore(self, model: nn.Module, *, exact: bool = True) -> None:
        """Restore the state of the failed step.

        Args:
            model: model built from ``config``, on any device.
            exact: also restore numeric attributes of modules. Set to False if the config was changed, because some of
                these attributes are set from the config.

        Raises:
            WeightsError: if tensor names or shapes do not match the model.
        """
        tensors = _tensors(model)
        if exact:  # with the numeric attributes, a single process holds the rows of the failed rank
            for name in self.sharded:
                if name in tensors and name in self.model and self.model[name].shape[1:] == tensors[name].shape[1:]:
                    with torch.no_grad():
                        rows = torch.empty_like(self.model[name], device=tensors[name].device)
                        tensors[name].set_(rows.untyped_storage(), 0, rows.shape, rows.stride())
        differing = [
            name for name, t in tensors.items() if name not in self.model or self.model[name].shape != t.shape
        ] + [name for name in self.model if name not in tensors]
        if differing:
            raise WeightsError(
                f"the model in the crash dump does not match the model built from its config: "
                f"{plural(len(differing), 'tensor differs', 'tensors differ')}, e.g. {', '.join(differing[:3])}.\n"
                "  fix: use the same code, plugin (--plugin FILE) and MODEL values as in the failed run"
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self.model[name])
        evaluating, frozen = set(self.evaluating), set(self.frozen)
        for name, module in model.named_modules():
            if exact:
                _restore_counters(module, self.counters.get(name, {}))
            module.training = name not in evaluating
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def precision(self, device: torch.device) -> PrecisionPolicy:
        """Build the policy of the failed step for ``device``."""
        return PrecisionPolicy(
            device.type, DTYPES[self.policy["dtype"]], "as in the crash dump", tf32=self.policy["tf32"]
        )


def _restore_counters(module: nn.Module, counters: dict[str, float]) -> None:
    """Restore numeric attributes. Other entries are ignored, because the crash dump is not trusted."""
    for key, number in counters.items():
        if all(isinstance(value, bool | int | float) for value in (vars(module).get(key), number)):
            setattr(module, key, number)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def replay_failure(
    model: nn.Module,
    micro_batches: list[MicroBatch],
    *,
    policy: PrecisionPolicy,
    loss_scale: float,
    frozen: tuple[str, ...] = (),
) -> tuple[NonFiniteLocation | None, str, MicroBatch, dict[str, float]]:
    """Replay the micro-batches of a failed step, and locate the first non-finite value.

    Returns:
        ``(location, reason, micro_batch, losses)``. ``location`` is None if the failure occurred in another process or
        was not reproduced. ``reason`` explains an error that prevented the search; else it is empty. ``micro_batch`` is
        the one with the failure, else the first one; ``losses`` are its losses under the policy.
    """
    location, note, losses = None, "", {}
    for micro_batch in reversed(micro_batches):
        try:
            with IsolatedPasses(model, micro_batch.batch, random=micro_batch.random, frozen=frozen) as passes:
                result = passes.train(policy, scale=loss_scale)
        except Exception as error:
            note = f"(the step could not be replayed: {type(error).__name__}: {error})"
            continue
        losses = result.losses
        if not result.finite:
            location, note = try_locate(
                model,
                micro_batch.batch,
                lambda candidate: locate_in_training(candidate, policy, scale=loss_scale),
                random=micro_batch.random,
                frozen=frozen,
            )
            break
    return location, note, micro_batch, losses


def build_crash_dump(
    model: nn.Module,
    *,
    policy: PrecisionPolicy,
    location: NonFiniteLocation | None,
    frozen: tuple[str, ...],
    **attributes: Any,
) -> CrashDump:
    """Build the crash dump of a skipped step; the model is unchanged because the step was not applied.

    Args:
        model: the model.
        policy: precision of the step.
        location: first non-finite value; None if it was not located in this process.
        frozen: ``MODEL.FREEZE_LAYERS``, if the layers were frozen in this step.
        attributes: the other attributes of ``CrashDump`` that the model does not have.
    """
    return CrashDump(
        rank=comm.get_rank(),
        policy=policy.state_dict(),
        location=location.as_dict() if location else None,
        model={name: tensor.detach().cpu() for name, tensor in _tensors(model).items()},
        evaluating=[name for name, module in model.named_modules() if not module.training],
        frozen=[name for name, p in model.named_parameters() if not p.requires_grad],
        frozen_layers=list(frozen),
        counters={name: numbers for name, module in model.named_modules() if (numbers := _counters(module))},
        sharded=list(row_shards(model)),
        **attributes,
    )


def _counters(module: nn.Module) -> dict[str, float]:
    """Return the public numeric attributes of a module."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float) and name[0] != "_"}
