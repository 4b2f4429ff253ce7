#!/usr/bin/env python
"""Soak test: kill and resume a training run repeatedly, and compare the result with an undisturbed run.

soak.py --config-file configs/Demo/quickstart.yml [--kills 30] [KEY VALUE ...]: the first run is undisturbed. The second
run is killed at random moments (SIGKILL, including its data-loading processes) and resumed. After a third of the kills,
the newest checkpoint is truncated; after two thirds, the disk is full until the training exits with an error. The exit
code is 0 if both runs end with bit-identical weights, optimizer and random state, and with the same iterations in
metrics.json.

If the file system of OUTPUT_DIR has less than 4 GiB of free space (e.g. a tmpfs), a file fills the disk. Otherwise, a
limit on the file size simulates a full disk.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fastamp.checkpoint import read_checkpoint
from fastamp.config import read_config
from fastamp.engine import run_command_line
from fastamp.utils.errors import ConfigError, WeightsError
from fastamp.utils.files import ignore_closed_stdout
from fastamp.utils.progress import format_duration

TRAIN = Path(__file__).with_name("train_net.py")
TRAINING = "training from iteration"
LARGEST_BALLAST = 4 * 2**30


class Run:
    """Training that is repeatedly started in the same folder.

    Args:
        folder: OUTPUT_DIR of the training.
        words: command-line arguments without ``--resume`` and OUTPUT_DIR.
        console: file for the output of the training, on another file system than ``folder``.
    """

    def __init__(self, folder: Path, words: list[str], console: Path) -> None:
        self.folder = folder
        self.words = words
        self.console = console

    def start(self, *, largest_file: int | None = None) -> subprocess.Popen[bytes]:
        """Start or resume the training, with files of at most ``largest_file`` bytes."""

        def limit() -> None:
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        command = [sys.executable, str(TRAIN), "--resume", *self.words, "OUTPUT_DIR", str(self.folder)]
        with self.console.open("wb") as console:
            return subprocess.Popen(
                command, stdout=console, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limit
            )

    def output(self) -> str:
        """Return the output of the last started process."""
        return self.console.read_text(errors="replace")

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the training has ended.

        Raises:
            ConfigError: if the exit code is not 0.
        """
        if process.wait():
            raise ConfigError(f"the training failed with exit code {process.returncode}:\n{self.output()[-3000:]}")

    def kill(self, process: subprocess.Popen[bytes], after: float, *, starting: bool) -> str:
        """Kill the training ``after`` seconds after its start (if ``starting``) or after its first step.

        Returns:
            Activity of the training when it was killed; ``"ended"`` if the training had already ended.
        """
        while not starting and TRAINING not in self.output():
            if process.poll() is not None:
                return "ended"
            time.sleep(0.02)
        deadline = time.monotonic() + after
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return "ended"
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output = self.output()
        if TRAINING not in output:
            return "starting"
        if list(self.folder.glob(".*.tmp")):
            return "writing a file"
        return "evaluating" if "evaluating on" in output.rpartition(" iter ")[2] else "training"

    def newest(self) -> Path | None:
        """Return the path in ``last_checkpoint``, or None if there is no checkpoint."""
        pointer = self.folder / "last_checkpoint"
        return self.folder / pointer.read_text().strip() if pointer.exists() else None

    def newest_time(self) -> int:
        """Return the modification time of the newest checkpoint in ns; 0 if there is none."""
        path = self.newest()
        return path.stat().st_mtime_ns if path and path.exists() else 0

    def is_loadable(self) -> bool:
        """Return True if the newest checkpoint exists and can be loaded."""
        path = self.newest()
        try:
            return path is not None and bool(read_checkpoint(path))
        except WeightsError:
            return False

    def truncate(self) -> str:
        """Truncate the newest checkpoint to half of its size; return its name."""
        path = self.newest()
        os.truncate(path, path.stat().st_size // 2)
        return path.name

    def fill_disk(self) -> str:
        """Fill the disk, resume training, and check that it fails with a user error.

        Returns:
            Description of how the disk was filled.

        Raises:
            ConfigError: if the exit code is not 2, a traceback was printed, or the newest checkpoint cannot be loaded.
        """
        free = shutil.disk_usage(self.folder).free
        ballast = self.folder.with_name("ballast")
        if free < LARGEST_BALLAST:
            how = f"{free / 2**20:.0f} MiB of free space filled"
            with ballast.open("wb") as file:
                try:
                    while True:
                        file.write(bytes(2**16))
                        file.flush()
                except OSError:
                    pass
            process = self.start()
        else:
            largest = self.newest().stat().st_size // 2
            how = f"files of at most {largest / 2**20:.1f} MiB"
            process = self.start(largest_file=largest)
        try:
            code = process.wait()
        finally:
            ballast.unlink(missing_ok=True)
        output = self.output()
        if code != 2 or "Traceback" in output or not self.is_loadable():
            state = "loadable" if self.is_loadable() else "damaged"
            raise ConfigError(
                f"with a full disk, expected exit code 2 and a loadable checkpoint; got exit code {code}, and the "
                f"newest checkpoint is {state}:\n"
                f"{output[-3000:]}"
            )
        return how


def differences(one: Path, other: Path) -> list[str]:
    """List the differences between the final checkpoints and metrics of two runs."""
    first, second = (read_checkpoint(folder / "model_final.pth") for folder in (one, other))
    differing = list(_differing("", first, second))
    lines = [[json.loads(line) for line in (folder / "metrics.json").open()] for folder in (one, other)]
    if [line["iteration"] for line in lines[0]] != [line["iteration"] for line in lines[1]]:
        differing.append("iterations in metrics.json")
    return differing


def _differing(path: str, one: Any, other: Any) -> Any:
    """Yield the paths at which two nested values differ; the config is skipped, because it contains the folder."""
    if isinstance(one, torch.Tensor):
        if not torch.equal(one, other):
            yield path
    elif isinstance(one, dict):
        for key in one.keys() | other.keys():
            if (path, key) != ("", "config"):
                yield from _differing(f"{path}.{key}", one.get(key), other.get(key))
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from _differing(f"{path}.{number}", first, second)
    elif one != other:
        yield path


def soak(args: argparse.Namespace, consoles: Path) -> bool:
    """Run both trainings; return True if all planned failures occurred and the results are identical."""
    words = ["--config-file", args.config_file, *args.opts]
    cfg = read_config(args.config_file, args.opts)
    if args.kills < 3:
        raise ConfigError(f"--kills must be at least 3, got {args.kills}.\n  fix: set --kills to 3 or more")
    folder = Path(cfg.OUTPUT_DIR).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"OUTPUT_DIR {folder} is not empty.\n  fix: choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    undisturbed, disturbed = (Run(folder / name, words, consoles / name) for name in ("undisturbed", "disturbed"))
    began = time.monotonic()
    undisturbed.wait(undisturbed.start())
    duration = time.monotonic() - began
    print(f"undisturbed run: {format_duration(duration)}", flush=True)
    rng = random.Random(args.seed)
    # Each kill loses half of the interval on average; with this bound the last kill comes before the end.
    longest = 1.5 * duration / args.kills
    moments: Counter[str] = Counter()
    truncated = full = ""
    began = time.monotonic()
    while moments.total() < args.kills:
        starting = rng.random() < 0.1
        before = disturbed.newest_time()
        activity = disturbed.kill(disturbed.start(), rng.uniform(0, 5 if starting else longest), starting=starting)
        if activity == "ended":
            break
        moments[activity] += 1
        if disturbed.newest_time() == before and not starting:
            longest *= 1.2  # no checkpoint was written: allow more time
        left = format_duration((time.monotonic() - began) / moments.total() * (args.kills - moments.total()))
        print(f"kill {moments.total()} of {args.kills}, while {activity}; about {left} left", flush=True)
        if not truncated and 3 * moments.total() >= args.kills and disturbed.is_loadable():
            truncated = disturbed.truncate()
            print(f"truncated {truncated}", flush=True)
        if not full and 3 * moments.total() >= 2 * args.kills and disturbed.is_loadable():
            full = disturbed.fill_disk()
            print(
                f"full disk ({full}): the training exited with an error; the newest checkpoint is loadable", flush=True
            )
    disturbed.wait(disturbed.start())
    lines = differences(undisturbed.folder, disturbed.folder)
    print(", ".join(f"{count} while {activity}" for activity, count in moments.most_common()))
    print(f"{moments.total()} kills; truncated: {truncated or 'nothing'}; full disk: {full or 'never'}")
    if lines:
        print(f"FAILED: {len(lines)} values differ from the undisturbed run, e.g. {', '.join(lines[:5])}")
    else:
        print("passed: final weights, optimizer and random states are bit-identical to the undisturbed run")
    return not lines and moments.total() == args.kills and bool(truncated and full)


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="YAML config file")
    parser.add_argument("--kills", type=int, default=30, help="number of kills (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments (default: %(default)s)")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys and their values")
    args = parser.parse_args(argv)
    same: list[bool] = []
    with tempfile.TemporaryDirectory() as consoles:
        return run_command_line(lambda: same.append(soak(args, Path(consoles)))) or int(not all(same))


if __name__ == "__main__":
    with ignore_closed_stdout():
        sys.exit(cli())
