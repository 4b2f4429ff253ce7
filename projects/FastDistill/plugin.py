"""Register the components of FastDistill and declare its config keys."""

from fastdistill import distiller_overhaul, resnet_distill  # noqa: F401  register components

KEYS = distiller_overhaul.KEYS
