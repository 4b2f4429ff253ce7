import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastamp.data.samplers import (
    BalancedIdentitySampler,
    EpochBatchSampler,
    ImbalancedDatasetSampler,
    InferenceSampler,
    NaiveIdentitySampler,
    SetReWeightSampler,
    TrainingSampler,
)
from fastamp.utils.errors import ConfigError, DataError


def take(iterable, count):
    return list(itertools.islice(iterable, count))


def chunks(indices, size):
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def images(counts, cameras=3):
    """Return the labels and cameras of a training set with ``counts[i]`` images of identity i."""
    labels = [identity for identity, count in enumerate(counts) for _ in range(count)]
    return labels, [index % cameras for index in range(len(labels))]


def make(name, counts=(9, 3, 5, 1, 8, 4, 4), batch_size=12, num_instances=4, seed=0, world_size=1):
    labels, camids = images(counts)
    if name == "training":
        return TrainingSampler(size=len(labels), seed=seed), labels, camids
    if name == "imbalanced":
        return ImbalancedDatasetSampler(labels=labels, seed=seed), labels, camids
    set_options = {"sets": [int(label > 2) for label in labels], "weights": (0.5, 1.0)} if name == "reweight" else {}
    classes = {"naive": NaiveIdentitySampler, "balanced": BalancedIdentitySampler, "reweight": SetReWeightSampler}
    sampler = classes[name](
        **set_options,
        labels=labels,
        camids=camids,
        batch_size=batch_size,
        num_instances=num_instances,
        seed=seed,
        world_size=world_size,
    )
    return sampler, labels, camids


ALL = ["training", "imbalanced", "naive", "balanced", "reweight"]


@pytest.mark.parametrize("name", ALL)
def test_index_stream_depends_only_on_seed_and_epoch(name):
    sampler = make(name)[0]
    stream = take(sampler.epoch(3), 200)
    take(sampler.epoch(1), 50)
    assert take(sampler.epoch(3), 200) == stream == take(make(name)[0].epoch(3), 200)
    assert take(sampler.epoch(4), 200) != stream
    assert take(make(name, seed=1)[0].epoch(3), 200) != stream
    take(make(name, seed=-1)[0].epoch(0), 1)


def test_training_sampler_covers_all_images_before_repeating():
    first, second = chunks(take(TrainingSampler(size=10, seed=0).epoch(0), 20), 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.parametrize("name", ["naive", "balanced", "reweight"])
def test_batch_has_p_identities_with_k_images(name):
    sampler, labels, _ = make(name)
    for batch in chunks(take(sampler.epoch(0), 12 * 100), 12):
        identities = [{labels[index] for index in chunk} for chunk in chunks(batch, 4)]
        assert all(len(identity) == 1 for identity in identities)
        assert len(set.union(*identities)) == 3


@pytest.mark.parametrize("name", ["naive", "balanced"])
def test_identity_samplers_repeat_images_only_of_small_identities(name):
    sampler, labels, _ = make(name)
    available = Counter(labels)
    for chunk in chunks(take(sampler.epoch(0), 12 * 100), 4):
        if available[labels[chunk[0]]] >= 4:
            assert len(set(chunk)) == 4


def test_naive_sampler_draws_images_without_replacement():
    # Two chunks for each of four identities give at least three batches of two identities.
    sampler, labels, _ = make("naive", counts=(8, 8, 8, 8), batch_size=8, num_instances=4)
    stream = take(sampler.epoch(0), 24)
    assert len(set(stream)) == 24
    counts_seen = Counter(index for epoch in range(200) for index in take(sampler.epoch(epoch), 16))
    assert set(counts_seen) == set(range(len(labels)))
    assert max(counts_seen.values()) < 1.6 * min(counts_seen.values())


def test_naive_sampler_fills_small_identities_with_repeated_images():
    sampler, _, _ = make("naive", counts=(2, 2), batch_size=8, num_instances=4)
    assert all(len(set(chunk)) <= 2 for chunk in chunks(take(sampler.epoch(0), 80), 4))


@pytest.mark.parametrize(
    ("counts", "batch_size", "expected"),
    [
        ((2,) * 8, 16, 2),
        ((1,) * 8, 16, 2),  # one image is repeated
        ((2, 2, 2, 3, 3, 9, 9, 9), 15, 3),  # what at least half of the identities have
        ((3,) * 8, 16, 2),  # 3 does not divide the batch
        ((20,) * 8, 16, 4),
    ],
)
def test_number_of_instances_follows_the_images_that_exist(counts, batch_size, expected):
    sampler, _, _ = make("naive", counts=counts, batch_size=batch_size, num_instances=0)
    assert sampler.num_instances == expected


def test_repeats_in_a_batch_are_counted():
    sampler, _, _ = make("naive", counts=(2, 4, 4, 5), batch_size=8, num_instances=4)
    assert sampler.repeats_per_batch == pytest.approx(2 * 2 / 4)  # 2 missing images of one of 4 identities, 2 drawn
    assert make("naive", counts=(4, 4, 4, 5), batch_size=8, num_instances=4)[0].repeats_per_batch == 0


def test_balanced_sampler_visits_every_identity_once_per_pass():
    sampler, labels, _ = make("balanced", counts=[5] * 9, batch_size=12, num_instances=4)
    passes = chunks([labels[chunk[0]] for chunk in chunks(take(sampler.epoch(0), 9 * 4 * 20), 4)], 9)
    assert all(sorted(drawn) == list(range(9)) for drawn in passes)


def test_balanced_sampler_prefers_different_cameras():
    labels, camids = [0] * 9, [0, 0, 0, 1, 1, 1, 2, 2, 3]
    sampler = BalancedIdentitySampler(labels=labels, camids=camids, batch_size=4, num_instances=4, seed=0)
    anchors = Counter()
    for anchor, *rest in chunks(take(sampler.epoch(0), 4 * 400), 4):
        anchors[anchor] += 1
        assert sorted([camids[anchor], *(camids[index] for index in rest)]) == [0, 1, 2, 3]
    assert set(anchors) == set(range(9))


def test_balanced_sampler_falls_back_to_same_camera_then_repeats():
    sampler = BalancedIdentitySampler(labels=[0] * 4, camids=[0, 0, 0, 1], batch_size=4, num_instances=4, seed=0)
    assert all(sorted(chunk) == [0, 1, 2, 3] for chunk in chunks(take(sampler.epoch(0), 400), 4))
    sampler = BalancedIdentitySampler(labels=[0], camids=[0], batch_size=3, num_instances=3, seed=0)
    assert take(sampler.epoch(0), 6) == [0] * 6
    sampler = BalancedIdentitySampler(labels=[0, 0], camids=[0, 1], batch_size=4, num_instances=4, seed=0)
    assert all(set(chunk) == {0, 1} for chunk in chunks(take(sampler.epoch(0), 40), 4))
    sampler = BalancedIdentitySampler(labels=[0, 0, 1], camids=[0, 1, 0], batch_size=2, num_instances=1, seed=0)
    assert len(take(sampler.epoch(0), 10)) == 10


def test_infeasible_batch_size_error_states_config_values(subtests):
    for options, error, numbers in (
        ({"num_instances": -1}, ConfigError, ["NUM_INSTANCE", "got -1"]),
        ({"num_instances": 5}, ConfigError, ["IMS_PER_BATCH 12", "NUM_INSTANCE 5", "multiple of 5"]),
        ({"num_instances": 1}, DataError, ["has 7", "needs 12"]),
        ({"num_instances": 4, "world_size": 2}, ConfigError, ["6 images on each of 2 ranks", "multiple of 8"]),
        ({"num_instances": 4, "world_size": 5}, ConfigError, ["IMS_PER_BATCH", "(5)", "got 12"]),
        ({"batch_size": 0}, ConfigError, ["IMS_PER_BATCH", "got 0"]),
        ({"batch_size": 2}, ConfigError, ["IMS_PER_BATCH 2", "NUM_INSTANCE 4"]),
    ):
        for name in ("naive", "balanced"):
            with subtests.test(f"{options} {name}"):
                with pytest.raises(error) as raised:
                    make(name, **options)
                for number in numbers:
                    assert number in str(raised.value)


def batches(sampler, count, **options):
    options = {"batch_size": 12, "iters_per_epoch": 3, **options}
    return take(EpochBatchSampler(sampler, **options), count)


def test_start_iter_gives_the_batches_of_an_uninterrupted_run(subtests):
    for start in (0, 1, 2, 3, 4, 7, 31):
        for name in ALL:
            with subtests.test(f"{start} {name}"):
                sampler = make(name)[0]
                assert batches(sampler, 10, start_iter=start) == batches(sampler, start + 10)[start:]


def test_batches_of_all_ranks_form_single_process_batch(subtests):
    for world_size in (1, 3):
        for name in ALL:
            with subtests.test(f"{world_size} {name}"):
                sampler = make(name, world_size=world_size)[0]
                expected_counts = [batches(sampler, 8, rank=rank, world_size=world_size) for rank in range(world_size)]
                combined = [list(itertools.chain(*parts)) for parts in zip(*expected_counts, strict=True)]
                assert combined == batches(sampler, 8)
                assert {len(part) for rank_batches in expected_counts for part in rank_batches} == {12 // world_size}


def test_sample_keys_are_epoch_position_and_index():
    sampler = TrainingSampler(size=34, seed=0)
    keys = list(itertools.chain(*batches(sampler, 6)))
    assert [key[0] for key in keys] == [0] * 36 + [1] * 36
    assert [key[1] for key in keys] == list(range(36)) * 2
    assert [key[2] for key in keys[36:]] == take(sampler.epoch(1), 36)


def test_batch_larger_than_dataset_repeats_images():
    (batch,) = batches(TrainingSampler(size=5, seed=0), 1, iters_per_epoch=1)
    assert len(batch) == 12 and len(set(batch)) == 12
    assert set(Counter(index for _, _, index in batch).values()) <= {2, 3}


def test_batch_size_not_divisible_by_ranks_raises():
    with pytest.raises(ConfigError, match=r"SOLVER.IMS_PER_BATCH.*\(5\); got 12"):
        EpochBatchSampler(TrainingSampler(size=5, seed=0), batch_size=12, iters_per_epoch=1, world_size=5)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_inference_sampler_covers_all_images_in_order(size, batch_size, world_size):
    parts = [
        InferenceSampler(size=size, batch_size=batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    keys = [key for part in parts for batch in part for key in batch]
    assert keys == [(0, index, index) for index in range(size)]
    for part in parts:
        assert len(part) == len(list(part))
        assert all(0 < len(batch) <= batch_size for batch in part)
    lengths = [len(part.indices) for part in parts]
    assert max(lengths) - min(lengths) <= 1


@given(
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=12),
    num_instances=st.integers(1, 5),
    identities=st.integers(1, 12),
    name=st.sampled_from(["naive", "balanced"]),
)
@settings(max_examples=80, deadline=None)
def test_any_feasible_batch_size_gives_full_batches(counts, num_instances, identities, name):
    options = {"counts": counts, "batch_size": identities * num_instances, "num_instances": num_instances}
    if identities > len(counts):
        with pytest.raises(DataError):
            make(name, **options)
        return
    sampler, labels, _ = make(name, **options)
    for batch in chunks(take(sampler.epoch(0), options["batch_size"] * 10), options["batch_size"]):
        of_each = Counter(labels[index] for index in batch)
        assert len(of_each) == identities and set(of_each.values()) == {num_instances}


def test_imbalanced_sampler_draws_identities_uniformly():
    counts = (20, 1, 5, 2)
    labels, _ = images(counts)
    drawn = Counter(take(ImbalancedDatasetSampler(labels=labels, seed=0).epoch(0), 40_000))
    for index, label in enumerate(labels):
        assert drawn[index] == pytest.approx(10_000 / counts[label], rel=0.15)


@pytest.mark.parametrize(
    "weights, expected_counts", [((1, 1), [3, 3]), ((1, 2), [2, 4]), ((0.9, 0.1), [5, 1]), ((4, 3), [3, 3])]
)
def test_set_weights_determine_identities_per_dataset(weights, expected_counts):
    labels, camids = images([6] * 30)
    sets = [int(label >= 10) for label in labels]
    sampler = SetReWeightSampler(
        sets=sets, weights=weights, labels=labels, camids=camids, batch_size=24, num_instances=4, seed=0
    )
    assert sampler.identities_per_set == expected_counts
    counts_seen, first = Counter(), Counter()
    for batch in chunks(take(sampler.epoch(0), 24 * 60), 24):
        assert Counter(sets[index] for index in batch) == {0: 4 * expected_counts[0], 1: 4 * expected_counts[1]}
        assert len({labels[index] for index in batch}) == 6
        counts_seen.update({labels[index] for index in batch})
        first[sets[batch[0]]] += 1
    # Identities of a dataset are drawn uniformly, and batches mix the datasets.
    for number, identities in enumerate((range(10), range(10, 30))):
        counts = [counts_seen[identity] for identity in identities]
        assert min(counts) >= 0.6 * 60 * expected_counts[number] / len(counts)
    assert min(first.values()) > 2


@pytest.mark.parametrize(
    "weights, sets, error, message",
    [
        ((1.0,), (0, 1), ConfigError, r"DATALOADER.SET_WEIGHT must be 2 .*got \(1.0,\)"),
        ((1.0, -1.0), (0, 1), ConfigError, r"DATALOADER.SET_WEIGHT.*got \(1.0, -1.0\)"),
        ((100.0, 1.0), (0, 1), ConfigError, r"DATALOADER.SET_WEIGHT \(100.0, 1.0\).* dataset 2 .* 3 identities"),
        ((1.0, 2.0), (0,) * 11 + (1,), DataError, r"dataset 2 .*has 1,.* DATALOADER.SET_WEIGHT \(1.0, 2.0\)"),
    ],
)
def test_infeasible_set_weights_raise(weights, sets, error, message):
    labels, camids = images([4] * 12)
    if len(sets) == 2:
        sets = [int(label >= 6) for label in labels]
    else:
        sets = [sets[label] for label in labels]
    with pytest.raises(error, match=message):
        SetReWeightSampler(
            sets=sets, weights=weights, labels=labels, camids=camids, batch_size=12, num_instances=4, seed=0
        )
