"""Register the components of PartialReID and declare its config keys."""

from partialreid import dsr_evaluation, dsr_head, partial_dataset, partialbaseline  # noqa: F401  register components

KEYS = (*dsr_evaluation.KEYS, *partial_dataset.KEYS)
