"""An empty data root."""

import pytest


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data root whose name looks like that of an image, and which $FASTAMP_DATASETS names."""
    folder = tmp_path / "-1_c9" / "0009_c3 p7_s1-a-b-c"
    folder.mkdir(parents=True)
    monkeypatch.setenv("FASTAMP_DATASETS", str(folder))
    return folder
