"""Old names of modules and of what they define still import."""

import importlib
import sys

import pytest

from fastamp.utils import moved


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_an_old_module_name_is_the_present_module(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=moved.MODULES[old]):
        module = importlib.import_module(old)
    assert module is importlib.import_module(moved.MODULES[old])
    assert module.__spec__.name == moved.MODULES[old]
    assert importlib.import_module(old) is module


def test_submodules_of_a_moved_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "fastamp.data.demo", raising=False)
    monkeypatch.delitem(sys.modules, "fastamp.data.demo.generate", raising=False)
    with pytest.warns(DeprecationWarning):
        from fastamp.data.demo.generate import generate_demo
    assert generate_demo is importlib.import_module("fastamp.demo.generate").generate_demo


def test_a_moved_name():
    with pytest.warns(DeprecationWarning, match="diagnostics.precautions"):
        from fastamp.amp import Precautions
    assert Precautions.__module__ == "fastamp.diagnostics.precautions"


def test_an_unknown_name_fails_as_ever():
    with pytest.raises(ImportError):
        importlib.import_module("fastamp.amp.crashes")
    with pytest.raises(AttributeError):
        moved.moved_names("fastamp.amp", {})("Unknown")
