"""FastAttr: recognition of pedestrian attributes, with and without re-identification."""

from fastattr import attributes, datasets, demo, evaluator, loss, model, output  # noqa: F401  register their components

SEARCH_TERMS = {
    "attributes": (
        "fastattr.search_term:AttributeTerm",
        'attributes of the images, separated by commas, e.g. "red upper, hat" (models of FastAttr)',
    )
}
KEYS = (*attributes.KEYS, *evaluator.KEYS, *loss.KEYS)
