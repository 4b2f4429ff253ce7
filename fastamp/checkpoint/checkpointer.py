"""Checkpoints: atomic, made of tensors and plain values, and a whole one to continue from as long as there is one."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from fastamp.checkpoint.load_state import examples, is_weight, load_model_state
from fastamp.checkpoint.weights_file import read_checkpoint, state_dict_in, write_checkpoint
from fastamp.utils import comm
from fastamp.utils.errors import WeightsError
from fastamp.utils.files import write_atomically
from fastamp.utils.structure import structure_mismatch

logger = logging.getLogger(__name__)

STRIPPED = "stripped"
"""The entry that marks a checkpoint without training state, see ``fastamp.checkpoint.strip``."""


class Checkpointer:
    """Save and load a model and whatever else a run needs to continue.

    Args:
        model: what ``"model"`` in a file is loaded into.
        save_dir: where files are written; ``last_checkpoint`` in it names the newest one.
        min_match: see ``load_model_state``.
        check: is called with the model before each save, and raises where that is not worth saving.
        notes: returns further entries of each file, which ``resume`` does not need.
        checkpointables: name -> object with ``state_dict()`` and ``load_state_dict(state)``; and ``form()`` where what
            is loaded need not have the form of the former, see ``structure_mismatch``.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str | os.PathLike[str] = "",
        *,
        min_match: float = 0.9,
        check: Callable[[nn.Module], None] | None = None,
        notes: Callable[[], dict[str, Any]] = dict,
        **checkpointables: Any,
    ) -> None:
        self.model = model
        self.save_dir = Path(save_dir)
        self.min_match = min_match
        self.check = check
        self.notes = notes
        self.checkpointables = checkpointables

    def content(self) -> dict[str, Any]:
        """Return what a file gets, but for further entries; called on every rank."""
        if self.check is not None:
            self.check(self.model)
        return {"model": self.model.state_dict()} | {key: p.state_dict() for key, p in self.checkpointables.items()}

    def save(self, name: str, *, tag: bool = True, **extra: Any) -> Path:
        """Write ``save_dir/name.pth`` atomically; called on every rank, of which the main one writes.

        Args:
            name: file name without ``.pth``.
            tag: also make ``last_checkpoint`` name it, once it is whole.
            extra: further entries, plain values or tensors.

        Returns:
            The file's path.
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
        """Delete ``save_dir/name.pth`` for each name, but never what ``last_checkpoint`` names."""
        if comm.is_main_process():
            for name in set(names) - {Path(_tagged_name(self.save_dir) or "").stem}:
                (self.save_dir / f"{name}.pth").unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Delete the unfinished files of a training that was killed while it wrote."""
        if comm.is_main_process():
            for name in ("model_*.pth", "last_checkpoint", "config.yaml", "metrics.json", "report.html"):
                for file in self.save_dir.glob(f".{name}.*.tmp"):
                    file.unlink(missing_ok=True)

    def last_checkpoint(self, folder: str | os.PathLike[str] | None = None) -> Path | None:
        """Return the checkpoint to resume from, the same on every rank; all ranks call this together.

        It is the one that ``last_checkpoint`` names. Where that is missing or damaged, it is the newest whole one,
        by the time of writing, of those that hold all that ``resume`` needs; of ``model_*.pth`` without
        ``model_best``, whose weights may be averaged ones that no training goes on from.

        Args:
            folder: that is looked into; None is ``save_dir``.

        Returns:
            None when there is no ``last_checkpoint`` and no such file.

        Raises:
            WeightsError: none of them is whole.
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
            problems.append(f"last_checkpoint names {named[:80]!r}, which is no file in that folder")
        for path in files:
            try:
                content = read_checkpoint(path, lazily=True)
            except WeightsError as error:
                problems.append(str(error).splitlines()[0])
                continue
            # What was asked for by name is taken, or refused by resume, which says why.
            if path.name == named or self._missing_entries(content) == []:
                if path.name != named:
                    why = "\n  ".join(problems or ["there is no last_checkpoint"])
                    logger.warning("%s\n  taking %s instead, the newest checkpoint that is whole", why, path)
                return path
            if isinstance(content, dict) and STRIPPED in content:
                problems.append(f"{path.name} was stripped of its training state")
        if not problems:
            return None
        found = "\n  ".join(problems)
        raise WeightsError(
            f"no checkpoint in {folder} is whole:\n  {found}\n"
            "  fix: start from the beginning, without --resume; the weights of a file that is whole, e.g. "
            "model_best.pth, can be given as MODEL.WEIGHTS then"
        )

    def _missing_entries(self, content: Any) -> list[str]:
        """Return what is not in a file's content and would be needed to continue."""
        return [key for key in ("model", *self.checkpointables) if not isinstance(content, dict) or key not in content]

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load the model's weights alone.

        Returns:
            The further entries of the file, empty for a bare state dict.

        Raises:
            WeightsError: see ``read_checkpoint``, ``state_dict_in`` and ``load_model_state``.
        """
        content = read_checkpoint(path)
        load_model_state(self.model, state_dict_in(content, path), source=str(path), min_match=self.min_match)
        return {key: value for key, value in content.items() if key != "model"} if "model" in content else {}

    def resume(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load the model and every checkpointable exactly, to continue a run.

        Returns:
            The further entries of the file.

        Raises:
            WeightsError: the file is damaged, is no training checkpoint, or is of another model.
        """
        content = read_checkpoint(path)
        if missing := self._missing_entries(content):
            cause = "it is no checkpoint of such a run"
            if isinstance(content, dict) and STRIPPED in content:
                raise WeightsError(
                    f"cannot resume from {path}: it was stripped of its training state ({', '.join(missing)}).\n"
                    "  fix: resume from the checkpoint that it was made of; or, to start a new run from its weights, "
                    "give it as MODEL.WEIGHTS without --resume"
                )
            if len(missing) == 1:
                cause = "this run's config asks for more than it holds"
            raise WeightsError(
                f"cannot resume from {path}: {', '.join(missing)} missing; {cause}.\n"
                "  fix: resume with the config that the run was started with (config.yaml beside the checkpoint); or, "
                "to start a new run from its weights, give it as MODEL.WEIGHTS without --resume"
            )
        own = self.model.state_dict()
        self._check_structure(content, path)
        state = content.pop("model")
        differ = [key for key in own.keys() | state.keys() if key not in own or key not in state]
        differ += [key for key in own.keys() & state.keys() if own[key].shape != state[key].shape]
        if differ:
            raise WeightsError(
                f"cannot resume from {path}: it is of another model, {len(differ)} tensors differ"
                f"{examples(sorted(differ))}.\n  fix: resume with the config that the run was started with "
                "(config.yaml beside the checkpoint)"
            )
        self.model.load_state_dict(state)
        for key, part in self.checkpointables.items():
            try:
                part.load_state_dict(content.pop(key))
            except (ValueError, LookupError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
                raise WeightsError(
                    f"cannot resume from {path}: its {key} does not fit this run ({error}).\n"
                    "  fix: resume with the config that the run was started with (config.yaml beside the checkpoint)"
                ) from error
        return content

    def _check_structure(self, content: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Raise WeightsError where an entry of a file has another form than what this run would write."""
        wrong = "" if isinstance(content["model"], dict) else "model: expected a dict"
        if not wrong:
            odd = [key for key, value in content["model"].items() if not is_weight(value) or not isinstance(key, str)]
            wrong = f"model: expected tensors by name, which {odd[0]!r} is not" if odd else ""
        for key, part in self.checkpointables.items():
            own = part.form() if hasattr(part, "form") else part.state_dict()
            wrong = wrong or structure_mismatch(own, content[key], key)
        if wrong:
            raise WeightsError(
                f"cannot resume from {path}: it holds what no such run writes, or is damaged.\n  {wrong}\n"
                "  fix: use an earlier checkpoint, or the config that the run was started with (config.yaml beside it)"
            )


def _tagged_name(folder: Path) -> str | None:
    """Return the file name in a folder's ``last_checkpoint``, whatever that is; None when there is no such file."""
    pointer = folder / "last_checkpoint"
    if not pointer.is_file():
        return None
    return Path(pointer.read_bytes().decode(errors="replace").replace("\0", "?").strip()).name
