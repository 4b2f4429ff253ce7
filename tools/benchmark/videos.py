#!/usr/bin/env python
"""Compare PyAV, with which fastamp reads videos, with the video decoder of torchcodec.

Both decode generated H.264 videos to RGB frames in turns: all frames, and each 25th frame. torchcodec needs the shared
libraries of FFmpeg. Print frames/s, the median of the ratios to fastamp in each turn for the elapsed time and for the
time of all cores, and the largest difference of the pixels from fastamp's.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image
from tabulate import tabulate
from torchcodec.decoders import VideoDecoder

from fastamp.tracking.frames import Frames, import_av

SIZES = ((1280, 720), (1920, 1080))
EVERY = 25
FASTAMP = "fastamp (PyAV)"
Read = Callable[[Path, list[int] | None], Iterator[np.ndarray]]


def write(path: Path, width: int, height: int, frames: int) -> None:
    """Write a video of noisy colors that move."""
    av, random = import_av("writing a video"), np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (height // 30, width // 30, 3), dtype=np.uint8))
    scene = np.asarray(coarse.resize((width, height)), dtype=np.int16)
    with av.open(str(path), "w") as video:
        stream = video.add_stream("libx264", rate=25, width=width, height=height, pix_fmt="yuv420p")
        for number in range(frames):
            noise = random.integers(-6, 7, scene.shape, dtype=np.int16)
            pixels = (np.roll(scene, (number, 3 * number), (0, 1)) + noise).clip(0, 255).astype(np.uint8)
            video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        video.mux(stream.encode())


def with_fastamp(path: Path, needed: list[int] | None) -> Iterator[np.ndarray]:
    """Read frames, numbered from 1, as the command `track` does."""
    return (frame for _, frame in Frames(path).read(needed))


def with_torchcodec(threads: int) -> Read:
    """Return a function that reads frames with torchcodec; 0 threads is FFmpeg's default, one for each core."""

    def read(path: Path, needed: list[int] | None) -> Iterator[np.ndarray]:
        decoder = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=threads)
        if needed is None:
            return (frame.numpy() for frame in decoder)
        return (decoder[number - 1].numpy() for number in needed)

    return read


VARIANTS: dict[str, Read] = {
    FASTAMP: with_fastamp,
    "torchcodec, 1 thread": with_torchcodec(1),
    "torchcodec, a thread for each core": with_torchcodec(0),
}


def compare(path: Path, frames: int, needed: list[int] | None, rounds: int) -> list[list[str]]:
    """Return ``(name, frames/s, ratios, largest difference)`` for each variant."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    order = list(VARIANTS)
    for _ in range(rounds):
        order.append(order.pop(0))
        for name in order:
            read, began = VARIANTS[name], (time.perf_counter(), time.process_time())
            count = sum(1 for _ in read(path, needed))
            seconds[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            assert count == (frames if needed is None else len(needed))
    rows = []
    for name, read in VARIANTS.items():
        turns = np.array(seconds[name])
        ratios = np.median(np.array(seconds[FASTAMP]) / turns, axis=0)
        pairs = zip(with_fastamp(path, needed), read(path, needed), strict=True)
        difference = max(np.abs(a.astype(np.int16) - b).max() for a, b in pairs)
        speed = count / np.median(turns[:, 0])
        rows.append([name, f"{speed:.0f}", *(f"{ratio:.2f}" for ratio in ratios), str(difference)])
    return rows


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=150, help="length of the videos (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for width, height in SIZES:
            path = Path(folder) / f"{height}.mp4"
            write(path, width, height, args.frames)
            assert Frames(path).rate == Fraction(25)
            for needed in (None, list(range(1, args.frames + 1, EVERY))):
                rows = compare(path, args.frames, needed, args.rounds)
                print(f"\n{width}x{height}, {f'each {EVERY}th frame' if needed else 'all frames'}")
                print(
                    tabulate(
                        rows, ["reader", "frames/s", "ratio", "ratio of CPU time", "difference"], tablefmt="github"
                    )
                )


if __name__ == "__main__":
    main()
