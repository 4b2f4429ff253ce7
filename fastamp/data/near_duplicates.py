"""Near-duplicates: resized or recompressed copies of an image, found by difference hashes or by thumbnails."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import faiss
import numpy as np
from PIL import Image

# Difference hash of 256 bits: each compares neighboring cells of a 16 x 17 grid. Measured on the demo dataset: resized
# and recompressed copies differ in 8 to 27 bits (medians; at most 39), different images in at least 49.
_HASH_SIDE, _MAX_BITS = 16, 30
HASH_BITS = _HASH_SIDE**2
# Images of one fixed camera, whose background is equal, differ in few bits. If 1 % of the pairs of different identities
# differ in fewer than 50 bits, the distance is that of gray thumbnails, and the threshold a fraction of the distance
# below which 1 % of these pairs are. Measured on 100 images (128 x 256) of one scene with noise and a rectangle of 15,
# 25 and 40 % of the side at a random place: 1 % of the pairs differ by at most 4.7, 7.9 and 10.6 gray levels (3, 10 and
# 19 bits), the nearest by 2.5, 3.5 and 4.4 (1, 4 and 10 bits); copies (JPEG quality 50 and 20; sides scaled by 0.5, 0.7
# and 1.5) by at most 1.7, 1.9 and 2.0 (10, 17 and 21 bits).
_SIMILAR_BITS, _FRACTION_OF_DIFFERENT, _PERCENTILE = 50, 0.4, 1
_THUMBNAIL = (16, 32)
# Random pairs from which the threshold of groups is estimated.
_GROUP_PAIRS = 20_000


@dataclass(frozen=True)
class Fingerprint:
    """Measure by which near-duplicates are recognized.

    Attributes:
        hash_bits: (32,) uint8, packed difference hash.
        thumbnail: (512,) uint8, gray levels of 16 x 32 pixels.
    """

    hash_bits: np.ndarray
    thumbnail: np.ndarray

    @classmethod
    def of(cls, image: Image.Image) -> "Fingerprint":
        """Compute the fingerprint of an image with 8 bits per channel."""
        gray = image.convert("L")
        cells = np.asarray(gray.resize((_HASH_SIDE + 1, _HASH_SIDE), Image.Resampling.BOX))
        thumbnail = np.asarray(gray.resize(_THUMBNAIL, Image.Resampling.BOX)).reshape(-1)
        return cls(np.packbits(cells[:, 1:] > cells[:, :-1]), thumbnail)


class NearestImages:
    """The nearest of the first images for each of the second images.

    Args:
        first, second: fingerprints of the images.
        different: pairs of fingerprints of different identities, from which the threshold is estimated.
        bits: maximum number of different bits between the hashes of near-duplicates. Default None: 30, unless the
            images of different identities are similar; then thumbnails are compared.

    Attributes:
        distances: distance of each second image to the nearest first image.
        nearest: index of that image.
        threshold: maximum distance of near-duplicates.
        note: description of the threshold if thumbnails are compared, else "".
    """

    def __init__(
        self,
        first: Sequence[Fingerprint],
        second: Sequence[Fingerprint],
        different: Sequence[tuple[Fingerprint, Fingerprint]],
        *,
        bits: int | None = None,
    ) -> None:
        self.threshold, self.note = _threshold(different, bits)
        if self.note:
            index = faiss.IndexFlatL2(_THUMBNAIL[0] * _THUMBNAIL[1])
            index.add(_centered([image.thumbnail for image in first]))
            squares, nearest = index.search(_centered([image.thumbnail for image in second]), 1)
            self.distances = np.sqrt(squares[:, 0].clip(min=0) / index.d).tolist()
        else:
            index = faiss.IndexBinaryFlat(HASH_BITS)
            index.add(np.stack([image.hash_bits for image in first]))
            distances, nearest = index.search(np.stack([image.hash_bits for image in second]), 1)
            self.distances = distances[:, 0].tolist()
        self.nearest = nearest[:, 0].tolist()

    def describe(self, distance: float) -> str:
        """Describe the distance of a pair."""
        if self.note:
            return f"gray levels differ by {distance:.1f} of 255"
        return f"{distance} of {HASH_BITS} bits differ"


def group_near_duplicates(
    fingerprints: Sequence[Fingerprint], identities: Sequence[Hashable], *, bits: int | None = None
) -> tuple[list[int | None], str]:
    """Group the near-duplicates of each identity, e.g. the frames of a burst.

    Args:
        fingerprints: fingerprints of N images.
        identities: identity of each image; images of different identities are never grouped.
        bits: see ``NearestImages``.

    Returns:
        ``(groups, note)``: number of the group of each image, None for images without a near-duplicate, and a
        description of the threshold if thumbnails are compared, else "". Two images are in one group if a chain of
        near-duplicates connects them.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    rng, count = np.random.default_rng(0), len(fingerprints)
    pairs = rng.integers(count, size=(_GROUP_PAIRS if count else 0, 2)).tolist()
    threshold, note = _threshold(
        [(fingerprints[a], fingerprints[b]) for a, b in pairs if identities[a] != identities[b]], bits
    )
    groups: list[int | None] = [None] * count
    rows_of: dict[Hashable, list[int]] = {}
    for row, identity in enumerate(identities):
        rows_of.setdefault(identity, []).append(row)
    number = 0
    for rows in rows_of.values():
        if note:
            values = _centered([fingerprints[row].thumbnail for row in rows])
            distances = np.stack([np.sqrt(np.square(values - value).mean(axis=1)) for value in values])
        else:
            hashes = np.stack([fingerprints[row].hash_bits for row in rows])
            distances = np.stack([np.unpackbits(hashes ^ digest, axis=1).sum(axis=1) for digest in hashes])
        _, labels = connected_components(csr_array(distances <= threshold), directed=False)
        sizes = np.bincount(labels)
        for row, label in zip(rows, labels.tolist(), strict=True):
            groups[row] = number + label if sizes[label] > 1 else None
        number += len(sizes)
    return groups, note


def _threshold(different: Sequence[tuple[Fingerprint, Fingerprint]], bits: int | None) -> tuple[float, str]:
    """Return the maximum distance of near-duplicates, and a note if it is that of thumbnails; see ``NearestImages``."""
    if bits is None and different:
        hashes, thumbnails = _sampled_distances(different)
        typical = float(np.percentile(hashes, _PERCENTILE))
        if typical < _SIMILAR_BITS:
            threshold = _FRACTION_OF_DIFFERENT * float(np.percentile(thumbnails, _PERCENTILE))
            return threshold, (
                f"{_PERCENTILE} % of the pairs of different identities differ in at most {typical:.0f} of "
                f"{HASH_BITS} bits; near-duplicates are pairs whose gray levels differ by at most "
                f"{threshold:.1f} of 255 (--near-duplicates BITS compares the bits instead)"
            )
    return float(_MAX_BITS if bits is None else bits), ""


def _sampled_distances(pairs: Sequence[tuple[Fingerprint, Fingerprint]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of different bits, and the root mean square difference of the thumbnails, of each pair."""
    first, second = zip(*pairs, strict=True)
    hashes = np.stack([image.hash_bits for image in first]) ^ np.stack([image.hash_bits for image in second])
    levels = _centered([image.thumbnail for image in first]) - _centered([image.thumbnail for image in second])
    return np.unpackbits(hashes, axis=1).sum(axis=1), np.sqrt(np.square(levels).mean(axis=1))


def _centered(thumbnails: Sequence[np.ndarray]) -> np.ndarray:
    """Stack thumbnails as float32, without their mean, since a copy may be brighter."""
    stacked = np.stack(thumbnails).astype(np.float32)
    return stacked - stacked.mean(axis=1, keepdims=True)
