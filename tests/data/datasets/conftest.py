"""Fixture for dataset tests: an empty data root."""

import pytest


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Empty data root in $FASTAMP_DATASETS, whose path resembles image names."""
    folder = tmp_path / "-1_c9" / "0009_c3 p7_s1-a-b-c"
    folder.mkdir(parents=True)
    monkeypatch.setenv("FASTAMP_DATASETS", str(folder))
    return folder
