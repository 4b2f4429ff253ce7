"""Fixture of an empty working directory, in which malicious code would create the file ``marker``."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Create an empty folder and change to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
