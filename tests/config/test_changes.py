"""Description of the differences between a config and a saved config, as logged on resume."""

import pytest

from fastamp.config import describe_changes, get_cfg
from fastamp.utils.errors import ConfigError


def test_describe_changes_returns_one_line_for_each_changed_key():
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.BASE_LR", "1e-5", "SOLVER.STEPS", "(3, 4)", "SOLVER.OPT_ARGS", "{eps: 1.0e-6}"])
    before = cfg.dump()
    assert describe_changes(cfg, before, "x") == []
    cfg.merge_from_list(["SOLVER.BASE_LR", "0.5", "SOLVER.STEPS", "(3,)", "SOLVER.OPT_ARGS", "{}"])
    cfg.merge_from_list(["MODEL.WEIGHTS", "a.pth", "SOLVER.AMP", "bf16"])
    assert sorted(describe_changes(cfg, before, "x")) == [
        "MODEL.WEIGHTS: '' -> a.pth",
        "SOLVER.AMP.DTYPE: auto -> bfloat16",
        "SOLVER.AMP.ENABLED: False -> True",
        "SOLVER.BASE_LR: 1e-05 -> 0.5",
        "SOLVER.OPT_ARGS: {eps: 1e-06} -> {}",
        "SOLVER.STEPS: [3, 4] -> [3]",
    ]


def test_describe_changes_treats_missing_keys_as_defaults_and_ignores_unknown_keys():
    cfg = get_cfg()
    assert describe_changes(cfg, "SOLVER: {GONE: 1}\nMODEL: 3", "x") == []
    cfg.SOLVER.STEPS = (1,)
    assert describe_changes(cfg, "", "x") == ["SOLVER.STEPS: [30, 55] -> [1]"]


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system [ls]", "- 1", "a: [", "{a: 1, a: 2}"])
def test_describe_changes_rejects_invalid_saved_config(text):
    with pytest.raises(ConfigError, match="the checkpoint's config"):
        describe_changes(get_cfg(), text, "the checkpoint's config")
