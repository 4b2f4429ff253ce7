"""fastamp: re-identification training and evaluation with mixed precision that cannot fail silently."""

__version__ = "0.1.0"
