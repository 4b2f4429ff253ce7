"""Heads, which map feature maps to embeddings and class logits."""

from fastamp.modeling.heads.build import HEADS_REGISTRY, build_heads
from fastamp.modeling.heads.clas_head import ClasHead
from fastamp.modeling.heads.embedding_head import EmbeddingHead
from fastamp.modeling.heads.fc_head import FCHead
from fastamp.modeling.heads.jpm_head import JPMHead
from fastamp.modeling.heads.part_token_head import PartTokenHead

__all__ = ["HEADS_REGISTRY", "ClasHead", "EmbeddingHead", "FCHead", "JPMHead", "PartTokenHead", "build_heads"]
