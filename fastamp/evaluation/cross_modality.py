"""Protocols of visible-infrared datasets: SYSU-MM01, RegDB and LLCM.

The CMC of SYSU-MM01 and LLCM counts identities: the ranking is reduced to the first image of each identity. Rank-k of
several shots is therefore higher than a CMC over images. mAP and mINP are computed over images.
"""

import random
from collections.abc import Collection
from functools import partial

import numpy as np

from fastamp.evaluation.identities import SAME_CAMERA, Identities, Junk, Matches
from fastamp.evaluation.protocol import PROTOCOL_REGISTRY, Protocol, RankingRule
from fastamp.evaluation.trials import SubGallery, TrialRanker, draw_images
from fastamp.utils.errors import DataError

_INFRARED, _VISIBLE = (3, 6), (1, 2, 4, 5)
_INDOOR = (1, 2)
# The infrared camera 3 and the visible camera 2 are at the same place.
_SAME_PLACE = (3, 2)


def _first_camera(query_cameras: Collection[int], gallery_cameras: Collection[int]) -> int:
    """Return the number of SYSU-MM01's first camera: 1 as in the dataset, or 0.

    Raises:
        DataError: if the queries are not from the infrared cameras 3 and 6, or the gallery from 1, 2, 4 and 5.
    """
    queries, gallery = set(query_cameras), set(gallery_cameras)
    for first in (1, 0):
        infrared, visible = ({camera - 1 + first for camera in cameras} for cameras in (_INFRARED, _VISIBLE))
        if queries <= infrared and gallery <= visible:
            return first
    raise DataError(
        "the protocols sysu_* require the cameras of SYSU-MM01, numbered from 1 or 0: queries from the infrared "
        "cameras 3 and 6, gallery images from the visible cameras 1, 2, 4 and 5.\n"
        f"  found: query cameras {_listed(queries)}; gallery cameras {_listed(gallery)}\n"
        "  fix: evaluate on SYSU-MM01, or choose another TEST.PROTOCOL, e.g. no_camera"
    )


def _listed(cameras: set[int]) -> str:
    return ", ".join(map(str, sorted(cameras)[:10])) + (", ..." if len(cameras) > 10 else "")


def _same_place(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair of a query of camera 3 and a gallery image of camera 2; see ``Junk.test``.

    Queries are only from cameras 3 and 6, so numbers from 0 and from 1 cannot be confused.
    """
    query, other = matches.query_camids[queries], matches.gallery_camids[gallery]
    junk: np.ndarray = ((query == 3) & (other == 2)) | ((query == 2) & (other == 1))
    return junk


def _build_sysu(identities: Identities, protocol: Protocol, *, cameras: tuple[int, ...], shots: int) -> TrialRanker:
    """Build the ranker of SYSU-MM01: queries of camera 3 rank no images of camera 2, of any identity."""
    sides = (identities.query_camids, identities.gallery_camids)
    first = _first_camera(*(camids.unique().tolist() for camids in sides))
    camera_3, camera_2 = (camera - 1 + first for camera in _SAME_PLACE)
    gallery_pids, gallery_camids = identities.gallery_pids.cpu().numpy(), identities.gallery_camids.cpu().numpy()
    is_camera_3 = identities.query_camids.cpu().numpy() == camera_3
    trials = []
    for trial in range(protocol.num_trials):
        drawn = draw_images(
            gallery_pids,
            gallery_camids,
            shots=shots,
            generator=random.Random(protocol.seed + trial),
            cameras=[camera - 1 + first for camera in cameras],
        )
        other_place = drawn[gallery_camids[drawn] != camera_2]
        trials.append(
            (SubGallery(np.flatnonzero(is_camera_3), other_place), SubGallery(np.flatnonzero(~is_camera_3), drawn))
        )
    return TrialRanker(
        identities,
        trials=trials,
        junk=None,
        trapezoid=protocol.trapezoid,
        reported_junk=SAME_PLACE,
        counts_identities=True,
    )


def _build_llcm(identities: Identities, protocol: Protocol, *, draws_queries: bool = False) -> TrialRanker:
    """Build the ranker of LLCM: all queries, and one random gallery image per identity and camera.

    With ``draws_queries``, as in DEEN's "VIS to IR": one random query per identity and camera, and the whole gallery.
    """
    queries = np.arange(len(identities.query_pids))
    gallery = np.argsort(identities.gallery_pids.cpu().numpy(), kind="stable")
    pids, camids = identities.gallery_pids, identities.gallery_camids
    if draws_queries:
        pids, camids = identities.query_pids, identities.query_camids
    trials = []
    for trial in range(protocol.num_trials):
        generator = random.Random(protocol.seed + trial)
        drawn = draw_images(pids.cpu().numpy(), camids.cpu().numpy(), shots=1, generator=generator)
        trials.append([SubGallery(np.sort(drawn), gallery) if draws_queries else SubGallery(queries, drawn)])
    return TrialRanker(
        identities, trials=trials, junk=SAME_CAMERA, trapezoid=protocol.trapezoid, counts_identities=True
    )


SAME_PLACE = Junk(_same_place, same_identity_only=False)
"""Images of SYSU-MM01's camera 2, of any identity, for queries of camera 3 (Wu et al. 2017, "RGB-infrared
cross-modality person re-identification")."""

for _mode, _cameras in {"all": _VISIBLE, "indoor": _INDOOR}.items():
    for _shot, _count in {"single": 1, "multi": 10}.items():
        PROTOCOL_REGISTRY.register(f"sysu_{_mode}_{_shot}")(
            RankingRule(
                text=f"SYSU-MM01 {_mode}, {_shot}-shot (camera 2 is junk for queries of camera 3; CMC over identities; "
                "{0.num_trials} random galleries, seed {0.seed})",
                junk=SAME_PLACE,
                build=partial(_build_sysu, cameras=_cameras, shots=_count),
                random_gallery=True,
                check_cameras=_first_camera,
            )
        )
PROTOCOL_REGISTRY.register("regdb")(RankingRule(text="RegDB (no junk)", junk=None))
PROTOCOL_REGISTRY.register("llcm")(
    RankingRule(
        text="LLCM (images of the query's identity and camera are junk; CMC over identities; {0.num_trials} random "
        "galleries, seed {0.seed})",
        junk=SAME_CAMERA,
        build=_build_llcm,
        random_gallery=True,
    )
)
PROTOCOL_REGISTRY.register("llcm_sampled_queries")(
    RankingRule(
        text="LLCM, DEEN's VIS to IR (random queries, whole gallery; images of the query's identity and camera are "
        "junk; CMC over identities; {0.num_trials} trials, seed {0.seed})",
        junk=SAME_CAMERA,
        build=partial(_build_llcm, draws_queries=True),
        random_queries=True,
    )
)
