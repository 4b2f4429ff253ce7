"""JSON Schema of config files."""

import json
from pathlib import Path

import jsonschema
import old_configs
import pytest
import yaml

from fastamp.cli import main
from fastamp.config import Key, get_cfg, read_config
from fastamp.config.component_keys import declared_keys
from fastamp.config.defaults import KEYS
from fastamp.config.recipes import list_recipes
from fastamp.config.releases import OLD_NAMES
from fastamp.config.schema import build_schema
from fastamp.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = [*ROOT.glob("configs/**/*.yml"), *ROOT.glob("projects/*/*.yml"), *ROOT.glob("fastamp/cli/*/*.yml")]
# Keys of the two projects whose files set keys of their own.
PROJECT_KEYS = (
    *declared_keys(ROOT / "fastamp/cli/project-template/components.py"),
    Key("MODEL.LOSSES.FEATURE_NORM.SCALE", 0.01, "Feature norm loss: loss weight."),
)
VALUES = (
    True,
    False,
    3,
    0,
    -1,
    0.5,
    1e9,
    "x",
    "on",
    [1],
    [],
    [1, 2],
    [1, 2, 3],
    [0.5] * 3,
    ["a"],
    [[1]],
    None,
    {"A": 1},
)


@pytest.fixture(scope="module")
def validator():
    schema = build_schema([*KEYS.values(), *PROJECT_KEYS])
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def accepts(mapping):
    try:
        get_cfg().merge_from_other_cfg(mapping)
    except (ConfigError, ValueError):
        return False
    return True


def test_shipped_files_are_valid(validator, subtests):
    assert len(SHIPPED) > 60
    for path in SHIPPED:
        with subtests.test(str(path.relative_to(ROOT))):
            validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.integration
def test_complete_configs_are_valid(validator):
    for name in ("", *list_recipes()):
        validator.validate(yaml.safe_load(read_config(name, []).dump()))


def test_files_of_old_releases_are_valid(validator, subtests):
    for name, mapping in old_configs.FILES.items():
        with subtests.test(name):
            validator.validate(mapping)


def test_errors_are_found(validator, subtests):
    cases = [
        {"SOLVER": {"BASE_LE": 0.1}},
        {"SOLVRE": {"BASE_LR": 0.1}},
        {"SOLVER": {"BASE_LR": "fast"}},
        {"SOLVER": {"BASE_LR": -0.1}},
        {"SOLVER": {"AMP": "fp17"}},
        {"SOLVER": 3},
        {"INPUT": {"FLIP": {"ENABLED": "maybe"}}},
        {"TEST": {"METRIC": "cosin"}},
        {"_BASE_": 3},
    ]
    for mapping in cases:
        with subtests.test(mapping=mapping):
            assert "_BASE_" in mapping or not accepts(mapping)
            assert not validator.is_valid(mapping)


@pytest.mark.integration
def test_each_value_is_valid_if_and_only_if_the_config_accepts_it(validator, subtests):
    for path in set(KEYS) - {"PROJECTS"}:  # only names of existing folders are accepted
        for value in VALUES:
            with subtests.test(path, value=value):
                mapping = nested(path, value)
                assert validator.is_valid(mapping) == accepts(mapping), (path, value)


def test_old_names_of_keys_are_valid_and_deprecated(validator):
    for old, current in OLD_NAMES.items():
        node = validator.schema
        for name in old.split("."):
            node = node["properties"][name]
        assert "properties" in node or (node["deprecated"] and current in node["deprecationMessage"])
        assert not current or validator.is_valid(nested(old, KEYS[current].default))


def test_command_prints_the_schema_with_component_names_and_keys_of_a_plugin(tmp_path, capsys):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        'from fastamp.config import Key\n\nKEYS = (Key("MODEL.TWO_STAGES.LENGTH", 3, "Epochs.", low=1),)\n'
    )
    assert main(["schema", "--plugin", str(plugin)]) == 0
    model = json.loads(capsys.readouterr().out)["properties"]["MODEL"]["properties"]
    assert "CrossEntropyLoss" in model["LOSSES"]["properties"]["NAME"]["items"]["examples"]
    assert model["TWO_STAGES"]["properties"]["LENGTH"]["minimum"] == 1
    assert main(["schema", "--plugin", "missing.py"]) == 2
    assert "missing.py" in capsys.readouterr().err
