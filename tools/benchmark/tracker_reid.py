#!/usr/bin/env python
"""Compare the time of ReID in a tracker: fastamp's adapters and BoxMOT's ReID models with the same weights.

The network is OSNet x0.25 with BoxMOT's random weights, for boxes in a frame of 1920 x 1080 pixels; each variant crops,
resizes, normalizes, computes features and normalizes them. BoxMOT's ONNX file is exported from its PyTorch model, and
its OpenVINO file is converted from it. Like these, fastamp's files take normalized images (fastamp export
--no-normalization): ONNX Runtime needs 0.2 ms to normalize one image, and PyTorch 0.03 ms. The variants run in turns,
in an order that rotates. Each round gives a ratio to BoxMOT with the same runtime; the table has the medians of times,
CPU times and ratios. All use the same number of threads, and the process may use as many cores. Without BoxMOT
(AGPL-3.0, pip install boxmot), only fastamp's variants are measured, with its own random weights.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tabulate import tabulate

from fastamp import Predictor
from fastamp.checkpoint.weights_file import write_checkpoint
from fastamp.config import get_cfg
from fastamp.diagnostics.environment import inspect_environment
from fastamp.inference.export import export
from fastamp.inference.runtime import ExportedModel
from fastamp.integrations import BoxmotReID
from fastamp.modeling import build_model

NAME = "osnet_x0_25"
OPTIONS = ["INPUT.SIZE_TEST", "[256, 128]", "TEST.FLIP.ENABLED", "False", "SOLVER.AMP.EVAL_DTYPE", "float32"]
RUNTIMES = {"ONNX Runtime": ".onnx", "OpenVINO": ".xml"}
Extract = Callable[[np.ndarray, np.ndarray], np.ndarray]


def boxmot_weights(folder: Path) -> Path | None:
    """Write BoxMOT's random weights; return None without BoxMOT."""
    try:
        from boxmot.reid.core.registry import ReIDModelRegistry
    except ImportError:
        return None
    torch.manual_seed(0)
    path = folder / f"{NAME}_msmt17.pt"
    model = ReIDModelRegistry.build_model(NAME, path, num_classes=1, pretrained=False, use_gpu=False)
    write_checkpoint(path, model.state_dict())
    return path


def make_predictor(weights: Path | None, folder: Path) -> Predictor:
    """Build the model of fastamp, with the weights of BoxMOT if given."""
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.BACKBONE.NAME", "build_osnet_backbone", "MODEL.BACKBONE.DEPTH", "x0_25"])
    cfg.merge_from_list(["MODEL.BACKBONE.PRETRAIN", "False", "MODEL.DEVICE", "cpu", *OPTIONS])
    if weights is None:
        weights = folder / "fastamp.pth"
        write_checkpoint(weights, {"model": build_model(cfg).state_dict()})
        cfg.MODEL.WEIGHTS = str(weights)
        return Predictor(cfg, device="cpu")
    from fastamp.inference.import_checkpoint import import_checkpoint

    target = folder / "imported.pth"
    import_checkpoint(str(weights), str(target), config_file="", opts=OPTIONS, plugin="")
    return Predictor(target, device="cpu", opts=OPTIONS)


def variants(folder: Path, threads: int) -> dict[str, Extract]:
    """Return the compared functions from a BGR frame and corners to features, BoxMOT's first."""
    weights = boxmot_weights(folder)
    predictor = make_predictor(weights, folder)
    models: dict[str, Any] = {} if weights is None else boxmot_models(weights, threads)
    if weights is None:
        print("BoxMOT is not installed, so it is not compared: pip install boxmot", file=sys.stderr)
    models["fastamp, PyTorch"] = BoxmotReID(predictor)
    for title, suffix in RUNTIMES.items():
        path = folder / f"fastamp{suffix}"
        export(predictor, path, data="", normalization=False)
        models[f"fastamp, {title}"] = BoxmotReID(ExportedModel(path, threads=threads))
    return {name: lambda frame, boxes, model=model: model.get_features(boxes, frame) for name, model in models.items()}


def boxmot_models(weights: Path, threads: int) -> dict[str, Any]:
    """Return BoxMOT's models; ONNX Runtime uses as many threads as fastamp's."""
    import onnxruntime
    import openvino
    from boxmot.reid.core import ReID

    models = {"BoxMOT, PyTorch": ReID(weights=weights, device="cpu").model}
    onnx_file, openvino_file = (weights.with_suffix(suffix) for suffix in RUNTIMES.values())
    torch.onnx.export(
        models["BoxMOT, PyTorch"].model,
        (torch.zeros(2, 3, 256, 128),),
        str(onnx_file),
        input_names=["images"],
        output_names=["output"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    make_options = onnxruntime.SessionOptions

    def options() -> Any:
        made = make_options()
        made.intra_op_num_threads = threads
        return made

    with mock.patch("onnxruntime.SessionOptions", options):
        models["BoxMOT, ONNX Runtime"] = ReID(weights=onnx_file, device="cpu").model
    folder = weights.with_name(f"{weights.stem}_openvino_model")
    folder.mkdir()
    openvino.save_model(openvino.convert_model(onnx_file), folder / openvino_file.name, compress_to_fp16=False)
    openvino_model = models["BoxMOT, OpenVINO"] = ReID(weights=folder, device="cpu").model
    used = openvino_model.executable_network.get_property("INFERENCE_NUM_THREADS")
    if used != threads:
        print(f"BoxMOT's OpenVINO model uses {used} threads, instead of {threads}", file=sys.stderr)
    return models


def measure(extractors: dict[str, Extract], boxes: int, rounds: int) -> list[tuple[str, float, float, float, float]]:
    """Return name, median milliseconds, CPU milliseconds and CPU time of BoxMOT by the own, and the least cosine."""
    frame, corners = frame_and_boxes(boxes)
    wall, cpu = ({name: [] for name in extractors} for _ in range(2))  # type: dict[str, list[float]]
    features = {name: np.asarray(extract(frame, corners)) for name, extract in extractors.items()}  # warm up
    names = list(extractors)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start, cpu_start = time.perf_counter(), time.process_time()
            extractors[name](frame, corners)
            cpu[name].append(1000 * (time.process_time() - cpu_start))
            wall[name].append(1000 * (time.perf_counter() - start))
    rows = []
    for name in names:
        other = cpu.get(f"BoxMOT, {name.partition(', ')[2]}", cpu[name])
        ratio = statistics.median(a / b for a, b in zip(other, cpu[name], strict=True))
        cosine = float((features[name] * features[names[0]]).sum(1).min())
        rows.append((name, statistics.median(wall[name]), statistics.median(cpu[name]), ratio, cosine))
    return rows


def frame_and_boxes(boxes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a smooth random BGR frame, and the corners of random boxes of 100 x 250 pixels."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.integers(0, 256, (1, 3, 34, 60)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=(1080, 1920), mode="bicubic").clamp(0, 255)
    frame = np.ascontiguousarray(smooth[0].byte().permute(1, 2, 0).numpy())
    left, top = rng.integers(0, 1800, boxes), rng.integers(0, 800, boxes)
    return frame, np.stack([left, top, left + 100, top + 250], axis=1).astype(np.float32)


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, nargs="+", default=[1, 8, 32], help="boxes in the frame")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="threads of each variant (default: 1)")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        extractors = variants(Path(folder), args.threads)
        print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
        headers = ("ms", "CPU ms", "times as fast as BoxMOT (CPU)", "min cosine")
        for boxes in args.boxes:
            rows = measure(extractors, boxes, args.rounds)
            print(tabulate(rows, (f"{boxes} boxes", *headers), floatfmt=("", ".1f", ".1f", ".2f", ".4f")), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
