"""Register the components of CLIP-ReID and declare its config keys."""

from clipreid import model, schedule, trainer  # noqa: F401  register components

KEYS = (*model.KEYS, *trainer.KEYS)
