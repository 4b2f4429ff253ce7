"""FastAttr: recognition of pedestrian attributes, alone or together with re-identification."""

from fastattr import attributes, evaluator, loss, model

KEYS = (*attributes.KEYS, *evaluator.KEYS, *loss.KEYS, *model.KEYS)
