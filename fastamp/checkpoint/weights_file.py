"""Read and write weights files: atomic writes, reading without code execution, detection of damage."""

import argparse
import contextlib
import io
import logging
import os
import pickle
import re
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastamp.checkpoint.pickle_limits import PickleLimitError, check_pickle
from fastamp.checkpoint.record import read_record
from fastamp.checkpoint.safetensors_file import read_safetensors
from fastamp.utils.errors import ConfigError, UserError, WeightsError
from fastamp.utils.files import FORMAT_KEY, check_format, check_not_device, expand, is_zip, real_path, write_atomically

logger = logging.getLogger(__name__)

FORMAT = 1
"""Number of the format of checkpoints; a change that earlier releases cannot read increases it."""
_ZIP = b"PK\x03\x04"  # torch distinguishes the formats by this signature
# Pickles in a file before torch 1.6: magic number, version, machine, content, list of storages.
_LEGACY_PICKLES = 5
# Entries of a checkpoint that may hold the state dict; "model_state" is pycls's.
_STATE_DICTS = ("model", "state_dict", "model_state")
_EXPORTED = (".onnx", ".xml", ".tflite", ".engine", ".pt2")
# Wrappers of distributed training at the start, and of torch.compile, FSDP and activation checkpointing anywhere.
_WRAPPERS = re.compile(
    r"^(?:(?:module|_forward_module|_orig_mod)\.)+|(^|\.)(?:(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+"
)
_ATTRIBUTES = ("model.", "net.")  # usual attributes of a LightningModule
_MOST = 0.9  # fraction of the tensors
_CHUNK = 2**20  # bytes per read, so that the file need not fit into memory


def _allowed_types() -> list[Any]:
    """List the additional types that may be unpickled: NumPy scalars, and configs of other programs.

    Unpickling these types runs no code: an argparse namespace only stores attributes, and a node of yacs, as in the
    files of Swin and VMamba, becomes an ordered dict.
    """
    kinds = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool_")
    reconstruct = np.float64(0).__reduce__()[0]  # NumPy 1 and 2 use different module names
    return [
        (reconstruct, "numpy.core.multiarray.scalar"),
        (reconstruct, "numpy._core.multiarray.scalar"),
        argparse.Namespace,
        (OrderedDict, "yacs.config.CfgNode"),
        np.dtype,
        *(type(np.dtype(kind)) for kind in kinds),
    ]


def damaged_record(path: str | os.PathLike[str]) -> str:
    """Find the first record with a wrong checksum in a file written by ``torch.save``.

    These files are zip archives with a CRC-32 per record, so that a single flipped bit is detected. A stored CRC of 0
    means that no checksum was computed (``torch.serialization.set_crc32_options``); it is ignored.

    Args:
        path: file to check.

    Returns:
        Name of the record; empty if all checksums match, and for files written before torch 1.6, which are not zip
        archives.

    Raises:
        zipfile.BadZipFile, EOFError, OSError and other errors of ``zipfile``: if the archive itself is damaged.
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


def write_checkpoint(path: Path, content: Any) -> None:
    """Write a checkpoint file atomically; a dict with the entry ``model`` gets an entry with the number of the format.

    Args:
        path: output file in an existing folder.
        content: tensors and plain values in dicts and lists.

    Raises:
        WriteError: if the file cannot be written.
    """
    content = _with_format(content)
    write_atomically(path, lambda file: torch.save(content, file))


def check_output(target: Path, source: Path, *, in_place: bool = False) -> None:
    """Check the path of a file that a command makes from a checkpoint.

    Args:
        target: output file.
        source: checkpoint.
        in_place: whether the output may be the checkpoint. Default False.

    Raises:
        ConfigError: if the name does not end in .pth, or the output file is the checkpoint.
    """
    if target.suffix != ".pth":
        raise ConfigError(
            f"the name of the output file must end in .pth, got {target}.\n"
            "  fix: choose another name, e.g. model.pth; `fastamp push` packages it as .safetensors"
        )
    if not in_place and real_path(target) == real_path(source):
        raise ConfigError(
            f"the output file {target} is the input file.\n"
            "  fix: choose another output file; `fastamp calibrate` replaces its input with --in-place"
        )


def checkpoint_size(content: Any) -> int:
    """Compute the size in bytes of the file that ``write_checkpoint`` would write."""
    file = _Size()
    torch.save(_with_format(content), file)
    return file.size


def _with_format(content: Any) -> Any:
    """Add the number of the format to a checkpoint; a state dict, or the content of another file, is unchanged."""
    return content | {FORMAT_KEY: FORMAT} if isinstance(content, dict) and "model" in content else content


class _Size(io.BytesIO):
    """Binary file that counts the written bytes and discards them."""

    size = 0

    def write(self, content: Any) -> int:
        """Count the bytes of ``content``."""
        self.size += len(content)
        return len(content)


def read_checkpoint(path: str | os.PathLike[str], *, lazily: bool = False) -> Any:
    """Load a checkpoint file on the CPU without executing code from it.

    Args:
        path: file written by ``torch.save``; or .safetensors file, see ``read_safetensors``.
        lazily: memory-map the tensors; not supported for files written before torch 1.6. Default False.

    Returns:
        Content of the file, without the number of its format.

    Raises:
        WeightsError: if the file is missing, empty, truncated, damaged according to its checksums, or not a checkpoint,
            if its format is that of a later version of fastamp, or if loading it would execute code.
    """
    path = expand(path)
    # os.path instead of Path methods, which raise if the name is too long or the folder is not accessible.
    if os.path.isdir(path):
        raise WeightsError(
            f"{path} is a folder, not a weights file.\n  fix: specify a .pth or .safetensors file in this folder"
        )
    if os.path.islink(path) and not os.path.exists(path):
        raise WeightsError(
            f"weights file {path} is a symbolic link to {os.readlink(path)}, which does not exist or links back.\n"
            "  fix: correct the link, or specify another file"
        )
    if not os.path.exists(path):
        files = path.parent.iterdir() if os.path.isdir(path.parent) else ()
        candidates = sorted(file.name for file in files if file.suffix in (".pth", ".safetensors"))
        more = f" and {len(candidates) - 10} more" if len(candidates) > 10 else ""
        listing = f"\n  files in this folder: {', '.join(candidates[:10])}{more}" if candidates else ""
        raise WeightsError(f"weights file not found: {path}{listing}\n  fix: specify an existing file")
    try:
        check_not_device(path)
        if path.suffix == ".safetensors":
            return _with_recorded_config(read_safetensors(path), path)
        _check_archive(path)
        if record := damaged_record(path):
            raise _damaged_file_error(path, f"the checksum of its record {record} does not match")
        _check_pickles(path)
        with torch.serialization.safe_globals(_allowed_types()):
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
            except UnicodeDecodeError:  # Python 2 pickled the bytes of NumPy scalars as strings
                with warnings.catch_warnings():  # PyTorch denies that it uses `encoding`
                    warnings.simplefilter("ignore", UserWarning)
                    content = torch.load(path, map_location="cpu", weights_only=True, encoding="latin1")
        if isinstance(content, dict):
            check_format(content.pop(FORMAT_KEY, FORMAT), FORMAT, path, WeightsError)
        return _with_recorded_config(content, path)
    except PickleLimitError as error:
        raise WeightsError(
            f"weights file {path} ({path.stat().st_size} bytes) was rejected: "
            f"loading it would take too much time or memory.\n  found: {error}\n"
            "  fix: do not use this file; torch.save(model.state_dict(), path) does not write such files"
        ) from error
    except pickle.UnpicklingError as error:
        name = _unsupported_object(error)
        if name:
            raise WeightsError(
                f"weights file {path} was rejected: it contains an object that is neither a tensor nor a plain value, "
                "and loading such an object can execute code.\n"
                f"  found: {name}\n"
                "  fix: save only the state dict: torch.save(model.state_dict(), path)"
            ) from error
        raise _damaged_file_error(path, _describe_damage(path), error) from error
    except UserError:
        raise
    except OSError as error:
        if error.strerror is None:  # raised by PyTorch about the content
            raise _damaged_file_error(path, _describe_damage(path), error) from error
        raise WeightsError(
            f"cannot read weights file {path}: {error.strerror}.\n  fix: make sure that this user can read the file"
        ) from error
    except Exception as error:  # PyTorch raises many exception types for damaged bytes
        raise _damaged_file_error(path, _describe_damage(path), error) from error


def _with_recorded_config(content: Any, path: Path) -> Any:
    """Add the config in the record of a published weights file, which other programs wrote without it."""
    config = read_record(path).get("config")
    return {"model": state_dict_in(content, path), "config": config} if isinstance(config, str) else content


def _check_archive(path: Path) -> None:
    """Reject tar, TorchScript and compressed archives.

    Raises:
        WeightsError: if the file is a tar archive, which PyTorch would unpack to disk; if it is a TorchScript archive;
            or if it is compressed, because ``torch.save`` never compresses and decompression could exhaust memory.
    """
    if not is_zip(path):
        if tarfile.is_tarfile(path):
            raise WeightsError(
                f"weights file {path} is a tar archive, which PyTorch 0.1 wrote and which is no longer supported.\n"
                "  fix: if the archive contains a .pth file, unpack it; otherwise load the file with an older version "
                "of PyTorch, and save it again"
            )
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.filename.partition("/")[2] == "constants.pkl" for entry in entries):
        raise WeightsError(
            f"weights file {path} is a TorchScript archive: it contains code, which fastamp does not execute.\n"
            f"  fix: convert its tensors, without executing the code: fastamp convert-clip {path} weights.pth"
        )
    size = sum(entry.file_size for entry in entries)
    if size > path.stat().st_size:
        raise WeightsError(
            f"weights file {path} is compressed or damaged: uncompressed size {size} bytes, file size "
            f"{path.stat().st_size}.\n"
            "  fix: if it is a zip archive that contains a .pth file, unpack it; otherwise write the file again with "
            "torch.save"
        )


def _check_pickles(path: Path) -> None:
    """Check the pickles that ``torch.load`` will read; see ``check_pickle``. Damaged pickles raise no error here.

    Raises:
        PickleLimitError: if loading would take a disproportionate amount of time or memory.
    """
    with open(path, "rb") as file, contextlib.suppress(ValueError, LookupError, OverflowError):
        if file.read(4) == _ZIP:
            # PyTorch's reader: in a crafted archive, another reader could find another record.
            check_pickle(torch._C.PyTorchFileReader(os.fspath(path)).get_record("data.pkl"))
            return
        file.seek(0)
        for number in range(_LEGACY_PICKLES):
            check_pickle(file, hash_items=number == _LEGACY_PICKLES - 1)


def _unsupported_object(error: Exception) -> str:
    """Extract from PyTorch's error the name of the type that it refused to load; empty for other errors."""
    match = re.search(r"GLOBAL (\S+)|but got <class '([^']+)'>", str(error))
    return (match[1] or match[2]) if match else ""


def _describe_damage(path: Path) -> str:
    """Describe how an unreadable file is damaged."""
    if path.stat().st_size == 0:
        return "the file is empty"
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive and not is_zip(path):
        return "it is truncated: the end of the archive is missing"
    return "it was not written by torch.save"


def _damaged_file_error(path: Path, cause: str, error: Exception | None = None) -> WeightsError:
    # Without the advice to disable weights_only.
    description = str(error).partition("\n")[0].partition(". In PyTorch 2.6")[0]
    with path.open("rb") as file:
        start = file.read(24)
    if start[:2] not in (
        b"PK",
        b"\x80\x02",
    ):  # neither archive nor pickle: the first bytes are more informative than PyTorch's error
        description = f"first bytes {start!r}" if start else ""
    detail = f"\n  found: {description or type(error).__name__}" if error else ""
    fix = "copy or download the file again, or use an earlier checkpoint"
    if path.suffix in _EXPORTED:
        fix = (
            "use the checkpoint from which the file was exported; `fastamp compare`, `search`, `serve` and `track` "
            "also run exported .onnx, .xml and .tflite files"
        )
    return WeightsError(
        f"cannot load weights file {path} ({path.stat().st_size} bytes): {cause}.{detail}\n  fix: {fix}"
    )


def state_dict_in(content: Any, path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Extract the state dict from the content of a checkpoint, and strip the prefixes of training tools from its keys.

    The prefixes are ``module.``, ``_forward_module.`` and ``_orig_mod.`` (DDP, DeepSpeed, torch.compile), also nested,
    and ``model.`` or ``net.`` (Lightning) if most tensors have it.

    Args:
        content: a bare state dict, or a dict that contains it under ``"model"``, ``"state_dict"`` or (pycls)
            ``"model_state"``.
        path: origin of the content, for the error message.

    Returns:
        The state dict.

    Raises:
        WeightsError: if there is no state dict.
    """
    state = content
    for key in _STATE_DICTS:
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
            f"weights file {path} contains no state dict (found: {kind}).\n"
            '  fix: save the weights as {"model": state_dict}, {"state_dict": state_dict} or a bare state dict'
        )
    return _without_wrappers(tensors)


def _without_wrappers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Strip the prefixes of training tools from tensor names.

    These are those of wrappers of PyTorch and DeepSpeed, and of the attribute that holds the network in a module of
    Lightning, if it is that of almost all tensors: the others are those of losses and metrics.
    """
    # Nested wrappers, e.g. an average of a distributed model, add one prefix each.
    stripped = {_WRAPPERS.sub(r"\1", key): value for key, value in tensors.items()}
    for prefix in _ATTRIBUTES:
        named = [key for key in stripped if key.startswith(prefix)]
        if len(named) >= _MOST * len(stripped):
            return _without_wrappers({key.removeprefix(prefix): value for key, value in stripped.items()})
    return stripped


def average_in(content: Any) -> Any:
    """Return the average of the weights in the content of a checkpoint of another program, if it has one.

    It is the entry ``"model_ema"`` next to ``"model"`` (VMamba, ConvNeXt, DeiT), or the teacher of DINO (also DINOv2,
    DINOv3, SOLIDER and PASS), next to a student; both programs evaluate the average. Other content is returned
    unchanged.
    """
    if not isinstance(content, dict):
        return content
    has_state = any(isinstance(content.get(key), dict) for key in _STATE_DICTS)
    name = "model_ema" if has_state else "teacher"
    average = content.get(name)
    if not isinstance(average, dict) or not average:
        return content
    if has_state:
        logger.info("the average of the weights in the file, %r, is used", name)
    return average


def tensors_by_path(content: Any) -> dict[str, torch.Tensor]:
    """Collect the tensors in nested dicts, and join the keys that lead to a tensor with dots.

    The tensor in ``{"teacher": {"backbone.conv1.weight": x}}`` gets the key ``"teacher.backbone.conv1.weight"``.
    """
    tensors: dict[str, torch.Tensor] = {}
    stack: list[tuple[str, Any]] = [("", content)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, dict):
            children = [
                (f"{name}.{key}" if name else key, inner) for key, inner in value.items() if isinstance(key, str)
            ]
            stack += reversed(children)
    return tensors
