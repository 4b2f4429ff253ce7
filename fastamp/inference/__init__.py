"""Use of trained models: features, comparison, search and export."""

from fastamp.inference.predictor import Predictor

__all__ = ["Predictor"]
