"""Change a gallery until the process is killed; print each change when it is acknowledged.

usage: gallery_writer.py FOLDER SEED
"""

import sys

import numpy as np

from fastamp.retrieval.gallery_store import Item
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.mutable_gallery import MutableGallery

WIDTH = 16


def feature(item_id: str, version: int) -> np.ndarray:
    """Return the feature that belongs to a version of an item."""
    number = int(item_id.removeprefix("item"))
    return np.random.default_rng([number, version]).standard_normal(WIDTH).astype(np.float32)


def main(folder: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    gallery = MutableGallery(folder, ModelId(WIDTH, "cosine", "hash", "checkpoint"))
    versions = {item.id: int(item.name) for item in gallery.items}
    count = 1 + max((int(item.removeprefix("item")) for item in versions), default=-1)
    while True:
        action = random.choice(["add", "add", "update", "remove"]) if len(versions) > 8 else "add"
        size = int(random.integers(1, 6))
        if action == "add":
            changed = {f"item{number}": 0 for number in range(count, count + size)}
            count += size
        else:
            chosen = random.choice(sorted(versions), size, replace=False).tolist()
            changed = {item: versions[item] + 1 for item in chosen}
        words = [f"{item}:{-1 if action == 'remove' else version}" for item, version in changed.items()]
        print("start", *words, flush=True)
        if action == "remove":
            gallery.remove(list(changed))
            versions = {item: version for item, version in versions.items() if item not in changed}
        else:
            items = [Item(item, str(version), camera="a" * 2000) for item, version in changed.items()]
            features = np.stack([feature(item, version) for item, version in changed.items()])
            (gallery.add if action == "add" else gallery.update)(items, features)
            versions |= changed
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
