"""Tests of the protocols of SYSU-MM01, RegDB and LLCM, against the reference programs and a naive loop."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from naive_ranking import protocol, protocol_of

from fastamp.evaluation import Identities, ReportOptions, compute_metrics
from fastamp.evaluation.trials import draw_images
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = Path(__file__).parents[1] / "reference/methods"
DATA = np.load(REFERENCE / "vi_eval1.npz")
RESULTS = json.loads((REFERENCE / "vi_eval1_results.json").read_text())
LISTS = json.loads((REFERENCE / "vi_lists1.json").read_text())
RANKS = tuple(range(1, 21))
SYSU = {"all": (1, 2, 4, 5), "indoor": (1, 2)}


def side(name, *, features="_features", ids="_ids"):
    """Return features (float64), identities and cameras of one side of the reference file."""
    pids = torch.from_numpy(DATA[name + ids])
    camids = torch.from_numpy(DATA[f"{name}_cams"]) if f"{name}_cams" in DATA else torch.zeros_like(pids)
    return torch.from_numpy(DATA[name + features]).double(), pids, camids


def evaluate(queries, gallery, rule, **options):
    identities = Identities(queries[1], gallery[1], queries[2], gallery[2])
    return compute_metrics(queries[0], gallery[0], identities, protocol_of(rule, ranks=RANKS, resamples=0, **options))


def assert_equals_reference(metrics, name):
    expected = RESULTS[name]
    for metric in ("mAP", "mINP"):
        assert metrics[metric] / 100 == pytest.approx(expected[metric], abs=1e-9)
    cmc = [metrics[f"Rank-{rank}"] / 100 for rank in RANKS]
    assert cmc == pytest.approx(DATA[f"{name}_cmc"].tolist(), abs=1e-7)  # the reference is float32


@pytest.mark.parametrize("shots", [1, 10])
@pytest.mark.parametrize("mode", SYSU)
def test_sysu_protocol_equals_reference_on_drawn_galleries(mode, shots):
    rule = f"sysu_{mode}_{'single' if shots == 1 else 'multi'}"
    metrics = evaluate(side("sysu_query"), side(f"sysu_{mode}_{shots}shot"), rule).metrics()
    assert_equals_reference(metrics, f"sysu_{mode}_{shots}shot")
    unsorted = evaluate(side("sysu_query"), side(f"sysu_{mode}_{shots}shot"), "no_camera").metrics()
    assert abs(unsorted["mAP"] - metrics["mAP"]) > 0.01  # negative control


def test_regdb_protocol_equals_reference_in_both_directions():
    labels = torch.from_numpy(DATA["regdb_labels"])
    visible, thermal = (
        (torch.from_numpy(DATA[f"regdb_{name}"]).double(), labels, torch.zeros_like(labels))
        for name in ("visible", "thermal")
    )
    assert_equals_reference(evaluate(visible, thermal, "regdb").metrics(), "regdb_visible_to_thermal")
    assert_equals_reference(evaluate(thermal, visible, "regdb").metrics(), "regdb_thermal_to_visible")


def test_llcm_protocols_equal_reference_in_both_directions():
    full, sampled = side("llcm_full"), side("llcm_sampled")
    metrics = evaluate(full, sampled, "llcm").metrics()
    assert_equals_reference(metrics, "llcm_full_queries_sampled_gallery")
    assert metrics["num_gallery"] == len(sampled[1])
    metrics = evaluate(sampled, full, "llcm_sampled_queries").metrics()
    assert_equals_reference(metrics, "llcm_sampled_queries_full_gallery")
    assert metrics["num_gallery"] == len(full[1])


@pytest.mark.parametrize("first", [0, 1])
def test_sysu_cameras_may_be_numbered_from_0(first):
    queries, gallery = side("sysu_query"), side("sysu_all_1shot")
    shifted = [(features, pids, camids - 1 + first) for features, pids, camids in (queries, gallery)]
    assert_equals_reference(evaluate(*shifted, "sysu_all_single").metrics(), "sysu_all_1shot")


@pytest.mark.parametrize("trial", range(4))
@pytest.mark.parametrize("mode", SYSU)
def test_sysu_galleries_are_those_of_the_reference_program(mode, trial):
    files = [
        (f"{folder}/{number:04d}.jpg", int(folder[-4:]), int(folder[3]))
        for folder, count in LISTS["sysu"]["tree"].items()
        for number in range(1, count + 1)
    ]
    pids, camids = (np.array([file[column] for file in files]) for column in (1, 2))
    drawn = draw_images(pids, camids, shots=1, generator=random.Random(trial), cameras=SYSU[mode])
    assert [files[index][0] for index in drawn] == LISTS["sysu"][f"gallery_{mode}_trial{trial}"]


@pytest.mark.parametrize("trial", range(4))
@pytest.mark.parametrize("mode, folder", [(1, "test_vis"), (2, "test_nir")])
def test_llcm_galleries_are_those_of_the_reference_program(mode, folder, trial):
    files = [
        (f"{path}/{number:04d}.jpg", int(path[-4:]), int(path.split("/")[1][3:]))
        for path, count in LISTS["llcm"]["tree"].items()
        if path.startswith(folder)
        for number in range(1, count + 1)
    ]
    pids, camids = (np.array([file[column] for file in files]) for column in (1, 2))
    drawn = draw_images(pids, camids, shots=1, generator=random.Random(trial))
    assert [files[index][0] for index in drawn] == LISTS["llcm"][f"gallery_mode{mode}_trial{trial}"]


def naive_sysu(distances, ids, drawn):
    """Yield AP, INP and identity rank of each query's first match for one drawn gallery; None without a match."""
    for query, row in enumerate(distances):
        kept = [g for g in drawn if not (ids.query_camids[query] == 3 and ids.gallery_camids[g] == 2)]
        order = sorted(kept, key=lambda g: row[g])  # stable: kept is in order of identity and camera
        pids = [int(ids.gallery_pids[g]) for g in order]
        query_pid = int(ids.query_pids[query])
        ranks = [rank for rank, pid in enumerate(pids, start=1) if pid == query_pid]
        if not ranks:
            yield None
            continue
        precision = [(i + 1) / rank for i, rank in enumerate(ranks)]
        yield np.mean(precision), len(ranks) / ranks[-1], len(set(pids[: ranks[0] - 1]))


def random_sysu(seed, *, levels=None, pids=9):
    """Draw a small SYSU-MM01-like set; with ``levels``, features are few distinct points, so that distances tie."""
    generator = np.random.default_rng(seed)
    sizes, cameras = (40, 150), ((3, 6), (1, 2, 4, 5))
    both = [generator.integers(0, pids, size) for size in sizes]
    camids = [generator.choice(choices, size) for choices, size in zip(cameras, sizes, strict=True)]
    centers = generator.standard_normal((pids, 6))
    features = [centers[side] + generator.standard_normal((len(side), 6)) for side in both]
    if levels:
        points = generator.standard_normal((levels, 6))
        features = [points[generator.integers(0, levels, size)] for size in sizes]
    ids = Identities(*(torch.from_numpy(labels) for labels in (*both, *camids)))
    ids.query_pids[:3] = 100  # without a match
    return *(torch.from_numpy(feature) for feature in features), ids


@pytest.mark.parametrize("levels", [None, 4])
@pytest.mark.parametrize("rule", ["sysu_all_single", "sysu_indoor_multi"])
def test_sysu_trials_equal_a_naive_loop(rule, levels):
    queries, gallery, ids = random_sysu(2, levels=levels)
    protocol = protocol_of(rule, metric="euclidean", num_trials=3, seed=5, ranks=RANKS, resamples=0)
    result = compute_metrics(queries, gallery, ids, protocol)
    distances = torch.cdist(queries, gallery).square()
    if levels:
        distances = distances.round(decimals=9)
    means = []
    for trial in range(3):
        drawn = draw_images(
            ids.gallery_pids.numpy(),
            ids.gallery_camids.numpy(),
            shots=1 if rule.endswith("single") else 10,
            generator=random.Random(5 + trial),
            cameras=SYSU[rule.split("_")[1]],
        )
        rows = list(naive_sysu(distances.tolist(), ids, drawn.tolist()))
        expected = [-1 if row is None else row[2] for row in rows]
        assert result.ranking.first_match[:, trial].tolist() == expected
        means.append(np.mean([row[:2] for row in rows if row is not None], axis=0))
    metrics = result.metrics()
    assert [metrics["mAP"], metrics["mINP"]] == pytest.approx((100 * np.mean(means, axis=0)).tolist(), abs=1e-9)
    assert metrics["num_query_without_match"] >= 3 and metrics["Rank-20"] == 100  # fewer than 20 identities


def test_sysu_ranking_does_not_depend_on_the_size_of_the_blocks():
    queries, gallery, ids = random_sysu(4)
    whole = compute_metrics(queries, gallery, ids, protocol_of("sysu_all_single")).ranking
    parts = compute_metrics(queries, gallery, ids, protocol_of("sysu_all_single", memory_budget_mb=1e-3)).ranking
    assert torch.equal(whole.first_match, parts.first_match) and torch.equal(whole.ap, parts.ap)


@pytest.mark.parametrize(
    "queries, gallery", [((1, 2), (3, 6)), ((3, 6), (1, 2, 3)), ((0, 3), (1, 2)), ((3, 6), (0, 1))]
)
def test_sysu_protocol_rejects_other_cameras(queries, gallery):
    features = torch.eye(2)
    ids = Identities(*torch.zeros(2, 2, dtype=torch.int64), torch.tensor(queries), torch.tensor(gallery)[:2])
    if len(gallery) == 3:
        ids.gallery_camids[0] = 3
    with pytest.raises(DataError, match="SYSU-MM01"):
        compute_metrics(features, features, ids, protocol_of("sysu_all_single"))


def test_sysu_gallery_without_a_camera_of_the_mode_has_no_matches():
    queries, gallery, ids = random_sysu(4)
    ids.gallery_camids[:] = 4
    with pytest.raises(DataError, match="sysu_indoor_single"):
        compute_metrics(queries, gallery, ids, protocol_of("sysu_indoor_single"))


def test_random_galleries_exclude_reranking_expansion_and_roc(subtests):
    rules = ["sysu_all_single", "llcm", "llcm_sampled_queries", "prcc"]
    for rule, option in itertools.product(rules, ["RERANK", "AQE", "ROC"]):
        found = rf"TEST.{option}.ENABLED.*{rule}"
        with subtests.test(rule=rule, option=option), pytest.raises(ConfigError, match=found):
            protocol("TEST.PROTOCOL", rule, f"TEST.{option}", "on")


def test_trapezoidal_ap_applies_to_random_galleries():
    queries, gallery, ids = random_sysu(4)
    plain, trapezoid = (
        compute_metrics(queries, gallery, ids, protocol_of("sysu_all_single", trapezoid=flag)).metrics()
        for flag in (False, True)
    )
    assert plain["mAP"] != trapezoid["mAP"] and plain["Rank-1"] == trapezoid["Rank-1"]


@pytest.mark.parametrize("rule", ["sysu_all_single", "llcm", "llcm_sampled_queries"])
def test_reports_show_the_gallery_of_the_first_trial(rule):
    queries, gallery, ids = random_sysu(4)
    options = ReportOptions(kinds=("best", "worst"), lists=4, length=200)
    found = compute_metrics(queries, gallery, ids, protocol_of(rule), options)
    lists = found.examples.lists["best"] + found.examples.lists["worst"]
    drawn = draw_images(ids.gallery_pids.numpy(), ids.gallery_camids.numpy(), shots=1, generator=random.Random(0))
    for example in lists:
        assert (found.ranking.first_match[example.query] >= 0).any() and example.first_match >= 1
        if rule != "llcm_sampled_queries":
            assert set(example.gallery) <= set(drawn)
        if rule.startswith("sysu") and ids.query_camids[example.query] == 3:
            assert (ids.gallery_camids[example.gallery] != 2).all()


def test_rank_counts_identities_and_not_images():
    """Three images of another identity before the match count as one."""
    ids = Identities(*map(torch.tensor, ([1], [0, 0, 0, 1], [6], [1, 4, 5, 1])))
    gallery = torch.tensor([[0.1], [0.2], [0.3], [0.4]])
    result = compute_metrics(torch.zeros(1, 1), gallery, ids, protocol_of("sysu_all_single", metric="euclidean"))
    assert result.ranking.first_match.unique().tolist() == [1] and result.ranking.mean_ap == pytest.approx(1 / 4)
