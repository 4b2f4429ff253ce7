"""FastReID's query expansion, which does not need the other ranks."""

import torch

from fastamp.evaluation.query_expansion import QueryExpansion, expand
from fastamp.utils import comm


@comm.as_single_process()
def aqe(
    query_feat: torch.Tensor, gallery_feat: torch.Tensor, qe_times: int = 1, qe_k: int = 10, alpha: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand query (Q, D) and gallery (G, D) features by alpha-QE; see ``fastamp.evaluation.query_expansion``."""
    return expand(query_feat, gallery_feat, QueryExpansion(k=qe_k, alpha=alpha, times=qe_times))
