"""Protocols of visible-infrared datasets: SYSU-MM01, RegDB and LLCM.

The CMC of SYSU-MM01 and LLCM counts identities: the ranking is reduced to the first image of each identity. Rank-k of
several shots is therefore higher than a CMC over images. mAP and mINP are computed over images.
"""

import random
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from fastamp.evaluation.identities import SAME_CAMERA, Identities, Junk, Matches
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, NoCamera, RankingRule
from fastamp.evaluation.trials import SubGallery, TrialRule, draw_images
from fastamp.utils.errors import DataError

_INFRARED, _VISIBLE = (3, 6), (1, 2, 4, 5)
_INDOOR = (1, 2)
_SYSU = "camera 2 is junk for queries of camera 3; CMC over identities; {num_trials} random galleries, seed {seed}"


def _dataset_cameras(identities: Identities) -> tuple[np.ndarray, np.ndarray]:
    """Return the cameras of queries and gallery images, numbered from 1 as in SYSU-MM01, if they are numbered from 0.

    Raises:
        DataError: if the queries are not from the infrared cameras 3 and 6, or the gallery from 1, 2, 4 and 5.
    """
    queries, gallery = identities.query_camids.cpu().numpy(), identities.gallery_camids.cpu().numpy()
    for offset in (0, 1):
        if np.isin(queries + offset, _INFRARED).all() and np.isin(gallery + offset, _VISIBLE).all():
            return queries + offset, gallery + offset
    raise DataError(
        "the protocols sysu_* require the cameras of SYSU-MM01, numbered from 1 or 0: queries from the infrared "
        "cameras 3 and 6, gallery images from the visible cameras 1, 2, 4 and 5.\n"
        f"  found: query cameras {_listed(queries)}; gallery cameras {_listed(gallery)}\n"
        "  fix: evaluate on SYSU-MM01, or choose another TEST.PROTOCOL, e.g. no_camera"
    )


def _listed(camids: np.ndarray) -> str:
    cameras = np.unique(camids)
    return ", ".join(map(str, cameras[:10])) + (", ..." if len(cameras) > 10 else "")


def _same_place(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair of a query of camera 3 and a gallery image of camera 2; see ``Junk.test``.

    Queries are only from cameras 3 and 6, so numbers from 0 and from 1 cannot be confused.
    """
    query, other = matches.query_camids[queries], matches.gallery_camids[gallery]
    return np.asarray(((query == 3) & (other == 2)) | ((query == 2) & (other == 1)))


SAME_PLACE = Junk(_same_place, same_identity_only=False)
"""Images of SYSU-MM01's camera 2, of any identity, for queries of camera 3 (Wu et al. 2017, "RGB-infrared
cross-modality person re-identification")."""


class Sysu(TrialRule):
    """Rule of SYSU-MM01, whose queries of camera 3 rank no images of camera 2, of any identity: base class.

    Attributes:
        cameras: cameras of the random gallery images.
        shots: number of gallery images of each identity and camera.
    """

    junk = SAME_PLACE
    counts_identities = True
    cameras: ClassVar[tuple[int, ...]] = _VISIBLE
    shots: ClassVar[int] = 1

    def check(self, identities: Identities) -> None:
        """Check the cameras, see ``_dataset_cameras``."""
        _dataset_cameras(identities)

    def trials(self, identities: Identities) -> list[list[SubGallery]]:
        """Draw the images of each trial."""
        query_camids, gallery_camids = _dataset_cameras(identities)
        # The infrared camera 3 and the visible camera 2 are at the same place.
        of_camera_3, others = np.flatnonzero(query_camids == 3), np.flatnonzero(query_camids != 3)
        pids, trials = identities.gallery_pids.cpu().numpy(), []
        for trial in range(self.num_trials):
            generator = random.Random(self.seed + trial)
            drawn = draw_images(pids, gallery_camids, shots=self.shots, generator=generator, cameras=self.cameras)
            other_place = drawn[gallery_camids[drawn] != 2]
            trials.append([SubGallery(of_camera_3, other_place), SubGallery(others, drawn)])
        return trials

    def within_part(self) -> RankingRule:
        """Return a rule without junk, which no sub-gallery contains."""
        return NoCamera(trapezoid=self.trapezoid)


@PROTOCOL_REGISTRY.register("sysu_all_single")
class SysuAllSingle(Sysu):
    """All cameras, one image of each identity and camera."""

    text = f"SYSU-MM01 all, single-shot ({_SYSU})"


@PROTOCOL_REGISTRY.register("sysu_all_multi")
class SysuAllMulti(Sysu):
    """All cameras, ten images of each identity and camera."""

    text = f"SYSU-MM01 all, multi-shot ({_SYSU})"
    shots = 10


@PROTOCOL_REGISTRY.register("sysu_indoor_single")
class SysuIndoorSingle(Sysu):
    """Cameras 1 and 2, one image of each identity and camera."""

    text = f"SYSU-MM01 indoor, single-shot ({_SYSU})"
    cameras = _INDOOR


@PROTOCOL_REGISTRY.register("sysu_indoor_multi")
class SysuIndoorMulti(Sysu):
    """Cameras 1 and 2, ten images of each identity and camera."""

    text = f"SYSU-MM01 indoor, multi-shot ({_SYSU})"
    cameras = _INDOOR
    shots = 10


@PROTOCOL_REGISTRY.register("regdb")
class RegDB(RankingRule):
    """Rule of RegDB."""

    text = "RegDB (no junk)"


@PROTOCOL_REGISTRY.register("llcm")
class Llcm(TrialRule):
    """Rule of LLCM: all queries, and one random gallery image per identity and camera."""

    text = (
        "LLCM (images of the query's identity and camera are junk; CMC over identities; {num_trials} random galleries, "
        "seed {seed})"
    )
    junk = SAME_CAMERA
    counts_identities = True

    def trials(self, identities: Identities) -> list[list[SubGallery]]:
        """Draw the images of each trial."""
        queries = np.arange(len(identities.query_pids))
        drawn = self._draw(identities.gallery_pids, identities.gallery_camids)
        return [[SubGallery(queries, images)] for images in drawn]

    def _draw(self, pids: torch.Tensor, camids: torch.Tensor) -> Iterator[np.ndarray]:
        """Draw one image per identity and camera for each trial."""
        for trial in range(self.num_trials):
            generator = random.Random(self.seed + trial)
            yield draw_images(pids.cpu().numpy(), camids.cpu().numpy(), shots=1, generator=generator)


@PROTOCOL_REGISTRY.register("llcm_sampled_queries")
class LlcmSampledQueries(Llcm):
    """DEEN's "VIS to IR" of LLCM: one random query per identity and camera, and the whole gallery."""

    text = (
        "LLCM, DEEN's VIS to IR (random queries, whole gallery; images of the query's identity and camera are junk; "
        "CMC over identities; {num_trials} trials, seed {seed})"
    )
    draws = ("query",)

    def trials(self, identities: Identities) -> list[list[SubGallery]]:
        """Draw the queries of each trial."""
        gallery = np.argsort(identities.gallery_pids.cpu().numpy(), kind="stable")
        drawn = self._draw(identities.query_pids, identities.query_camids)
        return [[SubGallery(np.sort(queries), gallery)] for queries in drawn]
