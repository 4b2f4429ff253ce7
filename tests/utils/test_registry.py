"""Registration, lookup, and error messages of registries."""

import pytest

from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.registry import Registry


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

    assert registry.get("B") is Second
    assert registry.build("build_a", 1, extra=2) == ("a", 1, 2)
    assert registry.build("B", 1) == ("b", 1)
    assert list(registry) == ["B", "build_a"] and "B" in registry and "C" not in registry


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
