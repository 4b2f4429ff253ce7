"""Protocol of MARS, whose queries and gallery images are tracklets with one feature each.

The authors' gallery contains all test tracklets, the queries too (``DATASETS.MARS.QUERIES_IN_GALLERY``). torchreid
removes the queries and uses the standard AP: market1501. Other video datasets use market1501, or no_camera if queries
and gallery are from one camera each.
"""

from dataclasses import dataclass
from typing import Any

from fastamp.config import CfgNode
from fastamp.evaluation.identities import SAME_CAMERA
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, RankingRule


@PROTOCOL_REGISTRY.register("mars")
@dataclass(frozen=True, kw_only=True)
class Mars(RankingRule):
    """Rule of MARS, always with trapezoidal AP."""

    text = "MARS (tracklets of the query's identity and camera, and of identity -1, are junk)"
    junk = SAME_CAMERA
    trapezoid: bool = True

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Read no config: the AP is part of the rule."""
        return {}
