"""Protocols with one random gallery image per identity: CUHK03 and VehicleID."""

from dataclasses import dataclass

import numpy as np
import torch

from fastamp.evaluation.identities import SAME_CAMERA, SAME_IMAGE, GalleryGroups, Identities
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, RandomRule, Ranker
from fastamp.utils.errors import ConfigError


class SingleGalleryShotRanker(Ranker):
    """Ranker of the CUHK03 protocol: CMC over one random gallery image per identity, AP and INP over all images.

    The protocol is from Li et al. 2014, "DeepReID". The ranker follows torchreid, except that images of other
    identities are drawn once per trial for all queries, not once per query. The image of the query's identity is drawn
    from the query's matches.

    Args:
        identities: identities and cameras of Q queries and G gallery images.
        rule: rule with the number of random galleries, R, and their seed.
    """

    def __init__(self, identities: Identities, rule: RandomRule) -> None:
        super().__init__(identities, rule)
        generator = np.random.default_rng(rule.seed)
        self.num_trials = rule.num_trials
        self._drawn = _draw_gallery(self.matches.groups, self.num_trials, generator)
        # Which of its matches a query gets in each trial, as a fraction of their number.
        self._choice = generator.random((self.num_trials, len(identities.query_pids)))

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Rank the gallery in each trial, see ``Ranker.rank``."""
        ap, inp, _ = super().rank(start, distances)
        pairs = self.matches.pairs(start, start + len(distances))
        counts = np.bincount(pairs.rows, minlength=len(distances))
        begins = np.cumsum(counts) - counts
        queries = np.flatnonzero(counts)
        group = self.matches.groups.find(self.matches.query_pids[start : start + len(distances)])
        first_match = np.full((len(distances), self.num_trials), -1)
        for number, (drawn, choice) in enumerate(zip(self._drawn, self._choice, strict=True)):
            positions = begins + (choice[start : start + len(distances)] * counts).astype(np.int64)
            match_columns = pairs.columns[positions[queries]]
            first_match[queries, number] = _rank_among_drawn(distances, queries, match_columns, drawn, group[queries])
        return ap, inp, first_match


class VehicleIDRanker(Ranker):
    """Ranker of the VehicleID protocol: one random gallery image per identity, and all other images as queries.

    The protocol is from Liu et al. 2016, "Deep relative distance learning". Cameras are ignored. The AP and INP of an
    image are averaged over the trials in which the image is a query. The number of these trials is the weight of the
    image in mAP and mINP.

    Args:
        identities: identities of N images, which are both queries and gallery.
        rule: rule with the number of random galleries, R, and their seed.
    """

    def __init__(self, identities: Identities, rule: RandomRule) -> None:
        super().__init__(identities, rule)
        self.num_trials, self.num_gallery = rule.num_trials, len(self.matches.groups.pids)
        self._drawn = _draw_gallery(self.matches.groups, self.num_trials, np.random.default_rng(rule.seed))

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Rank the gallery in each trial, see ``Ranker.rank``."""
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


@PROTOCOL_REGISTRY.register("cuhk03")
class Cuhk03(RandomRule):
    """Rule of CUHK03, see ``SingleGalleryShotRanker``."""

    text = "CUHK03 single gallery shot (same camera is junk; CMC over {num_trials} trials, seed {seed})"
    junk = SAME_CAMERA

    def ranker(self, identities: Identities, metric: str) -> Ranker:
        """Build the ranker."""
        return SingleGalleryShotRanker(identities, self)


@PROTOCOL_REGISTRY.register("vehicleid")
@dataclass(frozen=True, kw_only=True)
class VehicleID(RandomRule):
    """Rule of VehicleID, see ``VehicleIDRanker``.

    Raises:
        ConfigError: for trapezoidal AP.
    """

    text = "VehicleID (one gallery image per identity; queries: all other images; {num_trials} trials, seed {seed})"
    junk = SAME_IMAGE
    draws = ("query", "gallery")
    all_images = True

    def __post_init__(self) -> None:
        if self.trapezoid:
            raise ConfigError(
                f"TEST.AP_METHOD=trapezoid is not supported with TEST.PROTOCOL={self.name}, because each query has "
                "only one match.\n  fix: set TEST.AP_METHOD to standard"
            )

    def images_with_query(self, identities: Identities) -> torch.Tensor:
        """Select all images with an identity."""
        return torch.cat((identities.query_pids, identities.gallery_pids)).cpu() >= 0

    def ranker(self, identities: Identities, metric: str) -> Ranker:
        """Build the ranker."""
        return VehicleIDRanker(identities, self)


def _draw_gallery(groups: GalleryGroups, num_trials: int, generator: np.random.Generator) -> np.ndarray:
    """Draw a random gallery index for each of R trials and P identities: (R, P) int64."""
    choice = generator.random((num_trials, len(groups.pids)))
    return groups.order[groups.starts + (choice * groups.counts).astype(np.int64)]


def _rank_among_drawn(
    distances: torch.Tensor, rows: np.ndarray, match_columns: np.ndarray, drawn: np.ndarray, query_group: np.ndarray
) -> np.ndarray:
    """Compute the 0-based rank of each query's match among the drawn images of the other identities.

    Args:
        distances: (B, G) float.
        rows: (n,) int64, row of each query.
        match_columns: (n,) int64, gallery index of each query's match.
        drawn: (P,) int64, drawn gallery index of each identity.
        query_group: (n,) int64, index of each query's identity in ``drawn``.
    """
    drawn_distances = distances[rows[:, None], drawn]
    drawn_distances[np.arange(len(rows)), query_group] = torch.nan
    match_distances = distances[rows, match_columns][:, None]
    is_earlier = torch.from_numpy(drawn < match_columns[:, None]).to(distances.device)
    before = (drawn_distances < match_distances) | ((drawn_distances == match_distances) & is_earlier)
    return np.asarray(before.sum(1).cpu().numpy())
