"""Register the components of DomainGeneralization and declare its config keys."""

from domaingeneralization import evaluation, graph_sampler, head, matcher, trainer  # noqa: F401  register components

KEYS = (*matcher.KEYS, *head.KEYS, *evaluation.KEYS)
