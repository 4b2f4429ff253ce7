"""Pickle limits: crafted files are rejected, ordinary checkpoints are read."""

import collections
import contextlib
import functools
import pickle
import random

import hostile_pickles
import numpy as np
import preloaded
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastamp.checkpoint.pickle_limits import PickleLimitError, check_pickle
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.utils.errors import WeightsError


@pytest.mark.integration
@pytest.mark.parametrize("legacy", [False, True])
def test_hostile_checkpoints_are_rejected(tmp_path, legacy):
    """Load in a subprocess, because without the check, loading would ignore signals or overflow the stack."""
    paths = [
        hostile_pickles.write(code, tmp_path / f"{number}.pth", legacy=legacy)
        for number, code in enumerate(hostile_pickles.PICKLES.values())
    ]
    if legacy:
        paths.append(hostile_pickles.legacy_keys(tmp_path / "keys.pth"))
    done = preloaded.run(hostile_pickles.__file__, *paths)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(paths), done.stderr
    assert all("was rejected" in line for line in lines), lines


def test_hostile_file_of_a_few_hundred_bytes_is_rejected(tmp_path):
    code = b"}" + hostile_pickles.shared_tuples(30) + b"K\x00s"
    path = hostile_pickles.write(code, tmp_path / "small.pth", legacy=True)
    with pytest.raises(WeightsError, match=r"small\.pth \(\d{3} bytes\)"):
        read_checkpoint(path)


def ordered_dict_of_python_2(pairs):
    """Pickle an OrderedDict in the format of Python 2: a call with a list of pairs."""
    body = pickle.dumps(([list(pair) for pair in pairs],), 2)[2:-1]
    return hostile_pickles.PROTO + hostile_pickles.ORDERED_DICT + body + b"R."


@pytest.mark.integration
def test_pickle_limits_accept_ordinary_checkpoints(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(300)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shape, shared = (2, 2), {str(number): number for number in range(500)}
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": random.getstate(),
        "losses": np.random.default_rng(0).random(50_000).tolist(),
        "scalars": [np.float64(number) for number in range(5_000)],
        "by float": {number / 7: number for number in range(5_000)},
        "by pair": {(number, "a", (number,)): number for number in range(3_000)},
        "by large number": {2**62 + number: number for number in range(3_000)},
        "shapes": [shape] * 30_000,
        "shared": [shared] * 500,
        "parameters": [torch.nn.Parameter(torch.zeros(1)) for _ in range(3_000)],
        "counts": collections.Counter("abracadabra"),
        "deep": functools.reduce(lambda inner, _: [inner], range(100), 0),
    }
    for legacy in (False, True):
        torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
        found = read_checkpoint(tmp_path / "a.pth")
        plain = found.keys() - {"model", "optimizer", "parameters"}
        assert found.keys() == content.keys() and all(found[key] == content[key] for key in plain)
    check_pickle(ordered_dict_of_python_2((f"layer{number}.weight", 0.5) for number in range(5_000)))


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.recursive(st.integers() | st.text() | st.floats(), lambda inner: st.tuples(inner, inner), max_leaves=8)
plain = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner, inner, inner) | st.dictionaries(keys, inner),
    max_leaves=40,
)


@pytest.mark.integration
@given(plain, st.sampled_from([0, 1, 2, 3, 4, 5]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_check_pickle_accepts_plain_values_in_every_protocol(value, protocol):
    """Every pickle protocol is tested, because later versions of PyTorch may load more protocols."""
    check_pickle(pickle.dumps([value, value], protocol))


@given(st.binary(max_size=200), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_check_pickle_raises_only_documented_errors_for_damaged_pickles(noise, place):
    content = bytearray(pickle.dumps({"a": [1, (2.5, None)], ("b", 3): {"c": [[]] * 3}}, 2))
    content[place % len(content) : place % len(content) + len(noise) // 20] = noise
    with contextlib.suppress(PickleLimitError, ValueError, LookupError, OverflowError):
        check_pickle(bytes(content))
    check_pickle(pickle.dumps({"a": [[1], (2.5, None)]}, 2))


def test_pickle_size_limit_counts_shared_objects_at_each_reference():
    row = [0] * 1000
    check_pickle(pickle.dumps([row] * 900, 2))
    with pytest.raises(PickleLimitError, match="shared objects"):
        check_pickle(pickle.dumps([row] * 1300, 2))
    check_pickle(pickle.dumps([[0] * 1000 for _ in range(1300)], 2))  # as many objects, without sharing
