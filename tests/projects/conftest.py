"""Fixtures of the tests of projects."""

import pytest
import tiny

from fastamp.config.projects import import_project


@pytest.fixture(autouse=True, scope="module")
def own_components(unregistered):
    """Keep the components of projects from the tests of other files.

    Tests of projects import the modules in functions, after ``import_project``: an import when tests are collected
    would register components for the tests of other files.
    """


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Folder for runs, which contains the tiny demo dataset in ``data``."""
    monkeypatch.setenv("FASTAMP_DATASETS", str(tiny.make_demo(tmp_path / "data").parent))
    return tmp_path


@pytest.fixture(scope="module")
def unsupervised(unregistered):
    import_project("Unsupervised")
