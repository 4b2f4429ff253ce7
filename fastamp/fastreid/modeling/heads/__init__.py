"""Registry of heads, and heads with FastReID's constructors."""

from fastamp.fastreid.modeling.heads.build import REID_HEADS_REGISTRY, build_heads
from fastamp.fastreid.modeling.heads.clas_head import ClasHead
from fastamp.fastreid.modeling.heads.embedding_head import EmbeddingHead

__all__ = ["REID_HEADS_REGISTRY", "ClasHead", "EmbeddingHead", "build_heads"]
