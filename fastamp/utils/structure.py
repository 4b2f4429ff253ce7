"""Comparison of the structure of saved states: types, and shapes and dtypes of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def structure_mismatch(expected: Any, saved: Any, name: str = "") -> str:
    """Describe the first structural difference between two states; "" if their structures match.

    Keys that only one of the states contains and the values of tensors are ignored. None in ``expected`` matches any
    plain value. None in ``saved`` matches a dict, because the saved run did not have that component. Integers in
    ``saved`` must not be negative.

    Args:
        expected: state of this run: tensors and plain values in dicts, lists and tuples.
        saved: state from a file.
        name: name of the state, for the message.
    """
    if isinstance(expected, Mapping):
        if saved is None:
            return ""
        if not isinstance(saved, Mapping):
            return _expected(name, "a dict", saved)
        inner = ((expected[key], saved[key], f"{name}.{key}" if name else str(key)) for key in expected if key in saved)
        return next(filter(None, (structure_mismatch(*arguments) for arguments in inner)), "")
    if isinstance(expected, torch.Tensor):
        return _tensor_mismatch(expected, saved, name)
    if isinstance(expected, tuple):
        if not isinstance(saved, Sequence) or isinstance(saved, str) or len(saved) != len(expected):
            return _expected(name, f"{len(expected)} values", saved)
        pairs = zip(expected, saved, strict=True)
        return next(filter(None, (structure_mismatch(*pair, f"{name}[{n}]") for n, pair in enumerate(pairs))), "")
    if isinstance(expected, list):
        if not isinstance(saved, list):
            return _expected(name, "a list", saved)
        first = expected[:1] or [None]
        return next(
            filter(None, (structure_mismatch(first[0], value, f"{name}[{n}]") for n, value in enumerate(saved))), ""
        )
    if expected is None:
        plain = saved is None or isinstance(saved, bool | int | float | str | Mapping)
        return "" if plain else _expected(name, "a plain value", saved)
    if isinstance(expected, bool | str):
        return "" if isinstance(saved, type(expected)) else _expected(name, type(expected).__name__, saved)
    if isinstance(expected, int):
        is_count = isinstance(saved, int) and not isinstance(saved, bool) and 0 <= saved < 2**63
        return "" if is_count else _expected(name, "a non-negative integer", saved)
    is_number = isinstance(saved, int | float) and not isinstance(saved, bool) and abs(saved) < float("inf")
    return "" if is_number else _expected(name, "a number", saved)


def _tensor_mismatch(expected: torch.Tensor, saved: Any, name: str) -> str:
    if not isinstance(saved, torch.Tensor) or saved.layout != torch.strided or saved.is_meta:
        return _expected(name, "a tensor", saved)
    if saved.shape == expected.shape and saved.dtype == expected.dtype:
        return ""
    description = f"{saved.dtype} {tuple(saved.shape)}"
    return f"{name}: expected {expected.dtype} {tuple(expected.shape)}, got {description}"


def _expected(name: str, expected: str, actual: Any) -> str:
    is_number = isinstance(actual, float) or (isinstance(actual, int) and abs(actual) < 2**63)
    text = repr(actual) if is_number else type(actual).__name__
    return f"{name}: expected {expected}, got {text}"
