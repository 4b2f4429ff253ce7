"""Fixtures of the tests of projects."""

import sys

import pytest

from fastamp.utils import registry
from fastamp.utils.resources import resource_folder


@pytest.fixture(autouse=True, scope="module")
def unregistered():
    """Remove the components and modules of projects after the tests of a file.

    Tests of projects import the modules in functions, after ``import_project``: an import when tests are collected
    would register components for the tests of other files.
    """
    components = {each: dict(each._components) for each in registry._REGISTRIES}
    modules, path = set(sys.modules), list(sys.path)
    yield
    for each, names in components.items():
        each._components.clear()
        each._components.update(names)
    folder = str(resource_folder("projects"))
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
    sys.path[:] = path
