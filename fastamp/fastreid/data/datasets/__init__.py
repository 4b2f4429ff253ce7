"""FastReID's datasets."""

import importlib

from fastamp.fastreid.data.datasets import bases, registered
from fastamp.fastreid.data.datasets.registered import *  # noqa: F403

__all__ = ["bases", *registered.__all__]

# Otherwise, the import of these modules would replace the classes of the same name.
for _name in ("AirportALERT", "iLIDS"):
    globals()[_name] = getattr(importlib.import_module(f"{__name__}.{_name}"), _name)
