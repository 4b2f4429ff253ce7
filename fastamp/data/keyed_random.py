"""Counter-based random numbers, keyed by seed, stream, epoch and position."""

import zlib
from collections.abc import Mapping

import numpy as np

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Compute Philox-4x32-10 blocks (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        counters: (..., 4) integers in 0..2**32-1.
        key: two integers in 0..2**32-1.

    Returns:
        (..., 4) uint64 words in 0..2**32-1. Blocks with different counters or keys are statistically independent.
    """
    c0, c1, c2, c3 = np.moveaxis(counters.astype(np.uint64), -1, 0)
    for round_number in range(_ROUNDS):
        k0, k1 = (
            np.uint64((part + round_number * step) & 0xFFFFFFFF) for part, step in zip(key, _KEY_STEPS, strict=True)
        )
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _SHIFT) ^ c1 ^ k0, product1 & _LOW
        c2, c3 = (product0 >> _SHIFT) ^ c3 ^ k1, product0 & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1)


def keyed_uniforms(
    *, seed: int, counts: Mapping[str, int], epochs: np.ndarray, positions: np.ndarray
) -> dict[str, np.ndarray]:
    """Draw uniform random numbers of several streams for each (epoch, position) pair.

    The numbers of a pair do not depend on the batch, worker or rank, so that a resumed run repeats them exactly.

    Args:
        seed: any integer; the low 64 bits are used.
        counts: name of each stream -> number of random numbers per pair. Streams with different names are independent.
        epochs: (B,) integers in 0..2**32-1, epoch of each sample.
        positions: (B,) integers in 0..2**32-1, position of each sample in its epoch.

    Returns:
        Name of each stream -> (B, count) float64 in [0, 1), multiples of 2**-32.
    """
    blocks = [-(-count // 4) for count in counts.values()]
    counters = np.empty((len(positions), sum(blocks), 4), dtype=np.uint64)
    counters[..., 0] = np.concatenate([np.arange(number) for number in blocks])
    counters[..., 1] = np.asarray(positions)[:, None]
    counters[..., 2] = np.asarray(epochs)[:, None]
    counters[..., 3] = np.repeat([zlib.crc32(stream.encode()) for stream in counts], blocks)
    words = philox(counters, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)) * 2.0**-32
    ends = np.cumsum(blocks).tolist()
    return {
        stream: words[:, end - number : end].reshape(len(words), number * 4)[:, :count]
        for (stream, count), number, end in zip(counts.items(), blocks, ends, strict=True)
    }
