"""Detection of collapsed features: images with equal features are ranked only by their order in the gallery."""

import logging
import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.evaluation.identities import Identities
from fastamp.utils import comm

logger = logging.getLogger(__name__)

# Number of rounding steps from features to a distance; distances below that many units are noise.
_ROUNDING_STEPS = 4
# Minimum fraction of images with the feature of another identity to warn about; a few copies of images are normal.
_WARN_FRACTION = 0.05
_BLOCK_ROWS = 4096
# Number of features and columns that are tested first; they suffice for most models.
_NUM_PROBED = 64


def count_indistinct(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    identities: Identities,
    *,
    metric: str,
    dtype: torch.dtype,
    baseline: str = "",
) -> int:
    """Count images whose features cannot be distinguished from another identity's; log a warning if there are any.

    All images are counted if the largest distance between two features is below the resolution of ``dtype``. Instead
    of comparing all pairs, this distance is bounded by twice the largest distance from the mean. Otherwise, images with
    a feature that is bit-identical to a feature of another identity are counted. The result is 0 if these are fewer
    than 5 % of the images, because a dataset may contain copies of an image.

    Args:
        query_features: (Q, D) float, finite.
        gallery_features: (G, D) float, finite.
        identities: identities and cameras of the Q query and G gallery images.
        metric: ``"cosine"`` or ``"euclidean"``.
        dtype: dtype of the distances.
        baseline: name of the baseline that computed the features from the pixels; "" (default) for a model.

    Returns:
        Number of indistinguishable images, in 0..Q + G.
    """
    pids = torch.cat((identities.query_pids, identities.gallery_pids)).cpu().numpy()
    if len(np.unique(pids)) < 2:
        return 0
    sides = tuple(side for side in (query_features, gallery_features) if len(side))
    largest, length, resolution = _largest_distance(sides, metric, dtype)
    if largest <= resolution:
        _warn(
            f"all {len(pids)} features are equal to within rounding error: the largest {metric} distance is "
            f"{largest:.2g}, but the resolution of {str(dtype).removeprefix('torch.')} is {resolution:.2g} (largest "
            f"feature norm: {length:.3g}).",
            "the model collapsed to one output, its weights were not loaded, or its features are too small",
            baseline,
        )
        return len(pids)
    indistinct = _equal_to_another_identity(sides, pids)
    if indistinct < _WARN_FRACTION * len(pids):
        return 0
    _warn(
        f"{indistinct} of {len(pids)} features are bit-identical to a feature of another identity.",
        "the model partly collapsed (e.g. the features of some images are 0), or several identities contain the same "
        "image",
        baseline,
    )
    return indistinct


def _warn(problem: str, cause: str, baseline: str) -> None:
    fix = "check MODEL.WEIGHTS and the training losses; use an earlier checkpoint or a lower SOLVER.BASE_LR"
    if baseline:
        problem = f"baseline {baseline}: {problem}"
        cause, fix = "the images of several identities have the same pixels, e.g. blank images", "check the image files"
    if comm.is_main_process():
        logger.warning(
            "%s Images with equal features are ranked in gallery order, so the metrics are meaningless.\n"
            "  cause: %s\n"
            "  fix:   %s",
            problem,
            cause,
            fix,
        )


def _blocks(sides: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    for side in sides:
        yield from side.split(_BLOCK_ROWS)


def _largest_distance(sides: tuple[torch.Tensor, ...], metric: str, dtype: torch.dtype) -> tuple[float, float, float]:
    """Compute ``(upper bound of the largest distance, largest feature norm, resolution of distances)``.

    The bound is first computed from a few features. It is computed from all features only if the first bound does not
    clearly exceed the resolution. Euclidean distances are squared, as in the ranking.
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
    # The distance of the farthest pair is at least half the bound, a quarter for squared distances.
    return probe_bound if probe_bound > 4 * resolution else bound(sides), length, resolution


def _equal_to_another_identity(sides: tuple[torch.Tensor, ...], pids: np.ndarray) -> int:
    """Count rows that are bit-identical to a row of another identity, by comparing 64-bit hashes.

    A subset of the columns is hashed first. All columns are hashed only for rows that are equal in this subset.
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
    """Hash every ``step``-th column of the R ``rows`` (sorted indices into the concatenated sets) to (R,) int64."""
    generator = torch.Generator().manual_seed(0)
    count = 2 * len(range(0, sides[0].shape[1], step))
    factors = torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1
    hashes, start = [], 0
    for side in sides:
        side_rows = rows[(rows >= start) & (rows < start + len(side))] - start
        start += len(side)
        for part in side_rows.split(_BLOCK_ROWS):
            numbers = side[part.to(side.device), ::step].cpu().double() + 0.0  # maps -0 to 0
            # Two halves of each number: a product with all 64 bits has as many zeros at the end as the number.
            hashes.append((numbers.contiguous().view(torch.int32) * factors).sum(1))
    return torch.cat(hashes).numpy()
