"""Config tree: shorthands, conversions, error messages and atomic merges."""

import copy
import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yacs.config import CfgNode as YacsCfgNode

from fastamp.config import CfgNode, FrozenConfigError, get_cfg, read_config
from fastamp.config.defaults import KEYS
from fastamp.utils.errors import ConfigError


@pytest.fixture
def cfg():
    return get_cfg()


@pytest.fixture
def from_yaml(tmp_path):
    """Function that merges YAML text into the defaults."""

    def merge(text):
        file = tmp_path / "config.yml"
        file.write_text(text)
        merged = get_cfg()
        merged.merge_from_file(file)
        return merged

    return merge


def from_list(*opts):
    merged = get_cfg()
    merged.merge_from_list(list(opts))
    return merged


# ---- shorthands of SOLVER.AMP

AMP_SHORTHANDS = [
    ("True", True, "auto"),
    ("on", True, "auto"),
    ("yes", True, "auto"),
    ("auto", True, "auto"),
    ("bf16", True, "bfloat16"),
    ("BF16", True, "bfloat16"),
    ("fp16", True, "float16"),
    ("bfloat16", True, "bfloat16"),
    ("float16", True, "float16"),
    ("off", False, "auto"),
    ("False", False, "auto"),
    ("{ENABLED: True}", True, "auto"),
    ("{ENABLED: True, DTYPE: fp16}", True, "float16"),
]


def test_amp_shorthand_sets_enabled_and_dtype(from_yaml, tmp_path, subtests):
    for (text, enabled, dtype), quote in itertools.product(AMP_SHORTHANDS, ["", "'"]):
        with subtests.test(text=text, quote=quote):
            in_file = from_yaml(f"SOLVER: {{AMP: {quote}{text}{quote}}}")
            (tmp_path / "child.yml").write_text("_BASE_: config.yml\nSEED: 3\n")
            through_base = get_cfg()
            through_base.merge_from_file(tmp_path / "child.yml")
            on_command_line = from_list("SOLVER.AMP", text)
            for merged in (in_file, through_base, on_command_line):
                assert dict(merged.SOLVER.AMP) == dict(get_cfg().SOLVER.AMP) | {"ENABLED": enabled, "DTYPE": dtype}
                assert isinstance(merged.SOLVER.AMP, CfgNode)
                assert bool(merged.SOLVER.AMP) is enabled


def test_assigning_amp_shorthand_sets_enabled_and_dtype(cfg):
    cfg.SOLVER.AMP = True
    assert cfg.SOLVER.AMP
    assert cfg.SOLVER.AMP.ENABLED is True
    cfg.SOLVER.AMP = "bf16"
    assert cfg.SOLVER.AMP.DTYPE == "bfloat16"
    cfg.SOLVER.AMP = False
    assert not cfg.SOLVER.AMP
    assert cfg.SOLVER.AMP.DTYPE == "bfloat16"
    cfg.SOLVER.AMP_ENABLED = True
    assert cfg.SOLVER.AMP
    assert "AMP_ENABLED" not in cfg.SOLVER


def test_fastreid_key_solver_amp_enabled_is_accepted(from_yaml):
    assert from_yaml("SOLVER: {AMP_ENABLED: True}").SOLVER.AMP.ENABLED is True
    assert from_list("SOLVER.AMP_ENABLED", "True").SOLVER.AMP.ENABLED is True
    assert from_list("SOLVER.AMP.ENABLED", "True").SOLVER.AMP.ENABLED is True


def test_amp_off_keeps_dtype_from_the_base_file(tmp_path):
    (tmp_path / "base.yml").write_text("SOLVER: {AMP: fp16}")
    (tmp_path / "child.yml").write_text("_BASE_: base.yml\nSOLVER: {AMP: off}")
    cfg = get_cfg()
    cfg.merge_from_file(tmp_path / "child.yml")
    assert (cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE) == (False, "float16")
    cfg.merge_from_list(["SOLVER.AMP", "on"])
    assert (cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE) == (True, "float16")


def test_invalid_amp_dtype_suggests_nearest():
    with pytest.raises(ConfigError, match=r"command line: SOLVER.AMP.DTYPE: .*'bf17'.*'bf16'"):
        from_list("SOLVER.AMP", "bf17")


def test_bool_assigned_to_section_sets_its_enabled_key(cfg, from_yaml):
    assert from_yaml("TEST: {FLIP: True}").TEST.FLIP.ENABLED is True
    assert from_list("INPUT.REA", "on").INPUT.REA.ENABLED is True
    cfg.SOLVER.CLIP_GRADIENTS = True
    assert cfg.SOLVER.CLIP_GRADIENTS.ENABLED is True
    with pytest.raises(ConfigError, match=r"SOLVER: .*True"):
        cfg.SOLVER = True


def test_config_section_is_true_if_enabled_or_not_empty(cfg):
    assert cfg.SOLVER
    assert not cfg.SOLVER.OPT_ARGS
    assert not cfg.TEST.FLIP
    cfg.TEST.FLIP.ENABLED = True
    assert cfg.TEST.FLIP


# ---- conversions


def test_config_values_are_converted_to_the_type_of_the_key(subtests):
    cases = [
        ("SOLVER.BASE_LR", 1, 1.0),
        ("SOLVER.BASE_LR", "1e-3", 0.001),
        ("SOLVER.BASE_LR", " 3 ", 3.0),
        ("SOLVER.BASE_LR", np.float64(0.5), 0.5),
        ("SOLVER.CLIP_GRADIENTS.NORM_TYPE", "inf", float("inf")),
        ("SOLVER.MAX_EPOCH", 30.0, 30),
        ("SOLVER.MAX_EPOCH", "30.0", 30),
        ("SOLVER.MAX_EPOCH", "1e2", 100),
        ("SOLVER.MAX_EPOCH", np.int64(7), 7),
        ("MODEL.HEADS.SCALE", 30.0, 30),
        ("MODEL.LOSSES.TRI.MARGIN", 0, 0.0),
        ("CUDNN_BENCHMARK", "TRUE", True),
        ("CUDNN_BENCHMARK", "off", False),
        ("CUDNN_BENCHMARK", "Yes", True),
        ("CUDNN_BENCHMARK", np.bool_(True), True),
        ("MODEL.BACKBONE.DEPTH", 50, "50"),
        ("MODEL.BACKBONE.DEPTH", "050", "050"),
        ("OUTPUT_DIR", "2024_01", "2024_01"),
        ("OUTPUT_DIR", Path("a") / "b", str(Path("a") / "b")),
        ("OUTPUT_DIR", "", ""),
        ("DATASETS.NAMES", "Demo", ("Demo",)),
        ("DATASETS.NAMES", ["A", "B"], ("A", "B")),
        ("DATASETS.NAMES", "(A,B)", ("A", "B")),
        ("DATASETS.NAMES", "[A, B]", ("A", "B")),
        ("DATASETS.NAMES", '("A", "B",)', ("A", "B")),
        ("DATASETS.NAMES", "['A']", ("A",)),
        ("DATASETS.NAMES", "()", ()),
        ("DATASETS.NAMES", "", ()),
        ("DATASETS.NAMES", [1], ("1",)),
        ("SOLVER.STEPS", 40, (40,)),
        ("SOLVER.STEPS", "40,90", (40, 90)),
        ("SOLVER.STEPS", "(40, 90)", (40, 90)),
        ("SOLVER.STEPS", [40.0, "90"], (40, 90)),
        ("SOLVER.STEPS", np.array([4, 9]), (4, 9)),
        ("MODEL.PIXEL_MEAN", ["1e-3", 1, 2.5], (0.001, 1.0, 2.5)),
        ("DATALOADER.SET_WEIGHT", "[3e-4, 1e-3]", (3e-4, 1e-3)),
        ("SOLVER.AMP.FORCE_FP32", "[*.norm?, GeM]", ("*.norm?", "GeM")),
        ("SOLVER.AMP.FORCE_FP32", "backbone.layer[12].*", ("backbone.layer[12].*",)),
        ("SOLVER.AMP.FORCE_FP32", "[ab]*.norm", ("[ab]*.norm",)),
        ("MODEL.CHANNELS_LAST", True, "on"),
        ("MODEL.CHANNELS_LAST", "OFF", "off"),
        ("SOLVER.AMP.PREFLIGHT", False, "off"),
        ("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "Global_Norm", "global_norm"),
        ("SOLVER.AMP.DTYPE", "FP16", "float16"),
        ("INPUT.CHANNELS", "1", 1),
        ("INPUT.CHANNELS", 4.0, 4),
        ("INPUT.REA.VALUE", 117, (117.0,)),
    ]
    for (key, value, expected), way in itertools.product(cases, ["list", "attribute", "dict"]):
        with subtests.test(key=key, value=value, way=way):
            section, _, name = key.rpartition(".")
            node = cfg = get_cfg()
            for part in filter(None, section.split(".")):
                node = node[part]
            if way == "list":
                cfg.merge_from_list([key, value])
            elif way == "attribute":
                setattr(node, name, value)
            else:
                cfg.merge_from_other_cfg({key: value})
            assert node[name] == expected
            assert type(node[name]) is type(expected)
            if isinstance(expected, tuple):
                assert [type(element) for element in node[name]] == [type(element) for element in expected]


def test_scientific_notation_without_dot_in_yaml_becomes_float(from_yaml):
    # YAML 1.1 reads 3e-4 (no dot) as a string.
    assert from_yaml("DATALOADER: {SET_WEIGHT: [3e-4, 1e-3]}").DATALOADER.SET_WEIGHT == (3e-4, 1e-3)
    assert from_yaml("SOLVER: {BASE_LR: 3e-4}").SOLVER.BASE_LR == 3e-4


def test_tuple_written_as_text_in_yaml_is_parsed(from_yaml):
    cfg = from_yaml('DATASETS:\n  NAMES: ("A", "B",)\n')
    assert cfg.DATASETS.NAMES == ("A", "B")
    assert from_yaml("MODEL:\n  BACKBONE:\n    STRIDE_SIZE: (12, 12)\n").MODEL.BACKBONE.STRIDE_SIZE == (12, 12)


def test_invalid_config_value_error_names_source_key_and_value(cfg, subtests):
    cases = [
        ("SOLVER.MAX_EPOCH", 30.5, "30.5 (float)"),
        ("SOLVER.MAX_EPOCH", True, "True (bool)"),
        ("SOLVER.MAX_EPOCH", float("inf"), "inf (float)"),
        ("SOLVER.MAX_EPOCH", None, "null"),
        ("SOLVER.MAX_EPOCH", 2**80, "SOLVER.MAX_EPOCH: "),
        ("SOLVER.MAX_EPOCH", 16**5000, "SOLVER.MAX_EPOCH: "),
        ("SOLVER.MAX_EPOCH", 0, "at least 1"),
        ("SOLVER.BASE_LR", "fast", "'fast' (str)"),
        ("SOLVER.BASE_LR", "nan", "'nan' (str)"),
        ("SOLVER.BASE_LR", [0.1], "[0.1] (list)"),
        ("SOLVER.BASE_LR", 10**400, "SOLVER.BASE_LR: "),
        ("SOLVER.BASE_LR", True, "True (bool)"),
        ("CUDNN_BENCHMARK", 1, "1 (int)"),
        ("CUDNN_BENCHMARK", "maybe", "'maybe' (str)"),
        ("OUTPUT_DIR", None, "null"),
        ("OUTPUT_DIR", "None", "'None'"),
        ("OUTPUT_DIR", True, "True (bool)"),
        ("OUTPUT_DIR", ["a"], "['a'] (list)"),
        ("SOLVER.STEPS", [40, 90.5], "90.5 (float)"),
        ("SOLVER.STEPS", [40, None], "null"),
        ("SOLVER.STEPS", [[40]], "[40] (list)"),
        ("SOLVER.STEPS", [40, -1], "(40, -1)"),
        ("SOLVER.AMP.MIN_SCALE", 0, "got 0"),
        ("INPUT.CROP.SCALE", [0, 1], "got (0.0, 1.0)"),
        ("SOLVER.STEPS", "[40, 90", "'[40, 90'"),
        ("SOLVER.STEPS", None, "null"),
        ("MODEL.BACKBONE.STRIDE_SIZE", [1, 2, 3], "2 numbers"),
        ("DATASETS.NAMES", {"A"}, "{'A'} (set)"),
        ("SOLVER.BASE_LR", {"A": 1}, "{'A': 1}"),
        ("SOLVER", 3, "3 (int)"),
        ("SOLVER", None, "null"),
        ("SOLVER.AMP", None, "null"),
        ("TEST.FLIP", "perhaps", "'perhaps' (str)"),
        ("SOLVER.AMP.EVAL_DTYPE", "flaot32", "'float32'"),
        ("SOLVER.EPOCH_SCHEDULE", 3, "after_warmup, absolute"),
        ("MODEL.BACKBONE.STEM_POOL", None, "None"),
        ("INPUT.CHANNELS", 2, "choices: 1, 3, 4"),
        ("INPUT.CHANNELS", "gray", "'gray' (str)"),
        ("INPUT.CHANNELS", True, "True (bool)"),
        ("SOLVER.OPT_ARGS", 3, "3 (int)"),
        ("SOLVER.OPT_ARGS", {"a": {"b": 1}}, "SOLVER.OPT_ARGS.a"),
        ("SOLVER.OPT_ARGS", {"a": [[1]]}, "SOLVER.OPT_ARGS.a: "),
        ("SOLVER.OPT_ARGS", {1: 2}, "1 (int) in SOLVER.OPT_ARGS"),
        ("SOLVER", {None: 2}, "None (NoneType) in SOLVER"),
    ]
    for key, value, shown in cases:
        with subtests.test(key=key, shown=shown):
            before = cfg.clone()
            with pytest.raises(ConfigError) as caught:
                cfg.merge_from_list(["SEED", 5, key, value])
            message = str(caught.value)
            assert message.startswith("command line: ") and key in message and shown in message
            assert cfg == before


def test_invalid_value_in_config_file_error_names_the_file(from_yaml):
    with pytest.raises(ConfigError, match=r"config\.yml: SOLVER.MAX_EPOCH: .*30.5 \(float\)"):
        from_yaml("SOLVER: {MAX_EPOCH: 30.5}")
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR: .*\(date\)"):
        from_yaml("OUTPUT_DIR: 2024-01-02")


# ---- unknown keys


def test_unknown_config_key_error_suggests_the_nearest_key(subtests):
    cases = [
        ("SOLVER.BASELR", "'SOLVER.BASE_LR'"),
        ("SOLVR.BASE_LR", "'SOLVER.BASE_LR'"),
        ("solver.base_lr", "'SOLVER.BASE_LR'"),
        ("MODEL.NUM_WORKERS", "DATALOADER.NUM_WORKERS"),
        ("MODEL.NUM_WORKERS", "TEST.NUM_WORKERS"),
        ("SOLVER.EVAL_PERIOD", "TEST.EVAL_PERIOD"),
        ("SOLVER.AMP.DTYP", "'SOLVER.AMP.DTYPE'"),
        ("SOLVER.BASE_LR.X", "SOLVER.BASE_LR "),
        ("_BASE_", ""),
        (".SEED", ""),
        ("SOLVER.SOLVER.BASE_LR", ""),
        ("SOLVER.OPT_ARGS.", ""),
        ("SOLVER.", ""),
        ("", ""),
        ("SOLVER.AMP.X.Y", ""),
        ("ZZZ", "config list"),
    ]
    for key, suggested in cases:
        with subtests.test(key=key):
            with pytest.raises(ConfigError) as caught:
                from_list(key, "1")
            assert f"{key!r}" in str(caught.value) and suggested in str(caught.value)


def test_unknown_key_in_base_file_error_names_the_base_file(tmp_path):
    (tmp_path / "base.yml").write_text("SOLVER: {BASE_LT: 0.1}")
    (tmp_path / "child.yml").write_text("_BASE_: base.yml\nSEED: 1")
    cfg = get_cfg()
    with pytest.raises(ConfigError) as caught:
        cfg.merge_from_file(tmp_path / "child.yml")
    assert str(tmp_path / "base.yml") in str(caught.value)
    assert "child" not in str(caught.value)
    assert "'SOLVER.BASE_LT'" in str(caught.value) and "'SOLVER.BASE_LR'" in str(caught.value)
    assert cfg == get_cfg()


def test_unknown_config_section_error_suggests_the_nearest_section(from_yaml):
    with pytest.raises(ConfigError, match=r"'SOVLER'.*'SOLVER'"):
        from_yaml("SOVLER: {BASE_LR: 0.1}")


def test_unknown_config_attribute_error_suggests_the_nearest_key(cfg):
    with pytest.raises(ConfigError, match=r"'SOLVER.BASE_LT'.*'SOLVER.BASE_LR'"):
        cfg.SOLVER.BASE_LT = 1
    with pytest.raises(AttributeError, match=r"'SOLVER.BASE_LR'"):
        _ = cfg.SOLVER.BASE_LT
    assert getattr(cfg, "NEW", None) is None
    assert not hasattr(cfg.SOLVER, "BASE_LT")


def test_words_that_are_not_pairs_of_key_and_value_raise_with_a_fix(cfg, subtests):
    cases = [
        (["SEED"], "SEED"),
        (["SEED", "1", "SOLVER.BASE_LR"], "SOLVER.BASE_LR"),
        (["SEED=1"], "SEED 1"),
        (["SEED=1", "LOG_PERIOD=2"], "SEED 1"),
        (["SEED 1"], "SEED 1"),
        (["SEED", "=", "1"], "KEY=VALUE"),
        (["SEED", "1", "--resume", "True"], "write --resume"),
        (["SEED", "=1"], "KEY=VALUE"),
        (["SEED", "1", "INPUT.SIZE_TRAIN", "[64,", "32]"], "quote"),
        (["SEED", "1", "MODEL.PIXEL_MEAN", "[1,", "2,", "3]"], "quote"),
        (["SEED", "1", "INPUT.SIZE_TRAIN", "64", "32"], "list"),
        ([("SEED", 1)], "list"),
        ("SEED 1", "list"),
    ]
    for opts, fix in cases:
        with subtests.test(opts=opts):
            with pytest.raises(ConfigError, match=f"(?s)command line: .*SEED.*fix: .*{fix}"):
                cfg.merge_from_list(opts)
            assert cfg.SEED == 0


def test_read_config_has_defaults():
    assert read_config() == get_cfg()
    assert read_config("Demo/quickstart") == read_config("Demo/quickstart", [])


def test_a_config_is_shown_as_yaml_in_notebooks(cfg):
    shown = []
    cfg.SOLVER.AMP._repr_pretty_(SimpleNamespace(text=shown.append), cycle=False)
    assert shown == [str(cfg.SOLVER.AMP)] and "ENABLED: False\n" in shown[0]


@pytest.mark.integration
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.sampled_from(sorted(KEYS)), st.sampled_from(["SOLVER", "SOLVER.AMP", "TEST.FLIP"]), st.text()),
            st.one_of(st.text(), st.text(alphabet="[](){}'\",:-.e019 abTN&*!#\\\n~")),
        ),
        max_size=3,
    )
)
def test_merge_from_list_raises_only_config_error_for_arbitrary_text(pairs):
    cfg = get_cfg()
    try:
        cfg.merge_from_list([text for pair in pairs for text in pair])
    except ConfigError:
        assert cfg == get_cfg()
    else:
        again = get_cfg()
        again.merge_saved(cfg.dump())
        assert again == cfg


# ---- SOLVER.OPT_ARGS, the free-form section


def test_free_form_names_with_dots_survive_dump_and_load_cfg(cfg):
    cfg.merge_from_list(["SOLVER.LR_FACTORS", "{'backbone.layer1.*': 0.1, heads: 2}"])
    again = get_cfg()
    again.merge_saved(cfg.dump())
    assert again == cfg
    assert dict(again.SOLVER.LR_FACTORS) == {"backbone.layer1.*": 0.1, "heads": 2}
    with pytest.raises(ConfigError, match="without dots"):
        CfgNode.load_cfg("SOLVER.BASE_LR: 1")


def test_free_form_section_accepts_any_key_and_mapping_replaces_it(cfg, from_yaml):
    in_file = from_yaml("SOLVER: {OPT_ARGS: {betas: [0.9, 0.98], eps: 1e-6, fused: null, amsgrad: True}}")
    assert in_file.SOLVER.OPT_ARGS == {"betas": (0.9, 0.98), "eps": 1e-6, "fused": None, "amsgrad": True}
    in_file.merge_from_list(["SOLVER.OPT_ARGS.eps", "1e-5", "SOLVER.OPT_ARGS.betas", "(0.8, 0.9)"])
    assert in_file.SOLVER.OPT_ARGS == {"betas": (0.8, 0.9), "eps": 1e-5, "fused": None, "amsgrad": True}
    in_file.merge_from_list(["SOLVER.OPT_ARGS", "{eps: 1e-4}", "SOLVER.OPT_ARGS.maximize", "true"])
    assert in_file.SOLVER.OPT_ARGS == {"eps": 1e-4, "maximize": True}
    in_file.merge_from_list(["SOLVER.OPT_ARGS", "{'betas': (0.9, 0.98)}"])
    assert in_file.SOLVER.OPT_ARGS == {"betas": (0.9, 0.98)}
    in_file.merge_from_list(["SOLVER.OPT_ARGS", "{}"])
    assert in_file.SOLVER.OPT_ARGS == {}
    cfg.SOLVER.OPT_ARGS.eps = np.float32(0.5)
    assert cfg.SOLVER.OPT_ARGS == {"eps": 0.5}
    cfg.SOLVER.OPT_ARGS = {}
    assert cfg == get_cfg()
    cfg.SOLVER.OPT_ARGS = CfgNode({"eps": 2})
    assert dict(cfg.SOLVER.OPT_ARGS) == {"eps": 2}


# ---- other merges, copies, dumps


def test_merge_from_other_cfg_accepts_only_configs_and_dicts(cfg):
    other = get_cfg()
    other.SOLVER.AMP = "bf16"
    other.SEED = 4
    cfg.merge_from_other_cfg(other)
    assert cfg == other
    cfg.merge_from_other_cfg(CfgNode({"SOLVER": {"AMP": False}}))
    assert cfg.SOLVER.AMP.ENABLED is False
    cfg.merge_from_other_cfg(YacsCfgNode({"SEED": 9}))
    assert cfg.SEED == 9
    with pytest.raises(ConfigError, match=r"another config: .*'SEDE'.*'SEED'"):
        cfg.merge_from_other_cfg({"SEDE": 1})
    with pytest.raises(ConfigError, match="got 3"):
        cfg.merge_from_other_cfg(3)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c)), CfgNode.clone])
def test_copied_config_keeps_values_validation_and_frozen_state(copied, cfg):
    cfg.SOLVER.AMP = "bf16"
    cfg.freeze()
    result = copied(cfg)
    assert result == cfg
    assert result.is_frozen()
    assert result.SOLVER.is_frozen()
    if copied is not copy.copy:
        result.defrost()
        result.SOLVER.BASE_LR = 1
        assert cfg.SOLVER.BASE_LR == 3e-4
        assert result.is_set("SOLVER.BASE_LR") and not cfg.is_set("SOLVER.BASE_LR")
        with pytest.raises(ConfigError, match=r"SOLVER.BASE_LT"):
            result.SOLVER.BASE_LT = 1


def test_get_cfg_returns_a_new_config(cfg):
    cfg.SEED = 1
    cfg.define("EXTRA.KEY", 1, "A key.")
    assert get_cfg().SEED == 0
    assert "EXTRA" not in get_cfg()


def test_merging_dumped_config_reproduces_the_config(cfg, tmp_path):
    cfg.merge_from_list(
        [
            *("SOLVER.AMP", "fp16", "SOLVER.OPT_ARGS", "{eps: 1e-6, x: [1, a], y: None}", "OUTPUT_DIR", "ä: [#1]"),
            *("MODEL.BACKBONE.DEPTH", "50", "SOLVER.CLIP_GRADIENTS.NORM_TYPE", "inf", "MODEL.WEIGHTS", "'quoted'"),
            *("DATASETS.NAMES", "[true, '1']", "SOLVER.ETA_MIN_LR", "1e-7"),
        ]
    )
    for options in ({}, {"allow_unicode": True, "sort_keys": False}):
        file = tmp_path / "dump.yml"
        file.write_text(cfg.dump(**options), encoding="utf-8")
        again = get_cfg()
        again.merge_from_file(file)
        assert again == cfg
        assert "!!" not in file.read_text(encoding="utf-8")


def test_frozen_config_rejects_changes(cfg):
    cfg.freeze()
    changes = (
        lambda: setattr(cfg, "SEED", 1),
        lambda: setattr(cfg.SOLVER, "AMP", True),
        lambda: cfg.merge_from_list(["SEED", 1]),
        lambda: cfg.merge_from_other_cfg({"SEED": 1}),
        lambda: cfg.define("A", 1, "A key."),
        lambda: cfg.__setitem__("SEED", 1),
    )
    for change in changes:
        with pytest.raises(FrozenConfigError, match="frozen"):
            change()
    assert cfg == get_cfg()
    cfg.defrost()
    cfg.SEED = 1
    cfg.SOLVER.freeze()
    with pytest.raises(FrozenConfigError, match=r"SOLVER.BASE_LR: .*frozen"):
        cfg.merge_from_list(["SEED", 2, "SOLVER.BASE_LR", 1])
    assert cfg.SEED == 1


def test_with_values_returns_a_frozen_copy_and_keeps_the_original(cfg):
    cfg.freeze()
    other = cfg.with_values({"SOLVER.AMP": "fp16", "SOLVER.BASE_LR": "1e-3", "DATASETS.TESTS": ("a",)})
    assert other.is_frozen() and other.SOLVER.is_frozen()
    assert (other.SOLVER.AMP.ENABLED, other.SOLVER.AMP.DTYPE) == (True, "float16")
    assert (other.SOLVER.BASE_LR, other.DATASETS.TESTS) == (1e-3, ("a",))
    assert cfg == get_cfg() and cfg.is_frozen()
    with pytest.raises(ConfigError, match=r"SOLVER.BASE_LRR"):
        cfg.with_values({"SOLVER.BASE_LRR": 1})


def test_assigning_a_reserved_config_attribute_raises(cfg):
    with pytest.raises(ConfigError, match="_path"):
        cfg._path = "x"


# ---- keys of projects


def test_values_of_defined_project_keys_are_validated(cfg):
    cfg.define("TUNE.SEARCH.TRIALS", 8, "Trials.")
    cfg.define("TUNE.MODE", "max", "Direction of optimization.", choices=("min", "max"))
    cfg.define("TUNE.SPACE", {}, "Search space.")
    cfg.SOLVER.define("LOOKAHEAD", (), "Steps.", of=int)
    cfg.merge_from_list(["TUNE.SEARCH.TRIALS", "9.0", "TUNE.MODE", "MIN", "SOLVER.LOOKAHEAD", "3", "TUNE.SPACE.a", "1"])
    assert cfg.TUNE == {"SEARCH": {"TRIALS": 9}, "MODE": "min", "SPACE": {"a": 1}}
    assert cfg.SOLVER.LOOKAHEAD == (3,)
    with pytest.raises(ConfigError, match=r"'TUNE.SEARCH.TRAILS'.*'TUNE.SEARCH.TRIALS'"):
        cfg.merge_from_list(["TUNE.SEARCH.TRAILS", "9"])
    with pytest.raises(ConfigError, match=r"TUNE.MODE: .*'mix'"):
        cfg.clone().TUNE.MODE = "mix"
    with pytest.raises(ConfigError, match="TUNE.MODES"):
        cfg.TUNE.MODES = 1


@pytest.mark.parametrize(
    ("path", "meaning"),
    [("SEED", "x"), ("SOLVER", "x"), ("SEED.X", "x"), ("A..B", "x"), ("", "x"), ("A", "")],
)
def test_define_rejects_existing_keys_invalid_paths_and_empty_descriptions(path, meaning, cfg):
    with pytest.raises(ValueError, match="config key|section"):
        cfg.define(path, 1, meaning)
    assert cfg == get_cfg()


def test_define_rejects_default_of_wrong_type_or_outside_choices(cfg):
    with pytest.raises(ConfigError, match="A: .*object"):
        cfg.define("A", object(), "x")
    with pytest.raises(ConfigError, match="A: .*'b'"):
        cfg.define("A", "b", "x", choices=("c",))


def test_section_added_by_assignment_declares_its_attributes_as_keys(cfg):
    cfg.DISTILL = CfgNode()
    cfg.DISTILL.WEIGHT = 1
    cfg.DISTILL.TEACHER = CfgNode({"ENABLED": False, "FILES": ["a"]})
    cfg.KD = CfgNode()
    cfg.KD.ALPHA = 0.5
    cfg.KD.EMA = CfgNode({"WARMUP": 3})
    cfg.merge_from_list(["DISTILL.WEIGHT", "2", "DISTILL.TEACHER", "on", "DISTILL.TEACHER.FILES", "b", "KD.ALPHA", "1"])
    assert cfg.DISTILL == {"WEIGHT": 2, "TEACHER": {"ENABLED": True, "FILES": ["b"]}}
    assert (cfg.KD.ALPHA, cfg.KD.EMA.MOMENTUM, cfg.KD.EMA.WARMUP) == (1.0, 0.999, 3)
    with pytest.raises(ConfigError, match=r"'DISTILL.WIEGHT'.*'DISTILL.WEIGHT'"):
        cfg.merge_from_list(["DISTILL.WIEGHT", "2"])
    node = CfgNode()
    cfg.LATER = node
    node.KEY = 1
    assert cfg.LATER.KEY == 1
    restored = pickle.loads(pickle.dumps(cfg))
    restored.merge_from_list(["LATER.KEY", "5"])
    assert restored.LATER.KEY == 5
    cfg.PLAIN = YacsCfgNode({"A": {"B": 1}})
    cfg.merge_from_list(["PLAIN.A.B", "2"])
    assert cfg.PLAIN.A.B == 2


def test_assigning_a_section_of_another_config_copies_it(cfg):
    other = get_cfg()
    other.SOLVER.AMP = "fp16"
    cfg.SOLVER = other.SOLVER
    assert cfg.SOLVER == other.SOLVER
    assert cfg.SOLVER is not other.SOLVER
    with pytest.raises(ConfigError, match="SOLVER.BASE_LT"):
        cfg.SOLVER.BASE_LT = 1
    other.SOLVER.BASE_LR = 1
    assert cfg.SOLVER.BASE_LR == 3e-4


def test_standalone_cfgnode_declares_keys_by_assignment_but_not_by_merge():
    node = CfgNode({"A": 1, "B": {"C": "x"}})
    node.D = None
    node.merge_from_list(["A", "2", "B.C", "y", "D", "free"])
    assert node == {"A": 2, "B": {"C": "y"}, "D": "free"}
    with pytest.raises(ConfigError, match=r"'B.E'"):
        node.merge_from_list(["B.E", "1"])
    with pytest.raises(ConfigError, match="E: .*object"):
        node.E = object()
    assert CfgNode(new_allowed=True).is_new_allowed()
    node.MIXED = (1, "b", None)
    node.merge_from_list(["MIXED", "[c, 2]"])
    assert node.MIXED == ("c", 2)


def test_cfgnode_constructor_copies_the_given_node(cfg):
    assert CfgNode(cfg) == cfg
    assert CfgNode(cfg.SOLVER) == cfg.SOLVER
    assert CfgNode(cfg.SOLVER.AMP) == cfg.SOLVER.AMP


def test_load_cfg_rejects_python_files_and_tags_without_executing_them(tmp_path):
    assert CfgNode.load_cfg("A: 1") == {"A": 1}
    file = tmp_path / "config.py"
    file.write_text("raise SystemExit(9)")
    with file.open() as opened, pytest.raises(ConfigError, match=r"config\.py"):
        CfgNode.load_cfg(opened)
    with pytest.raises(ConfigError, match="python/object/apply"):
        CfgNode.load_cfg("!!python/object/apply:os.system ['false']")


@pytest.mark.parametrize("key", ["SEED", "SOLVER.BASE_LR"])
def test_config_value_with_400_digits_raises_config_error(key):
    with pytest.raises(ConfigError, match=key):
        get_cfg().merge_from_list([key, "9" * 400])
