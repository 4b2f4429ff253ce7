"""Former names of config keys and sections."""

import copy
import pickle

import pytest
import yaml

from fastamp.checkpoint.entries import merge_from_checkpoint
from fastamp.checkpoint.weights_file import write_checkpoint
from fastamp.config import describe_changes, describe_config, explain_key, get_cfg
from fastamp.config.defaults import FASTREID_SPELLINGS, KEYS, RENAMED, current_path, former_paths
from fastamp.utils.errors import ConfigError

FORMER = {
    "INPUT.GREY.ENABLED": True,
    "INPUT.GREY.PROB": 0.25,
    "INPUT.LOCAL_GREY.ENABLED": True,
    "INPUT.LOCAL_GREY.PROB": 0.75,
    "LOG_ACTIVATIONS": True,
    "SOLVER.AMP.BN_GUARD": False,
    "SOLVER.AMP.LOCATE": "off",
    "TEST.AP": "trapezoid",
    "TEST.AQE.SIDES": "query",
    "TEST.FLOORS": True,
    "TEST.REPEATS": 3,
    "TEST.RERANK.FORM": "torchreid",
}
"""Former path of each renamed key -> a value other than the default."""


@pytest.fixture
def cfg():
    return get_cfg()


def nested(values):
    mapping = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = mapping
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return mapping


def values_of(cfg):
    values = {key.path: value for key, value in cfg.keys_below()}
    return {old: values[current_path(old)] for old in FORMER}


def test_former_names_of_all_renamed_keys_are_tested():
    former = {old for key in KEYS for old in former_paths(key)} - FASTREID_SPELLINGS.keys()
    assert former == FORMER.keys() and not former & KEYS.keys()
    assert all(any(f"{key}.".startswith(f"{new}.") for key in KEYS) for new in RENAMED.values())


def test_command_line_accepts_former_names_of_keys(cfg):
    cfg.merge_from_list([word for old, value in FORMER.items() for word in (old, str(value))])
    assert values_of(cfg) == FORMER


@pytest.mark.parametrize("dotted", [True, False])
def test_config_file_accepts_former_names_of_keys(cfg, tmp_path, dotted):
    file = tmp_path / "old.yml"
    file.write_text(yaml.safe_dump(FORMER if dotted else nested(FORMER)))
    cfg.merge_from_file(str(file))
    assert values_of(cfg) == FORMER and cfg.translation_notes() == []


def test_bool_for_former_section_name_sets_enabled_of_renamed_section(cfg, tmp_path):
    cfg.merge_from_list(["INPUT.GREY", "on"])
    assert cfg.INPUT.GRAYSCALE.ENABLED is True
    (tmp_path / "old.yml").write_text("INPUT: {LOCAL_GREY: True}\n")
    cfg.merge_from_file(str(tmp_path / "old.yml"))
    assert cfg.INPUT.LOCAL_GRAYSCALE.ENABLED is True


def test_merge_from_other_cfg_and_with_values_accept_former_names(cfg):
    cfg.merge_from_other_cfg(nested(FORMER))
    assert values_of(cfg) == FORMER
    assert values_of(get_cfg().with_values(FORMER)) == FORMER


def test_config_in_checkpoint_with_former_key_names_loads(cfg, tmp_path):
    write_checkpoint(tmp_path / "old.pth", {"model": {}, "config": yaml.safe_dump(nested(FORMER))})
    merge_from_checkpoint(cfg, tmp_path / "old.pth")
    assert values_of(cfg) == FORMER


def test_config_attributes_with_former_names_can_be_read_and_assigned(cfg):
    cfg.TEST.FLOORS = True
    cfg.INPUT.GREY = True
    cfg.INPUT.LOCAL_GREY.PROB = 0.75
    cfg.LOG_ACTIVATIONS = True
    assert (cfg.TEST.BASELINES, cfg.INPUT.GRAYSCALE.ENABLED, cfg.INPUT.LOCAL_GRAYSCALE.PROB) == (True, True, 0.75)
    assert (cfg.TEST.FLOORS, cfg["TEST"]["FLOORS"], cfg.INPUT.GREY.PROB, cfg.LOG_ACTIVATIONS) == (True, True, 0.1, True)
    assert hasattr(cfg.TEST, "REPEATS") and not hasattr(cfg.TEST, "REPEATSS")
    assert "FLOORS" not in cfg.TEST and "FLOORS" not in cfg.dump()
    for twin in (cfg.clone(), copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert twin.TEST.FLOORS is True
    cfg.freeze()
    with pytest.raises(ConfigError, match="frozen"):
        cfg.TEST.FLOORS = False
    with pytest.raises(KeyError):
        cfg["FLOORS"]


def test_invalid_value_for_former_key_name_error_states_current_key(cfg):
    with pytest.raises(ConfigError, match=r"TEST\.AP_METHOD: .*'trapezoids'(.|\n)*'trapezoid'"):
        cfg.merge_from_list(["TEST.AP", "trapezoids"])


def test_project_key_named_like_a_former_key_is_not_an_alias(cfg):
    cfg.define("TEST.FLOORS", 3, "Number of storeys.")
    cfg.merge_from_list(["TEST.FLOORS", "5"])
    assert (cfg.TEST.FLOORS, cfg.TEST.BASELINES) == (5, False)


def test_describe_changes_ignores_renaming_of_keys(cfg):
    before = yaml.safe_dump(nested(FORMER))
    cfg.merge_from_list([word for old, value in FORMER.items() for word in (old, str(value))])
    assert describe_changes(cfg, before, "x") == []
    cfg.TEST.NUM_TRIALS = 4
    assert describe_changes(cfg, before, "x") == ["TEST.NUM_TRIALS: 3 -> 4"]


def test_explain_key_and_describe_config_accept_former_names():
    lines = explain_key("input.grey.prob").splitlines()
    assert lines[0] == "INPUT.GRAYSCALE.PROB: 0.1" and "    former name: INPUT.GREY.PROB" in lines
    assert "INPUT.GRAYSCALE.ENABLED: False" in describe_config("input.grey")
    assert not any(f"{old}:" in describe_config() for old in FORMER)
