"""FastReID's ``DATASET_REGISTRY``, and the classes of the registered datasets by name."""

from typing import Any

from fastamp.data.datasets import DATASET_REGISTRY as _CORE
from fastamp.fastreid.data.datasets.bases import with_methods
from fastamp.utils.registry import Registry


class _DatasetRegistry(Registry):
    """The registry of ``fastamp.data``, from which all classes come with FastReID's methods."""

    def get(self, name: str) -> Any:
        """Return the class registered under ``name``; see ``with_methods``."""
        return with_methods(super().get(name))


DATASET_REGISTRY = _DatasetRegistry(_CORE.kind, _CORE._components, replaces_built_in=True)  # noqa: SLF001

__all__ = ["DATASET_REGISTRY", *sorted(DATASET_REGISTRY._components)]  # noqa: SLF001


def __getattr__(name: str) -> Any:
    if name in DATASET_REGISTRY:
        return DATASET_REGISTRY.get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
