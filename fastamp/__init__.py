"""fastamp: re-identification training and evaluation with mixed precision that cannot fail silently."""

from typing import Any

from fastamp.utils import moved

__version__ = "0.1.0"
__all__ = ["Predictor", "__version__"]

moved.install()


def __getattr__(name: str) -> Any:
    """Import ``Predictor`` when it is first asked for, since ``import fastamp`` alone is to be fast."""
    if name == "Predictor":
        from fastamp.inference import Predictor

        return Predictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
