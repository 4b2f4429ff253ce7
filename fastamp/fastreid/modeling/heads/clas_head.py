"""Classification head with FastReID's constructor."""

from fastamp.fastreid.modeling.heads.embedding_head import EmbeddingHead
from fastamp.modeling.heads import clas_head


class ClasHead(EmbeddingHead, clas_head.ClasHead):
    """Head with class logits in evaluation mode; see ``fastamp.modeling.heads.ClasHead``."""
