"""Save checkpoints atomically, and load or resume from the newest readable one."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fastamp.checkpoint.adapters import ADAPTERS_OF, load_adapters
from fastamp.checkpoint.load_state import examples, is_weight, load_model_state
from fastamp.checkpoint.shards import full_state_dict, full_state_form, load_full_state
from fastamp.checkpoint.weights_file import average_in, read_checkpoint, state_dict_in, write_checkpoint
from fastamp.utils import comm
from fastamp.utils.errors import WeightsError
from fastamp.utils.files import write_atomically
from fastamp.utils.structure import structure_mismatch

logger = logging.getLogger(__name__)

STRIPPED = "stripped"
"""Key of the entry that marks a checkpoint without training state; see ``fastamp.checkpoint.strip``."""


def load_weights(
    model: nn.Module,
    content: Any,
    path: str | os.PathLike[str],
    *,
    min_match: float,
    allow_missing: bool,
    base: str | os.PathLike[str],
) -> dict[str, Any]:
    """Load the model weights of a checkpoint or weights file.

    Args:
        model: model to load into.
        content: content of the file; of a checkpoint of DINO, the teacher is loaded. LoRA adapters are loaded on top of
            ``base``.
        path: the file, for messages.
        min_match, allow_missing, base: see ``Checkpointer``.

    Returns:
        The remaining entries of the file, without the weights; empty for a bare state dict.

    Raises:
        WeightsError: see ``state_dict_in``, ``load_model_state`` and ``load_adapters``.
    """
    state = state_dict_in(average_in(content), path)
    if ADAPTERS_OF in content:
        load_adapters(model, content, source=path, base=base, min_match=min_match)
    else:
        options: dict[str, Any] = {"min_match": min_match, "allow_missing": allow_missing}
        load_model_state(model, state, source=str(path), content=content, **options)
    return {key: value for key, value in content.items() if key != "model"} if "model" in content else {}


@runtime_checkable
class FormedState(Protocol):
    """Part of a checkpoint whose state dict may differ in structure from its current one."""

    def form(self) -> Any:
        """Return an example of the structure."""


class Checkpointer:
    """Save and load a model together with the training state of a run.

    Args:
        model: model stored under ``"model"``.
        save_dir: output folder; the file ``last_checkpoint`` in it names the newest checkpoint.
        min_match: see ``load_model_state``. Default 0.9.
        allow_missing: see ``load_model_state``. Default True, for training.
        base: weights file without adapters; ``load`` reads it before a file of LoRA adapters. Default "": such files
            are refused.
        check: called with the model before each save; if it raises an exception, nothing is saved.
        notes: function that returns additional entries for each checkpoint; ``resume`` does not require these entries.
        checkpointables: objects with ``state_dict()`` and ``load_state_dict(state)``; each keyword becomes an entry of
            the checkpoint. ``resume`` compares the structure of an entry with ``form()`` of the object, or, without
            this method, with its ``state_dict()``.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str | os.PathLike[str] = "",
        *,
        min_match: float = 0.9,
        allow_missing: bool = True,
        base: str | os.PathLike[str] = "",
        check: Callable[[nn.Module], None] | None = None,
        notes: Callable[[], dict[str, Any]] = dict,
        **checkpointables: Any,
    ) -> None:
        self.model = model
        self.save_dir = Path(save_dir)
        self.min_match, self.allow_missing = min_match, allow_missing
        self.base = base
        self.check = check
        self.notes = notes
        self.checkpointables = checkpointables

    def content(self) -> dict[str, Any]:
        """Call ``check``, then collect the state of the model and all checkpointables. Must be called on every rank."""
        if self.check is not None:
            self.check(self.model)
        return {"model": full_state_dict(self.model)} | {key: p.state_dict() for key, p in self.checkpointables.items()}

    def save(self, name: str, *, tag: bool = True, **extra: Any) -> Path:
        """Write ``save_dir/name.pth`` atomically. Must be called on every rank; only the main process writes.

        Args:
            name: file name without ``.pth``.
            tag: update ``last_checkpoint`` after the file is complete. Default True.
            extra: additional entries: plain values or tensors.

        Returns:
            Path of the checkpoint.
        """
        content = self.content() | self.notes() | extra
        path = self.save_dir / f"{name}.pth"
        if not comm.is_main_process():
            return path
        self.save_dir.mkdir(parents=True, exist_ok=True)
        write_checkpoint(path, content)
        if tag:
            write_atomically(self.save_dir / "last_checkpoint", lambda file: file.write(path.name.encode()))
        return path

    def delete(self, names: Iterable[str]) -> None:
        """Delete ``save_dir/name.pth`` for each name, except the checkpoint named in ``last_checkpoint``."""
        if comm.is_main_process():
            for name in set(names) - {Path(_tagged_name(self.save_dir) or "").stem}:
                (self.save_dir / f"{name}.pth").unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Delete incomplete files left by a run that was killed while writing."""
        if comm.is_main_process():
            for name in ("model_*.pth", "last_checkpoint", "config.yaml", "metrics.json", "report.html"):
                for file in self.save_dir.glob(f".{name}.*.tmp"):
                    file.unlink(missing_ok=True)

    def last_checkpoint(self, folder: str | os.PathLike[str] | None = None) -> Path | None:
        """Find the checkpoint to resume from. Must be called on every rank; all ranks get the same path.

        This is the checkpoint named in the file ``last_checkpoint`` or, if that checkpoint is missing or damaged, the
        most recently written readable ``model_*.pth`` that has all entries required by ``resume``. ``model_best.pth``
        is excluded, because its weights may be averaged.

        Args:
            folder: folder to search; None for ``save_dir``.

        Returns:
            Path of the checkpoint; None if the folder contains neither a file ``last_checkpoint`` nor a checkpoint to
            resume from.

        Raises:
            WeightsError: if no checkpoint is readable although the folder contains checkpoints or ``last_checkpoint``.
        """
        folder = self.save_dir if folder is None else Path(folder)
        path, problem = None, ""
        if comm.is_main_process():
            try:
                path = self._newest_readable(folder)
            except WeightsError as error:
                problem = str(error)
        if problem := comm.gather_bytes(problem.encode())[0].decode():
            raise WeightsError(problem)
        name = os.fsdecode(comm.gather_bytes(os.fsencode(path.name) if path else b"")[0])
        return folder / name if name else None

    def _newest_readable(self, folder: Path) -> Path | None:
        named, problems = _tagged_name(folder), []
        files = [path for path in folder.glob("model_*.pth") if path.name not in (named, "model_best.pth")]
        files.sort(key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
        if named is not None and os.path.isfile(folder / named):
            files.insert(0, folder / named)
        elif named is not None:
            problems.append(f"last_checkpoint names {named[:80]!r}, which does not exist")
        for path in files:
            try:
                content = read_checkpoint(path, lazily=True)
            except WeightsError as error:
                problems.append(str(error).splitlines()[0])
                continue
            # The named checkpoint is returned even if entries are missing: resume explains the error.
            if path.name == named or self._missing_entries(content) == []:
                if path.name != named:
                    why = "\n  ".join(problems or ["last_checkpoint not found"])
                    logger.warning("%s\n  using %s, the newest readable checkpoint", why, path)
                return path
            if isinstance(content, dict) and STRIPPED in content:
                problems.append(f"{path.name} has no training state: it was stripped")
        if not problems:
            return None
        listed_problems = "\n  ".join(problems)
        raise WeightsError(
            f"no readable checkpoint in {folder}:\n  {listed_problems}\n"
            "  fix: start a new run without --resume; to start from existing weights, set MODEL.WEIGHTS to a readable "
            "file, e.g. model_best.pth"
        )

    def _missing_entries(self, content: Any) -> list[str]:
        """List the entries that ``resume`` requires and that ``content`` lacks."""
        return [key for key in ("model", *self.checkpointables) if not isinstance(content, dict) or key not in content]

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load only the model weights from a file.

        Args:
            path: checkpoint or weights file.

        Returns:
            The remaining entries of the file; see ``load_weights``.

        Raises:
            WeightsError: see ``read_checkpoint`` and ``load_weights``.
        """
        options: dict[str, Any] = {"min_match": self.min_match, "allow_missing": self.allow_missing, "base": self.base}
        return load_weights(self.model, read_checkpoint(path), path, **options)

    def resume(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore the model and all checkpointables, so that the run continues as if it had not been interrupted.

        Returns:
            The remaining entries of the file, which are not part of the restored state.

        Raises:
            WeightsError: if the file is damaged, is not a training checkpoint, or does not match the model.
        """
        content = read_checkpoint(path)
        if missing := self._missing_entries(content):
            cause = "the file is not a checkpoint of this kind of run"
            if isinstance(content, dict) and STRIPPED in content:
                raise WeightsError(
                    f"cannot resume from {path}: it was stripped and has no training state (missing: "
                    f"{', '.join(missing)}).\n"
                    "  fix: resume from the original checkpoint; or set MODEL.WEIGHTS to this file and start a new run "
                    "without --resume"
                )
            if len(missing) == 1:
                cause = "the config of this run requires this entry"
            raise WeightsError(
                f"cannot resume from {path}: missing entries: {', '.join(missing)}; {cause}.\n"
                "  fix: resume with the run's original config (config.yaml next to the checkpoint); or set "
                "MODEL.WEIGHTS to the checkpoint and start a new run without --resume"
            )
        model_form = full_state_form(self.model)
        self._check_structure(content, path)
        state = content.pop("model")
        differ = [key for key in model_form.keys() | state.keys() if key not in model_form or key not in state]
        differ += [key for key in model_form.keys() & state.keys() if model_form[key].shape != state[key].shape]
        if differ:
            raise WeightsError(
                f"cannot resume from {path}: the file does not match the model; mismatched tensors: {len(differ)}"
                f"{examples(sorted(differ))}.\n  fix: resume with the run's original config (config.yaml next to the "
                "checkpoint)"
            )
        load_full_state(self.model, state)
        for key, part in self.checkpointables.items():
            try:
                part.load_state_dict(content.pop(key))
            except (ValueError, LookupError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
                raise WeightsError(
                    f"cannot resume from {path}: {key} does not match this run: {error}.\n"
                    "  fix: resume with the run's original config (config.yaml next to the checkpoint)"
                ) from error
        return content

    def _check_structure(self, content: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Raise WeightsError if the structure of an entry differs from what this run would write."""
        wrong = "" if isinstance(content["model"], dict) else "model: expected a dict"
        if not wrong:
            invalid = [
                key for key, value in content["model"].items() if not is_weight(value) or not isinstance(key, str)
            ]
            wrong = f"model: expected a dict of dense tensors, got an invalid entry {invalid[0]!r}" if invalid else ""
        for key, part in self.checkpointables.items():
            if isinstance(part, torch.optim.Optimizer):  # has no state before the first step
                current = {"state": {}, "param_groups": [{"params": [0]}]}
            else:
                current = part.form() if isinstance(part, FormedState) else part.state_dict()
            wrong = wrong or structure_mismatch(current, content[key], key)
        if wrong:
            raise WeightsError(
                f"cannot resume from {path}: the file has unexpected content or is damaged.\n  {wrong}\n"
                "  fix: use an earlier checkpoint, or the run's original config (config.yaml next to the checkpoint)"
            )


def _tagged_name(folder: Path) -> str | None:
    """Return the file name in ``last_checkpoint``, even if no such file exists; None without ``last_checkpoint``."""
    pointer = folder / "last_checkpoint"
    if not pointer.is_file():
        return None
    return Path(pointer.read_bytes().decode(errors="replace").replace("\0", "?").strip()).name
