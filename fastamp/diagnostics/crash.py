"""The file that is left when a precision fails: all that is needed to see the failure again."""

from dataclasses import dataclass
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
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "Crash": "fastamp.diagnostics.crash.CrashDump",
        "crash_of": "fastamp.diagnostics.crash.build_crash_dump",
        "investigate": "fastamp.diagnostics.crash.replay_failure",
    },
)

FOLDER = "amp_crash"
_FORMAT = 1


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a step.

    Attributes:
        batch: what the model was given.
        random: the random state before its forward pass (``fastamp.utils.env.random_state``).
    """

    batch: dict[str, Any]
    random: dict[str, Any]


@dataclass
class CrashDump:
    """A failed step.

    Attributes:
        message: what was said when it failed.
        iteration, rank: where.
        config: the run's whole config as YAML text.
        policy: the precision, as ``PrecisionPolicy.state_dict``.
        loss_scale: the loss scale of the step; 1 without loss scaling.
        micro_batch: the one whose values were not finite.
        losses: loss name -> value under the policy; may be infinite or NaN.
        location: ``NonFiniteLocation.as_dict``; None when nothing was found on this process.
        model: its parameters and buffers, those that checkpoints leave out too.
        evaluating: names of the modules that were in evaluation mode, e.g. frozen ones.
        frozen: names of the parameters that needed no gradient.
        frozen_layers: ``MODEL.FREEZE_LAYERS``, where they were frozen at that time.
        counters: module name -> its attributes that are plain numbers, e.g. a place in a queue.
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

    def write(self, folder: Path) -> Path:
        """Write the file, tensors and plain values alone, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"iteration_{self.iteration}_rank_{self.rank}.pth"
        content = vars(self) | {"micro_batch": vars(self.micro_batch), "fastamp_crash": _FORMAT}
        write_checkpoint(path, content)
        return path

    @classmethod
    def read(cls, path: str | Path) -> "CrashDump":
        """Read a file, or the newest one of a folder.

        Raises:
            WeightsError: there is none, or it is something else.
        """
        path = Path(path)
        if path.is_dir():
            files = sorted(path.glob("*.pth"), key=lambda file: file.stat().st_mtime)
            if not files:
                raise WeightsError(f"{path} holds no crash file (*.pth)")
            path = files[-1]
        content = read_checkpoint(str(path))
        if not isinstance(content, dict) or content.pop("fastamp_crash", None) != _FORMAT:
            raise WeightsError(f"{path} is no crash file: those stand in OUTPUT_DIR/{FOLDER}/")
        try:
            return cls(**content | {"micro_batch": MicroBatch(**content["micro_batch"])})
        except (TypeError, KeyError) as error:
            raise WeightsError(f"{path} is no crash file of this version: {error}") from error

    def restore(self, model: nn.Module, *, exact: bool = True) -> None:
        """Give ``model``, built from ``config``, the state it failed in.

        Args:
            model: on any device.
            exact: its modules' plain numbers too; not where the config was changed, which some of them come from.

        Raises:
            WeightsError: it is another model.
        """
        own = _tensors(model)
        differing = [name for name, t in own.items() if name not in self.model or self.model[name].shape != t.shape] + [
            name for name in self.model if name not in own
        ]
        if differing:
            raise WeightsError(
                f"the model of the crash file is another one than its config builds here: {len(differing)} tensors "
                f"differ, e.g. {', '.join(differing[:3])}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.model[name])
        evaluating, frozen = set(self.evaluating), set(self.frozen)
        for name, module in model.named_modules():
            if exact:
                _take_numbers(module, self.counters.get(name, {}))
            module.training = name not in evaluating
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def precision(self, device: torch.device) -> PrecisionPolicy:
        """Return the policy of the failed step, for ``device``."""
        return PrecisionPolicy(
            device.type, DTYPES[self.policy["dtype"]], "as in the crash file", tf32=self.policy["tf32"]
        )


def _take_numbers(module: nn.Module, numbers: dict[str, float]) -> None:
    """Set attributes that ``module`` has, and that are plain numbers there and here; a file sets no others."""
    for key, number in numbers.items():
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
    """Replay the micro-batches of a step that failed.

    Returns:
        Where the first value that is not finite was made (None when it was not on this process, or did not show
        again), why it could not be searched if so, the micro-batch it was in (else the first), and the losses of that
        one under the policy.
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
                lambda each: locate_in_training(each, policy, scale=loss_scale),
                random=micro_batch.random,
                frozen=frozen,
            )
            break
    return location, note, micro_batch, losses


def build_crash_dump(
    model: nn.Module,
    *,
    message: str,
    iteration: int,
    config: str,
    policy: PrecisionPolicy,
    loss_scale: float,
    micro_batch: MicroBatch,
    losses: dict[str, float],
    location: NonFiniteLocation | None,
    frozen: tuple[str, ...],
) -> CrashDump:
    """Return the crash of ``model`` as it is now, which is as it was before the step: that left no trace."""
    return CrashDump(
        message=message,
        iteration=iteration,
        rank=comm.get_rank(),
        config=config,
        policy=policy.state_dict(),
        loss_scale=loss_scale,
        micro_batch=micro_batch,
        losses=losses,
        location=location.as_dict() if location else None,
        model={name: tensor.detach().cpu() for name, tensor in _tensors(model).items()},
        evaluating=[name for name, module in model.named_modules() if not module.training],
        frozen=[name for name, p in model.named_parameters() if not p.requires_grad],
        frozen_layers=list(frozen),
        counters={name: numbers for name, module in model.named_modules() if (numbers := _counters(module))},
    )


def _counters(module: nn.Module) -> dict[str, float]:
    """Return the attributes of a module that are plain numbers."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float) and name[0] != "_"}
