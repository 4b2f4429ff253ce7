"""fastamp: re-identification training and evaluation with verified mixed precision."""

from typing import Any

from fastamp.utils.version import __version__

__all__ = ["Predictor", "__version__", "from_pretrained"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import ``Predictor`` and ``from_pretrained`` on first access, so that ``import fastamp`` is fast."""
    if name == "Predictor":
        from fastamp.inference import Predictor

        return Predictor
    if name == "from_pretrained":
        from fastamp.inference.hub import from_pretrained

        return from_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
