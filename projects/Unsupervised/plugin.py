"""Register the components of Unsupervised and declare its config keys."""

from unsupervised import (  # noqa: F401  register components
    camera_proxies,
    cluster_contrast,
    domain_norm,
    head,
    hybrid_memory,
    memory,
    pseudo_labels,
    sampler,
    trainer,
)

KEYS = (
    *memory.KEYS,
    *cluster_contrast.KEYS,
    *camera_proxies.KEYS,
    *sampler.KEYS,
    *pseudo_labels.KEYS,
    *trainer.KEYS,
)
