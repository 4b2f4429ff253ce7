import numpy as np
import pytest

from fastamp.data.keyed_random import keyed_uniforms, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_matches_reference_vectors(counter, key, expected):
    words = philox(np.array([counter]), key)
    assert " ".join(f"{word:08x}" for word in words[0].tolist()) == expected


def draw(seed=1, stream="flip", epochs=(0,), positions=(0,), count=5):
    pairs = {"epochs": np.array(epochs), "positions": np.array(positions)}
    return keyed_uniforms(seed=seed, counts={stream: count}, **pairs)[stream]


def test_keyed_uniform_does_not_depend_on_batch():
    jointly = draw(epochs=[3] * 100, positions=range(100))
    separately = np.concatenate([draw(epochs=[3], positions=[position]) for position in range(100)])
    assert np.array_equal(jointly, separately)


def test_streams_drawn_together_equal_streams_drawn_separately():
    counts, keys = {"flip": 1, "crop": 5, "none": 0, "erase": 8}, {"epochs": [3] * 9, "positions": range(9)}
    together = keyed_uniforms(seed=1, counts=counts, **{name: np.array(value) for name, value in keys.items()})
    assert list(together) == list(counts)
    for stream, count in counts.items():
        assert together[stream].shape == (9, count)
        assert np.array_equal(together[stream], draw(stream=stream, count=count, **keys))


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"seed": -1}, {"seed": 2**40 + 1}, {"stream": "crop"}, {"epochs": [1]}, {"positions": [1]}]
)
def test_each_key_component_changes_keyed_uniform(other):
    assert not np.isin(draw(), draw(**other)).any()


def test_keyed_uniform_is_uniform_and_uncorrelated():
    numbers = draw(epochs=np.arange(20_000) // 5000, positions=np.arange(20_000) % 5000, count=6)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(numbers.mean(axis=0) - 0.5).max() < 0.01
    assert np.abs(numbers.var(axis=0) - 1 / 12).max() < 0.003
    assert np.abs(np.corrcoef(numbers.T) - np.eye(6)).max() < 0.03
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03
