"""Register the components of Unsupervised and declare its config keys."""

from unsupervised import cluster_contrast, head, sampler, trainer  # noqa: F401  register components

KEYS = (*cluster_contrast.KEYS, *sampler.KEYS, *trainer.KEYS)
