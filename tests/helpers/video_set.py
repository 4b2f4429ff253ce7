"""Tiny video dataset: a CSV file with the column tracklet."""

import numpy as np
from PIL import Image


def write_video(folder, *, train=6, test=4, frames=(5, 1, 7), cameras=2, size=(32, 16), header="tracklet"):
    """Write images and ``video.csv`` to ``folder``, and return the file.

    Each identity has one tracklet per camera and entry of ``frames`` in training, and one tracklet per camera in the
    test set, with ``frames[0]`` frames: camera 0 is the query set, the others are the gallery.
    """
    rng = np.random.default_rng(0)
    lines = [f"path,pid,camid,split,{header}"]
    for pid in range(train + test):
        color = rng.integers(256, size=3)
        for camera in range(cameras):
            for number, count in enumerate(frames if pid < train else frames[:1]):
                split = "train" if pid < train else "gallery" if camera else "query"
                for frame in range(count):
                    name = f"{pid}_{camera}_{number}_{frame}.png"
                    noise = rng.integers(-40, 40, (*size, 3))
                    Image.fromarray((color + noise).clip(0, 255).astype(np.uint8)).save(folder / name)
                    lines.append(f"{name},{pid},{camera},{split},{pid}_{camera}_{number}")
    file = folder / "video.csv"
    file.write_text("\n".join(lines) + "\n")
    return file
