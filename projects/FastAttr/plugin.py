"""FastAttr: recognition of pedestrian attributes, with and without re-identification."""

from fastattr import attributes, datasets, demo, evaluator, loss, model  # noqa: F401  register their components

KEYS = (*attributes.KEYS, *evaluator.KEYS, *loss.KEYS)
