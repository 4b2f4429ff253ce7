"""Protocols of cloth-changing datasets: LTCC, DeepChange and other sets with clothes labels, and PRCC.

The column ``clothes`` is the outfit of the person. Outfits of different persons need not be distinguished. The general
protocol of these datasets is market1501.
"""

import random

import numpy as np
import torch

from fastamp.evaluation.identities import Identities, Junk, Matches, same_camera
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, RankingRule
from fastamp.evaluation.trials import SubGallery, TrialRule, draw_images
from fastamp.utils.errors import DataError
from fastamp.utils.missing import is_missing

CLOTHES = "clothes"
# Seed of PRCC's ten galleries in the program of Gu et al. 2022; one generator draws all of them.
_PRCC_SEED = 3


def _same_clothes(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    return np.asarray(matches.query_columns[CLOTHES][queries] == matches.gallery_columns[CLOTHES][gallery])


def _same_camera_or_clothes(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair from the same camera or in the same clothes; see ``Junk.test``."""
    return np.asarray(same_camera(matches, queries, gallery) | _same_clothes(matches, queries, gallery))


def _same_camera_or_other_clothes(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair from the same camera or in other clothes; see ``Junk.test``."""
    return np.asarray(same_camera(matches, queries, gallery) | ~_same_clothes(matches, queries, gallery))


class ClothesRule(RankingRule):
    """Rule that needs the clothes of the persons: base class."""

    columns = (CLOTHES,)

    def check(self, identities: Identities) -> None:
        """Check that the clothes are known.

        Raises:
            DataError: if a query, or a gallery image of a query's identity, has no value in the column.
        """
        query, gallery = (values.cpu().numpy() for values in identities.columns[CLOTHES])
        is_relevant = torch.isin(identities.gallery_pids, identities.query_pids).cpu().numpy()
        missing = int(is_missing(query).sum()), int((is_missing(gallery) & is_relevant).sum())
        if any(missing):
            raise DataError(
                f"TEST.PROTOCOL={self.name} requires the clothes of all queries and of the gallery images of their "
                f"identities; the column {CLOTHES!r} is empty for {missing[0]} queries and {missing[1]} gallery "
                "images.\n  fix: label these images, remove them, or set TEST.PROTOCOL to market1501"
            )


@PROTOCOL_REGISTRY.register("cloth_changing")
class ClothChanging(ClothesRule):
    """Matches are in other clothes, from other cameras."""

    text = "cloth-changing (images of the query's identity from its camera or in its clothes are junk)"
    junk = Junk(_same_camera_or_clothes)


@PROTOCOL_REGISTRY.register("same_clothes")
class SameClothes(ClothesRule):
    """Matches are in the same clothes, from other cameras."""

    text = "same clothes (images of the query's identity from its camera or in other clothes are junk)"
    junk = Junk(_same_camera_or_other_clothes)


@PROTOCOL_REGISTRY.register("prcc")
class Prcc(TrialRule):
    """Rule of PRCC: one random gallery image per identity in each trial."""

    text = "PRCC single-shot (one gallery image per identity; {num_trials} random galleries, seed {seed})"

    def trials(self, identities: Identities) -> list[list[SubGallery]]:
        """Draw the images of each trial."""
        generator = random.Random(_PRCC_SEED + self.seed)
        queries, pids = np.arange(len(identities.query_pids)), identities.gallery_pids.cpu().numpy()
        return [
            [SubGallery(queries, draw_images(pids, None, shots=1, generator=generator))] for _ in range(self.num_trials)
        ]


@PROTOCOL_REGISTRY.register("prcc_multi_shot")
class PrccMultiShot(RankingRule):
    """Rule of PRCC with the whole gallery."""

    text = "PRCC multi-shot, as in CAL's program (whole gallery, no junk)"
