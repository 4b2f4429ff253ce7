"""Rules that draw one gallery image of each identity, several times: CUHK03's and VehicleID's."""

import numpy as np
import torch

from fastamp.evaluation.protocol import (
    RULES,
    SAME_CAMERA,
    GalleryGroups,
    Identities,
    Junk,
    Ranker,
    RankingRule,
    junk_from_cross_camera,
)
from fastamp.utils.moved import moved_names, renamed_arguments

__getattr__ = moved_names(__name__, {"OneGalleryImageRanker": "fastamp.evaluation.single_shot.VehicleIDRanker"})


class SingleGalleryShotRanker(Ranker):
    """CUHK03's protocol: the CMC is over one drawn gallery image of each identity, AP and INP are over all.

    Li et al. 2014, "DeepReID"; as torchreid computes it, but that the images of the other identities are drawn once
    for all queries, not anew for each. A query's own image is drawn among its matches.

    Args:
        identities: of Q queries and G gallery images.
        num_trials: draws, R.
        seed: of the draws.
        junk, trapezoid: see ``Ranker``.
    """

    @renamed_arguments(ids="identities", repeats="num_trials", cross_camera=("junk", junk_from_cross_camera))
    def __init__(
        self,
        identities: Identities,
        *,
        num_trials: int,
        seed: int,
        junk: Junk | None = SAME_CAMERA,
        trapezoid: bool = False,
    ) -> None:
        super().__init__(identities, junk=junk, trapezoid=trapezoid)
        generator = np.random.default_rng(seed)
        self.num_trials = num_trials
        self._drawn = _draw_gallery(self.matches.groups, num_trials, generator)
        # Which of its matches stands for a query, as a share of their number.
        self._choice = generator.random((num_trials, len(identities.query_pids)))

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """See ``Ranker``."""
        ap, inp, _ = super().rank(start, distances)
        pairs = self.matches.pairs(start, start + len(distances))
        counts = np.bincount(pairs.rows, minlength=len(distances))
        begins = np.cumsum(counts) - counts
        valid = counts > 0
        group = self.matches.groups.find(self.matches.query_pids[start : start + len(distances)])
        first_match = np.full((len(distances), self.num_trials), -1)
        for number, (drawn, choice) in enumerate(zip(self._drawn, self._choice, strict=True)):
            positions = begins + (choice[start : start + len(distances)] * counts).astype(np.int64)
            match_columns = pairs.columns[positions[valid]]
            first_match[valid, number] = _rank_among_drawn(
                distances, np.flatnonzero(valid), match_columns, drawn, group[valid]
            )
        return ap, inp, first_match


class VehicleIDRanker(Ranker):
    """VehicleID's protocol: one drawn image of each identity is the gallery, all the others are the queries.

    Liu et al. 2016, "Deep relative distance learning". There are no cameras. AP and INP of an image are the means over
    the draws in which it is a query, and its weight in the means over images is their number.

    Args:
        identities: of N images, the same on both sides.
        num_trials: draws, R.
        seed: of the draws.
    """

    @renamed_arguments(ids="identities", repeats="num_trials")
    def __init__(self, identities: Identities, *, num_trials: int, seed: int) -> None:
        super().__init__(identities, junk=None)
        self.num_trials = num_trials
        self._drawn = _draw_gallery(self.matches.groups, num_trials, np.random.default_rng(seed))

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """See ``Ranker``."""
        images = np.arange(start, start + len(distances))
        group = self.matches.groups.find(self.matches.query_pids[images])
        first_match = np.full((len(distances), self.num_trials), -1)
        for number, drawn in enumerate(self._drawn):
            queries = np.flatnonzero(drawn[group] != images)
            match_columns = drawn[group[queries]]
            first_match[queries, number] = _rank_among_drawn(distances, queries, match_columns, drawn, group[queries])
        trial = first_match >= 0
        precision = np.where(trial, 1 / (first_match + 1.0 + ~trial), 0).sum(1) / trial.sum(1).clip(1)
        return precision, precision, first_match


RULES["cuhk03"] = RankingRule(
    text="CUHK03 single gallery shot (own camera is junk; CMC over {0.num_trials} draws, seed {0.seed})",
    junk=SAME_CAMERA,
    build=lambda identities, protocol: SingleGalleryShotRanker(
        identities, num_trials=protocol.num_trials, seed=protocol.seed, junk=protocol.junk, trapezoid=protocol.trapezoid
    ),
)
RULES["vehicleid"] = RankingRule(
    text="VehicleID (one gallery image of each identity, all others are queries; {0.num_trials} draws, seed {0.seed})",
    junk=None,
    build=lambda identities, protocol: VehicleIDRanker(identities, num_trials=protocol.num_trials, seed=protocol.seed),
    random_query_gallery_split=True,
)


def _draw_gallery(groups: GalleryGroups, num_trials: int, generator: np.random.Generator) -> np.ndarray:
    """Return (R, P) int64: a gallery image of each of P identities, for each draw."""
    choice = generator.random((num_trials, len(groups.pids)))
    return groups.order[groups.starts + (choice * groups.counts).astype(np.int64)]


def _rank_among_drawn(
    distances: torch.Tensor, rows: np.ndarray, match_columns: np.ndarray, drawn: np.ndarray, query_group: np.ndarray
) -> np.ndarray:
    """Return the rank from 0 of each query's image among the images drawn of the other identities.

    Args:
        distances: (B, G) float.
        rows: (n,) int64, the queries' rows in it.
        own: (n,) int64, the gallery image that stands for the query's own identity.
        drawn: (P,) int64, the gallery image of each identity.
        own_group: (n,) int64, the query's own identity among the P.
    """
    rows, match_columns, drawn, query_group = (
        torch.from_numpy(side).to(distances.device) for side in (rows, match_columns, drawn, query_group)
    )
    drawn_distances = distances[rows[:, None], drawn]
    drawn_distances[torch.arange(len(rows), device=distances.device), query_group] = torch.nan
    match_distances = distances[rows, match_columns][:, None]
    before = (drawn_distances < match_distances) | (
        (drawn_distances == match_distances) & (drawn < match_columns[:, None])
    )
    return before.sum(1).cpu().numpy()
