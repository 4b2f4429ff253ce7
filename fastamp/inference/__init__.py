"""What a trained model is used for: features, comparison, search, export."""

from fastamp.inference.predictor import Predictor

__all__ = ["Predictor"]
