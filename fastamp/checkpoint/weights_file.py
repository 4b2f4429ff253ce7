"""Weights files: written atomically, read without running code from them, every damage to one said."""

import argparse
import contextlib
import io
import os
import pickle
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastamp.checkpoint.pickle_limits import PickleLimitError, check_pickle
from fastamp.utils.errors import WeightsError
from fastamp.utils.files import check_not_device, expand, write_atomically

_ZIP = b"PK\x03\x04"  # by which torch tells the formats apart
# Of the format before torch 1.6: magic number, version, machine, content, and the list of its storages.
_LEGACY_PICKLES = 5
_CHUNK = 2**20  # bytes that are checked at a time: a file need not fit into memory


def _allowed_types() -> list[Any]:
    """Return what foreign checkpoints' NumPy scalars and arguments of a command line need to be unpickled.

    By name and nothing more; a Namespace holds attributes and runs nothing.
    """
    kinds = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool_")
    reconstruct = np.float64(0).__reduce__()[0]  # its module has another name in NumPy 1, where the new one is empty
    return [
        (reconstruct, "numpy.core.multiarray.scalar"),
        (reconstruct, "numpy._core.multiarray.scalar"),
        argparse.Namespace,
        np.dtype,
        *(type(np.dtype(kind)) for kind in kinds),
    ]


def damaged_record(path: str | os.PathLike[str]) -> str:
    """Return the name of the first record in a file of ``torch.save``'s that is not what was written.

    Such a file is a zip archive with a CRC-32 for each record, so that one flipped bit of a tensor is found. A stored
    CRC of 0 stands for one that was never computed (``torch.serialization.set_crc32_options``), and is not compared.

    Args:
        path: the file.

    Returns:
        Empty when all records are whole, and for the format before torch 1.6, which is no archive.

    Raises:
        zipfile.BadZipFile, EOFError, OSError and others of ``zipfile``'s: the archive itself is damaged.
    """
    with open(path, "rb") as file:
        if file.read(4) != _ZIP:
            return ""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.CRC == 0:
                continue
            try:
                with archive.open(record) as content:
                    while content.read(_CHUNK):
                        pass
            except zipfile.BadZipFile:
                return record.filename
    return ""


class _DamagedRecord(Exception):
    """A part of a file is not what was written."""


def write_checkpoint(path: Path, content: Any) -> None:
    """Write a checkpoint file atomically.

    Args:
        path: of the file, in a folder that exists.
        content: tensors and plain values in dicts and lists.

    Raises:
        WriteError: it cannot be written.
    """
    write_atomically(path, lambda file: torch.save(content, file))


def checkpoint_size(content: Any) -> int:
    """Return how many bytes ``write_checkpoint`` would write."""
    size = _Size()
    torch.save(content, size)
    return size.bytes


class _Size(io.RawIOBase):
    """A file that only counts what is written to it."""

    bytes = 0

    def write(self, content: Any) -> int:
        """Take bytes."""
        self.bytes += len(content)
        return len(content)


def read_checkpoint(path: str | os.PathLike[str], *, lazily: bool = False) -> Any:
    """Return the content of a checkpoint file, on the CPU, without ever running code from it.

    Args:
        path: a file that ``torch.save`` wrote.
        lazily: leave the tensors in the file until they are used; not for files before torch 1.6.

    Raises:
        WeightsError: the file is missing, empty, truncated, not what was written by its checksums, no checkpoint, or
            needs code to be loaded.
    """
    path = expand(path)
    # Not the path's own methods, which raise for a name that is too long or a folder that may not be entered.
    if os.path.isdir(path):
        raise WeightsError(f"{path} is a folder, not a weights file; name the .pth file in it")
    if os.path.islink(path) and not os.path.exists(path):
        raise WeightsError(f"weights file {path} is a link to {os.readlink(path)}, which does not exist or leads back")
    if not os.path.exists(path):
        near = sorted(p.name for p in path.parent.glob("*.pth")) if os.path.isdir(path.parent) else []
        found = f"\n  that folder has: {', '.join(near)}" if near else ""
        raise WeightsError(f"weights file {path} does not exist{found}")
    try:
        check_not_device(path)
        _check_archive(path)
        if record := damaged_record(path):
            raise _DamagedRecord(f"its record {record} is not what was written, by the checksum that is stored with it")
        _check_pickles(path)
        with torch.serialization.safe_globals(_allowed_types()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except _DamagedRecord as error:
        raise _damaged_file_error(path, str(error)) from error
    except PickleLimitError as error:
        raise WeightsError(
            f"weights file {path} ({path.stat().st_size} bytes) is made so that reading it would take forever, or "
            f"exhaust the memory.\n  found: {error}\n"
            "  fix: do not use it; torch.save(model.state_dict(), path) does not write such a file"
        ) from error
    except pickle.UnpicklingError as error:
        found = _unsupported_object(error)
        if found:
            raise WeightsError(
                f"weights file {path} holds objects other than tensors and plain values, which fastamp never loads, "
                "because they can run code.\n"
                f"  found: {found}\n"
                "  fix: save it again as a state dict: torch.save(model.state_dict(), path)"
            ) from error
        raise _damaged_file_error(path, _describe_damage(path), error) from error
    except WeightsError:
        raise
    except OSError as error:
        if error.strerror is None:  # of PyTorch's own, about the content
            raise _damaged_file_error(path, _describe_damage(path), error) from error
        raise WeightsError(f"weights file {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # damaged bytes make PyTorch raise nearly anything
        raise _damaged_file_error(path, _describe_damage(path), error) from error


def _check_archive(path: Path) -> None:
    """Check which kind of archive a file is.

    Raises:
        WeightsError: it is a tar archive, which PyTorch would unpack on the disk; a TorchScript archive; or compressed,
            which ``torch.save`` never does: a few bytes could fill the memory.
    """
    if not _is_zip(path):
        if tarfile.is_tarfile(path):
            raise WeightsError(
                f"weights file {path} is a tar archive, or damaged.\n"
                "  fix: unpack it if it holds a .pth file; of PyTorch 0.1, save it with a later one"
            )
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.filename.partition("/")[2] == "constants.pkl" for entry in entries):
        raise WeightsError(
            f"weights file {path} is a TorchScript archive, a program with weights in it, which fastamp does not run.\n"
            "  fix: if you trust it, write its weights as a state dict: "
            f"torch.save(torch.jit.load({str(path)!r}, map_location='cpu').state_dict(), 'weights.pth')"
        )
    size = sum(entry.file_size for entry in entries)
    if size > path.stat().st_size:
        raise WeightsError(
            f"weights file {path} holds {size} bytes in {path.stat().st_size}: it was compressed, or is damaged.\n"
            "  fix: unpack it, if that is what it is for, or load and save it again with torch.save"
        )


def _check_pickles(path: Path) -> None:
    """Check the pickles that ``torch.load`` will read, see ``check_pickle``; damaged ones are left to it.

    Raises:
        PickleLimitError: loading would take far more time or memory than the file's size explains.
    """
    with open(path, "rb") as file, contextlib.suppress(ValueError, LookupError, OverflowError):
        if file.read(4) == _ZIP:
            # PyTorch's own reader: another one may find another record in an archive that is made for that.
            check_pickle(torch._C.PyTorchFileReader(os.fspath(path)).get_record("data.pkl"))
            return
        file.seek(0)
        for number in range(_LEGACY_PICKLES):
            check_pickle(file, hash_items=number == _LEGACY_PICKLES - 1)


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # of an end that says that the rest is elsewhere
        return False


def _unsupported_object(error: Exception) -> str:
    """Return the name of what PyTorch would not load, '' if it stopped for another reason; its advice is left out."""
    found = re.search(r"GLOBAL (\S+)|but got <class '([^']+)'>", str(error))
    return (found[1] or found[2]) if found else ""


def _describe_damage(path: Path) -> str:
    """Return in which way a file cannot be read."""
    if path.stat().st_size == 0:
        return "it is empty"
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive and not _is_zip(path):
        return "it is truncated: the end of the archive is missing"
    return "it is no file that torch.save wrote"


def _damaged_file_error(path: Path, cause: str, error: Exception | None = None) -> WeightsError:
    found = str(error).partition("\n")[0].partition(". In PyTorch 2.6")[0]  # without advice to run what is in it
    with path.open("rb") as file:
        start = file.read(24)
    if start[:2] not in (b"PK", b"\x80\x02"):  # neither an archive nor a pickle: PyTorch's error does not say more
        found = f"a file that begins with {start!r}" if start else ""
    detail = f"\n  found: {found or type(error).__name__}" if error else ""
    return WeightsError(
        f"weights file {path} ({path.stat().st_size} bytes) cannot be loaded: {cause}.{detail}\n"
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


def tensors_by_path(content: Any) -> dict[str, torch.Tensor]:
    """Return all tensors in dicts inside dicts of what ``read_checkpoint`` returned, by their keys joined with dots.

    ``{"teacher": {"backbone.conv1.weight": x}}`` gives ``teacher.backbone.conv1.weight``.
    """
    found: dict[str, torch.Tensor] = {}
    open_: list[tuple[str, Any]] = [("", content)]
    while open_:
        name, value = open_.pop()
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            below = [(f"{name}.{key}" if name else key, each) for key, each in value.items() if isinstance(key, str)]
            open_ += reversed(below)
    return found
