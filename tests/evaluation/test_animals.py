"""Tests of the protocols of animals, against MiewID's numbers and naive loops."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastamp.config import read_config
from fastamp.evaluation import Identities, Protocol, compute_metrics, identification
from fastamp.evaluation.metrics import baseline_metrics
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = np.load(Path(__file__).parents[1] / "reference/methods/animals_miewid1.npz")
PIDS = torch.from_numpy(REFERENCE["labels"])
FEATURES = torch.from_numpy(REFERENCE["embeddings"])


def protocol(name, *options):
    cfg = read_config("", ["TEST.PROTOCOL", name, "TEST.BOOTSTRAP", "0", *options])
    return Protocol.from_config(cfg)


def identities(query, gallery, **columns):
    """Build identities; ``columns`` are values of all images, queries first."""
    pids = [torch.as_tensor(labels) for labels in (query, gallery)]
    n = len(pids[0])
    values = {name: (torch.as_tensor(column[:n]), torch.as_tensor(column[n:])) for name, column in columns.items()}
    return Identities(*pids, *(torch.zeros_like(pid) for pid in pids), values)


NO_SPECIES = ("TEST.ANIMALS.DATABASE", "")


def test_leave_one_out_equals_the_numbers_of_miewid():
    ranks = f"{tuple(range(1, 21))}"
    for name in ("animals_disjoint", "animals_disjoint_miewid"):  # each label has several images
        found = compute_metrics(
            FEATURES[:7],
            FEATURES[7:],
            identities(PIDS[:7], PIDS[7:]),
            protocol(name, *NO_SPECIES, "TEST.RANKS", ranks),
        ).metrics()
        assert found["mAP"] == pytest.approx(100 * float(REFERENCE["mAP"]), abs=1e-5)
        cmc = [found[f"Rank-{rank}"] for rank in range(1, 21)]
        assert cmc == pytest.approx(100 * REFERENCE["cmc"], abs=1e-5)
        assert cmc == pytest.approx(100 * REFERENCE["onevsall_cmc"], abs=1e-5)
        assert (found["num_query"], found["num_gallery"]) == (60, 59)


def test_query_and_database_equal_the_numbers_of_miewid():
    options = (*NO_SPECIES, "TEST.RANKS", f"{tuple(range(1, 21))}")
    found = compute_metrics(
        FEATURES[:30], FEATURES[30:], identities(PIDS[:30], PIDS[30:]), protocol("animals_closed", *options)
    ).metrics()
    assert found["mAP"] == pytest.approx(100 * float(REFERENCE["query_db_mAP"]), abs=1e-5)
    assert [found[f"Rank-{n}"] for n in range(1, 21)] == pytest.approx(100 * REFERENCE["query_db_cmc"], abs=1e-5)


def test_images_without_another_of_their_identity_are_excluded_or_wrong():
    pids = PIDS.clone()
    pids[10] = 99
    ids = identities(pids[:7], pids[7:])
    found, miewid = (
        compute_metrics(FEATURES[:7], FEATURES[7:], ids, protocol(name, *NO_SPECIES)).metrics()
        for name in ("animals_disjoint", "animals_disjoint_miewid")
    )
    assert (found["num_query_without_match"], miewid["num_query_without_match"]) == (1, 0)
    for name in ("mAP", "Rank-1", "Rank-10"):
        assert miewid[name] == pytest.approx(found[name] * 59 / 60)


def make(seed=0, *, float64=True):
    """Make features of three species with a database, test queries and validation queries; some of both are unknown."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(40, 8))
    sets = {"query": [], "gallery": []}
    for pid in range(40):
        species, validation = pid % 3, int(pid % 4 == 1)
        unknown = pid % 5 == 2
        for split, count in (("query", rng.integers(1, 4)), ("gallery", 0 if unknown else rng.integers(1, 5))):
            for _ in range(count):
                noise = rng.normal(size=8) * 0.8
                sets[split].append((pid, species, validation, centers[pid] + noise))
    images = [*sets["query"], *sets["gallery"]]
    pids, species, validation = (torch.tensor([image[column] for image in images]) for column in range(3))
    features = torch.tensor(np.stack([image[3] for image in images]))
    n = len(sets["query"])
    ids = identities(pids[:n], pids[n:], species=species, validation=validation)
    return features[:n] if float64 else features[:n].float(), features[n:] if float64 else features[n:].float(), ids


def naive(queries, gallery, ids):
    """Return the labels, predictions, scores and unknown identities of the test, and the trials of the validation."""
    similarity = torch.nn.functional.cosine_similarity(queries[:, None], gallery[None], dim=2).numpy()
    (qs, gs), (qv, gv) = (tuple(side.tolist() for side in ids.columns[name]) for name in ("species", "validation"))
    query, database = ids.query_pids.tolist(), ids.gallery_pids.tolist()
    true, predicted, scores, unknown, trials = [], [], [], set(), []
    for i, pid in enumerate(query):
        rows = [j for j in range(len(database)) if gs[j] == qs[i] and (qv[i] or not gv[j])]
        best = max(rows, key=lambda j: similarity[i, j])
        known = any(database[j] == pid for j in rows)
        if qv[i]:
            other = max(similarity[i, j] for j in rows if database[j] != pid)
            trials.append((similarity[i, best], other, database[best] == pid, known, pid))
            continue
        true.append(pid)
        scores.append(similarity[i, best])
        predicted.append(database[best])
        unknown |= set() if known else {pid}
    return true, predicted, np.array(scores), unknown, trials


def best_threshold(trials):
    """Search the best geometric mean of BAKS and BAUS over all thresholds."""

    def score(threshold):
        known, new = defaultdict(list), defaultdict(list)
        for similarity, other, right, is_known, pid in trials:
            if is_known:
                known[pid].append(right and similarity >= threshold)
            new[pid].append(other < threshold)
        means = [np.mean([np.mean(answers) for answers in side.values()]) for side in (known, new)]
        return math.sqrt(means[0] * means[1])

    values = sorted({value for trial in trials for value in trial[:2]})
    candidates = [values[0] - 1, *((a + b) / 2 for a, b in itertools.pairwise(values)), values[-1] + 1]
    return max(map(score, candidates)), score


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("float64", [True, False])
def test_open_set_equals_a_naive_loop(seed, float64):
    queries, gallery, ids = make(seed, float64=float64)
    found = compute_metrics(queries, gallery, ids, protocol("animals_open")).metrics()
    true, predicted, scores, unknown, trials = naive(queries.double(), gallery.double(), ids)
    threshold = found["new_threshold"]["similarity"]
    highest, score = best_threshold(trials)
    assert score(threshold) == pytest.approx(highest, abs=1e-9)
    labels = [pid if value >= threshold else "new" for pid, value in zip(predicted, scores, strict=True)]
    baks, baus = (function(true, labels, unknown) for function in (identification.baks, identification.baus))
    expected = {"BAKS": baks, "BAUS": baus, "BAKS-BAUS": math.sqrt(baks * baus)}
    expected["AUC-new"] = identification.auc_new([pid in unknown for pid in true], scores)
    assert {name: found[name] for name in expected} == pytest.approx({k: 100 * v for k, v in expected.items()})
    assert found["num_query"] == len(true) and found["num_validation"] == len(trials)
    assert found["num_query_without_match"] == sum(pid in unknown for pid in true)
    right = [a == b for a, b in zip(true, predicted, strict=True) if a not in unknown]
    assert found["Rank-1"] == pytest.approx(100 * np.mean(right))
    assert set(expected) <= set(protocol("animals_open").metric_names())


def test_threshold_does_not_depend_on_the_test_queries():
    queries, gallery, ids = make()
    before = compute_metrics(queries, gallery, ids, protocol("animals_open")).metrics()["new_threshold"]
    changed = queries.clone()
    test = ids.columns["validation"][0] == 0
    changed[test] = torch.randn(int(test.sum()), 8, dtype=torch.float64)
    after = compute_metrics(changed, gallery, ids, protocol("animals_open")).metrics()
    assert after["new_threshold"] == before
    # Negative control: it depends on the validation queries.
    changed = queries.clone()
    changed[~test] = torch.randn(int((~test).sum()), 8, dtype=torch.float64)
    assert compute_metrics(changed, gallery, ids, protocol("animals_open")).metrics()["new_threshold"] != before


def test_closed_set_searches_only_the_own_species():
    queries, gallery, ids = make()
    found = compute_metrics(queries, gallery, ids, protocol("animals_closed")).metrics()
    similarity = torch.nn.functional.cosine_similarity(queries[:, None], gallery[None], dim=2)
    species = ids.columns["species"]
    similarity[species[0][:, None] != species[1]] = -2
    nearest = ids.gallery_pids[similarity.argmax(1)].tolist()
    true, known = ids.query_pids.tolist(), set(ids.gallery_pids.tolist())
    assert found["BAKS"] == pytest.approx(100 * identification.baks(true, nearest, set(true) - known))
    assert not {"BAUS", "new_threshold"} & found.keys()
    every = compute_metrics(queries, gallery, ids, protocol("animals_closed", *NO_SPECIES)).metrics()
    assert every["mAP"] < found["mAP"]


def test_given_threshold_needs_no_validation_column_and_is_not_used_for_baselines():
    queries, gallery, ids = make()
    given = protocol("animals_open", "TEST.ANIMALS.THRESHOLD", "0.5")
    assert list(given.columns) == ["species"]
    found = compute_metrics(queries, gallery, ids, given).metrics()
    assert found["new_threshold"] == {"similarity": 0.5}
    assert "BAKS" not in baseline_metrics(queries, gallery, ids, given, "pixels")
    assert "BAUS" in baseline_metrics(queries, gallery, ids, protocol("animals_open"), "pixels")


def test_metrics_by_species_and_their_mean():
    queries, gallery, ids = make()
    found = compute_metrics(queries, gallery, ids, protocol("animals_open", "TEST.GROUP_BY", "species")).metrics()
    assert set(found["groups"]) == {"0", "1", "2"}
    names = ("Rank-1", "mAP", "BAKS", "BAUS", "BAKS-BAUS", "AUC-new")
    for name in names:
        mean = np.mean([group[name] for group in found["groups"].values()])
        assert found["mean_over_groups"][name] == pytest.approx(mean)
    assert sum(group["num_query"] for group in found["groups"].values()) == found["num_query"]
    assert {group["new_threshold"]["similarity"] for group in found["groups"].values()} == {
        found["new_threshold"]["similarity"]
    }
    for number in range(3):
        rows, others = ids.columns["species"][0] == number, ids.columns["species"][1] == number
        alone = compute_metrics(
            queries[rows],
            gallery[others],
            ids.select(rows, others),
            protocol("animals_open", "TEST.ANIMALS.THRESHOLD", str(found["new_threshold"]["similarity"])),
        ).metrics()
        test = ids.columns["validation"][0][rows] == 0
        if not bool((~test).any()):
            assert alone["BAKS"] == pytest.approx(found["groups"][str(number)]["BAKS"])


def test_metrics_that_are_not_defined_are_listed():
    queries, gallery, ids = make()
    known = torch.isin(ids.query_pids, ids.gallery_pids)
    found = compute_metrics(queries[known], gallery, ids.select(known, slice(None)), protocol("animals_open")).metrics()
    assert found["not_defined"] == ["BAUS", "BAKS-BAUS", "AUC-new"]
    assert "BAKS" in found and not set(found["not_defined"]) & found.keys()


def test_a_query_whose_species_has_no_database_is_new():
    queries, gallery, ids = make()
    species = ids.columns["species"]
    kept = species[1] != 0
    found = compute_metrics(
        queries,
        gallery[kept],
        ids.select(slice(None), kept),
        protocol("animals_open", "TEST.ANIMALS.THRESHOLD", "-2", "TEST.GROUP_BY", "species"),
    ).metrics()
    assert found["groups"]["0"]["BAUS"] == 100 and "mAP" not in found["groups"]["0"]
    assert found["groups"]["1"]["BAUS"] == 0


def test_threshold_cannot_be_chosen_without_known_validation_queries():
    queries, gallery, ids = make()
    test = ids.columns["validation"][0] == 0
    with pytest.raises(DataError, match=r"TEST\.ANIMALS\.VALIDATION"):
        compute_metrics(queries[test], gallery, ids.select(test, slice(None)), protocol("animals_open")).metrics()
    kept = ids.columns["validation"][1] == 0
    with pytest.raises(DataError, match=r"TEST\.ANIMALS\.THRESHOLD"):
        compute_metrics(queries, gallery[kept], ids.select(slice(None), kept), protocol("animals_open")).metrics()


@pytest.mark.parametrize(("highest", "names"), [(2, {}), (1, {"validation": ("left", "right")})])
def test_column_for_validation_must_be_0_or_1(highest, names):
    queries, gallery, ids = make()
    columns = ids.columns | {"validation": tuple(column * highest for column in ids.columns["validation"])}
    with pytest.raises(DataError, match=r"got (2|left, right)\."):
        compute_metrics(queries, gallery, replace(ids, columns=columns, column_names=names), protocol("animals_open"))


def test_missing_columns_and_invalid_thresholds_are_errors():
    queries, gallery, ids = make()
    for columns in ({}, {"species": ids.columns["species"]}):
        missing = Identities(ids.query_pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids, columns)
        with pytest.raises(DataError, match="species|validation"):
            compute_metrics(queries, gallery, missing, protocol("animals_open"))
    with pytest.raises(ConfigError, match=r"TEST\.ANIMALS\.THRESHOLD"):
        protocol("animals_open", "TEST.ANIMALS.THRESHOLD", "high")
