"""Packaged models: weights and entries in model.safetensors, and the config in config.yaml next to it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastamp.config.files import LARGEST
from fastamp.utils.errors import WeightsError, optional_package
from fastamp.utils.files import FORMAT_KEY, check_format, write_atomically

WEIGHTS_NAME = "model.safetensors"
FORMAT = 1
"""Number of the format of packaged models; a change that earlier releases cannot read increases it."""
CONFIG_NAME = "config.yaml"
INFERENCE_ENTRIES = ("policy", "pairs", "calibration", "best", "stripped", "evaluation", "versions", "adapters_of")
"""Entries of a checkpoint that inference, extraction, export and model cards read, other than weights and config."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64)}


def write_packaged_model(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the content of a checkpoint to ``folder/model.safetensors`` and ``folder/config.yaml``.

    Each name gets its own contiguous copy of its tensor: tensors that share memory, such as tied weights, are written
    once per name. The file has a SHA-256 checksum of its tensors and entries, which ``read_safetensors`` verifies.

    Args:
        folder: existing folder.
        content: ``"model"``: state dict of dense tensors; ``"config"``: YAML text; and any of ``INFERENCE_ENTRIES``:
            plain values and small tensors in dicts and lists.

    Raises:
        ConfigError: if safetensors is not installed.
        WriteError: if a file cannot be written.
    """
    save = _safetensors().torch.save
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in content["model"].items()
    }
    entries = json.dumps({name: _to_json(content[name]) for name in INFERENCE_ENTRIES if name in content})
    metadata = {"format": "pt", FORMAT_KEY: str(FORMAT), "fastamp": entries, "sha256": checksum(tensors, entries)}
    write_atomically(folder / WEIGHTS_NAME, lambda file: file.write(save(tensors, metadata)))
    write_atomically(folder / CONFIG_NAME, lambda file: file.write(content["config"].encode()))


def read_safetensors(path: Path) -> dict[str, Any]:
    """Read a .safetensors file, and the config in the file config.yaml in the same folder, if there is one.

    The format contains no code. Files of other programs have no entries and no checksum.

    Args:
        path: existing file.

    Returns:
        ``"model"``: state dict; ``"config"``: YAML text, if found; and the entries of the file.

    Raises:
        ConfigError: if safetensors is not installed.
        WeightsError: if a file is damaged, truncated or not a .safetensors file, or if the checksum does not match.
        OSError: if a file cannot be read.
    """
    library = _safetensors()
    try:
        with library.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata.get("fastamp", "{}")
        entries = {name: _from_json(value) for name, value in json.loads(text).items() if name in INFERENCE_ENTRIES}
    except OSError:
        raise
    except Exception as error:  # safetensors and PyTorch raise many exception types for damaged bytes
        raise _damaged(path, "it is truncated or not a .safetensors file") from error
    check_format(metadata.get(FORMAT_KEY, str(FORMAT)), str(FORMAT), path, WeightsError)
    if metadata.get("sha256", expected := checksum(tensors, text)) != expected:
        raise _damaged(path, "its checksum does not match")
    content = {"model": tensors} | entries
    config = path.with_name(CONFIG_NAME)
    if config.is_file():
        content["config"] = _read_config(config)
    return content


def _read_config(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(LARGEST + 1)  # parse_yaml rejects a longer text
    except UnicodeDecodeError as error:
        raise _damaged(path, "it is not UTF-8 text") from error


def _damaged(path: Path, cause: str) -> WeightsError:
    size = path.stat().st_size
    return WeightsError(
        f"cannot load {path} ({size} bytes): {cause if size else 'the file is empty'}.\n"
        "  fix: copy or download the file again"
    )


def _safetensors() -> Any:
    """Import safetensors, which is an optional package."""
    with optional_package(".safetensors files require safetensors", "hub"):
        import safetensors.torch
    return safetensors


def checksum(tensors: Mapping[str, torch.Tensor], text: str = "") -> str:
    """Return the SHA-256 of a text and of the names, dtypes, shapes and bytes of tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _to_json(value: Any) -> Any:
    """Convert plain values and tensors in dicts and lists to JSON values. Float32 values are exact."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, Mapping):
        return {name: _to_json(member) for name, member in value.items()}
    return [_to_json(member) for member in value] if isinstance(value, list | tuple) else value


def _from_json(value: Any) -> Any:
    """Reverse ``_to_json``; tuples become lists."""
    if isinstance(value, dict):
        if value.keys() == {"dtype", "values"}:
            return torch.tensor(value["values"], dtype=_DTYPES[value["dtype"]])
        return {name: _from_json(member) for name, member in value.items()}
    return [_from_json(member) for member in value] if isinstance(value, list) else value
