"""Building blocks of models: pooling, norm, classifiers, distance."""

from fastamp.layers.classifier import CLS_LAYER_REGISTRY
from fastamp.layers.distance import pairwise_distance
from fastamp.layers.norm import build_norm
from fastamp.layers.pooling import POOL_LAYER_REGISTRY

__all__ = ["CLS_LAYER_REGISTRY", "POOL_LAYER_REGISTRY", "build_norm", "pairwise_distance"]
