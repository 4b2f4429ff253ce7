"""FastReID's launcher."""

from fastamp.engine.launch import launch

__all__ = ["launch"]
