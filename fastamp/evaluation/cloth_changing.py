"""Protocols of cloth-changing datasets: LTCC, DeepChange and other sets with clothes labels, and PRCC.

The column ``clothes`` is the outfit of the person. Outfits of different persons need not be distinguished. The general
protocol of these datasets is market1501.
"""

import random

import numpy as np
import torch

from fastamp.evaluation.identities import Identities, Junk, Matches, same_camera
from fastamp.evaluation.protocol import PROTOCOL_REGISTRY, Protocol, Ranker, RankingRule, build_ranker
from fastamp.evaluation.trials import SubGallery, TrialRanker, draw_images
from fastamp.utils.errors import DataError

CLOTHES = "clothes"
# Seed of PRCC's ten galleries in the program of Gu et al. 2022; one generator draws all of them.
_PRCC_SEED = 3


def _same_clothes(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    same: np.ndarray = matches.query_columns[CLOTHES][queries] == matches.gallery_columns[CLOTHES][gallery]
    return same


def _same_camera_or_clothes(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair from the same camera or in the same clothes; see ``Junk.test``."""
    junk: np.ndarray = same_camera(matches, queries, gallery) | _same_clothes(matches, queries, gallery)
    return junk


def _same_camera_or_other_clothes(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair from the same camera or in other clothes; see ``Junk.test``."""
    junk: np.ndarray = same_camera(matches, queries, gallery) | ~_same_clothes(matches, queries, gallery)
    return junk


def _build_with_clothes(identities: Identities, protocol: Protocol) -> Ranker:
    """Build a ranker of all gallery images after checking that the clothes are known.

    Raises:
        DataError: if a query, or a gallery image of a query's identity, has no value in the column.
    """
    query, gallery = (values.cpu() for values in identities.columns[CLOTHES])
    is_relevant = torch.isin(identities.gallery_pids.cpu(), identities.query_pids.cpu())
    missing = int(_is_missing(query).sum()), int((_is_missing(gallery) & is_relevant).sum())
    if any(missing):
        raise DataError(
            f"TEST.PROTOCOL={protocol.rule} requires the clothes of all queries and of the gallery images of their "
            f"identities; the column {CLOTHES!r} is empty for {missing[0]} queries and {missing[1]} gallery images.\n"
            "  fix: label these images, remove them, or set TEST.PROTOCOL to market1501"
        )
    return build_ranker(identities, protocol)


def _is_missing(values: torch.Tensor) -> torch.Tensor:
    return values.isnan() if values.is_floating_point() else values == -1


def _build_prcc(identities: Identities, protocol: Protocol) -> TrialRanker:
    """Build the ranker of PRCC: one random gallery image per identity in each trial."""
    generator = random.Random(_PRCC_SEED + protocol.seed)
    queries, pids = np.arange(len(identities.query_pids)), identities.gallery_pids.cpu().numpy()
    trials = [
        [SubGallery(queries, draw_images(pids, None, shots=1, generator=generator))] for _ in range(protocol.num_trials)
    ]
    return TrialRanker(identities, trials=trials, junk=None, trapezoid=protocol.trapezoid)


PROTOCOL_REGISTRY.register("cloth_changing")(
    RankingRule(
        text="cloth-changing (images of the query's identity from its camera or in its clothes are junk)",
        junk=Junk(_same_camera_or_clothes),
        build=_build_with_clothes,
        columns=(CLOTHES,),
    )
)
PROTOCOL_REGISTRY.register("same_clothes")(
    RankingRule(
        text="same clothes (images of the query's identity from its camera or in other clothes are junk)",
        junk=Junk(_same_camera_or_other_clothes),
        build=_build_with_clothes,
        columns=(CLOTHES,),
    )
)
PROTOCOL_REGISTRY.register("prcc")(
    RankingRule(
        text="PRCC single-shot (one gallery image per identity; {0.num_trials} random galleries, seed {0.seed})",
        junk=None,
        build=_build_prcc,
        random_gallery=True,
    )
)
PROTOCOL_REGISTRY.register("prcc_multi_shot")(
    RankingRule(text="PRCC multi-shot, as in CAL's program (whole gallery, no junk)", junk=None)
)
