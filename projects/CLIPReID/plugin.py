"""Register the components of CLIP-ReID and declare its config keys."""

from clipreid import model, schedule, trainer  # noqa: F401  register components

COMMANDS = {"convert-clip": ("clipreid.convert_clip", "convert OpenAI's file of CLIP to a weights file")}
KEYS = (*model.KEYS, *trainer.KEYS)
