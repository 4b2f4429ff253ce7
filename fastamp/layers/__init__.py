"""Layers for pooling, normalization, attention and classification, and distances between features."""

from fastamp.layers.attention import NonLocal, SELayer, dot_product_attention
from fastamp.layers.classifier import CLS_LAYER_REGISTRY
from fastamp.layers.distance import pairwise_distance
from fastamp.layers.drop_path import DropPath
from fastamp.layers.mixstyle import MixStyle
from fastamp.layers.norm import IBN, build_norm
from fastamp.layers.partial_fc import PartialFC, PartialLogits
from fastamp.layers.pooling import POOL_LAYER_REGISTRY, pooled_width
from fastamp.layers.selective_scan import selective_scan

__all__ = [
    "CLS_LAYER_REGISTRY",
    "IBN",
    "POOL_LAYER_REGISTRY",
    "DropPath",
    "MixStyle",
    "NonLocal",
    "PartialFC",
    "PartialLogits",
    "SELayer",
    "build_norm",
    "dot_product_attention",
    "pairwise_distance",
    "pooled_width",
    "selective_scan",
]
