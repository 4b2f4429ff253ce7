"""Fixture of an empty working folder, in which executed code would create a marker file."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Create an empty folder and make it the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
