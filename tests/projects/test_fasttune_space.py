"""FastTune search spaces: samples, resulting configs, and invalid spaces."""

import numpy as np
import pytest
from autotuner.space import IDENTITIES, SHORT_NAMES, Parameter, Space, default_space, read_space
from autotuner.tune_hooks import EvalRounds

from fastamp.config import get_cfg, read_config
from fastamp.config.defaults import KEYS
from fastamp.utils.errors import ConfigError


def draw(parameter, random):
    """Draw a random value of ``parameter`` as a search algorithm does: choices and steps are drawn by index."""
    low, high = parameter.values[0], parameter.values[-1]
    if parameter.kind == "choice":
        return parameter.decode(random.integers(len(parameter.values)))
    if parameter.kind == "quniform":
        return parameter.decode(random.integers(parameter.steps + 1))
    if parameter.kind == "randint":
        return parameter.decode(random.integers(low, high))
    if parameter.kind == "loguniform":
        return parameter.decode(np.exp(random.uniform(np.log(low), np.log(high))))
    return parameter.decode(random.uniform(low, high))


def draws(space, random):
    return {key: draw(parameter, random) for key, parameter in space.parameters.items()}


def space_of(tmp_path, text, cfg=None):
    path = tmp_path / "space.yml"
    path.write_text(text)
    return read_space(path, cfg or get_cfg())


@pytest.mark.parametrize(
    "kind, values, low, high, is_integer",
    [
        ("uniform", (0.5, 2.0), 0.5, 2.0, False),
        ("loguniform", (1e-6, 1e-3), 1e-6, 1e-3, False),
        ("randint", (3, 6), 3, 5, True),
        ("quniform", (0.1, 1.05, 0.3), 0.1, 1.0, False),
        ("quniform", (4, 16, 4), 4, 16, True),
    ],
)
def test_decoded_samples_cover_the_range_of_a_parameter(kind, values, low, high, is_integer):
    parameter = Parameter("SOLVER.BASE_LR", kind, values)
    random = np.random.default_rng(0)
    drawn = [draw(parameter, random) for _ in range(2000)]
    assert low <= min(drawn) and max(drawn) <= high + 1e-12
    assert parameter.extremes() == pytest.approx((low, high))
    spread = np.log(drawn) if kind == "loguniform" else np.array(drawn)
    ends = np.log([low, high]) if kind == "loguniform" else np.array([low, high])
    assert spread.mean() == pytest.approx(ends.mean(), abs=0.1 * (ends[1] - ends[0]))
    if is_integer or kind == "quniform":
        assert len(set(np.round(drawn, 9))) == {"randint": 3}.get(kind, 4)
    assert not is_integer or all(float(value).is_integer() for value in drawn)


def test_read_space_supports_all_distributions_and_fastreid_key_names(tmp_path):
    space = space_of(
        tmp_path,
        """
        lr: {loguniform: [1e-6, 1e-3]}
        SOLVER.WEIGHT_DECAY: {choice: [0.0, 5e-4]}
        SOLVER.AMP: {choice: [bf16, off]}
        MODEL.LOSSES.TRI.MARGIN: {uniform: [0.0, 0.5]}
        SOLVER.WARMUP_ITERS: {quniform: [0, 200, 50]}
        IDENTITIES: {randint: [4, 17]}
        num_inst: {choice: [2, 4, 8]}
        SOLVER.STEPS: {choice: [[40, 90], [30, 70]]}
        """,
    )
    cfg = get_cfg()
    random = np.random.default_rng(1)
    seen = set()
    for _ in range(50):
        values = draws(space, random)
        made = space.apply(cfg, values)
        assert values[IDENTITIES] * made.DATALOADER.NUM_INSTANCE == made.SOLVER.IMS_PER_BATCH
        assert values["SOLVER.BASE_LR"] == made.SOLVER.BASE_LR and made.SOLVER.STEPS in ((40, 90), (30, 70))
        assert isinstance(made.SOLVER.WARMUP_ITERS, int)
        seen.add(made.DATALOADER.NUM_INSTANCE)
    assert seen == {2, 4, 8}
    assert cfg.SOLVER.BASE_LR == get_cfg().SOLVER.BASE_LR
    assert set(SHORT_NAMES.values()) <= set(KEYS)


@pytest.mark.parametrize(
    "values, batch",
    [
        ({"SOLVER.IMS_PER_BATCH": 50}, 48),  # rounded to a multiple of K = 4
        ({"SOLVER.IMS_PER_BATCH": 60, "DATALOADER.NUM_INSTANCE": 16}, 64),
        ({"SOLVER.IMS_PER_BATCH": 1}, 4),
        ({"DATALOADER.NUM_INSTANCE": 3}, 63),
        ({IDENTITIES: 5}, 20),
        ({IDENTITIES: np.int64(5), "DATALOADER.NUM_INSTANCE": np.int64(2)}, 10),
        ({"SOLVER.BASE_LR": np.float64(0.1)}, None),
    ],
)
def test_search_space_rounds_batch_size_to_multiple_of_images_per_identity(tmp_path, values, batch):
    space = space_of(tmp_path, "lr: {uniform: [0.1, 0.2]}")
    changed = space.overrides(get_cfg(), values)
    assert changed.get("SOLVER.IMS_PER_BATCH") == batch and IDENTITIES not in changed
    assert all(type(value) in (int, float) for value in changed.values())
    assert space.apply(get_cfg(), values).SOLVER.IMS_PER_BATCH % changed.get("DATALOADER.NUM_INSTANCE", 4) == 0


@pytest.mark.parametrize(
    "text, message",
    [
        ("SOLVER.BASE_LRR: {uniform: [0.1, 0.2]}", "SOLVER.BASE_LRR.*SOLVER.BASE_LR"),
        ("SOLVER.BASE_LR: {uniform: [-1.0, 0.2]}", "SOLVER.BASE_LR"),
        ("SOLVER.OPT: {choice: [3, [Adam]]}", "SOLVER.OPT"),
        ("SOLVER.BASE_LR: {uniforn: [0.1, 0.2]}", "'uniforn'.*'uniform'"),
        ("SOLVER.BASE_LR: {uniform: [0.2, 0.1]}", r"uniform: .*\[0.2, 0.1\]"),
        ("SOLVER.BASE_LR: {uniform: [0.2]}", r"\[0.2\]"),
        ("SOLVER.BASE_LR: {uniform: [a, b]}", r"\['a', 'b'\]"),
        ("SOLVER.BASE_LR: {uniform: [.nan, 1.0]}", r"\[nan, 1.0\]"),
        ("SOLVER.BASE_LR: {quniform: [0.0, 1.0, 0.0]}", "step"),
        ("SOLVER.BASE_LR: {loguniform: [0, 1.0]}", "loguniform"),
        ("SOLVER.BASE_LR: {randint: [0.5, 2]}", "randint"),
        ("SOLVER.BASE_LR: 0.1", "choice, uniform"),
        ("SOLVER.BASE_LR: {choice: []}", "choice"),
        ("SOLVER.WARMUP_ITERS: {uniform: [10, 20]}", "SOLVER.WARMUP_ITERS.*randint"),
        ("IDENTITIES: {randint: [0, 4]}", "IDENTITIES"),
        ("IDENTITIES: {loguniform: [1, 4]}", "IDENTITIES"),
        ("{bsz: {choice: [64]}, IDENTITIES: {randint: [4, 8]}}", "IDENTITIES and SOLVER.IMS_PER_BATCH"),
        (
            "{lr: {uniform: [0.1, 1.0]}, SOLVER.BASE_LR: {uniform: [0.1, 1.0]}}",
            "lr and SOLVER.BASE_LR",
        ),
        ("", "space.yml"),
        ("[1, 2]", "space.yml"),
    ],
)
def test_read_space_raises_for_invalid_search_space(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        space_of(tmp_path, text)


def test_read_space_error_names_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="--space.*none.yml"):
        read_space(tmp_path / "none.yml", get_cfg())


def test_narrowed_search_space_surrounds_values_of_best_trial(tmp_path):
    space = Space(
        [
            Parameter("SOLVER.BASE_LR", "loguniform", (1e-6, 1e-3)),
            Parameter("INPUT.REA.PROB", "uniform", (0.0, 0.6)),
            Parameter(IDENTITIES, "randint", (4, 17)),
            Parameter("SOLVER.WARMUP_ITERS", "quniform", (0, 200, 50)),
            Parameter("DATALOADER.NUM_INSTANCE", "choice", (2, 4, 8)),
        ]
    )
    best = {
        "SOLVER.BASE_LR": 1e-5,
        "INPUT.REA.PROB": 0.55,
        IDENTITIES: 10,
        "SOLVER.WARMUP_ITERS": 200,
        "DATALOADER.NUM_INSTANCE": 4,
    }
    narrow = space.narrowed(best, [best | {"DATALOADER.NUM_INSTANCE": 2}]).parameters
    assert narrow["SOLVER.BASE_LR"].values == pytest.approx((1e-5 / 10**0.5, 1e-5 * 10**0.5))
    assert narrow["INPUT.REA.PROB"].values == pytest.approx((0.45, 0.6))
    assert narrow[IDENTITIES].extremes() == (8, 12)
    assert narrow["SOLVER.WARMUP_ITERS"].extremes() == (150, 200)
    assert narrow["DATALOADER.NUM_INSTANCE"].values == (2, 4)
    again = Space(list(narrow.values()))
    assert all(again.narrowed(best, []).parameters[key].steps >= 1 for key in ("SOLVER.WARMUP_ITERS",))


@pytest.mark.parametrize(
    "config_file, name",
    [
        ("configs/Market1501/bagtricks_R50.yml", "bagtricks"),
        ("configs/Market1501/sbs_R101-ibn.yml", "sbs"),
        ("configs/Demo/quickstart.yml", "demo"),
        ("configs/Demo/sbs_R50.yml", "sbs"),
    ],
)
def test_default_search_space_is_found_by_recipe_name(config_file, name):
    cfg = read_config(config_file)
    path = default_space(config_file)
    assert path.stem == name
    read_space(path, cfg)


def test_error_for_recipe_without_default_search_space_lists_all_spaces():
    with pytest.raises(ConfigError, match="(?s)mine.yml.*--space FILE.*bagtricks.yml"):
        default_space("mine.yml")


@pytest.mark.parametrize(
    "period, epochs, grace", [(1, 4, 0), (1, 4, 3), (2, 9, 3), (10, 120, 10), (20, 60, 11), (5, 7, 99)]
)
def test_eval_rounds_count_only_evaluations_after_grace_epochs(period, epochs, grace):
    rounds = EvalRounds(period, epochs, grace)
    evaluations = sorted({*range(period, epochs + 1, period), epochs})
    counting = [epoch for epoch in evaluations if epoch >= min(grace, epochs) or epoch == epochs]
    assert [rounds.at(epoch) for epoch in evaluations] == [
        counting.index(epoch) + 1 if epoch in counting else 0 for epoch in evaluations
    ]
    assert rounds.total == len(counting) >= 1


def test_sample_of_recipe_is_none_if_a_value_is_not_a_choice(tmp_path):
    cfg = get_cfg()
    options = ["SOLVER.BASE_LR", 2e-3, "SOLVER.WARMUP_ITERS", 70, "SOLVER.IMS_PER_BATCH", 48, "SOLVER.AMP", "bf16"]
    cfg.merge_from_list(options)
    space = space_of(
        tmp_path,
        """
        lr: {loguniform: [1e-6, 1e-3]}
        SOLVER.WEIGHT_DECAY: {choice: [0.0, 5e-4]}
        SOLVER.AMP: {choice: [off, bf16]}
        SOLVER.WARMUP_ITERS: {quniform: [0, 200, 50]}
        IDENTITIES: {randint: [4, 17]}
        num_inst: {choice: [2, 4, 8]}
        """,
        cfg,
    )
    sample = space.sample_of(cfg)
    assert sample == dict(zip(space.parameters, (1e-3, 1, 1, 1, 12, 1), strict=True))
    again = space.apply(cfg, space.decoded(sample))
    assert (again.SOLVER.BASE_LR, again.SOLVER.WARMUP_ITERS, again.SOLVER.IMS_PER_BATCH) == (1e-3, 50, 48)
    assert space_of(tmp_path, "SOLVER.WEIGHT_DECAY: {choice: [0.0, 5e-3]}").sample_of(cfg) is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("SOLVER.MAX_EPOCH: {choice: [2, 4]}", "SOLVER.MAX_EPOCH"),
        ("OUTPUT_DIR: {choice: [a, b]}", "OUTPUT_DIR"),
        ("SOLVER.OPT: {uniform: [0, 1]}", "SOLVER.OPT"),
        ("num_inst: {choice: [-1, 2]}", "DATALOADER.NUM_INSTANCE"),
        ("IDENTITIES: {choice: [2.5, 4]}", "IDENTITIES"),
        ("IDENTITIES: {choice: [null, 4]}", "IDENTITIES"),
        ("SOLVER: {BASE_LR: {uniform: [0.1, 1.0]}}", "SOLVER.BASE_LR"),
    ],
)
def test_read_space_raises_for_unsupported_key_or_distribution(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        space_of(tmp_path, text)


def test_read_space_converts_numeric_text_in_choices_to_numbers(tmp_path):
    space = space_of(
        tmp_path,
        "{SOLVER.WARMUP_ITERS: {choice: [1e1, '20']}, lr: {choice: [1e-3, 2e-3]}, IDENTITIES: {choice: ['4']}}",
    )
    assert [parameter.values for parameter in space.parameters.values()] == [(10, 20), (1e-3, 2e-3), (4,)]


def test_read_space_error_names_binary_file(tmp_path):
    (tmp_path / "space.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="space.yml"):
        read_space(tmp_path / "space.yml", get_cfg())
