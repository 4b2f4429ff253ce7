#!/usr/bin/env python
"""Compare the light models by parameters, multiply-adds, file size and latency, in each runtime and precision.

The models are those of configs/Light/ for images of 256x128, exported as by `fastamp export`. PyTorch, ONNX Runtime
and OpenVINO use one thread. All models, runtimes and precisions run in turns, so that drift of the machine's speed does
not bias the comparison; the CPU time of the process does not contain that of other programs. Each cell is the median in
milliseconds per image, with the lowest and the highest round in parentheses.

Weights are those of the demo recipes (`fastamp train Light/demo_osnet_x0_25`) in `--runs`, or random. Random weights
are not exported in int8: the number of layers that stay in float32 depends on the weights. OpenVINO converts the
weights of an fp16 file to float32 or bf16, so that there is no column for it; its bf16 is computed from the float32
file.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from fastamp.amp import PrecisionPolicy
from fastamp.checkpoint.weights_file import write_checkpoint
from fastamp.config import get_cfg, read_config
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine.dry_run import multiply_adds
from fastamp.inference.export import ExportError, export
from fastamp.inference.export.trace import DeployableModule
from fastamp.inference.predictor import Predictor
from fastamp.inference.sessions import Session, open_onnx, open_openvino
from fastamp.modeling import build_model
from fastamp.modeling.heads import EmbeddingHead

SIZE = (256, 128)
MODELS = {
    "OSNet x0.25": "Light/osnet_x0_25",
    "OSNet x0.5": "Light/osnet_x0_5",
    "OSNet x1.0": "Light/osnet_x1_0",
    "MobileNetV4-Conv-S": "Light/mobilenetv4",
    "RepVGG-A0": "Light/repvgg_A0",
    "RepVGG-A0, not deployed": "Light/repvgg_A0",
    "LightMBN": "Light/lightmbn",
    "ResNet-50": "Market1501/bagtricks_R50",
}
# (runtime, precision) -> suffix and precision of the exported file
FILES = {
    ("ONNX Runtime", "float32"): (".onnx", "float32"),
    ("ONNX Runtime", "fp16"): (".onnx", "fp16"),
    ("ONNX Runtime", "int8"): (".onnx", "int8"),
    ("OpenVINO", "float32"): (".xml", "float32"),
    ("OpenVINO", "bf16"): (".xml", "float32"),
    ("OpenVINO", "int8"): (".onnx", "int8"),  # `fastamp export --format openvino` converts the same ONNX model
}
FILE_PRECISIONS = ("float32", "fp16", "int8")
# The models are trained on images of half the size: no decrease of mAP is an error.
INT8 = {"data": "Demo", "max_images": 40, "tolerance": 100.0, "calibration_images": 32}
VARIANTS = (("PyTorch", "float32"), ("PyTorch", "bf16"), *FILES)

Run = Callable[[np.ndarray], Any]
"""Function: images (B, 3, H, W) float32 in 0..255 -> features."""


def make_predictor(folder: Path, recipe: str, runs: Path) -> tuple[Predictor, bool]:
    """Return a Predictor of a recipe, and True if it has the weights of the demo run instead of random weights."""
    trained = runs / f"demo_{Path(recipe).name}/model_final.pth"
    options = {"INPUT.SIZE_TEST": SIZE, "TEST.FLIP.ENABLED": False}
    if trained.exists():
        return Predictor(trained, device="cpu", opts=[word for pair in options.items() for word in pair]), True
    cfg = read_config(recipe).with_values(
        options
        | {"MODEL.DEVICE": "cpu", "MODEL.BACKBONE.PRETRAIN": False, "MODEL.HEADS.NUM_CLASSES": 2, "DATASETS.TESTS": ()}
    )
    torch.manual_seed(0)
    path = folder / f"{recipe.replace('/', '_')}.pth"
    write_checkpoint(path, {"model": build_model(cfg).state_dict(), "config": cfg.dump()})
    return Predictor(path, device="cpu"), False


def export_once(predictor: Predictor, path: Path, precision: str) -> Path | None:
    """Export a model unless the file exists; return None if the exported model fails its parity check."""
    try:
        if not path.exists():
            export(predictor, path, precision=precision, **(INT8 if precision == "int8" else {"data": ""}))
    except ExportError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return None
    return path


def pytorch_run(model: nn.Module, precision: str) -> Run:
    """Return the forward pass of a model in a precision."""
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.AMP", "bf16" if precision == "bf16" else "off"])
    policy = PrecisionPolicy.from_config(cfg, torch.device("cpu"))

    @torch.inference_mode()
    def run(images: np.ndarray) -> Any:
        with policy.autocast():
            return model(torch.from_numpy(images))

    return run


def session_run(session: Session) -> Run:
    """Return the function of a session for arrays."""
    return lambda images: session.run({"images": images})


def prepare(folder: Path, name: str, runs_folder: Path) -> tuple[dict[tuple[str, str, str], Run], list[str]]:
    """Build and export a model.

    Returns:
        (model, runtime, precision) -> function; and the row of sizes: name, parameters without classifiers,
        multiply-adds of one image, the file size in each precision, and the number of layers of the int8 model in
        float32.
    """
    predictor, trained = make_predictor(folder, MODELS[name], runs_folder)
    model = predictor.model
    deployed = not name.endswith("not deployed")
    for module in list(model.modules()) if deployed else ():
        if isinstance(module, DeployableModule):
            module.switch_to_deploy()
    runs = {(name, "PyTorch", precision): pytorch_run(model, precision) for precision in ("float32", "bf16")}
    sizes: dict[str, str] = {}
    float_layers: int | str = ""
    for (runtime, precision), (suffix, file_precision) in FILES.items() if deployed else ():
        file = f"{name.lower().replace(' ', '_').replace('.', '_')}_{file_precision}{suffix}"
        path = export_once(predictor, folder / file, file_precision) if trained or precision != "int8" else None
        if path is None:
            continue
        if runtime == "ONNX Runtime":
            session = open_onnx(path, threads=1)
        else:
            session = open_openvino(path, threads=1, precision="bf16" if precision == "bf16" else "f32")
        runs[name, runtime, precision] = session_run(session)
        if suffix == ".onnx":
            sizes[file_precision] = f"{path.stat().st_size / 1e6:.2f}"
        if (runtime, precision) == ("ONNX Runtime", "int8"):
            float_layers = len(json.loads(session.metadata["quantization"])["float_layers"])
    classifiers = sum(head.weight.numel() for head in model.modules() if isinstance(head, EmbeddingHead))
    parameters = sum(parameter.numel() for parameter in model.parameters()) - classifiers
    macs = multiply_adds(model, torch.zeros(1, 3, *SIZE))
    files = [sizes.get(precision, "") for precision in FILE_PRECISIONS]
    return runs, [name, f"{parameters / 1e6:.2f}", f"{macs / 1e9:.3f}", *files, str(float_layers)]


def measure(
    runs: dict[tuple[str, str, str], Run], batches: dict[int, np.ndarray], rounds: int, repeats: int
) -> dict[tuple[tuple[str, str, str], int], list[float]]:
    """Run all variants in turns; return the CPU time in milliseconds per image, for each round."""
    times: dict[tuple[tuple[str, str, str], int], list[float]] = {(key, size): [] for key in runs for size in batches}
    for number in tqdm(range(rounds + 1), desc="rounds", disable=None):
        for key, run in runs.items():
            for size, images in batches.items():
                count = max(1, repeats // size)
                start = time.process_time()
                for _ in range(count):
                    run(images)
                if number:  # the first warms up
                    times[key, size].append((time.process_time() - start) / (count * size) * 1e3)
    return times


def latency_table(times: dict[tuple[tuple[str, str, str], int], list[float]], names: list[str], size: int) -> str:
    """Format the median, lowest and highest time of each model, runtime and precision as a table."""
    rows = []
    for name in names:
        latencies = [times.get(((name, *variant), size)) for variant in VARIANTS]
        cells = [f"{statistics.median(t):.1f} ({min(t):.1f}-{max(t):.1f})" if t else "" for t in latencies]
        rows.append([name, *cells])
    return tabulate(rows, ["ms per image", *(" ".join(words) for words in VARIANTS)], tablefmt="github")


def main() -> None:
    """Print the table of sizes, and the latencies of each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="batch sizes (default: 1 16)")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=4, help="images in a round, at least (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder of the exported files; files that exist are used")
    parser.add_argument("--runs", type=Path, default=Path("logs/light"), help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
    generator = np.random.default_rng(0)
    batches = {size: generator.integers(0, 256, (size, 3, *SIZE)).astype(np.float32) for size in args.batches}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runs, rows = {}, []
        for name in tqdm(args.models, desc="exports", disable=None):
            models, row = prepare(folder, name, args.runs)
            runs |= models
            rows.append(row)
        headers = [
            "",
            "parameters (M)",
            "multiply-adds (G)",
            *(f"ONNX {precision} (MB)" for precision in FILE_PRECISIONS),
        ]
        headers.append("layers in float32 (int8)")
        print(tabulate(rows, headers, tablefmt="github", disable_numparse=True), flush=True)
        times = measure(runs, batches, args.rounds, args.repeats)
    for size in args.batches:
        print(f"\nbatch {size}\n\n{latency_table(times, args.models, size)}")


if __name__ == "__main__":
    main()
