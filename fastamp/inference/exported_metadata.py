"""Metadata of exported files, which may be of other people: types, ranges and sizes of all entries that are used."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastamp.utils.errors import WeightsError

MOST_BYTES = 2**24
"""Largest size of all metadata of a file, in bytes."""
_LARGEST_SIDE, _LARGEST_WIDTH = 4096, 2**20


def read_metadata(texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Convert the metadata of a file of `fastamp export` to values, and check them.

    Args:
        texts: entries of the metadata, JSON or text.
        path: file, for messages.

    Raises:
        WeightsError: if an entry is missing, or has an invalid type or value.
    """
    if "config_hash" not in texts or "resize" not in texts:
        raise unusable(path, "has no description of its preprocessing, so it was not written by `fastamp export`")
    if sum(map(len, texts.values())) > MOST_BYTES:
        raise unusable(path, f"has metadata larger than {MOST_BYTES:,} bytes")
    values = {name: _value(text) for name, text in texts.items()}
    values["config_hash"] = texts["config_hash"]  # may have the form of a number
    for name, is_valid in _ENTRIES.items():
        if name not in values and name not in _OPTIONAL:
            raise unusable(path, f"has invalid metadata: {name} is missing")
        if name in values and not is_valid(values[name]):
            raise unusable(path, f"has invalid metadata: {name} is {texts[name]!r:.100}")
    for name in ("pixel_mean", "pixel_std"):
        if len(values[name]) != values["channels"]:
            found = f"{name} has {len(values[name])} values for {values['channels']} channels"
            raise unusable(path, f"has invalid metadata: {found}")
    return values


def unusable(path: Path, cause: str) -> WeightsError:
    """Return the error of an exported file that has to be exported again; ``cause`` follows its path."""
    return WeightsError(f"{path} {cause}.\n  fix: export the model again: fastamp export MODEL {path.name}")


def as_text(value: Any) -> str:
    """Return an entry of the metadata as text: a string as it is, and another value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _number(low: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low < value and abs(value) < 1e30


def _list_of(is_valid: Callable[[Any], bool], *counts: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) in counts and all(map(is_valid, value))


def _one_of(*choices: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) in map(type, choices) and value in choices


_CHANNELS = (1, 3, 4)
_SIZE = _list_of(_whole(1, _LARGEST_SIDE), 2)
_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "config_hash": lambda value: 0 < len(value) <= 200,
    "resize": lambda value: _SIZE(value) or _list_of(_whole(0, _LARGEST_SIDE), 1)(value),  # see ``Resize``
    "center_crop": lambda value: value is None or _SIZE(value),
    "interpolation": _one_of("bicubic", "bilinear", "nearest"),
    "channels": _one_of(*_CHANNELS),
    "color_order": _one_of("L", "RGB", "BGR", "RGBA", ""),
    "normalization": _one_of("inside", "outside"),
    "preprocess": _one_of("inside", "outside"),
    "pixel_mean": _list_of(_number(-math.inf), *_CHANNELS),
    "pixel_std": _list_of(_number(0), *_CHANNELS),
    "l2": _one_of(True, False),
    "metric": _one_of("cosine", "euclidean"),
    "protocol": lambda value: isinstance(value, str) and len(value) <= 200,
    "feature_width": _whole(1, _LARGEST_WIDTH),
    "bit_depth": _whole(1, 32),
    "decode_reduced": _one_of(True, False),
    "calibration": lambda value: isinstance(value, dict),
}
_OPTIONAL = ("protocol", "preprocess", "bit_depth", "decode_reduced", "calibration")
