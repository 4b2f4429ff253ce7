"""Register the components of FastRetri and declare its config keys."""

from fastretri import datasets, retri_evaluator  # noqa: F401  register components

KEYS = retri_evaluator.KEYS
