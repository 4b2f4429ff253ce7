"""Runs that record the behavior of a version; see tests/reference/recorded/README.md."""

import ast
import hashlib
import importlib
import json
import os
import pkgutil
import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import PIL
import tiny
import torch

import fastamp
from fastamp.config import CfgNode, get_cfg
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.engine.command_line import TrainingInterrupted

FILES = Path(__file__).parents[1] / "reference/recorded"
STOP = 8
"""Number of iterations before the interruption, in the second of two epochs with six iterations each."""
COMMON = (
    "SOLVER.MAX_EPOCH",
    "2",
    "TEST.EVAL_PERIOD",
    "1",
    "SOLVER.CHECKPOINT_ITERS",
    "4",
    "SOLVER.CHECKPOINT_KEEP",
    "2",
)
RUNS = {
    "ema": (
        "SOLVER.AMP", "bf16", "SOLVER.EMA.ENABLED", "True", "SOLVER.EMA.WARMUP", "False", "SOLVER.EMA.DECAY", "0.9",
    ),
    "swa": ("SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.START_EPOCH", "0", "SOLVER.SWA.LR_FACTOR", "0.5"),
    # The pre-flight would lower the initial scale; without it the first steps are skipped.
    "fp16": (
        "SOLVER.AMP", "fp16", "SOLVER.AMP.PREFLIGHT", "off", "SOLVER.AMP.INIT_SCALE", "4194304",
        "SOLVER.AMP.GROWTH_INTERVAL", "3",
    ),
    "accumulation": (
        "SOLVER.ACCUM_STEPS", "2", "SOLVER.IMS_PER_BATCH", "8", "MODEL.FREEZE_LAYERS", "backbone.0",
        "SOLVER.FREEZE_ITERS", "10", "SOLVER.CLIP_GRADIENTS", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "global_norm",
        "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "1.0", "MODEL.LOSSES.NAME",
        "('CrossEntropyLoss', 'TripletLoss', 'CenterLoss')", "MODEL.LOSSES.CENTER.LR", "0.3",
    ),
    "moco": ("SOLVER.AMP", "bf16", "MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "40"),
    "distiller": ("MODEL.META_ARCHITECTURE", "Distiller", "KD.EMA.ENABLED", "True", "KD.EMA.MOMENTUM", "0.8"),
}  # fmt: skip
"""Folder of an interrupted run -> its options, in addition to those of ``tiny`` and ``COMMON``."""
TWO_RANKS = (
    "SOLVER.AMP", "bf16", "SOLVER.EMA.ENABLED", "True", "SOLVER.EMA.WARMUP", "False", "SOLVER.MAX_EPOCH", "1",
    "SOLVER.CHECKPOINT_ITERS", "2",
)  # fmt: skip
CRASH = (
    "SOLVER.AMP", "fp16", "SOLVER.AMP.PREFLIGHT", "warn", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "2",
    "SOLVER.IMS_PER_BATCH", "8", "SOLVER.MAX_EPOCH", "1",
)  # fmt: skip
IMAGES = torch.arange(2 * 3 * 64 * 32).reshape(2, 3, 64, 32).remainder(251).to(torch.uint8)

SEARCH = ("--num-trials", "3", "--srch-algo", "random", "--scheduler", "asha", "--max-concurrent", "1", "--seed", "1")
SPACE = "lr: {loguniform: [1e-3, 1e-2]}\n"
PARTS = "import tiny\n"
SEARCH_OPTIONS = ("SOLVER.MAX_EPOCH", "12", "SOLVER.STEPS", "(10,)", "TEST.EVAL_PERIOD", "1", "SOLVER.AMP", "bf16")


class Interrupt(HookBase):
    """Hook that sends SIGTERM to its own process in the middle of an epoch."""

    def before_step(self) -> None:
        if self.trainer.iter == STOP - 1:
            signal.raise_signal(signal.SIGTERM)


class KeepWeights(HookBase):
    """Hook that copies the tensors of the model at the iteration where the interrupted run was saved."""

    def before_step(self) -> None:
        if self.trainer.iter == STOP:
            self.weights = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}


def config(folder: Path, name: str) -> CfgNode:
    """Build the config of one of ``RUNS``."""
    return tiny.tiny_config(folder, *COMMON, *RUNS[name])


def train(cfg: CfgNode, *hooks: HookBase, resume: bool = False) -> None:
    """Train until the end, or until a hook interrupts the run."""
    torch.manual_seed(0)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.trainer.register_hooks(hooks)
    trainer.train()


def interrupt(folder: Path, name: str) -> None:
    """Train one of ``RUNS`` until it is interrupted."""
    try:
        train(config(folder, name), Interrupt())
    except TrainingInterrupted:
        return
    raise AssertionError(f"{name} was not interrupted")


def machine() -> str:
    """Hash the hardware and versions that affect rounding and decoding; equal hashes imply bit-identical results."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.is_file() else [platform.processor()]
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))}) or lines
    facts += [torch.__version__, torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    facts += [numpy.__version__, PIL.__version__, platform.python_version(), os.environ.get("DNNL_MAX_CPU_ISA", "")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def search_arguments(folder: Path) -> list[str]:
    """Write the input files of a FastTune search to the working folder, and return its arguments."""
    Path("space.yml").write_text(SPACE)
    Path("parts.py").write_text(PARTS)
    files = ("--space", "space.yml", "--parts", "parts.py")
    return [*files, *SEARCH, *tiny.tiny_options(folder, *SEARCH_OPTIONS)]


# ---- names and keys


def module_names() -> Iterator[str]:
    """Yield the names of the public modules of the package."""
    yield "fastamp"
    for found in pkgutil.walk_packages(fastamp.__path__, "fastamp."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield found.name


def public_names() -> dict[str, list[str]]:
    """Map each module to the public names that it defines or lists in ``__all__``."""
    names = {}
    for module in module_names():
        imported = importlib.import_module(module)
        found = set(getattr(imported, "__all__", ()))
        for node in ast.parse(Path(imported.__file__).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {each.id for each in targets if isinstance(each, ast.Name)}
        names[module] = sorted(name for name in found - {"logger"} if not name.startswith("_"))
    return names


def commands() -> dict[str, list[str]]:
    """List the commands of the console script and the scripts in ``tools``."""
    from fastamp.cli import COMMANDS

    tools = Path(__file__).parents[2] / "tools"
    return {"fastamp": sorted(COMMANDS), "tools": sorted(path.name for path in tools.glob("*.py"))}


def keys() -> dict[str, Any]:
    """Map each config key to its type and default, and each alias to its key."""
    from fastamp.config.defaults import RENAMED, SHORTHANDS
    from fastamp.config.releases import current_names

    found = {
        key.path: [type(value).__name__, dict(value) if isinstance(value, dict) else value]
        for key, value in get_cfg().keys_below()
    }
    spellings = {"renamed": dict(RENAMED), "shorthands": dict(SHORTHANDS), "old releases": current_names()}
    return json.loads(json.dumps({"keys": found, **spellings}))


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each tensor and plain value in nested dicts and lists; paths use slashes."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from flat(each, f"{name}/{key}" if name else str(key))
    else:
        yield name, value
