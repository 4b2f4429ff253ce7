"""Protocols of video datasets, whose queries and gallery images are tracklets with one feature each: MARS.

iLIDS-VID and PRID2011 have one query and one gallery tracklet per identity, from two cameras, and use no_camera.
DukeMTMC-VideoReID uses market1501.
"""

from fastamp.evaluation.identities import SAME_CAMERA
from fastamp.evaluation.protocol import PROTOCOL_REGISTRY, RankingRule

PROTOCOL_REGISTRY.register("mars")(
    RankingRule(
        text="MARS (gallery of all test tracklets, queries too; tracklets of the query's identity and camera, and of "
        "identity -1, are junk)",
        junk=SAME_CAMERA,
        queries_in_gallery=True,
        trapezoid=True,
    )
)
PROTOCOL_REGISTRY.register("mars_torchreid")(
    RankingRule(
        text="MARS, as in torchreid (gallery without the queries; tracklets of the query's identity and camera are "
        "junk)",
        junk=SAME_CAMERA,
    )
)
