"""Held-out identities are disjoint from training, reproducible, and have a match for every query."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastamp.data import split
from fastamp.data.datasets.base import ImageItem
from fastamp.utils.errors import ConfigError, DataError


def hold_out(items, fraction, seed):
    return split.hold_out(items, fraction, seed, key="A.KEY")


def images(seed, count=60, pids=12, cameras=3):
    random = np.random.default_rng(seed)
    return [
        ImageItem(f"{i}.jpg", f"set_{random.integers(pids)}", f"set_c{random.integers(cameras)}") for i in range(count)
    ]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(12, 80), st.integers(1, 4), st.floats(0.1, 0.6))
def test_hold_out_identities_are_disjoint_and_every_query_has_a_match(seed, count, cameras, fraction):
    items = images(seed, count, cameras=cameras)
    try:
        training, query, gallery = hold_out(items, fraction, seed)
    except (ConfigError, DataError):
        return
    assert sorted(item.path for item in training + query + gallery) == sorted(item.path for item in items)
    test_paths = {item.path for item in query + gallery}
    pid_of = {item.path: item.pid for item in items}
    assert not {pid_of[item.path] for item in training} & {pid_of[path] for path in test_paths}
    assert len({pid_of[path] for path in test_paths}) == max(2, round(fraction * len(set(pid_of.values()))))
    for item in query:
        assert any(other.pid == item.pid and other.camid != item.camid for other in gallery)
    assert {item.pid for item in query + gallery} == set(range(1, len({pid_of[path] for path in test_paths}) + 1))


def test_hold_out_depends_only_on_seed():
    items = images(0)
    assert hold_out(items, 0.3, 1) == hold_out(items, 0.3, 1)
    assert hold_out(items, 0.3, 1) != hold_out(items, 0.3, 2)
    assert {i.path for i in hold_out(items[::-1], 0.3, 1)[0]} == {i.path for i in hold_out(items, 0.3, 1)[0]}


@pytest.mark.parametrize("fraction", [0.0, 1.0, 0.95])
def test_hold_out_without_training_identities_raises(fraction):
    with pytest.raises(ConfigError, match=f"A.KEY.* {fraction:g}"):
        hold_out(images(0), fraction, 0)


def test_hold_out_raises_if_all_identities_have_one_image():
    items = [ImageItem(f"{i}.jpg", f"set_{i}", "set_c0") for i in range(10)]
    with pytest.raises(DataError, match="A.KEY"):
        hold_out(items, 0.3, 0)


def test_unique_cameras_give_one_query_per_identity():
    items = [ImageItem(f"{i}.jpg", i // 4, i) for i in range(24)]
    query, gallery = split.query_and_gallery(items)
    assert [item.path for item in query] == [f"{i}.jpg" for i in range(0, 24, 4)] and len(gallery) == 18
