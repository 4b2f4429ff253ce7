"""Fixtures for dataset tests: empty data roots."""

import pytest


@pytest.fixture
def new_root(tmp_path, monkeypatch):
    """Function that sets $FASTAMP_DATASETS to a new empty data root, whose path resembles image names."""
    roots = []

    def make():
        folder = tmp_path / f"-1_c9_{len(roots)}" / "0009_c3 p7_s1-a-b-c"
        folder.mkdir(parents=True)
        monkeypatch.setenv("FASTAMP_DATASETS", str(folder))
        roots.append(folder)
        return folder

    return make


@pytest.fixture
def root(new_root):
    """Empty data root in $FASTAMP_DATASETS."""
    return new_root()
