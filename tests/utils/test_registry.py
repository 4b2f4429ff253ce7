"""Registration, lookup, and error messages of registries."""

import importlib.util
import inspect
import sys

import pytest

from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.registry import DuplicateNameError, Registry


def test_modules_are_imported_if_a_name_is_not_found(monkeypatch, tmp_path):
    (tmp_path / "module_with_late.py").write_text(
        "import fastamp\ndef build_late(cfg): return 'late'\n"
        "build_late.__module__ = 'fastamp.late'\nfastamp.registry.register()(build_late)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("MODEL.LATE", {"here": str}, modules=("module_with_late",))
    monkeypatch.setattr("fastamp.registry", registry, raising=False)
    assert "here" in registry and "module_with_late" not in sys.modules
    assert list(registry) == ["build_late", "here"] and registry.build("build_late", None) == "late"
    del sys.modules["module_with_late"]
    other = Registry("MODEL.LATER", modules=("module_with_late",))
    monkeypatch.setattr("fastamp.registry", other)

    def build_late(cfg): ...

    with pytest.raises(DuplicateNameError, match="build_late"):  # found before the module is needed
        other.register()(build_late)


def test_registered_components_are_found_and_built_by_name():
    registry = Registry("MODEL.THING")

    @registry.register()
    def build_a(cfg, extra=0):
        return ("a", cfg, extra)

    @registry.register("B")
    class Second:
        @classmethod
        def from_config(cls, cfg):
            return ("b", cfg)

    class Third:
        takes_config = True

        def __init__(self, cfg):
            self.cfg = cfg

        @classmethod
        def from_config(cls, cfg):
            raise NotImplementedError

    registry.register("C")(Third)
    assert registry.build("C", 1).cfg == 1
    assert registry.get("B") is Second
    assert registry.build("build_a", 1, extra=2) == ("a", 1, 2)
    assert registry.build("B", 1) == ("b", 1)
    assert list(registry) == ["B", "C", "build_a"] and "B" in registry and "D" not in registry


def test_component_is_registered_without_parentheses_of_the_decorator():
    registry = Registry("MODEL.THING")

    @registry.register
    def build_a(cfg):
        return cfg

    assert build_a(1) == registry.build("build_a", 1) == 1


def test_registering_a_component_name_twice_raises():
    registry = Registry("MODEL.THING")
    registry.register("a")(int)
    with pytest.raises(KeyError, match=r"MODEL.THING: 'a'"):
        registry.register("a")(str)


def test_unknown_component_error_lists_choices_and_suggests_the_nearest():
    registry = Registry("MODEL.THING")
    registry.register("TripletLoss")(int)
    registry.register("Focal")(int)
    with pytest.raises(ConfigError) as error:
        registry.get("tripletloss")
    assert "MODEL.THING" in str(error.value)
    assert "Did you mean 'TripletLoss'?" in str(error.value)
    assert "choices: Focal, TripletLoss" in str(error.value)


def test_did_you_mean_is_empty_without_a_similar_choice():
    assert did_you_mean("zzz", ["abc"]) == ""


def module_class(folder, monkeypatch, module):
    """Run a file as the module ``module`` and return its class."""
    file = folder / f"{module}.py"
    file.write_text("class Market:\n    pass\n")
    spec = importlib.util.spec_from_file_location(module, file)
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module, loaded)
    spec.loader.exec_module(loaded)
    return loaded.Market


def test_users_component_replaces_a_built_in_one_with_a_warning(tmp_path, monkeypatch, caplog):
    registry = Registry("MODEL.THING", replaces_built_in=True)
    built_in = type("Market", (), {"__module__": "fastamp.data"})
    registry.register()(built_in)
    mine = module_class(tmp_path, monkeypatch, "mine")
    registry.register()(mine)
    assert registry.get("Market") is mine and "mine.py" in caplog.text and "fix:" in caplog.text
    again = module_class(tmp_path, monkeypatch, "mine")
    registry.register()(again)  # the same file again
    assert registry.get("Market") is again
    with pytest.raises(DuplicateNameError, match="(?s)'Market'.*fix:"):
        registry.register()(module_class(tmp_path, monkeypatch, "yours"))
    with pytest.raises(ConfigError):
        registry.register()(built_in)


def test_built_in_component_of_other_registries_is_not_replaced(tmp_path, monkeypatch):
    registry = Registry("MODEL.THING")
    registry.register()(type("Market", (), {"__module__": "fastamp.modeling"}))
    with pytest.raises(DuplicateNameError):
        registry.register()(module_class(tmp_path, monkeypatch, "mine"))


def test_builder_of_a_component_is_from_config_or_the_component():
    registry = Registry("MODEL.THING")

    @registry.register()
    def function(cfg, columns):
        return cfg, columns

    @registry.register()
    class WithConfig:
        takes_config = True

        def __init__(self, cfg, columns):
            self.values = cfg, columns

        @classmethod
        def from_config(cls, cfg):
            raise NotImplementedError

    @registry.register()
    class Built:
        @classmethod
        def from_config(cls, cfg, columns):
            return cfg, columns

    for name in ("function", "WithConfig", "Built"):
        assert [*inspect.signature(registry.builder(name)).parameters] == ["cfg", "columns"]
        found = registry.build(name, 1, columns=2)
        assert (found.values if name == "WithConfig" else found) == (1, 2)


def test_component_without_optional_members_gets_the_defaults_of_the_contract():
    class Contract:
        width: int
        parts = ()
        note = "default"

        @classmethod
        def adapt(cls, cfg):
            return cfg + 1

        def build(self):
            raise NotImplementedError

    registry = Registry("MODEL.THING", contract=Contract)

    @registry.register()
    def function():
        pass

    @registry.register()
    class Component:
        note = "its own"

    for component in (function, Component, Component()):
        assert component.parts == () and component.adapt(1) == 2
        assert not hasattr(component, "width") and not hasattr(component, "build")
    assert function.note == "default" and Component.note == "its own"
