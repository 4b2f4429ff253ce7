"""Inference with trained models: feature extraction, image comparison, gallery search and export."""

from fastamp.inference.predictor import Predictor

__all__ = ["Predictor"]
