"""Tests of the sampler that draws species with equal probability."""

import itertools
from collections import Counter

import numpy as np
import pytest
from tiny import tiny_config

from fastamp.data.group_sampler import GroupIdentitySampler
from fastamp.data.samplers import build_sampler
from fastamp.utils.errors import ConfigError, DataError

# Identities 0 to 19 are of species 0, 20 to 23 of species 1 and 24 to 29 of species 2, with 1 to 5 images each.
COUNTS = [1 + number % 5 for number in range(30)]
LABELS = np.repeat(np.arange(30), COUNTS)
SPECIES = np.repeat([0] * 20 + [1] * 4 + [2] * 6, COUNTS)


def make(*, batch_size=24, seed=0, world_size=1, **options):
    return GroupIdentitySampler(
        groups=SPECIES,
        labels=LABELS,
        camids=np.zeros(len(LABELS)),
        batch_size=batch_size,
        num_instances=2,
        seed=seed,
        world_size=world_size,
        **options,
    )


def batches(sampler, count, size=24, epoch=0):
    indices = list(itertools.islice(sampler.epoch(epoch), count * size))
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def test_mixed_batches_have_equally_many_identities_of_each_species():
    drawn: Counter[int] = Counter()
    for batch in batches(make(), 40):
        identities = LABELS[batch].reshape(-1, 2)
        assert (identities[:, 0] == identities[:, 1]).all()
        assert len(set(identities[:, 0])) == 12
        assert Counter(SPECIES[batch[::2]].tolist()) == {0: 4, 1: 4, 2: 4}
        drawn.update(identities[:, 0].tolist())
    assert len(drawn) == 30
    for first, last in ((0, 20), (20, 24), (24, 30)):  # identities of a species are drawn equally often, up to one pass
        counts = [drawn[number] for number in range(first, last)]
        assert max(counts) - min(counts) <= 1


def test_a_species_with_too_few_identities_gives_its_share_to_the_others():
    batch = batches(make(batch_size=40), 1, size=40)[0]
    assert Counter(SPECIES[batch[::2]].tolist()) == {0: 10, 1: 4, 2: 6}


def test_single_batches_are_of_one_species_each_with_equal_probability():
    species = [set(SPECIES[batch].tolist()) for batch in batches(make(batch_size=8, single=True), 600, size=8)]
    assert {len(kind) for kind in species} == {1}
    assert all(170 < count < 230 for count in Counter(labels.pop() for labels in species).values())


def test_stream_depends_on_seed_and_epoch():
    assert batches(make(), 5) == batches(make(), 5) != batches(make(seed=1), 5)
    assert batches(make(), 5) != batches(make(), 5, epoch=1)


def test_single_batches_need_enough_identities_of_each_species():
    with pytest.raises(DataError, match=r"DATALOADER\.GROUPS"):
        make(single=True)


def test_sampler_is_built_with_the_column_of_the_config(tmp_path):
    names = ["DATALOADER.SAMPLER_TRAIN", "GroupIdentitySampler", "DATALOADER.NUM_INSTANCE", "2"]
    cfg = tiny_config(tmp_path, *names, "SOLVER.IMS_PER_BATCH", "24")
    images = {"labels": LABELS, "camids": LABELS, "sets": LABELS, "world_size": 1}
    sampler = build_sampler(cfg, columns={"species": SPECIES}, **images)
    assert batches(sampler, 3) == batches(make(seed=cfg.SEED), 3)
    for column in (None, SPECIES.astype(np.float32)):
        with pytest.raises(ConfigError, match=r"DATALOADER\.GROUPS\.COLUMN"):
            build_sampler(cfg, columns={} if column is None else {"species": column}, **images)
