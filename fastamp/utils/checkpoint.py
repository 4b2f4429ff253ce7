"""Checkpoints: atomic, made of tensors and plain values, never able to run code."""

import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastamp.utils import comm
from fastamp.utils.errors import WeightsError
from fastamp.utils.load_state import examples, load_model_state


def _numpy_scalars() -> list[Any]:
    """Return what a foreign checkpoint's NumPy scalars need to be unpickled, by name and nothing more."""
    kinds = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool_")
    reconstruct = np.float64(0).__reduce__()[0]  # its module has another name in NumPy 1, where the new one is empty
    return [
        (reconstruct, "numpy.core.multiarray.scalar"),
        (reconstruct, "numpy._core.multiarray.scalar"),
        np.dtype,
        *(type(np.dtype(kind)) for kind in kinds),
    ]


def read_checkpoint(path: str | os.PathLike[str]) -> Any:
    """Return the content of a checkpoint file, on the CPU, without ever running code from it.

    Args:
        path: a file that ``torch.save`` wrote.

    Raises:
        WeightsError: the file is missing, empty, truncated, no checkpoint, or needs code to be loaded.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise WeightsError(f"{path} is a folder, not a weights file; name the .pth file in it")
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("*.pth")) if path.parent.is_dir() else []
        found = f"\n  that folder has: {', '.join(near)}" if near else ""
        raise WeightsError(f"weights file {path} does not exist{found}")
    try:
        with torch.serialization.safe_globals(_numpy_scalars()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = _foreign_object(error)
        if found:
            raise WeightsError(
                f"weights file {path} holds objects other than tensors and plain values, which fastamp never loads, "
                "because they can run code.\n"
                f"  found: {found}\n"
                "  fix: save it again as a state dict: torch.save(model.state_dict(), path)"
            ) from error
        raise _damaged(path, error) from error
    except PermissionError as error:
        raise WeightsError(f"weights file {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # damaged bytes make PyTorch raise nearly anything
        raise _damaged(path, error) from error


def _foreign_object(error: Exception) -> str:
    """Return the name of what PyTorch would not load, '' if it stopped for another reason; its advice is left out."""
    found = re.search(r"GLOBAL (\S+)|but got <class '([^']+)'>", str(error))
    return (found[1] or found[2]) if found else ""


def _damaged(path: Path, error: Exception) -> WeightsError:
    size = path.stat().st_size
    cause = "it is no file that torch.save wrote"
    if size == 0:
        cause = "it is empty"
    elif path.read_bytes()[:2] == b"PK" and not zipfile.is_zipfile(path):
        cause = "it is truncated: the end of the archive is missing"
    detail = str(error).splitlines()[0] if str(error) else type(error).__name__
    return WeightsError(
        f"weights file {path} ({size} bytes) cannot be loaded: {cause}.\n  PyTorch says: {detail}\n"
        "  fix: copy or download it again, or use an earlier checkpoint"
    )


def state_dict_in(content: Any, path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the state dict in what ``read_checkpoint`` returned, without ``module.`` prefixes, however many.

    Args:
        content: ``{"model": state_dict, ...}``, the same with ``"state_dict"`` or (pycls) ``"model_state"`` for
            ``"model"``, or a bare state dict.
        path: where it is from, for the message.

    Raises:
        WeightsError: there is no state dict in it.
    """
    state = content
    for key in ("model", "state_dict", "model_state"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            state = content[key]
            break
    tensors = {}
    if isinstance(state, dict):
        named = ((key, value) for key, value in state.items() if isinstance(key, str))
        tensors = {key: value for key, value in named if isinstance(value, torch.Tensor)}
    if not tensors:
        kind = (
            f"a dict with the keys {', '.join(map(str, list(state)[:8]))}" if isinstance(state, dict) else type(state)
        )
        raise WeightsError(
            f"weights file {path} holds no state dict (found: {kind}).\n"
            '  expected: {"model": state_dict, ...}, {"state_dict": ...} or a state dict'
        )
    # A wrapper inside another one, e.g. an average of a distributed model, leaves a prefix each.
    return {re.sub(r"^(module\.)+", "", key): value for key, value in tensors.items()}


def write_atomically(path: str | os.PathLike[str], write: Callable[[Any], None]) -> None:
    """Let ``write(file)`` fill a temporary neighbour of ``path``, then rename it: readers see all of it or nothing."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private to the user; give it what a plain open() would have.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class Checkpointer:
    """Save and load a model and whatever else a run needs to continue.

    Args:
        model: what ``"model"`` in a file is loaded into.
        save_dir: where files are written; ``last_checkpoint`` in it names the newest one.
        min_match: see ``load_model_state``.
        check: is called with the model before each save, and raises where that is not worth saving.
        checkpointables: name -> object with ``state_dict()`` and ``load_state_dict(state)``.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str | os.PathLike[str] = "",
        *,
        min_match: float = 0.9,
        check: Callable[[nn.Module], None] | None = None,
        **checkpointables: Any,
    ) -> None:
        self.model = model
        self.save_dir = Path(save_dir)
        self.min_match = min_match
        self.check = check
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
        content = self.content() | extra
        path = self.save_dir / f"{name}.pth"
        if not comm.is_main_process():
            return path
        self.save_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: torch.save(content, file))
        if tag:
            write_atomically(self.save_dir / "last_checkpoint", lambda file: file.write(path.name.encode()))
        return path

    def last_checkpoint(self) -> Path | None:
        """Return the file that ``last_checkpoint`` names, None when there is none.

        Raises:
            WeightsError: ``last_checkpoint`` names no file that is there.
        """
        pointer = self.save_dir / "last_checkpoint"
        if not pointer.is_file():
            return None
        name = Path(pointer.read_bytes().decode(errors="replace").replace("\0", "?").strip()).name
        path = self.save_dir / name
        if not name or not path.is_file():
            others = sorted(self.save_dir.glob("model_*.pth"), key=lambda file: file.stat().st_mtime)
            hint = f"write {others[-1].name} into it" if others else "remove it to start from the beginning"
            raise WeightsError(f"{pointer} names {name!r}, which is no file in that folder.\n  fix: {hint}")
        return path

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
        needed = ["model", *self.checkpointables]
        missing = [key for key in needed if not isinstance(content, dict) or key not in content]
        if missing:
            cause = "it is no checkpoint of such a run"
            if len(missing) == 1:
                cause = "this run's config asks for more than it holds"
            raise WeightsError(
                f"cannot resume from {path}: {', '.join(missing)} missing; {cause}.\n"
                "  fix: resume with the config that the run was started with (config.yaml beside the checkpoint); or, "
                "to start a new run from its weights, give it as MODEL.WEIGHTS without --resume"
            )
        own = self.model.state_dict()
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
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                raise WeightsError(
                    f"cannot resume from {path}: its {key} does not fit this run ({error}).\n"
                    "  fix: resume with the config that the run was started with (config.yaml beside the checkpoint)"
                ) from error
        return content
