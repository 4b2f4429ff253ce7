"""Config files of FastReID v0.1.1 and v1.0.0, read from the reference data."""

import json
from pathlib import Path

import yaml

FILES = json.loads((Path(__file__).parents[1] / "reference" / "fastreid_old_configs.json").read_text())


def write(root):
    """Write the files of each release to ``root/<release>/configs/...``, and return ``root``."""
    for name, mapping in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    return root
