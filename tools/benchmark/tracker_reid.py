#!/usr/bin/env python
"""Compare the time of ReID in a tracker: fastamp's adapters and BoxMOT's ReID models with the same weights.

The network is OSNet x0.25 with BoxMOT's random weights, for boxes in a frame of 1920 x 1080 pixels; each variant crops,
resizes, normalizes, computes features and normalizes them. The variants run in turns, and the median of all rounds is
used. Without BoxMOT (AGPL-3.0, pip install boxmot), only fastamp's variants are measured, with its own random weights.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from fastamp import Predictor
from fastamp.checkpoint.weights_file import write_checkpoint
from fastamp.config import get_cfg
from fastamp.diagnostics.environment import inspect_environment
from fastamp.inference.export import export
from fastamp.inference.exported import ExportedModel
from fastamp.integrations import BoxmotReID
from fastamp.modeling import build_model

NAME = "osnet_x0_25"
OPTIONS = ["INPUT.SIZE_TEST", "[256, 128]", "TEST.FLIP.ENABLED", "False", "SOLVER.AMP.EVAL_DTYPE", "float32"]
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


def variants(folder: Path) -> dict[str, Extract]:
    """Return the compared functions from a BGR frame and corners to features."""
    weights = boxmot_weights(folder)
    predictor = make_predictor(weights, folder)
    export(predictor, folder / "fastamp.onnx", data="")
    found: dict[str, Extract] = {}
    if weights is not None:
        from boxmot.reid.core import ReID

        torch_model = ReID(weights=weights, device="cpu").model
        found["BoxMOT, PyTorch"] = lambda frame, boxes: torch_model.get_features(boxes, frame)
        onnx_file = folder / f"{NAME}_msmt17.onnx"
        torch.onnx.export(
            torch_model.model,
            (torch.zeros(2, 3, 256, 128),),
            str(onnx_file),
            input_names=["images"],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        onnx_model = ReID(weights=onnx_file, device="cpu").model
        found["BoxMOT, ONNX Runtime"] = lambda frame, boxes: onnx_model.get_features(boxes, frame)
    else:
        print("BoxMOT is not installed, so it is not compared: pip install boxmot", file=sys.stderr)
    plain, exported = BoxmotReID(predictor), BoxmotReID(ExportedModel(folder / "fastamp.onnx"))
    found["fastamp, Predictor"] = lambda frame, boxes: plain.get_features(boxes, frame)
    found["fastamp, ONNX Runtime"] = lambda frame, boxes: exported.get_features(boxes, frame)
    return found


def measure(found: dict[str, Extract], boxes: int, rounds: int) -> list[tuple[str, float, float]]:
    """Return name, median milliseconds, and the smallest cosine to the features of the first variant."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.integers(0, 256, (1, 3, 34, 60)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=(1080, 1920), mode="bicubic").clamp(0, 255)
    frame = np.ascontiguousarray(smooth[0].byte().permute(1, 2, 0).numpy())
    left, top = rng.integers(0, 1800, boxes), rng.integers(0, 800, boxes)
    corners = np.stack([left, top, left + 100, top + 250], axis=1).astype(np.float32)
    times: dict[str, list[float]] = {name: [] for name in found}
    features = {name: np.asarray(extract(frame, corners)) for name, extract in found.items()}  # warm up
    for _ in range(rounds):
        for name, extract in found.items():
            start = time.perf_counter()
            extract(frame, corners)
            times[name].append(1000 * (time.perf_counter() - start))
    first = next(iter(features.values()))
    return [(name, statistics.median(times[name]), float((features[name] * first).sum(1).min())) for name in found]


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, nargs="+", default=[1, 8, 32], help="boxes in the frame")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = variants(Path(folder))
        print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
        for boxes in args.boxes:
            rows = measure(found, boxes, args.rounds)
            table = [(name, median, rows[0][1] / median, cosine) for name, median, cosine in rows]
            headers = (f"{boxes} boxes", "median ms", f"times as fast as {rows[0][0]}", "min cosine")
            print(tabulate(table, headers, floatfmt=("", ".1f", ".2f", ".4f")), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
