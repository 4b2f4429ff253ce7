"""Tests of the comparison of two runs on the same queries."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fastamp.cli import main
from fastamp.data.datasets.base import ImageItem
from fastamp.evaluation.metrics import EvaluationResult
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.reid_evaluation import write_per_query
from fastamp.evaluation.run_comparison import compare_rankings, compare_runs
from fastamp.report.queries import write_queries
from fastamp.utils.errors import ConfigError, DataError

PIDS = np.repeat(np.arange(20), 3)


def ranking_of(first_match):
    """Return results whose only match has the given ranks; -1 for queries without a match."""
    ranks = torch.as_tensor(first_match)
    ap = torch.where(ranks >= 0, 1 / (1 + ranks.clamp_min(0).double()), 0)
    return RankingResult(ap, ap, ranks[:, None])


def write_run(run, ranking, paths, *, pids=PIDS, name="Some", protocol=None):
    """Write the results of each query of a run as the evaluation does."""
    folder = run / "evaluation" / name
    write_queries(
        folder / "queries.csv", ranking, [ImageItem(path, pid, 0) for path, pid in zip(paths, pids, strict=True)], None
    )
    write_per_query(EvaluationResult(protocol or Protocol(), ranking, None, 5), folder / "per_query.npz")
    return run


@pytest.fixture
def rankings():
    """Results of two models on 20 identities with 3 queries; the second is better, and one query has no match."""
    generator = np.random.default_rng(0)
    first = generator.integers(0, 12, len(PIDS))
    second = np.where(generator.random(len(PIDS)) < 0.5, 0, first)
    first[7] = second[7] = -1
    return ranking_of(first), ranking_of(second)


@pytest.fixture
def runs(tmp_path, rankings):
    """Two run folders whose queries are below different folders and in a different order."""
    names = [f"{number}.jpg" for number in range(len(PIDS))]
    order = np.random.default_rng(1).permutation(len(PIDS))
    second = rankings[1].select(torch.from_numpy(order))
    return (
        write_run(tmp_path / "a", rankings[0], [f"/data/x/{name}" for name in names]),
        write_run(tmp_path / "b", second, [f"/mnt/y/{names[row]}" for row in order], pids=PIDS[order]),
    )


def test_differences_are_those_of_the_metrics(rankings):
    found = {
        compare_ranking.metric: compare_ranking for compare_ranking in compare_rankings(*rankings, PIDS, ranks=(1, 3))
    }
    assert list(found) == ["mAP", "Rank-1", "Rank-3", "mINP"]
    for name, expected in (
        ("mAP", [ranking.mean_ap for ranking in rankings]),
        ("Rank-1", [ranking.cmc(1) for ranking in rankings]),
    ):
        difference = found[name]
        assert [difference.first, difference.second] == pytest.approx([100 * value for value in expected])
        assert difference.difference == pytest.approx(difference.second - difference.first)
        assert 0 < difference.low < difference.difference < difference.high
        assert difference.p_value < 0.001


def test_exchanged_runs_have_the_opposite_difference(rankings):
    there, back = (compare_rankings(*pair, PIDS) for pair in (rankings, rankings[::-1]))
    assert [difference.difference for difference in there] == pytest.approx(
        [-difference.difference for difference in back]
    )
    assert [difference.low for difference in there] == pytest.approx([-difference.high for difference in back])
    assert [difference.p_value for difference in there] == [difference.p_value for difference in back]


def test_equal_results_have_no_difference(rankings):
    for difference in compare_rankings(rankings[1], rankings[1], PIDS):
        assert (difference.difference, difference.low, difference.high, difference.p_value) == (0, 0, 0, 1)


def test_copies_of_queries_are_no_further_evidence(rankings):
    """Identities are the units: images of the same person that are repeated do not make the interval narrower."""
    once = compare_rankings(*rankings, PIDS)
    copied = compare_rankings(*(ranking.select(torch.arange(60).repeat(4)) for ranking in rankings), np.tile(PIDS, 4))
    for few, many in zip(once, copied, strict=True):
        assert (many.low, many.high) == pytest.approx((few.low, few.high))
        assert many.p_value == few.p_value


def test_p_value_is_that_of_all_permutations():
    """With 3 identities there are 8 permutations, two of which have a difference as large as the observed one."""
    worse, better = ranking_of([1, 1, 1]), ranking_of([0, 0, 0])
    found = compare_rankings(worse, better, np.arange(3), resamples=20_000)
    assert found[0].p_value == pytest.approx(0.25, abs=0.02)


def test_queries_of_runs_are_matched_by_path(runs, rankings):
    (found,) = compare_runs(*runs)
    assert found.name == "Some"
    assert (found.num_queries, found.num_identities) == (59, 20)
    assert found.differences == compare_rankings(*rankings, PIDS.astype(str))


def test_sets_of_different_names_are_compared_if_their_queries_are_the_same(runs):
    folder = runs[1] / "evaluation/Some"
    folder.rename(folder.with_name("Other"))
    (found,) = compare_runs(*runs)
    assert found.name == "Some and Other"


def test_other_queries_are_an_error(runs, rankings, tmp_path):
    paths = [f"{number}.jpg" for number in range(1, 61)]
    with pytest.raises(DataError, match=r"0\.jpg.*3\.jpg") as caught:
        compare_runs(runs[0], write_run(tmp_path / "c", rankings[1], paths))
    assert "fix:" in str(caught.value)


def test_other_identities_are_an_error(runs, rankings, tmp_path):
    paths = [f"{number}.jpg" for number in range(60)]
    with pytest.raises(DataError, match=r"60.*0\.jpg.*60.*0\.jpg"):
        compare_runs(runs[0], write_run(tmp_path / "c", rankings[1], paths, pids=PIDS + 1))


def test_other_queries_with_a_match_are_an_error(runs, tmp_path):
    ranks = np.zeros(60, dtype=np.int64)
    ranks[3] = -1
    run = write_run(tmp_path / "c", ranking_of(ranks), [f"{number}.jpg" for number in range(60)])
    with pytest.raises(DataError, match=r"TEST\.PROTOCOL"):
        compare_runs(runs[0], run)


def test_one_identity_is_an_error(rankings):
    with pytest.raises(DataError, match="got 1"):
        compare_rankings(*rankings, np.zeros(60))


def test_missing_folder_and_missing_results_are_errors(runs, tmp_path):
    with pytest.raises(ConfigError, match="OUTPUT_DIR"):
        compare_runs(runs[0], tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"TEST\.PER_QUERY=on"):
        compare_runs(runs[0], tmp_path / "empty")


@pytest.mark.parametrize("file", ["per_query.npz", "queries.csv"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"path,pid\n\x00,1\n", None])
def test_damaged_results_are_errors(runs, file, content):
    path = Path(runs[1], "evaluation/Some", file)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataError, match="fix:"):
        compare_runs(*runs)


def test_results_of_two_evaluations_in_one_folder_are_an_error(runs):
    (runs[0] / "evaluation/Some/queries.csv").replace(runs[1] / "evaluation/Some/queries.csv")
    (runs[0] / "evaluation/Some/queries.csv").write_bytes((runs[1] / "evaluation/Some/queries.csv").read_bytes())
    with pytest.raises(DataError, match=r"queries\.csv.*per_query\.npz"):
        compare_runs(*runs)


def test_command_prints_a_table_and_json(runs, capsys):
    words = ["compare-runs", *map(str, runs), "--ranks", "1"]
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines if "-|" not in line] == [*("metric", "mAP", "Rank-1", "mINP")]
    assert main([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    expected = compare_runs(*runs, ranks=[1])[0].differences
    assert [difference["difference"] for difference in found["differences"]] == [
        difference.difference for difference in expected
    ]


def test_command_states_different_evaluations(runs, rankings, tmp_path, capsys):
    protocol = Protocol(metric="euclidean")
    run = write_run(tmp_path / "c", rankings[1], [f"{number}.jpg" for number in range(60)], protocol=protocol)
    assert main(["compare-runs", str(runs[0]), str(run)]) == 0
    assert "euclidean" in capsys.readouterr().out
    assert main(["compare-runs", *map(str, runs)]) == 0
    assert "evaluations differ" not in capsys.readouterr().out


def test_command_reports_errors(runs, tmp_path, input_error):
    assert "fix:" in input_error(main, ["compare-runs", str(runs[0]), str(tmp_path / "none")])
