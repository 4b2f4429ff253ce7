"""FastTune: importance of keys, figure with the lineage of trials, and estimate of disk space."""

from pathlib import Path

import numpy as np
import pytest
import tiny
from autotuner import disk
from autotuner.disk import check_disk, trial_bytes
from autotuner.importance import importances
from autotuner.picture import _draw_lineage, draw_trials
from autotuner.search import Outcome, best_first
from autotuner.settings import Search
from autotuner.space import Parameter, Space

from fastamp.engine import DefaultTrainer
from fastamp.utils.errors import ConfigError

SPACE = Space(
    [
        Parameter("SOLVER.BASE_LR", "loguniform", (1e-5, 1e-1)),
        Parameter("SOLVER.OPT", "choice", ("Adam", "SGD")),
        Parameter("MODEL.LOSSES.TRI.MARGIN", "uniform", (0.0, 1.0)),
    ]
)


def outcome(name, values, history, parents=(), history_values=None):
    return Outcome(
        stage="search",
        name=name,
        values=values,
        score=max(score for _, score in history),
        epochs=history[-1][0],
        failure="",
        folder=Path(name),
        history=history,
        history_values=history_values or [values] * len(history),
        parents=list(parents),
    )


def draw(random):
    return {
        "SOLVER.BASE_LR": 10 ** random.uniform(-5, -1),
        "SOLVER.OPT": str(random.choice(["Adam", "SGD"])),
        "MODEL.LOSSES.TRI.MARGIN": random.uniform(0, 1),
    }


def test_key_importance_is_the_explained_fraction_of_score_variance():
    random = np.random.default_rng(0)
    outcomes = []
    for number in range(60):
        values = draw(random)
        # A peak in the middle, which correlation does not detect; a smaller effect of a choice; no effect of the third.
        score = 10 - 2 * (np.log10(values["SOLVER.BASE_LR"]) + 3) ** 2 + (values["SOLVER.OPT"] == "SGD")
        outcomes.append(outcome(str(number), values, [(4, score)]))
    found = importances(outcomes, SPACE)
    assert next(iter(found)) == "SOLVER.BASE_LR" and found["SOLVER.BASE_LR"] > 0.4
    assert found["SOLVER.OPT"] < 0.3 and found["MODEL.LOSSES.TRI.MARGIN"] < 0.1
    assert importances(outcomes[:5], SPACE) == {}


def test_key_importance_is_zero_if_all_scores_and_values_are_equal():
    values = {"SOLVER.BASE_LR": 1e-3, "SOLVER.OPT": "Adam", "MODEL.LOSSES.TRI.MARGIN": 0.3}
    assert set(importances([outcome(str(n), values, [(4, 7.0)]) for n in range(8)], SPACE).values()) == {0.0}


def population():
    """Return outcomes of four PBT trials; scores increase with the epoch and decrease with the learning rate."""
    random = np.random.default_rng(1)
    made = []
    for number in range(4):
        drawn = [draw(random) for _ in range(3)]
        history = [(e + 1, 20.0 * e - np.log10(drawn[e]["SOLVER.BASE_LR"])) for e in range(3)]
        parents = [(1, "trial_0")] if number == 3 else []
        made.append(outcome(f"trial_{number}", drawn[-1], history, parents, drawn))
    return sorted(made, key=lambda trial: -trial.score)


def test_key_importance_in_pbt_ranks_scores_within_an_epoch():
    found = importances(population(), SPACE)
    assert next(iter(found)) == "SOLVER.BASE_LR" and found["SOLVER.BASE_LR"] > 0.3


def test_search_figure_shows_lineage_of_pbt_trials(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    plot = figure.subplots()
    outcomes = population()
    _draw_lineage(plot, outcomes)
    (arrow,) = plot.texts
    clone, parent = (
        dict(next(outcome for outcome in outcomes if outcome.name == f"trial_{n}").history) for n in (3, 0)
    )
    assert arrow.xyann == (1, parent[1]) and arrow.xy == (2, clone[2])
    # The line of the copy is interrupted at the epoch where it was copied.
    assert sorted(len(line.get_xdata()) for line in plot.lines) == [1, 2, 3, 3, 3]
    assert draw_trials(outcomes, SPACE, tmp_path / "trials.png").read_bytes()[1:4] == b"PNG"


def test_trials_with_equal_scores_are_sorted_by_name():
    """With another order, the weights of the winner might already have been deleted."""
    equal = [outcome(name, draw(np.random.default_rng(0)), [(4, 7.0)]) for name in ("trial_1", "trial_0", "trial_2")]
    assert best_first(equal)[0].name == best_first(equal[::-1])[0].name == "trial_0"


def config(output, *opts):
    return tiny.tiny_config(output, *opts)


@pytest.mark.parametrize("options", [(), ("SOLVER.OPT", "SGD"), ("SOLVER.EMA.ENABLED", "True")])
def test_estimated_checkpoint_size_matches_saved_checkpoint(demo, tmp_path, options):
    cfg = config(tmp_path, *options)
    trainer = DefaultTrainer(cfg)
    for parameter in trainer.model.parameters():
        parameter.grad = parameter.detach().clone()
    trainer.optimizer.step()
    checkpoint, weights = trial_bytes(cfg, 16)
    content = trainer.checkpointer.content()

    def size(value):
        if isinstance(value, dict):
            return sum(map(size, value.values()))
        return value.numel() * value.element_size() if hasattr(value, "numel") else 0

    assert weights == size(content["model"])
    parts = [content[name] for name in ("model", "optimizer", "average") if name in content]
    assert checkpoint == pytest.approx(sum(map(size, parts)), rel=0.15)  # buffers have no optimizer state


def test_check_disk_raises_if_free_space_is_too_small(demo, tmp_path, monkeypatch):
    usage = disk.shutil.disk_usage(tmp_path)
    search = Search(title="search", folder=tmp_path / "search", cfg=config(tmp_path), space=SPACE, trials=4)
    check_disk(search, 16, concurrent=2)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(ConfigError, match="--num-trials"):
        check_disk(search, 16, concurrent=2)
