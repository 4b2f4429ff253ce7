"""Default values of all config keys, and their documentation in the terminal."""

import json
from pathlib import Path

import pytest
import yaml

from fastamp.config import describe_config, get_cfg
from fastamp.config.defaults import KEYS, SHORTHANDS
from fastamp.config.key import convert
from fastamp.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
VALUES = json.loads((Path(__file__).parents[1] / "reference" / "fastreid_config_values.json").read_text())


def flat(cfg):
    """Return a dict of config key -> value, with tuples converted to lists."""
    return {key.path: list(value) if isinstance(value, tuple) else value for key, value in cfg.keys_below()}


def nested(values):
    """Convert a dict of dotted keys to nested dicts: ``{"A.B": 1}`` to ``{"A": {"B": 1}}``."""
    tree = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def test_config_defaults_equal_fastreid_defaults():
    ours = flat(get_cfg())
    assert len(VALUES["defaults"]) == 131
    for path, value in VALUES["defaults"].items():
        assert ours[path] == value, path
        assert type(ours[path]) is type(value), path


@pytest.mark.integration
def test_fastreid_recipes_merge_and_survive_a_dump(tmp_path, subtests):
    file = tmp_path / "recipe.yml"
    for recipe, changes in VALUES["resolved"].items():
        with subtests.test(recipe):
            file.write_text(yaml.safe_dump(nested(changes)))
            cfg = get_cfg()
            cfg.merge_from_file(file)
            assert flat(cfg) == flat(get_cfg()) | changes

            file.write_text(cfg.dump())
            again = get_cfg()
            again.merge_from_file(file)
            assert again == cfg
            assert "!!" not in cfg.dump()


def test_reference_file_contains_all_43_fastreid_recipes():
    assert len(VALUES["resolved"]) == 43


def test_bagtricks_recipe_equals_fastreid_recipe():
    cfg = get_cfg()
    cfg.merge_from_file(ROOT / "configs" / "Market1501" / "bagtricks_R50.yml")
    assert flat(cfg) == flat(get_cfg()) | VALUES["resolved"]["Market1501/bagtricks_R50.yml"]


def test_every_config_key_has_a_description_and_a_convertible_default(subtests):
    for key in KEYS.values():
        with subtests.test(key.path):
            assert key.meaning.endswith("."), "the description is a sentence"
            assert set(key.aliases.values()) <= set(key.choices)
            if not key.is_free_form:
                assert convert(key, key.default) == key.default
                if isinstance(key.default, tuple):
                    assert key.element_type is not None, "an empty default needs of="


def test_config_keys_absent_from_fastreid_have_expected_defaults():
    cfg = get_cfg()
    amp = dict(cfg.SOLVER.AMP)
    assert amp == {
        "ENABLED": False,
        "DTYPE": "auto",
        "INIT_SCALE": 65536,
        "GROWTH_FACTOR": 2,
        "BACKOFF_FACTOR": 0.5,
        "GROWTH_INTERVAL": 2000,
        "MIN_SCALE": 1,
        "MAX_SCALE": 2**24,
        "MAX_CONSECUTIVE_SKIPS": 25,
        "ON_FAILURE": "error",
        "FORCE_FP32": (),
        "PREFLIGHT": "error",
        "EVAL_DTYPE": "same",
        "RESTORE_BUFFERS_ON_SKIP": True,
        "TRACE_NONFINITE": "on_failure",
    }
    assert (cfg.SEED, cfg.LOG_PERIOD, cfg.MODEL.CHANNELS_LAST, cfg.MODEL.BACKBONE.STEM_POOL) == (0, 50, "auto", "ceil")
    assert (cfg.MODEL.WEIGHTS_MIN_MATCH, cfg.TEST.NUM_WORKERS, cfg.TEST.BASELINES) == (0.9, -1, False)
    assert (cfg.SOLVER.EPOCH_SCHEDULE, cfg.SOLVER.OPT_ARGS, cfg.SOLVER.TF32) == ("after_warmup", {}, False)


def test_shorthands_refer_to_existing_keys():
    for section, name in SHORTHANDS.items():
        assert {f"{section}.{name}", f"{section}.ENABLED"} <= set(KEYS)


# ---- documentation


def test_describe_config_lists_every_key_within_100_columns():
    text = describe_config()
    for key in KEYS.values():
        assert f"\n{key.path}: " in f"\n{text}"
    assert max(map(len, text.splitlines())) <= 100


def test_describe_config_with_prefix_describes_only_that_section_or_key():
    text = describe_config("solver.amp")
    assert "SOLVER.AMP.DTYPE: auto" in text
    assert "SOLVER.BASE_LR" not in text
    assert "choices: auto, bfloat16, float16" in " ".join(text.split()).lower()
    assert "Choices: 1, 3, 4." in describe_config("INPUT.CHANNELS")
    assert describe_config("SOLVER.BASE_LR").count("\n") >= 1


def test_describe_config_with_unknown_prefix_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"'SOLVERS'.*'SOLVER"):
        describe_config("SOLVERS")


def test_describe_config_shows_changed_values_and_project_keys():
    cfg = get_cfg()
    cfg.define("TUNE.TRIALS", 8, "Trials of the search.")
    cfg.SOLVER.BASE_LR = 0.1
    assert "TUNE.TRIALS: 8" in describe_config(cfg=cfg)
    assert "SOLVER.BASE_LR: 0.0003   (set to: 0.1)" in describe_config("SOLVER.BASE_LR", cfg)
