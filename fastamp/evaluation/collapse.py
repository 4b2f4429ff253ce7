"""Find features that cannot be told apart, whose ranking is the gallery's order."""

import logging
import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.evaluation.protocol import Identities
from fastamp.utils import comm
from fastamp.utils.moved import renamed_arguments

logger = logging.getLogger(__name__)

# Roundings between the features and a distance: a largest distance below so many steps is noise.
_ROUNDING_STEPS = 4
# Fraction of the images from which on features that equal another identity's are reported: copies are normal.
_WARN_FRACTION = 0.05
_BLOCK_ROWS = 4096
# Features and columns that are looked at first: of most models these tell enough.
_NUM_PROBED = 64


@renamed_arguments(queries="query_features", gallery="gallery_features", ids="identities")
def count_indistinct(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    identities: Identities,
    *,
    metric: str,
    dtype: torch.dtype,
) -> int:
    """Return how many images have a feature that no distance tells from another identity's, and warn of many.

    All of them, if the largest distance between two features is below the resolution of ``dtype``: it is at most twice
    the largest distance from the mean, so no pairs are needed. Otherwise those whose feature equals, bit for bit,
    one of another identity. Below 5 % of the images, 0: a set may hold copies of an image.

    Args:
        query_features: (Q, D) finite float features.
        gallery_features: (G, D) finite float features.
        identities: of the Q and G images.
        metric: ``"cosine"`` or ``"euclidean"``.
        dtype: of the distances.

    Returns:
        0..Q + G.
    """
    pids = torch.cat((identities.query_pids, identities.gallery_pids)).cpu().numpy()
    if len(np.unique(pids)) < 2:
        return 0
    largest, length, resolution = _largest_distance((query_features, gallery_features), metric, dtype)
    if largest <= resolution:
        _warn(
            f"all {len(pids)} features are the same for the {metric} distance: no two are farther apart than "
            f"{largest:.2g}, and {str(dtype).removeprefix('torch.')} resolves {resolution:.2g} (largest length of a "
            f"feature: {length:.3g}).",
            "the model has collapsed to one output, its weights were not loaded or its features are too small",
        )
        return len(pids)
    indistinct = _equal_to_another_identity((query_features, gallery_features), pids)
    if indistinct < _WARN_FRACTION * len(pids):
        return 0
    _warn(
        f"{indistinct} of {len(pids)} features equal, bit for bit, the feature of another identity.",
        "the model has partly collapsed (e.g. all outputs are 0 for some images), or identities share their images",
    )
    return indistinct


def _warn(found: str, cause: str) -> None:
    if comm.is_main_process():
        logger.warning(
            "%s Equal distances are ranked in the gallery's order: these metrics say nothing of the model.\n"
            "  cause: %s\n"
            "  fix:   check MODEL.WEIGHTS and the training's losses; an earlier checkpoint, or a lower SOLVER.BASE_LR",
            found,
            cause,
        )


def _blocks(sides: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    for side in sides:
        yield from side.split(_BLOCK_ROWS)


def _largest_distance(sides: tuple[torch.Tensor, ...], metric: str, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return a bound on the largest distance, the largest length of a feature, and the resolution of distances.

    The bound is from the mean of all features; where a few are already farther apart than the resolution, from theirs
    alone. Euclidean distances, as they are ranked, are squared.
    """
    exact = torch.float32 if sides[0].device.type == "mps" else torch.float64
    length = max(float(block.to(dtype).norm(dim=1).max()) for block in _blocks(sides))
    if math.isinf(length) or length**2 < torch.finfo(dtype).tiny:
        length = max(float(block.to(exact).norm(dim=1).max()) for block in _blocks(sides))
    info = torch.finfo(dtype)
    resolution = _ROUNDING_STEPS * (info.eps if metric == "cosine" else info.eps * length**2 + info.tiny)

    def bound(sides: tuple[torch.Tensor, ...]) -> float:
        def prepared() -> Iterator[torch.Tensor]:
            for block in _blocks(sides):
                block = block.to(dtype)
                yield F.normalize(block, dim=1) if metric == "cosine" else block

        mean = sum(block.sum(0, dtype=exact) for block in prepared()) / sum(len(side) for side in sides)
        radius = max(float((block - mean).norm(dim=1).max()) for block in prepared())
        return (2 * radius) ** 2 / (2 if metric == "cosine" else 1)

    probe_bound = bound(tuple(side[:_NUM_PROBED] for side in sides))
    # Their farthest pair is at least half as far apart as their bound, of squares a quarter.
    return probe_bound if probe_bound > 4 * resolution else bound(sides), length, resolution


def _equal_to_another_identity(sides: tuple[torch.Tensor, ...], pids: np.ndarray) -> int:
    """Return how many rows equal, bit for bit, a row of another identity (by a 64-bit hash of integers).

    Some columns are compared first, and all of them only of the rows that are equal in these.
    """
    rows, width = torch.arange(len(pids)), sides[0].shape[1]
    for step in dict.fromkeys((max(1, width // _NUM_PROBED), 1)):
        _, group = np.unique(_hashes(sides, rows, step), return_inverse=True)
        row_pids = pids[rows.numpy()]
        low, high = np.full(group.max() + 1, row_pids.max()), np.full(group.max() + 1, row_pids.min())
        np.minimum.at(low, group, row_pids)
        np.maximum.at(high, group, row_pids)
        rows = rows[torch.from_numpy((low < high)[group])]
        if not len(rows):
            break
    return len(rows)


def _hashes(sides: tuple[torch.Tensor, ...], rows: torch.Tensor, step: int) -> np.ndarray:
    """Return a hash of each of ``rows`` (sorted, numbered through all sides), of every ``step``-th column: (R,)."""
    integer = torch.int64 if sides[0].dtype == torch.float64 else torch.int32
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (len(range(0, sides[0].shape[1], step)),), generator=generator) * 2 + 1
    hashes, start = [], 0
    for side in sides:
        side_rows = rows[(rows >= start) & (rows < start + len(side))] - start
        start += len(side)
        for part in side_rows.split(_BLOCK_ROWS):
            numbers = side[part.to(side.device), ::step]
            numbers = numbers.double() if integer == torch.int64 else numbers.float()
            numbers = (numbers.cpu() + 0.0).contiguous()  # -0 is 0
            hashes.append((numbers.view(integer).long() * factors).sum(1))
    return torch.cat(hashes).numpy()
