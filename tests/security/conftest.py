"""A folder to stand in, where what is run would leave its mark."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a new folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
