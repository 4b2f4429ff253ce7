#!/usr/bin/env python
"""Train while being killed at random moments, and compare with a run that nothing disturbed.

soak.py --config-file configs/Demo/quickstart.yml [--kills 30] [KEY VALUE ...]: the first run is undisturbed. The second
is killed (SIGKILL, its data-loading processes too) and resumed again and again; after a third of the kills its newest
checkpoint is cut short, after two thirds its disk is full until it has ended by itself. At the end both must have the
same weights, optimizer and random state, bit for bit, and the same iterations in metrics.json; exit code 0 if so.

The disk is full by a file that takes all of OUTPUT_DIR's file system where that is a small one (less than 4 GiB, e.g. a
tmpfs), else by a limit on the size of files.
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
    """A training that is started again and again in the same folder.

    Args:
        folder: its OUTPUT_DIR.
        words: the command line without ``--resume`` and OUTPUT_DIR.
        console: file for what it prints, which must not be on a disk that is full.
    """

    def __init__(self, folder: Path, words: list[str], console: Path) -> None:
        self.folder = folder
        self.words = words
        self.console = console

    def start(self, *, largest_file: int | None = None) -> subprocess.Popen[bytes]:
        """Start or resume it; its files can be of ``largest_file`` bytes at most."""

        def limit() -> None:
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

        command = [sys.executable, str(TRAIN), "--resume", *self.words, "OUTPUT_DIR", str(self.folder)]
        with self.console.open("wb") as console:
            return subprocess.Popen(
                command, stdout=console, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limit
            )

    def said(self) -> str:
        """Return what the process that was started last has printed."""
        return self.console.read_text(errors="replace")

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the training is at its end.

        Raises:
            ConfigError: it ended otherwise.
        """
        if process.wait():
            raise ConfigError(f"the training ended with exit code {process.returncode}:\n{self.said()[-3000:]}")

    def kill(self, process: subprocess.Popen[bytes], after: float, *, starting: bool) -> str:
        """Kill it some seconds after its start or its first step; return what it was doing, or ``"ended"``."""
        while not starting and TRAINING not in self.said():
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
        said = self.said()
        if TRAINING not in said:
            return "starting"
        if list(self.folder.glob(".*.tmp")):
            return "writing a file"
        return "evaluating" if "evaluating on" in said.rpartition(" iter ")[2] else "training"

    def newest(self) -> Path | None:
        """Return the file that ``last_checkpoint`` names, if there is one yet."""
        pointer = self.folder / "last_checkpoint"
        return self.folder / pointer.read_text().strip() if pointer.exists() else None

    def newest_time(self) -> int:
        """Return when that file was written, 0 when there is none."""
        path = self.newest()
        return path.stat().st_mtime_ns if path and path.exists() else 0

    def is_whole(self) -> bool:
        """Return whether there is a newest checkpoint, and it can be loaded."""
        path = self.newest()
        try:
            return path is not None and bool(read_checkpoint(path))
        except WeightsError:
            return False

    def truncate(self) -> str:
        """Cut the newest checkpoint in half; return its name."""
        path = self.newest()
        os.truncate(path, path.stat().st_size // 2)
        return path.name

    def fill_disk(self) -> str:
        """Let it go on with a full disk until it ends by itself; return how the disk was filled.

        Raises:
            ConfigError: it did not end with exit code 2 and a message, or its newest checkpoint is no whole file.
        """
        free = shutil.disk_usage(self.folder).free
        ballast = self.folder.with_name("ballast")
        if free < LARGEST_BALLAST:
            how = f"all of the {free / 2**20:.0f} MiB that were free taken"
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
        said = self.said()
        if code != 2 or "Traceback" in said or not self.is_whole():
            whole = "whole" if self.is_whole() else "broken"
            raise ConfigError(
                f"with a full disk the training ended with exit code {code}; its newest checkpoint is {whole}:\n"
                f"{said[-3000:]}"
            )
        return how


def differences(one: Path, other: Path) -> list[str]:
    """Return what is not the same in two runs' last checkpoints and metrics."""
    first, second = (read_checkpoint(folder / "model_final.pth") for folder in (one, other))
    found = list(_differing("", first, second))
    lines = [[json.loads(line) for line in (folder / "metrics.json").open()] for folder in (one, other)]
    if [line["iteration"] for line in lines[0]] != [line["iteration"] for line in lines[1]]:
        found.append("the iterations in metrics.json")
    return found


def _differing(place: str, one: Any, other: Any) -> Any:
    """Yield the places where two nested values differ, but for what the config says of the folder."""
    if isinstance(one, torch.Tensor):
        if not torch.equal(one, other):
            yield place
    elif isinstance(one, dict):
        for key in one.keys() | other.keys():
            if (place, key) != ("", "config"):
                yield from _differing(f"{place}.{key}", one.get(key), other.get(key))
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for number, (mine, its) in enumerate(zip(one, other, strict=True)):
            yield from _differing(f"{place}.{number}", mine, its)
    elif one != other:
        yield place


def soak(args: argparse.Namespace, consoles: Path) -> bool:
    """Do both runs; return whether they came out the same."""
    words = ["--config-file", args.config_file, *args.opts]
    cfg = read_config(args.config_file, args.opts)
    if args.kills < 3:
        raise ConfigError(f"--kills is {args.kills}; expected 3 at least")
    folder = Path(cfg.OUTPUT_DIR).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"OUTPUT_DIR {folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    peace, war = (Run(folder / name, words, consoles / name) for name in ("undisturbed", "disturbed"))
    began = time.monotonic()
    peace.wait(peace.start())
    lasted = time.monotonic() - began
    print(f"undisturbed: {format_duration(lasted)}", flush=True)
    dice = random.Random(args.seed)
    # Of a run's time between two kills half is lost, so that the last one comes before the end.
    longest = 1.5 * lasted / args.kills
    moments: Counter[str] = Counter()
    truncated = full = ""
    began = time.monotonic()
    while moments.total() < args.kills:
        starting = dice.random() < 0.1
        before = war.newest_time()
        doing = war.kill(war.start(), dice.uniform(0, 5 if starting else longest), starting=starting)
        if doing == "ended":
            break
        moments[doing] += 1
        if war.newest_time() == before and not starting:
            longest *= 1.2  # it must come as far as its next checkpoint at times
        left = format_duration((time.monotonic() - began) / moments.total() * (args.kills - moments.total()))
        print(f"kill {moments.total()} of {args.kills}, while {doing}; about {left} left", flush=True)
        if not truncated and 3 * moments.total() >= args.kills and war.is_whole():
            truncated = war.truncate()
            print(f"cut {truncated} in half", flush=True)
        if not full and 3 * moments.total() >= 2 * args.kills and war.is_whole():
            full = war.fill_disk()
            print(f"a full disk ({full}): ended with a message, the newest checkpoint is whole", flush=True)
    war.wait(war.start())
    found = differences(peace.folder, war.folder)
    print(", ".join(f"{count} while {doing}" for doing, count in moments.most_common()))
    print(f"{moments.total()} kills survived; truncated: {truncated or 'nothing'}; full disk: {full or 'never'}")
    if found:
        print(f"NOT the same as undisturbed: {len(found)} values differ, e.g. {', '.join(found[:5])}")
    else:
        print("the final weights, optimizer and random states are those of the undisturbed run, bit for bit")
    return not found and moments.total() == args.kills and bool(truncated and full)


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="YAML config file")
    parser.add_argument("--kills", type=int, default=30, help="how many times it is killed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys and their values")
    args = parser.parse_args(argv)
    same: list[bool] = []
    with tempfile.TemporaryDirectory() as consoles:
        return run_command_line(lambda: same.append(soak(args, Path(consoles)))) or int(not all(same))


if __name__ == "__main__":
    with ignore_closed_stdout():
        sys.exit(cli())
