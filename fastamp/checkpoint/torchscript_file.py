"""Read the tensors of a TorchScript archive without executing its code."""

import collections
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from fastamp.checkpoint.pickle_limits import PickleLimitError, check_pickle
from fastamp.checkpoint.weights_file import tensors_by_path
from fastamp.utils.errors import WeightsError
from fastamp.utils.files import expand

_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_LISTS = ("build_intlist", "build_tensorlist", "build_doublelist", "build_boollist")


class _ScriptObject(dict[str, Any]):
    """Attributes of an object in the archive; its class, which is code, is not loaded."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.update(state)


class _Unpickler(pickle.Unpickler):
    """Unpickler for tensors, plain values and the attributes of objects.

    Args:
        archive: reader of the archive's records.
    """

    def __init__(self, archive: Any) -> None:
        super().__init__(io.BytesIO(archive.get_record("data.pkl")))
        self.archive = archive

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for the classes and functions of TorchScript; refuse all others."""
        if module.startswith("__torch__"):
            return _ScriptObject
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch.jit._pickle" and name in _LISTS:
            return list
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Return a storage as a tensor (n,)."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"persistent object {kind!r}")
        content = self.archive.get_record(f"data/{int(key)}")
        if int(count) * dtype.itemsize > len(content):
            raise ValueError(f"record data/{key} has {len(content)} bytes, expected {int(count) * dtype.itemsize}")
        return torch.frombuffer(bytearray(content), dtype=dtype, count=int(count)) if count else torch.empty(0)


def _rebuild_tensor(storage: torch.Tensor, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    return storage.as_strided(tuple(size), tuple(stride), offset).clone()


def read_torchscript(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read the tensors of a TorchScript archive, e.g. a file of OpenAI's CLIP. No code of the file is executed.

    Args:
        path: file written by ``torch.jit.save``.

    Returns:
        Attribute path -> tensor, e.g. ``visual.conv1.weight``.

    Raises:
        WeightsError: if the file is missing, is not a TorchScript archive, is damaged, or contains other objects.
    """
    path = Path(expand(path))
    try:
        archive = torch._C.PyTorchFileReader(os.fspath(path))
        if "constants.pkl" not in archive.get_all_records():
            raise ValueError("it contains no constants.pkl")
        check_pickle(archive.get_record("data.pkl"))
        tensors = tensors_by_path(_Unpickler(archive).load())
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError) as error:
        raise _error(path, str(error)) from error
    except (pickle.UnpicklingError, PickleLimitError) as error:
        raise _error(path, f"an object that is not read: {error}") from error
    if not tensors:
        raise _error(path, "it contains no tensors")
    return tensors


def _error(path: Path, reason: str) -> WeightsError:
    return WeightsError(
        f"cannot read {path} as a TorchScript archive.\n  found: {reason.splitlines()[0] if reason else 'nothing'}\n"
        "  fix: specify a file of torch.jit.save, or download it again; other weights files need no conversion"
    )
