#!/usr/bin/env python
"""Measure training, inference and ranking on a GPU, and run the CUDA tests; ``--part`` selects a subset.

Each part takes about 8 minutes on one H200 with 16 cores. Results are written to one JSON file after each measurement;
a second run continues after the last finished measurement. Training steps of fastamp and of a bare PyTorch loop with
the same model alternate in blocks, so that both run at the same clock rate. ``--toy`` runs all measurements with tiny
networks and images on any device.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ranking import SIZES, generate, load
from tabulate import tabulate

from fastamp.amp import PrecisionPolicy, resolve_device
from fastamp.amp.checks import FIRST_STEPS
from fastamp.amp.step import StepVerdict
from fastamp.config import get_cfg
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.demo import DEMO_VERSION, generate_demo
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine import TRAINER_REGISTRY
from fastamp.evaluation import Protocol, compute_metrics
from fastamp.evaluation.evaluator import extract_features
from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import matrix_product
from fastamp.modeling import build_model
from fastamp.solver import build_optimizer
from fastamp.utils.env import keep_freed_memory

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ("tests", "train", "infer", "rank")
PRECISIONS = ("float32", "tf32", "bf16", "fp16")
NUM_CLASSES = 751

Figures = dict[str, float]


class Network(NamedTuple):
    """Recipe of a network, and the options that replace its backbone."""

    recipe: str
    options: tuple[str, ...] = ()


NETWORKS = {
    "R50": Network("bagtricks_R50.yml"),
    "R18": Network("bagtricks_R50.yml", ("MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512")),
    "OSNet x1.0": Network(
        "bagtricks_R50.yml",
        (
            "MODEL.BACKBONE.NAME",
            "build_osnet_backbone",
            "MODEL.BACKBONE.DEPTH",
            "x1_0",
            "MODEL.BACKBONE.FEAT_DIM",
            "512",
        ),
    ),
    "ViT-B": Network("vit_base.yml"),
    "SBS R101-ibn": Network("sbs_R101-ibn.yml"),
}
TINY = Network("bagtricks_R50.yml", ("MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512"))


class Setup(NamedTuple):
    """Device and sizes of a run.

    Attributes:
        device: device to measure.
        toy: use tiny networks, images and test sets.
        seconds: duration of one measurement.
    """

    device: torch.device
    toy: bool
    seconds: float

    def synchronize(self) -> None:
        """Wait for all kernels on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def config(self, network: str, batch: int, precision: str, *opts: str) -> Any:
        """Build the config of a network with random weights at 256x128, or 64x32 in a toy run."""
        chosen = TINY if self.toy else NETWORKS[network]
        cfg = get_cfg()
        cfg.merge_from_file(str(REPOSITORY / "configs/Market1501" / chosen.recipe))
        size = "(64, 32)" if self.toy else "(256, 128)"
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, "float32")
        cfg.merge_from_list([
            "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.DEVICE", str(self.device), "MODEL.HEADS.NUM_CLASSES",
            str(NUM_CLASSES), "INPUT.SIZE_TRAIN", size, "INPUT.SIZE_TEST", size, "SOLVER.IMS_PER_BATCH", str(batch),
            "TEST.IMS_PER_BATCH", str(batch), "SOLVER.AMP.ENABLED", str(dtype != "float32"), "SOLVER.AMP.PREFLIGHT",
            "off", "SOLVER.TF32", str(precision == "tf32"), "SOLVER.OPT", "Adam", *chosen.options, *opts,
        ])  # fmt: skip
        if dtype != "float32":
            cfg.merge_from_list(["SOLVER.AMP.DTYPE", dtype])
        return cfg

    def batch_size(self, batch: int) -> int:
        """Return ``batch``, or at most 8 in a toy run."""
        return min(batch, 8) if self.toy else batch


class RepeatedBatch:
    """Yield one random batch that is already on the device."""

    def __init__(self, cfg: Any, device: torch.device) -> None:
        count, size = cfg.SOLVER.IMS_PER_BATCH, tuple(cfg.INPUT.SIZE_TRAIN)
        self.batch = {
            "images": torch.randint(256, (count, 3, *size), dtype=torch.uint8).to(device),
            "targets": (torch.arange(count) // 4).to(device),
            "camids": (torch.arange(count) % 4).to(device),
            "viewids": torch.zeros(count, dtype=torch.int64, device=device),
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield dict(self.batch)


# ---- training


def fastamp_step(cfg: Any, loader: Any, *, read: bool = True) -> Callable[[], None]:
    """Build a function that runs one iteration of fastamp's trainer.

    Args:
        cfg: config.
        loader: training batches.
        read: if False, the host uses a constant instead of reading the result of the finiteness check from the device.
    """
    torch.manual_seed(0)
    model = build_model(cfg)
    trainer = TRAINER_REGISTRY.build(
        "AMPTrainer" if cfg.SOLVER.AMP.ENABLED else "SimpleTrainer",
        cfg,
        model=model,
        data_loader=loader,
        optimizers=[build_optimizer(cfg, model)],
    )
    model.train()
    if not read:
        for _ in range(FIRST_STEPS + 1):  # these steps have additional checks, which end when the host reads them
            trainer.run_step()
            trainer.iter += 1
        verdict = StepVerdict(True, 1.0, trainer.step.loss_scale)

        def check_finite(gradients: Any) -> StepVerdict:
            trainer.step.verdict = verdict
            trainer.step._losses_finite = None
            return verdict

        trainer.step.check_finite = check_finite

    def step() -> None:
        trainer.run_step()
        trainer.iter += 1  # only the first iteration checks that low precision is used

    return step


def bare_step(cfg: Any, loader: Any) -> Callable[[], None]:
    """Build a function that runs one step of a plain loop: autocast, channels_last, fused Adam, GradScaler in fp16."""
    torch.manual_seed(0)
    model = build_model(cfg).train()
    policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3.5e-4, weight_decay=5e-4, fused=True)
    scaler = torch.amp.GradScaler(policy.device_type, enabled=policy.needs_loss_scaling)
    batches = iter(loader)

    def step() -> None:
        with policy.autocast():
            loss = sum(model(next(batches)).values())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def time_blocks(setup: Setup, steps: list[Callable[[], None]], rounds: int = 5) -> list[float]:
    """Measure the seconds per step of several functions, in alternating blocks of steps.

    Args:
        setup: device and duration.
        steps: functions to compare.
        rounds: number of blocks per function.

    Returns:
        Median seconds per step over the blocks, for each function.
    """
    estimates = []
    for step in steps:
        for _ in range(2 if setup.toy else 5):
            step()
        setup.synchronize()
        start = time.perf_counter()
        step()
        setup.synchronize()
        estimates.append(time.perf_counter() - start)
    block = max(1, int(setup.seconds / rounds / max(estimates)))
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for which in range(len(steps)) if number % 2 else reversed(range(len(steps))):
            setup.synchronize()
            start = time.perf_counter()
            for _ in range(block):
                steps[which]()
            setup.synchronize()
            times[which].append((time.perf_counter() - start) / block)
    return [statistics.median(each) for each in times]


def count_reads(step: Callable[[], None], steps: int = 4) -> float:
    """Return the mean number of operations per step that make the host wait for a CUDA device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught) / steps


def device_figures(setup: Setup, step: Callable[[], None]) -> Figures:
    """Measure the peak memory in MiB and the device reads of a step; empty for devices other than CUDA."""
    if setup.device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats(setup.device)
    step()
    memory = torch.cuda.max_memory_allocated(setup.device) / 2**20
    return {"MiB": memory, "reads/step": count_reads(step)}


def train_step(network: str, batch: int, precision: str, *opts: str) -> Callable[[Setup], Figures]:
    """Build the comparison of a fastamp step with a step of a bare loop on the same network."""

    def measure(setup: Setup) -> Figures:
        cfg = setup.config(network, setup.batch_size(batch), precision, *opts)
        loader = RepeatedBatch(cfg, setup.device)
        ours = fastamp_step(cfg, loader)
        ours()
        on_device = device_figures(setup, ours)
        bare = bare_step(cfg, loader)
        seconds, bare_seconds = time_blocks(setup, [ours, bare])
        images = cfg.SOLVER.IMS_PER_BATCH
        return {
            "images/s": images / seconds,
            "bare images/s": images / bare_seconds,
            "of bare": bare_seconds / seconds,
            **on_device,
        }

    return measure


def device_read(network: str) -> Callable[[Setup], Figures]:
    """Build a measurement of how much the only device read per step increases the step time."""

    def measure(setup: Setup) -> Figures:
        cfg = setup.config(network, setup.batch_size(64), "bf16")
        loader = RepeatedBatch(cfg, setup.device)
        with_read, without = (fastamp_step(cfg, loader, read=read) for read in (True, False))
        seconds, seconds_without = time_blocks(setup, [with_read, without])
        images = cfg.SOLVER.IMS_PER_BATCH
        return {"images/s": images / seconds, "cost of the read": seconds / seconds_without - 1}

    return measure


@contextmanager
def demo_files(setup: Setup) -> Iterator[None]:
    """Generate the Demo dataset as JPEG files with the network's image size."""
    identities = 16 if setup.toy else 256
    size = (64, 32) if setup.toy else (256, 128)
    before = os.environ.get("FASTAMP_DATASETS")
    with tempfile.TemporaryDirectory() as folder:
        generate_demo(
            Path(folder) / f"fastamp-demo-v{DEMO_VERSION}",
            train_identities=identities,
            test_identities=identities // 4,
            images_per_identity=6 if setup.toy else 10,
            distractors=6,
            cameras=3,
            image_size=size,
            workers=os.cpu_count() or 1,
        )
        os.environ["FASTAMP_DATASETS"] = folder
        try:
            yield
        finally:
            os.environ.pop("FASTAMP_DATASETS")
            if before is not None:
                os.environ["FASTAMP_DATASETS"] = before


def train_from_files(setup: Setup) -> Figures:
    """Compare training steps that read JPEG files with training steps on a batch in memory."""
    workers = "2" if setup.toy else str(max(1, (os.cpu_count() or 2) - 2))
    opts = ("DATASETS.NAMES", "('Demo',)", "DATALOADER.NUM_WORKERS", workers, "INPUT.FLIP.ENABLED", "True")
    cfg = setup.config("R50", setup.batch_size(256), "bf16", *opts)
    with demo_files(setup):
        loader = build_reid_train_loader(cfg)
        cfg.merge_from_list(["MODEL.HEADS.NUM_CLASSES", str(loader.dataset.num_classes)])
        from_files, from_memory = fastamp_step(cfg, loader), fastamp_step(cfg, RepeatedBatch(cfg, setup.device))
        seconds, compute = time_blocks(setup, [from_files, from_memory])
    images = cfg.SOLVER.IMS_PER_BATCH
    return {"images/s": images / seconds, "of compute": compute / seconds}


# ---- inference


def extraction(network: str, precision: str, *opts: str) -> Callable[[Setup], Figures]:
    """Build the comparison of feature extraction from a batch in memory with extraction in uncompiled float32."""

    def measure(setup: Setup) -> Figures:
        batch = setup.batch_size(256)
        configs = [setup.config(network, batch, "float32"), setup.config(network, batch, precision, *opts)]
        steps = []
        for cfg in configs:
            model = build_model(cfg).eval()
            policy = PrecisionPolicy.from_config(cfg, setup.device)
            images = RepeatedBatch(cfg, setup.device).batch

            @torch.inference_mode()
            def step(model: Any = model, images: Any = images, policy: PrecisionPolicy = policy) -> None:
                extract_features(model, images, policy)

            steps.append(step)
        float32, seconds = time_blocks(setup, steps)
        return {"images/s": batch / seconds, "x float32": float32 / seconds}

    return measure


def extract_from_files(setup: Setup) -> Figures:
    """Measure feature extraction from JPEG files."""
    workers = "2" if setup.toy else str(max(1, (os.cpu_count() or 2) - 2))
    cfg = setup.config("R50", setup.batch_size(256), "bf16", "TEST.NUM_WORKERS", workers)
    model, policy = build_model(cfg).eval(), PrecisionPolicy.from_config(cfg, setup.device)
    with demo_files(setup), torch.inference_mode():
        loader, _ = build_reid_test_loader(cfg, "Demo")
        images, start = 0, time.perf_counter()
        for batch in loader:
            images += len(extract_features(model, batch, policy))
        setup.synchronize()
    return {"images/s": images / (time.perf_counter() - start)}


# ---- ranking


def ranking(size: str, *, re_ranking: bool) -> Callable[[Setup], Figures]:
    """Build the comparison of evaluation with its matrix product, or of re-ranking with its neighbor search."""

    def measure(setup: Setup) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            generate(SIZES["small" if setup.toy else size], Path(folder))
            queries, gallery, identities = load(Path(folder))
        queries, gallery = queries.to(setup.device), gallery.to(setup.device)
        protocol = Protocol(re_ranking=ReRanking()) if re_ranking else Protocol()
        out = torch.empty(min(1024, len(queries)), len(gallery), device=setup.device)

        def least() -> None:
            if re_ranking:
                both = torch.nn.functional.normalize(torch.cat((queries, gallery)), dim=1)
                nearest_neighbors(both, both, ReRanking().num_neighbors)
            else:
                for block in queries.split(1024):
                    matrix_product(block, gallery, out[: len(block)])

        def whole() -> None:
            compute_metrics(queries, gallery, identities, protocol)

        seconds = []
        for function in (least, whole):
            function()
            setup.synchronize()
            start = time.perf_counter()
            function()
            setup.synchronize()
            seconds.append(time.perf_counter() - start)
        return {"s": seconds[1], "neighbor search s" if re_ranking else "product s": seconds[0],
                "ratio": seconds[1] / seconds[0]}  # fmt: skip

    return measure


def run_tests(setup: Setup) -> Figures:
    """Run the tests that need CUDA, and count their outcomes."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "cuda", "-p", "no:cacheprovider"]
    command += ["tests/amp/test_cuda.py"] if setup.toy else []
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    print(result.stdout[-4000:], file=sys.stderr)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", result.stdout)}
    return {name: counts.get(name, 0) for name in ("passed", "failed", "skipped", "error")}


def measurements(part: str) -> dict[str, Callable[[Setup], Figures]]:
    """Return the measurements of a part: name -> function that runs the measurement."""
    if part == "tests":
        return {"CUDA tests": run_tests}
    if part == "train":
        steps = {
            f"R50 batch {batch} {precision}": train_step("R50", batch, precision)
            for batch in (64, 256)
            for precision in PRECISIONS
        }
        steps["R50 batch 256 bf16 compiled"] = train_step("R50", 256, "bf16", "MODEL.COMPILE", "inductor")
        steps |= {
            f"{name} batch 64 bf16": train_step(name, 64, "bf16") for name in NETWORKS if name[:2] not in ("R5", "R1")
        }
        steps |= {f"{name} batch 64 bf16, the read": device_read(name) for name in ("R50", "R18")}
        return steps | {"R50 batch 256 bf16 from files": train_from_files}
    if part == "infer":
        return {
            "R50 bf16": extraction("R50", "bf16"),
            "R50 bf16 compiled": extraction("R50", "bf16", "MODEL.COMPILE", "inductor"),
            "ViT-B bf16": extraction("ViT-B", "bf16"),
            "R50 bf16 from files": extract_from_files,
        }
    return {
        f"{size} {'re-ranking' if re_ranking else 'ranking'}": ranking(size, re_ranking=re_ranking)
        for size in ("market1501", "msmt17")
        for re_ranking in (False, True)
    }


class Target(NamedTuple):
    """Bounds of a measured value: at least ``low`` and at most ``high``."""

    part: str
    name: str
    figure: str
    low: float | None = None
    high: float | None = None

    def describe(self) -> str:
        """Return the bound as text."""
        return f">= {self.low:g}" if self.low is not None else f"<= {self.high:g}"

    def holds(self, value: float) -> bool:
        """Return True if ``value`` is within the bound."""
        return value >= self.low if self.low is not None else value <= self.high


TARGETS = (
    Target("tests", "CUDA tests", "failed", high=0),
    *(Target("train", f"R50 batch {batch} {p}", "of bare", low=0.97) for batch in (64, 256) for p in ("bf16", "fp16")),
    Target("train", "R50 batch 256 bf16", "x float32", low=2.5),
    Target("train", "R50 batch 256 bf16", "images/s", low=2500),
    Target("train", "R50 batch 256 bf16", "reads/step", high=1),
    Target("train", "R50 batch 256 bf16 from files", "of compute", low=0.85),
    Target("train", "R50 batch 64 bf16, the read", "cost of the read", high=0.02),
    Target("train", "R18 batch 64 bf16, the read", "cost of the read", high=0.02),
)


def add_ratios(results: dict[str, dict[str, Figures]]) -> None:
    """Add to each low-precision training measurement its speed relative to float32 at the same batch size."""
    train = results.get("train", {})
    for name, figures in train.items():
        base = train.get(re.sub(r"(tf32|bf16|fp16).*", "float32", name))
        if base and base is not figures and "images/s" in figures:
            figures["x float32"] = figures["images/s"] / base["images/s"]


def tables(results: dict[str, dict[str, Figures]]) -> str:
    """Format a table of the measured values of each part, and a table that compares values with their targets."""
    text = []
    for part in PARTS:
        if part in results:
            columns = list(dict.fromkeys(key for figures in results[part].values() for key in figures))
            rows = [
                [name, *(f"{figures[key]:.4g}" if key in figures else "" for key in columns)]
                for name, figures in results[part].items()
            ]
            text.append(f"{part}\n" + tabulate(rows, headers=["", *columns], tablefmt="github", disable_numparse=True))
    rows = []
    for target in TARGETS:
        value = results.get(target.part, {}).get(target.name, {}).get(target.figure)
        if value is not None:
            verdict = "reached" if target.holds(value) else "missed"
            rows.append([f"{target.name}: {target.figure}", target.describe(), f"{value:.4g}", verdict])
    if rows:
        text.append(
            tabulate(rows, headers=["target", "bound", "measured", ""], tablefmt="github", disable_numparse=True)
        )
    return "\n\n".join(text)


def main(argv: list[str] | None = None) -> None:
    """Measure the chosen parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="JSON file with all results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of one timed measurement")
    parser.add_argument("--match", default="", help="run only measurements whose name contains this text")
    parser.add_argument("--again", action="store_true", help="repeat measurements that the file already has")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the command itself")
    args = parser.parse_args(argv)
    setup = Setup(resolve_device(args.device), args.toy, args.seconds)
    if setup.device.type == "cpu":
        keep_freed_memory()  # as default_setup does
    stored = json.loads(args.output.read_text()) if args.output.exists() else {"toy": args.toy}
    if stored.get("toy", False) is not args.toy:
        parser.error(f"{args.output} has results with{'out' if args.toy else ''} --toy: choose another --output")
    environment = inspect_environment(setup.device, asked=args.device).table()
    print(environment, file=sys.stderr)
    stored["environment"] = environment
    results = stored.setdefault("results", {})
    for part in args.part:
        done = results.setdefault(part, {})
        todo = {
            name: measure
            for name, measure in measurements(part).items()
            if args.match in name and (args.again or name not in done)
        }
        for number, (name, measure) in enumerate(todo.items(), start=1):
            start = time.perf_counter()
            done[name] = measure(setup)
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()
            torch._dynamo.reset()
            add_ratios(results)
            args.output.write_text(json.dumps(stored, indent=1))
            print(f"{part} {number}/{len(todo)}: {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(tables(results))


if __name__ == "__main__":
    main()
