#!/usr/bin/env python
"""Test and measure fastamp on a GPU within a time budget: ten minutes in all, the most valuable measurements first.

``--plan`` lists the parts, their measurements and the seconds of each, and starts nothing. Each measurement runs in a
process that ends at its limit, and starts only if its limit fits into what is left of ``--budget``. Its figures are
written to a JSON file when it ends. A second run with the same ``--output`` continues: first the measurements that have
not run, then those that failed. What the measurements print is appended to a log file beside the JSON file.

Training steps of fastamp and of a bare PyTorch loop with the same model alternate in blocks, so that both run at the
same clock rate. ``--toy`` runs all measurements with tiny networks and images on any device.
"""

import argparse
import contextlib
import cProfile
import json
import multiprocessing
import os
import pstats
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from device_waits import count_device_waits
from ranking import SIZES, generate, load
from tabulate import tabulate
from train_step import build_trainer, fastamp_step

from fastamp.amp import PrecisionPolicy, resolve_device
from fastamp.amp.checks import FIRST_STEPS
from fastamp.amp.step import StepVerdict
from fastamp.config import CfgNode, get_cfg
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.dataset import ReidDataset
from fastamp.data.loader import TestLoader
from fastamp.data.samplers import InferenceSampler
from fastamp.demo import DEMO_VERSION, generate_demo
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine import run_command_line
from fastamp.evaluation import Protocol, compute_metrics
from fastamp.evaluation.rerank import ReRanking
from fastamp.feature_pass import extract_features
from fastamp.layers.distance import matrix_product
from fastamp.modeling import build_model
from fastamp.utils.env import available_cores, keep_freed_memory
from fastamp.utils.errors import ConfigError, TrainingError, UserError, summarize_error
from fastamp.utils.files import write_atomically

REPOSITORY = Path(__file__).resolve().parents[2]
DTYPES = {"float32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NUM_CLASSES = 751
ROUNDS = 5
STARTUP = 60.0
"""Time limit of the process that describes the device, in seconds."""

Figures = dict[str, float]


class Network(NamedTuple):
    """Recipe of a network, and the options that replace its backbone."""

    recipe: str
    options: tuple[str, ...] = ()


NETWORKS = {
    "R50": Network("Market1501/bagtricks_R50"),
    "OSNet x1.0": Network(
        "Market1501/bagtricks_R50",
        (
            "MODEL.BACKBONE.NAME",
            "build_osnet_backbone",
            "MODEL.BACKBONE.DEPTH",
            "x1_0",
            "MODEL.BACKBONE.FEAT_DIM",
            "512",
        ),
    ),
    "ViT-B": Network("Market1501/vit_base"),
    "SBS R101-ibn": Network("Market1501/sbs_R101-ibn"),
}
TINY = Network("Market1501/bagtricks_R50", ("MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512"))


class Setup(NamedTuple):
    """Device and sizes of a run.

    Attributes:
        device: device to measure.
        toy: use tiny networks, images and test sets, and measure one step.
        seconds: duration of the timed steps of one loop.
        folder: folder for files, shared by the measurements of one run.
        limit: seconds until the process of the measurement is ended.
    """

    device: torch.device
    toy: bool
    seconds: float
    folder: Path
    limit: float

    def synchronize(self) -> None:
        """Wait for all kernels on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def config(self, network: str, batch: int, precision: str, *opts: str) -> Any:
        """Build the config of a network with random weights at 256x128, or 64x32 in a toy run."""
        chosen = TINY if self.toy else NETWORKS[network]
        cfg = get_cfg()
        cfg.merge_from_file(chosen.recipe)
        size = "(64, 32)" if self.toy else "(256, 128)"
        cfg.merge_from_list([
            "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.DEVICE", str(self.device), "MODEL.HEADS.NUM_CLASSES",
            str(NUM_CLASSES), "INPUT.SIZE_TRAIN", size, "INPUT.SIZE_TEST", size, "SOLVER.IMS_PER_BATCH", str(batch),
            "TEST.IMS_PER_BATCH", str(batch), "SOLVER.AMP.ENABLED", str(precision != "float32"),
            "SOLVER.AMP.PREFLIGHT", "off", "SOLVER.TF32", "False", "SOLVER.OPT", "Adam", *chosen.options, *opts,
        ])  # fmt: skip
        if precision != "float32":
            cfg.merge_from_list(["SOLVER.AMP.DTYPE", DTYPES[precision]])
        return cfg

    def batch_size(self, batch: int) -> int:
        """Return ``batch``, or at most 8 in a toy run."""
        return min(batch, 8) if self.toy else batch


class Measurement(NamedTuple):
    """Measurement of the plan.

    Attributes:
        part: part of the plan.
        name: unique name.
        limit: seconds until its process is ended, including the start of the process.
        run: function that returns the figures.
    """

    part: str
    name: str
    limit: float
    run: Callable[[Setup], Figures]


class Failure(TrainingError):
    """Failure of a measurement that has figures nevertheless."""

    def __init__(self, message: str, figures: Figures) -> None:
        super().__init__(message)
        self.figures = figures


# ---- tests


def run_tests(setup: Setup, files: list[Path], *options: str) -> Figures:
    """Run the tests that need CUDA, without the slow ones, and count their outcomes.

    Ten seconds before the limit, pytest is interrupted; the tests that have run until then are counted. ``options`` are
    options of pytest.

    Raises:
        Failure: if a test failed, or pytest was interrupted.
    """
    report = setup.folder / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda and not slow", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", "-o", "faulthandler_timeout=45", *(["-n", "0"] if setup.toy else [])]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    command += [*options, *map(str, files)]
    # The background jobs of a shell ignore this signal, and so would pytest.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": path})
    try:
        process.wait(setup.limit - 10)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
    if not report.exists():
        raise TrainingError(f"pytest ended with exit code {process.returncode} and without a report")
    failures, skips = [], []
    suites = xml.etree.ElementTree.parse(report)
    for case in suites.iter("testcase"):
        skips += [skip.get("message") for skip in case.findall("skipped")]
        for failed in (*case.findall("failure"), *case.findall("error")):
            failures.append(f"{case.get('classname')}::{case.get('name')}: {failed.get('message', '')[:300]}")
    total = sum(int(suite.get("tests", 0)) for suite in suites.iter("testsuite"))  # an interrupted test does not count
    figures = {
        "passed": float(total - len(failures) - len(skips)),
        "failed": float(len(failures)),
        "skipped": float(len(skips)),
        "skipped for another reason": float(sum(reason != "needs a CUDA device" for reason in skips)),
    }
    problems = failures if process.returncode in (0, 1) else [f"pytest exit code {process.returncode}", *failures]
    if problems:
        raise Failure("\n".join(problems), figures)
    return figures


def cuda_tests(setup: Setup) -> Figures:
    """Run all tests with the mark cuda, except those on fake tensors."""
    files = [path for path in sorted((REPOSITORY / "tests").rglob("test_*.py")) if "mark.cuda" in path.read_text()]
    return run_tests(setup, [path for path in files if path.name != "test_fake_cuda.py"])


def fake_tensor_tests(setup: Setup) -> Figures:
    """Run the tests on fake tensors that can also run on a device."""
    return run_tests(setup, [REPOSITORY / "tests/test_fake_cuda.py"])


# ---- training


class RepeatedBatch:
    """Yield one random batch that is already on the device."""

    def __init__(self, cfg: CfgNode, device: torch.device) -> None:
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


def trained_step(cfg: CfgNode, loader: Any) -> Callable[[], None]:
    """Build a function that runs one iteration of fastamp's trainer."""
    return fastamp_step(build_trainer(cfg, loader))


def step_without_read(cfg: CfgNode, loader: Any) -> Callable[[], None]:
    """Build an iteration that uses a constant instead of reading the result of the finiteness check from the device."""
    trainer = build_trainer(cfg, loader)
    step = fastamp_step(trainer)
    for _ in range(FIRST_STEPS + 1):  # these steps have additional checks, which end when the host reads them
        step()
    verdict = StepVerdict(True, 1.0, trainer.step.loss_scale)

    def check_finite(gradients: Any) -> StepVerdict:
        trainer.step._verdict = verdict
        trainer.step._losses_finite = None
        return verdict

    trainer.step.check_finite = check_finite
    return step


def bare_step(cfg: CfgNode, loader: Any) -> Callable[[], None]:
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


def time_blocks(setup: Setup, steps: list[Callable[[], None]]) -> list[float]:
    """Measure the seconds per step of several functions, in alternating blocks of steps; one step in a toy run.

    Returns:
        Median seconds per step over the blocks, for each function.
    """
    estimates = []
    for step in steps:
        for _ in range(2 if setup.toy else 5):  # the first step is not compiled
            step()
        setup.synchronize()
        start = time.perf_counter()
        step()
        setup.synchronize()
        estimates.append(time.perf_counter() - start)
    if setup.toy:
        return estimates
    block = max(1, int(setup.seconds / ROUNDS / max(estimates)))
    times: list[list[float]] = [[] for _ in steps]
    for number in range(ROUNDS):
        for which in range(len(steps)) if number % 2 else reversed(range(len(steps))):
            setup.synchronize()
            start = time.perf_counter()
            for _ in range(block):
                steps[which]()
            setup.synchronize()
            times[which].append((time.perf_counter() - start) / block)
    return [statistics.median(timings) for timings in times]


def count_reads(step: Callable[[], None], steps: int = 4) -> float:
    """Return the mean number of operations per step that make the host wait for a CUDA device."""
    with count_device_waits() as waits:
        for _ in range(steps):
            step()
    return waits.count / steps


def training(
    network: str, batch: int, precisions: tuple[str, ...], compiled: bool = False
) -> Callable[[Setup], Figures]:
    """Build the comparison of fastamp's steps with those of a bare loop on the same network, in each precision.

    A toy run compiles without Inductor, which takes minutes on a CPU.
    """

    def measure(setup: Setup) -> Figures:
        images = setup.batch_size(batch)
        steps, figures = {}, {}
        opts = ("MODEL.COMPILE", "aot_eager" if setup.toy else "inductor") if compiled else ()
        for precision in precisions:
            cfg = setup.config(network, images, precision, *opts)
            loader = RepeatedBatch(cfg, setup.device)
            for loop, build in ((precision, trained_step), (f"{precision} bare", bare_step)):
                if setup.device.type != "cuda":
                    steps[loop] = build(cfg, loader)
                    continue
                before = torch.cuda.memory_allocated(setup.device)
                steps[loop] = step = build(cfg, loader)
                step()
                torch.cuda.reset_peak_memory_stats(setup.device)
                step()
                figures[f"{loop} MiB"] = (torch.cuda.max_memory_allocated(setup.device) - before) / 2**20
        seconds = dict(zip(steps, time_blocks(setup, list(steps.values())), strict=True))
        if setup.device.type == "cuda":
            # Only now: the first steps in float16 are skipped, and a skipped step also reads which gradients overflow.
            figures |= {f"{loop} reads/step": count_reads(step) for loop, step in steps.items()}
        for loop, duration in seconds.items():
            figures[f"{loop} images/s"] = images / duration
        for precision in precisions:
            figures[f"{precision} of bare"] = seconds[f"{precision} bare"] / seconds[precision]
        for other in precisions[1:]:
            figures[f"{precisions[0]} x {other}"] = seconds[other] / seconds[precisions[0]]
        return figures

    return measure


def device_read(setup: Setup) -> Figures:
    """Measure how much the only device read per step increases the step time, on a small and on a large batch.

    The host waits for the device there, and afterwards the device waits for the host. With a batch so small that the
    device always waits for the host, the read costs nothing. What the host does in a step is printed to the log.
    """
    figures = {}
    for batch in (64, 256):
        cfg = setup.config("R50", setup.batch_size(batch), "bf16")
        loader = RepeatedBatch(cfg, setup.device)
        steps = [trained_step(cfg, loader), step_without_read(cfg, loader)]
        seconds, without = time_blocks(setup, steps)
        figures[f"cost of the read at batch {batch}"] = seconds / without - 1
        if batch == 64:
            for step in (steps[0], bare_step(cfg, loader)):
                profile = cProfile.Profile()
                for _ in range(2 if setup.toy else 20):
                    profile.runcall(step)
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return figures


# ---- extraction, ranking, files


def extraction(setup: Setup) -> Figures:
    """Compare feature extraction from a batch in memory in bfloat16 and in float32."""
    batch, steps = setup.batch_size(256), []
    for precision in ("bf16", "float32"):
        cfg = setup.config("R50", batch, precision)
        model, images = build_model(cfg).eval(), RepeatedBatch(cfg, setup.device).batch
        policy = PrecisionPolicy.from_config(cfg, setup.device)

        @torch.inference_mode()
        def step(model: Any = model, images: Any = images, policy: PrecisionPolicy = policy) -> None:
            extract_features(model, images, policy)

        steps.append(step)
    seconds, float32 = time_blocks(setup, steps)
    return {"images/s": batch / seconds, "x float32": float32 / seconds}


def ranking(setup: Setup) -> Figures:
    """Compare an evaluation of the size of MSMT17 with its matrix product, and measure re-ranking."""
    generate(SIZES["small" if setup.toy else "msmt17"], setup.folder)
    queries, gallery, identities = load(setup.folder)
    queries, gallery = queries.to(setup.device), gallery.to(setup.device)
    out = torch.empty(min(1024, len(queries)), len(gallery), device=setup.device)

    def product() -> None:
        for block in queries.split(1024):
            matrix_product(block, gallery, out[: len(block)])

    def evaluate(protocol: Protocol) -> None:
        compute_metrics(queries, gallery, identities, protocol)

    seconds = []
    for function, args in ((product, ()), (evaluate, (Protocol(),)), (evaluate, (Protocol(re_ranking=ReRanking()),))):
        function(*args)
        setup.synchronize()
        start = time.perf_counter()
        function(*args)
        setup.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"s": seconds[1], "x product": seconds[1] / seconds[0], "re-ranking s": seconds[2]}


def draw_images(setup: Setup) -> str:
    """Generate the Demo dataset as JPEG files with the network's image size, unless a measurement did, and select it.

    Returns:
        The number of workers that load it.
    """
    folder = setup.folder / "images"
    identities = 16 if setup.toy else 64
    generate_demo(
        folder / f"fastamp-demo-v{DEMO_VERSION}",
        train_identities=identities,
        test_identities=identities,
        images_per_identity=6 if setup.toy else 10,
        distractors=6,
        cameras=3,
        image_size=(64, 32) if setup.toy else (256, 128),
        workers=available_cores(),
    )
    os.environ["FASTAMP_DATASETS"] = str(folder)
    return "2" if setup.toy else str(max(1, available_cores() - 2))


def train_from_files(setup: Setup) -> Figures:
    """Compare training steps that read JPEG files with training steps on a batch in memory."""
    opts = ("DATASETS.NAMES", "('Demo',)", "DATALOADER.NUM_WORKERS", draw_images(setup), "INPUT.FLIP.ENABLED", "True")
    cfg = setup.config("R50", setup.batch_size(256), "bf16", *opts)
    loader = build_reid_train_loader(cfg)
    cfg.merge_from_list(["MODEL.HEADS.NUM_CLASSES", str(loader.dataset.num_classes)])
    seconds, compute = time_blocks(
        setup, [trained_step(cfg, batches) for batches in (loader, RepeatedBatch(cfg, setup.device))]
    )
    return {"images/s": cfg.SOLVER.IMS_PER_BATCH / seconds, "of compute": compute / seconds}


def extract_from_files(setup: Setup) -> Figures:
    """Measure feature extraction from JPEG files, each read several times, from the second batch on."""
    cfg = setup.config("R50", setup.batch_size(256), "bf16", "TEST.NUM_WORKERS", draw_images(setup))
    model, policy = build_model(cfg).eval(), PrecisionPolicy.from_config(cfg, setup.device)
    files = build_reid_test_loader(cfg, "Demo")[0].dataset
    rows = np.tile(np.arange(len(files)), 1 if setup.toy else 40)
    repeated = ReidDataset(files.items.take(rows), files.transforms, relabel=False, sources=files.sources)
    sampler = InferenceSampler(size=len(repeated), batch_size=cfg.TEST.IMS_PER_BATCH)
    batches = iter(TestLoader(repeated, sampler, num_workers=cfg.TEST.NUM_WORKERS, device=setup.device))
    with torch.inference_mode():
        extract_features(model, next(batches), policy)
        setup.synchronize()
        images, start = 0, time.perf_counter()
        for batch in batches:
            images += len(extract_features(model, batch, policy))
        setup.synchronize()
    return {"images/s": images / (time.perf_counter() - start)}


def demo(setup: Setup) -> Figures:
    """Run the demo as in the README; in a toy run, only its first epoch with small images.

    Raises:
        TrainingError: if it fails.
    """
    output = setup.folder / "demo"
    words = [f"MODEL.DEVICE={setup.device}", f"OUTPUT_DIR={output}"]
    if setup.toy:
        words += ["SOLVER.MAX_EPOCH=1", "INPUT.SIZE_TRAIN=[32,16]", "INPUT.SIZE_TEST=[32,16]"]
    start = time.perf_counter()
    environment = os.environ | {"FASTAMP_DATASETS": str(setup.folder / "datasets")}
    status = subprocess.run([sys.executable, "-m", "fastamp", "demo", *words], env=environment).returncode
    seconds = time.perf_counter() - start
    if status:
        raise TrainingError(f"fastamp demo ended with exit code {status}")
    rows = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    return {"s": seconds, "mAP": [row["Demo/mAP"] for row in rows if "Demo/mAP" in row][-1]}


LOW = ("bf16", "fp16")
MEASUREMENTS = (
    Measurement("tests", "CUDA tests", 90, cuda_tests),
    Measurement("tests", "fake-tensor tests on the device", 55, fake_tensor_tests),
    Measurement("ResNet-50", "R50 batch 256", 55, training("R50", 256, ("bf16", "float32"))),
    Measurement("ResNet-50", "R50 batch 64", 40, training("R50", 64, ("bf16", "fp16", "float32"))),
    Measurement("ResNet-50", "R50, the read", 35, device_read),
    Measurement("ResNet-50", "R50 batch 256 compiled", 60, training("R50", 256, ("bf16",), compiled=True)),
    Measurement("ResNet-50", "R50 batch 64 compiled", 50, training("R50", 64, ("bf16",), compiled=True)),
    Measurement("networks", "OSNet x1.0 batch 64", 45, training("OSNet x1.0", 64, LOW)),
    Measurement("networks", "ViT-B batch 64", 27, training("ViT-B", 64, LOW)),
    Measurement("networks", "SBS R101-ibn batch 64", 38, training("SBS R101-ibn", 64, LOW)),
    Measurement("pipeline", "R50 extraction", 15, extraction),
    Measurement("pipeline", "ranking, size of MSMT17", 15, ranking),
    Measurement("pipeline", "R50 batch 256 from files", 25, train_from_files),
    Measurement("pipeline", "R50 extraction from files", 15, extract_from_files),
    Measurement("pipeline", "demo", 35, demo),
)
"""All measurements in order of value."""

PARTS = tuple(dict.fromkeys(measurement.part for measurement in MEASUREMENTS))


class Target(NamedTuple):
    """Bounds of a figure, at least ``low`` or at most ``high``, on devices whose names contain ``device``.

    The figure is that of one measurement, or of all measurements that have it if ``name`` is empty.
    """

    figure: str
    low: float | None = None
    high: float | None = None
    name: str = ""
    device: str = ""

    def describe(self) -> str:
        """Return the bound as text."""
        return f">= {self.low:g}" if self.low is not None else f"<= {self.high:g}"

    def holds(self, value: float) -> bool:
        """Return True if ``value`` is within the bound."""
        return value >= self.low if self.low is not None else value <= self.high


TARGETS = (
    Target("failed", high=0),
    Target("skipped", high=0),
    Target("bf16 images/s", low=4000, name="R50 batch 256", device="H100"),
    Target("bf16 images/s", low=5000, name="R50 batch 256", device="H200"),
    *(Target(f"{precision} of bare", low=0.95) for precision in DTYPES),
    *(Target(f"{precision} reads/step", high=1) for precision in DTYPES),
    Target("bf16 x float32", low=2.5, name="R50 batch 256"),
    *(Target(f"cost of the read at batch {batch}", high=0.02) for batch in (64, 256)),
    Target("of compute", low=0.85),
    Target("mAP", low=80, name="demo"),
)


def find_target(name: str, figure: str, device: str) -> Target | None:
    """Return the target of a figure on a device, or None."""
    matching = (t for t in TARGETS if t.figure == figure and t.name in ("", name) and t.device in device)
    return next(matching, None)


def format_results(stored: dict[str, Any]) -> str:
    """Format a table of all figures and their targets. Figures of a toy run are not compared with targets."""
    rows = []
    for measurement in MEASUREMENTS:
        record = stored["results"].get(measurement.name, {})
        for figure, value in record.get("figures", {}).items():
            target = find_target(measurement.name, figure, stored["device"])
            verdict = "" if target is None or stored["toy"] else "reached" if target.holds(value) else "missed"
            rows.append([measurement.name, figure, f"{value:.4g}", target.describe() if target else "", verdict])
        if "error" in record:
            rows.append([measurement.name, "error", record["error"].partition("\n")[0], "", "failed"])
    headers = ["measurement", "figure", "value", "target", ""]
    return f"{stored['device']}\n" + tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def format_plan(measurements: list[Measurement], results: dict[str, Any], budget: float) -> str:
    """Format a table of the measurements with their limits, and whether they have run or may not fit in the budget."""
    rows, total = [], 0.0
    for part in PARTS:
        members = [measurement for measurement in measurements if measurement.part == part]
        if members:
            rows.append([part, "", f"{sum(member.limit for member in members):.0f}", "", ""])
        for member in members:
            record = results.get(member.name)
            done = record is not None and "error" not in record
            total += 0 if done else member.limit
            state = "done" if done else "if time is left" if total > budget else "failed" if record else ""
            rows.append(["", member.name, f"{member.limit:.0f}", f"{total:.0f}", state])
    headers = ["part", "measurement", "at most s", "total s", ""]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


# ---- processes


def describe_device(setup: Setup) -> dict[str, str]:
    """Return the name of the device and a table of its environment."""
    report = inspect_environment(setup.device, asked=str(setup.device))
    return {"device": report.device_name or str(setup.device), "environment": report.table()}


def run_limited(
    run: Callable[[Setup], dict[str, Any]], device: str, limit: float, log: Path, **setup: Any
) -> dict[str, Any]:
    """Run a function in a process that ends at a limit.

    The process is forked, which saves the seconds of importing PyTorch. It ends with all processes that it started.

    Args:
        run: function to run.
        device: device name. This process must not use CUDA, or the forked process could not.
        limit: seconds until the process is ended.
        log: file to which the output of the process is appended.
        setup: further attributes of ``Setup``.

    Returns:
        ``figures`` of the function, ``error`` if it failed, and ``seconds``.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_run_here, args=(run, device, limit, log, setup, sender)
    )
    start = time.monotonic()
    process.start()
    sender.close()
    try:
        if receiver.poll(limit):
            record = receiver.recv()
        else:
            record = {"error": f"ended at its limit of {limit:.0f} s"}
    except EOFError:
        process.join()
        record = {"error": f"the process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that it started
        process.join()
    return {**record, "seconds": round(time.monotonic() - start, 1)}


def _run_here(
    run: Callable[[Setup], dict[str, Any]], device: str, limit: float, log: Path, setup: Any, sender: Connection
) -> None:
    """Run a function as a process group, and send its figures or its error."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgrp()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    try:
        resolved = resolve_device(device, "--device")
        if resolved.type == "cpu":
            keep_freed_memory()  # as default_setup does
        torch.backends.cudnn.benchmark = True  # as the recipes
        sender.send({"figures": run(Setup(resolved, limit=limit, **setup))})
    except UserError as error:
        traceback.print_exc()
        sender.send({"error": str(error), **({"figures": error.figures} if isinstance(error, Failure) else {})})
    except Exception as error:
        traceback.print_exc()
        sender.send({"error": summarize_error(error)})


def main(argv: list[str] | None = None) -> int:
    """Run the measurements that fit into the budget, and print the table of all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print the measurements and their seconds, and exit")
    parser.add_argument(
        "--budget", type=float, default=600, help="seconds for all measurements together (default: %(default)s)"
    )
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--match", default="", help="run only measurements whose name contains this text")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="JSON file with all results")
    parser.add_argument("--again", action="store_true", help="repeat measurements that the file already has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=2, help="duration of the timed steps of one loop (default: %(default)s)"
    )
    parser.add_argument(
        "--toy", action="store_true", help="tiny sizes, one step, limits twice as long, to try the command itself"
    )
    args = parser.parse_args(argv)
    chosen = [
        measurement for measurement in MEASUREMENTS if measurement.part in args.part and args.match in measurement.name
    ]
    if not chosen:
        raise ConfigError(f"--match {args.match!r}: no such measurement.\n  fix: choose one of those of --plan")
    stored: dict[str, Any] = {"toy": args.toy, "results": {}}
    if args.output.exists():
        stored = json.loads(args.output.read_text())
    if args.plan:
        print(format_plan(chosen, stored["results"], args.budget))
        return 0
    deadline = time.monotonic() + args.budget
    log, results = args.output.with_suffix(".log"), stored["results"]
    with tempfile.TemporaryDirectory() as folder:
        common = {"toy": args.toy, "seconds": args.seconds, "folder": Path(folder)}
        description = run_limited(describe_device, args.device, STARTUP, log, **common)
        if "error" in description:
            raise ConfigError(description["error"])
        this = {"toy": args.toy, **description["figures"]}
        for key in ("toy", "device"):
            if stored.setdefault(key, this[key]) != this[key]:
                raise ConfigError(
                    f"{args.output} has results of another kind of run.\n"
                    f"  found: {key} {stored[key]!r} in the file, {this[key]!r} in this run\n"
                    "  fix:   choose another --output"
                )
        stored |= this
        print(stored["environment"], file=sys.stderr)
        failed = {name for name, record in results.items() if "error" in record}
        todo = [
            measurement
            for measurement in chosen
            if args.again or measurement.name not in results or measurement.name in failed
        ]
        for measurement in sorted(todo, key=lambda measurement: measurement.name in failed):
            left, limit = deadline - time.monotonic(), measurement.limit * (2 if args.toy else 1)  # a CPU may be slow
            if limit > left:
                print(f"{measurement.name}: not started: at most {limit:.0f} s, {left:.0f} s are left", file=sys.stderr)
                continue
            results[measurement.name] = record = run_limited(measurement.run, args.device, limit, log, **common)
            write_atomically(args.output, lambda file: file.write(json.dumps(stored, indent=1).encode()))
            outcome = record.get("error") or ", ".join(f"{k} {v:.4g}" for k, v in record["figures"].items())
            print(f"{measurement.name}: {record['seconds']:.0f} s: {outcome}", file=sys.stderr, flush=True)
    print(format_results(stored))
    return int(any("error" in results.get(measurement.name, {}) for measurement in chosen))


if __name__ == "__main__":
    codes = [0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the process of the current measurement, too
    sys.exit(run_command_line(lambda: codes.append(main())) or codes[-1])
