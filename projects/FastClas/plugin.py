"""Register the components of FastClas and declare its config keys."""

from fastclas import bee_ant, class_folder, demo, evaluator, output  # noqa: F401  register components

KEYS = class_folder.KEYS
