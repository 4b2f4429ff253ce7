"""Tests of the error rates of a calibrated model on a test set."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from look_alikes import look_alikes
from naive_ranking import protocol_of

from fastamp.evaluation import Identities, Protocol
from fastamp.evaluation.calibration_check import check_calibration
from fastamp.evaluation.thresholds import calibrate


@pytest.fixture(scope="module")
def test_set():
    """Features and identities of 200 people with 4 images, the first a query, and 50 distractors of identity 500."""
    features, identities = look_alikes(200, 4, seed=0)
    others, _ = look_alikes(50, 1, seed=1)
    is_query = identities.query_camids == 0
    order = torch.cat((is_query.nonzero()[:, 0], (~is_query).nonzero()[:, 0]))
    pids, camids = identities.query_pids[order], identities.query_camids[order]
    gallery = torch.cat((pids[200:], torch.full((50,), 500))), torch.cat((camids[200:], torch.zeros(50).long()))
    return torch.cat((features[order], others)), Identities(pids[:200], gallery[0], camids[:200], gallery[1])


@pytest.fixture(scope="module")
def calibration(test_set):
    features, identities = test_set
    used = Protocol().rule.images_with_query(identities)
    everyone = identities.all_images().select(used, used)
    return calibrate(features[used], everyone, metric="cosine", far=0.01, frr=0.1, fpir=0.1, source="People")


def test_rates_are_those_of_the_other_identities_of_the_same_dataset(test_set, calibration):
    found = check_calibration(*test_set, Protocol(), calibration, dataset="People")
    assert found.rates == calibration.measured and found.excluded == 100
    assert "over 100 identities" in found.describe()


def test_rates_of_another_dataset_use_all_identities_with_a_query(test_set, calibration):
    found = check_calibration(*test_set, Protocol(), calibration, dataset="Others")
    assert found.rates.far.num_identities == 200 and found.excluded == 0
    assert abs(found.rates.gallery_size - calibration.gallery_size) <= 4
    assert found.genuine.sum() == pytest.approx(1) and found.impostor.sum() == pytest.approx(1)
    assert found.edges[0] < calibration.same_threshold < found.edges[-1]
    assert found.impostor[np.searchsorted(found.edges, calibration.same_threshold) :].sum() < 0.02


def test_groups_are_the_pairs_of_images_with_two_values(test_set, calibration):
    features, identities = test_set
    columns = {
        "modality": tuple((camids > 1).long() for camids in (identities.query_camids, identities.gallery_camids))
    }
    named = replace(identities, columns=columns, column_names={"modality": ("day", "night")})
    found = check_calibration(features, named, Protocol(group_by="modality"), calibration, dataset="Others")
    assert found.rates == check_calibration(*test_set, Protocol(), calibration, dataset="Others").rates
    assert list(found.groups) == ["day", "day, night", "night"]
    assert sum(rates.far.num_trials for rates in found.groups.values()) == found.rates.far.num_trials
    scores = torch.nn.functional.normalize(features[:800], dim=1)
    scores = scores @ scores.T
    everyone = named.all_images()
    night = everyone.columns["modality"][0] == 1
    errors = sum(
        scores[i, j] >= calibration.same_threshold
        for i, j in itertools.combinations(range(800), 2)
        if everyone.query_pids[i] != everyone.query_pids[j] and night[i] and night[j]
    )
    assert found.groups["night"].far.num_errors == errors > 0
    assert "| day, night |" in found.describe()


def test_groups_of_one_camera_have_no_false_rejects(test_set, calibration):
    found = check_calibration(*test_set, Protocol(group_by="camera"), calibration, dataset="Others")
    assert len(found.groups) == 4 + 6
    assert found.groups["1"].frr.num_trials == 0 < found.groups["1"].far.num_trials
    assert [row[2] for row in found.group_rows() if row[0] == "1"] == [""]


def test_two_values_without_genuine_pairs_are_excluded(test_set, calibration):
    features, identities = test_set
    columns = {"species": tuple(pids % 2 for pids in (identities.query_pids, identities.gallery_pids))}
    named = replace(identities, columns=columns)
    found = check_calibration(features, named, Protocol(group_by="species"), calibration, dataset="Others")
    assert list(found.groups) == ["0", "1"]


def test_distractors_have_no_query(test_set):
    _, identities = test_set
    assert Protocol().rule.images_with_query(identities).tolist() == [True] * 800 + [False] * 50
    assert protocol_of("vehicleid").rule.images_with_query(identities).all()


def test_unsuitable_test_sets_are_not_checked(test_set, calibration, caplog):
    features, identities = test_set
    assert check_calibration(*test_set, Protocol(metric="euclidean"), calibration, dataset="People") is None
    one_camera = Identities(identities.query_pids, identities.gallery_pids, *map(torch.zeros_like, (
        identities.query_camids, identities.gallery_camids)))  # fmt: skip
    assert check_calibration(features, one_camera, Protocol(), calibration, dataset="People") is None
    assert "euclidean" in caplog.text and "no genuine" in caplog.text


def test_changed_dataset_is_reported(test_set, calibration, caplog):
    features, identities = test_set
    found = check_calibration(
        features[1:], identities.select(slice(1, None), slice(None)), Protocol(), calibration, dataset="People"
    )
    assert "199 identities, but had 200" in caplog.text and found.rates.far.num_identities == 99
