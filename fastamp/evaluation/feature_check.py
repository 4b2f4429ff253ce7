"""Checks of features before they are ranked."""

import math

import torch

from fastamp.evaluation.identities import Identities
from fastamp.utils.errors import DataError


def check_features(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    identities: Identities,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Validate query and gallery features before ranking.

    Args:
        query_features: (Q, D) float.
        gallery_features: (G, D) float.
        identities: identities and cameras of the Q query and G gallery images.
        dtype: dtype of distances between float64 features. Distances between features of other dtypes are float32.
            Default: float64.

    Raises:
        DataError: if shapes do not match, features are not finite, or their squared distances overflow.
    """
    for name, features, pids, camids in (
        ("query", query_features, identities.query_pids, identities.query_camids),
        ("gallery", gallery_features, identities.gallery_pids, identities.gallery_camids),
    ):
        if features.dim() != 2 or not len(features) == len(pids) == len(camids):
            raise DataError(
                f"shape mismatch in the {name} set: expected features (N, D), with one identity and camera for each "
                f"image; got features {tuple(features.shape)}, {len(pids)} identities and {len(camids)} cameras.\n"
                "  fix: pass arrays of the same images"
            )
        if len(features):
            check_finite_features(name, features, dtype)
    if query_features.shape[1] != gallery_features.shape[1]:
        raise DataError(
            f"shape mismatch: query features have {query_features.shape[1]} dimensions, but gallery features "
            f"have {gallery_features.shape[1]}\n  fix: extract both with the same model"
        )


def check_finite_features(name: str, features: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that features (N, D) have dimensions, are finite, and have squared distances that do not overflow.

    Args:
        name: name of the set for messages, e.g. ``"query"``.
        features: (N, D) float with N at least 1.
        dtype: dtype of the distances of float64 features.

    Raises:
        DataError: if they are not.
    """
    if features.numel() == 0:
        raise DataError(
            f"the {name} features have 0 dimensions; expected at least 1.\n"
            "  fix: extract the features again, with a model whose features have at least one dimension"
        )
    low, high = (bound.item() for bound in torch.aminmax(features))
    largest = max(abs(low), abs(high))
    if not math.isfinite(largest):
        bad = (~torch.isfinite(features).all(1)).nonzero().flatten().tolist()
        raise DataError(
            f"{name} features are not finite: {len(bad)} of {len(features)} contain NaN or Inf (first indices: "
            f"{', '.join(map(str, bad[:5]))})\n"
            "  cause: training diverged, the weights or normalization buffers are corrupt, or float16 overflowed\n"
            "  fix: lower SOLVER.BASE_LR, or use an older checkpoint; for float16, set SOLVER.AMP.EVAL_DTYPE to float32"
        )
    dtype = torch.float32 if features.dtype != torch.float64 else dtype
    limit = math.sqrt(torch.finfo(dtype).max / features.shape[1]) / 2
    if largest > limit:
        raise DataError(
            f"{name} features are too large: they contain values up to {largest:.3g}, but squared "
            f"distances of {features.shape[1]} dimensions overflow in {str(dtype).removeprefix('torch.')} for "
            f"values above {limit:.3g}.\n"
            "  fix: divide the features by a constant, or use an earlier checkpoint"
        )
