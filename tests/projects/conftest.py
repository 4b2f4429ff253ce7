"""Fixtures of the tests of projects."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def own_components(unregistered):
    """Keep the components of projects from the tests of other files.

    Tests of projects import the modules in functions, after ``import_project``: an import when tests are collected
    would register components for the tests of other files.
    """
