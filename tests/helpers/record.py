"""Record the results of this version, write files to be loaded by later versions, or compare two records.

    python tests/helpers/record.py OUTPUT           short runs, evaluations, export, features, figures
    python tests/helpers/record.py --compare A B    print the differences of two records; exit code 1 if there are any
    python tests/helpers/record.py --files FOLDER   the files of tests/reference/recorded

On one machine with the same OMP_NUM_THREADS, records of different versions can be compared bit by bit.
"""

# ruff: noqa: E402
import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX512_CORE_BF16")  # as in tests/conftest.py
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tools"), str(ROOT / "projects/FastTune")]

import numpy as np
import PIL.Image
import recorded
import tiny
import torch
import train_net

import fastamp
from fastamp import Predictor
from fastamp.cli import main as fastamp_command
from fastamp.inference.export import export
from fastamp.inference.extract import extract
from fastamp.inference.index import KINDS, build_index, load_index

TWENTY_STEPS = ("SOLVER.MAX_EPOCH", "4", "LOG_PERIOD", "1", "TEST.EVAL_PERIOD", "2")  # 24 of them
RECIPE = (
    "MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512",
    "MODEL.BACKBONE.LAST_STRIDE", "1", "MODEL.BACKBONE.PRETRAIN", "False", "SOLVER.EMA.ENABLED", "True",
    "SOLVER.EMA.DECAY", "0.9", "SOLVER.EMA.WARMUP", "False", "MODEL.FREEZE_LAYERS", "backbone.layer1",
    "SOLVER.FREEZE_ITERS", "6",
    "SOLVER.IMS_PER_BATCH", "8", "SOLVER.ACCUM_STEPS", "2", "SOLVER.CLIP_GRADIENTS", "True",
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "norm", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "1.0",
    "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'TripletLoss', 'CenterLoss')", "MODEL.LOSSES.CE.EPSILON", "0.1",
    "MODEL.HEADS.POOL_LAYER", "GeneralizedMeanPoolingP", "INPUT.AUTOAUG.ENABLED", "True",
)  # fmt: skip
SHORT = {
    **{f"two_convolutions_{name}": ("SOLVER.AMP", name) for name in ("off", "bf16", "fp16")},
    **{f"resnet18_{name}": ("SOLVER.AMP", name, *RECIPE) for name in ("off", "bf16")},
}
TIMES = ("time", "data_time", "images_per_second", "eta_seconds", "peak_memory_mb")


# ---- records


def record(output: Path) -> None:
    """Write a record of each run into ``output``, and ``summary.json``."""
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"version": fastamp.__version__, "machine": recorded.machine(), "records": {}}
    with in_scratch_folder():
        for name, make in RECORDS.items():
            began = time.perf_counter()
            values = dict(recorded.flat(make()))
            torch.save(values, output / f"{name}.pth")
            shown = [(key, value) for key, value in values.items() if re.search(r"mAP$|total_loss$", key)]
            summary["records"][name] = {"sha256": checksum(values), "values": len(values), "last": dict(shown[-3:])}
            print(f"{name}: {len(values)} values, {checksum(values)}, {time.perf_counter() - began:.1f} s", flush=True)
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


@contextlib.contextmanager
def in_scratch_folder() -> Iterator[None]:
    """Change to a temporary folder with a demo set in ``datasets``, so that all stored paths are relative."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["FASTAMP_DATASETS"] = "datasets"
        tiny.make_demo(Path("datasets"))
        try:
            yield
        finally:
            os.chdir(before)


def short_run(name: str, options: tuple[str, ...]) -> dict[str, Any]:
    """Train in this process with ``train_net.py``; return the metrics of each step and the final state."""
    words = tiny.tiny_options(Path(name), *options)
    assert train_net.cli(words) == 0
    return run_record(Path(name))


def run_record(folder: Path) -> dict[str, Any]:
    """Collect the metrics of each step and the content of the last checkpoint, without the names of hooks."""
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    content = torch.load(folder / "model_final.pth", weights_only=True)
    trainer = content.pop("trainer")
    trainer["hooks"] = sorted(map(str, filter(None, trainer["hooks"].values())))
    for part in ("config", "random"):
        del content[part]
    metrics = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
    return {"metrics": metrics, "trainer": trainer, **content}


def evaluation(*options: str) -> dict[str, Any]:
    """Evaluate the weights of the float32 run with a report, and return the metrics and the text of the report."""
    folder = Path("evaluation")
    shutil.rmtree(folder, ignore_errors=True)
    weights = ("MODEL.WEIGHTS", "two_convolutions_off/model_best.pth", "TEST.REPORT", "True")
    assert train_net.cli(["--eval-only", *tiny.tiny_options(folder, *weights, *options)]) == 0
    return {
        "metrics": json.loads((folder / "metrics_eval.json").read_text())["metrics"],
        "report": report_text(folder / "report.html"),
    }


class _Text(HTMLParser):
    """HTML parser that collects the text and images of a page by section."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, list[str]] = {}
        self._section = "head"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "section":
            self._section = str(values.get("id"))
        if tag in ("path", "polyline", "img", "rect"):
            drawn = "".join(str(values.get(key)) for key in ("d", "points", "src", "width", "height"))
            self.sections.setdefault(self._section, []).append(hashlib.sha256(drawn.encode()).hexdigest()[:16])

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.sections.setdefault(self._section, []).append(data.strip())


def report_text(path: Path) -> dict[str, list[str]]:
    """Collect the text and drawings of a report by section, without sections that depend on the machine or on time."""
    page = _Text()
    page.feed(path.read_text(encoding="utf-8"))
    training = page.sections.get("training", [])
    if "Speed" in training:  # the last figure
        del training[training.index("Speed") :]
    return {name: lines for name, lines in page.sections.items() if name not in ("head", "environment")}


def exported() -> dict[str, Any]:
    """Export with torch.export; return the parity result and the features of the exported program."""
    report = export(predictor(), "model.pt2", data="")
    program = torch.export.load("model.pt2").module()
    parity = [vars(each) for each in report.comparisons]
    return {"parity": parity, "features": program(images=recorded.IMAGES.float())}


def predictor() -> Predictor:
    return Predictor("two_convolutions_off/model_best.pth", device="cpu")


def inference() -> dict[str, Any]:
    """Compute features, extract a dataset, and search each kind of index; return the results."""
    model = predictor()
    features = model.features(list(recorded.IMAGES))
    extraction, _ = extract(model, "Demo", "gallery.npz")
    found = {}
    for kind in KINDS:
        index = build_index(extraction, f"{kind}.index", kind=kind)
        result = index.search(features.numpy(), 5)
        found[kind] = {"rows": result.rows.tolist(), "scores": result.scores.tolist()}
    return {"features": features, "gallery": torch.from_numpy(extraction.features.astype(np.float32)), "found": found}


def pictures() -> dict[str, Any]:
    """Compute checksums of the pixels in the figures of ``fastamp visualize``."""
    words = ["visualize", "two_convolutions_off", "--output", "pictures", "--device", "cpu", "--num", "2"]
    assert fastamp_command(words) == 0
    pixels = {
        str(path): hashlib.sha256(np.asarray(PIL.Image.open(path)).tobytes()).hexdigest()
        for path in sorted(Path("pictures").rglob("*.png"))
        if path.name != "curves.png"  # shows images/s
    }
    return {"pictures": pixels, "curves": Path("pictures/curves.png").is_file()}


def trained_with_report() -> dict[str, Any]:
    """Collect the text of a training report, excluding the speed."""
    words = tiny.tiny_options(Path("reported"), "SOLVER.MAX_EPOCH", "1", "TEST.REPORT", "True")
    assert train_net.cli(words) == 0
    sections = report_text(Path("reported/report.html"))
    return {name: lines for name, lines in sections.items() if name != "precision"} | {"names": list(sections)}


RECORDS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        name: lambda name=name, options=options: short_run(name, (*TWENTY_STEPS, *options))
        for name, options in SHORT.items()
    },
    **{
        name: lambda name=name, options=options: short_run(name, (*recorded.COMMON, "LOG_PERIOD", "1", *options))
        for name, options in recorded.RUNS.items()
    },
    "evaluation": evaluation,
    "evaluation_reranked": lambda: evaluation(
        "TEST.RERANK.ENABLED",
        "True",
        "TEST.AQE.ENABLED",
        "True",
        "TEST.FLIP.ENABLED",
        "True",
        "TEST.ROC.ENABLED",
        "True",
    ),
    "inference": inference,
    "export": exported,
    "pictures": pictures,
    "report": trained_with_report,
}


def checksum(values: dict[str, Any]) -> str:
    """Hash names and values."""
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return digest.hexdigest()[:16]


# ---- comparison


def differences(first: Path, second: Path) -> list[str]:
    """List the differences between two records, one line each."""
    lines = []
    names = [{path.stem for path in folder.glob("*.pth")} for folder in (first, second)]
    lines += [f"{name}: only in one of the records" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        one, two = (torch.load(folder / f"{name}.pth", weights_only=True) for folder in (first, second))
        for key in sorted(one.keys() | two.keys()):
            if (said := difference(one, two, key)) is not None:
                lines.append(f"{name}: {key}: {said}")
    return lines if any(names) else [f"no record is in {first} or {second}"]


def difference(one: dict[str, Any], two: dict[str, Any], key: str) -> str | None:
    """Describe the difference between two values; None if they are bit-identical."""
    if key not in one or key not in two:
        return f"only in the {'first' if key in one else 'second'}"
    a, b = one[key], two[key]
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None if type(a) is type(b) and repr(a) == repr(b) else f"{a!r} -> {b!r}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} -> {b.dtype} {tuple(b.shape)}"
    if a.numpy().tobytes() == b.numpy().tobytes():
        return None
    return f"{int((a != b).sum())} of {a.numel()} elements, at most by {(a.double() - b.double()).abs().max():.3g}"


def compare(first: Path, second: Path) -> int:
    """Print the differences and return the exit code."""
    lines = differences(first, second)
    print("\n".join(lines) or "bit-identical")
    return int(bool(lines))


# ---- files


def write_files(folder: Path) -> None:
    """Write the files of ``tests/reference/recorded``; they contain no paths of the scratch folder."""
    folder = folder.resolve()
    (folder / "names.json").write_text(to_json({"modules": recorded.public_names(), "commands": recorded.commands()}))
    (folder / "keys.json").write_text(to_json(recorded.keys()))
    with in_scratch_folder():
        for name in recorded.RUNS:
            recorded.interrupt(Path(name), name)
        two_ranks()
        crash()
        search()
        expected = gallery()
        facts = {
            "fastamp": fastamp.__version__,
            "machine": recorded.machine(),
            "torch": torch.__version__,
            "ray": version("ray"),
        }
        (folder / "recorded.json").write_text(to_json(facts | {"python": sys.version.split()[0], "expected": expected}))
        for name in (*recorded.RUNS, "two_ranks"):
            kept = ["config.yaml", "last_checkpoint", "metrics.json", "model_interrupted.pth"]
            take(Path(name), folder / name, [*kept, *(["model_best.pth"] if name == "ema" else [])])
        take(Path("crash/amp_crash"), folder / "amp_crash", [path.name for path in Path("crash/amp_crash").iterdir()])
        take(Path(), folder / "inference", ["gallery.npz", *(f"{kind}.index" for kind in KINDS)])
        shutil.rmtree(folder / "search", ignore_errors=True)
        shutil.copytree("search", folder / "search", ignore=shutil.ignore_patterns("*.tfevents.*", "log.txt", ".lock"))
    hide_paths(folder)


def hide_paths(folder: Path) -> None:
    """Replace the paths of Python and of this code in Ray's pickles with text of the same length."""
    for path in filter(Path.is_file, folder.rglob("*")):
        content = before = path.read_bytes()
        for place in {str(ROOT), sys.prefix, sys.base_prefix, str(Path.home())}:
            hidden = "/" + "x" * (len(place) - 1)
            for form in (str.encode, lambda text: text.encode().hex().encode()):
                content = content.replace(form(place), form(hidden))
        if content != before:
            print(f"removed paths from {path.relative_to(folder)}")
            path.write_bytes(content)


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def take(source: Path, target: Path, names: list[str]) -> None:
    """Copy files to a folder after removing its previous content."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in names:
        shutil.copyfile(source / name, target / name)


def two_ranks() -> None:
    """Train in two processes until one receives a signal."""
    flags = ("--fault", "signal on rank 1", "two_ranks", "2")
    command = [sys.executable, str(ROOT / "tests/helpers/ranks.py"), *flags, *recorded.TWO_RANKS]
    assert subprocess.run(command, capture_output=True).returncode == 128 + signal.SIGTERM


def crash() -> None:
    """Train with weights that overflow in float16 until a crash dump is written."""
    recorded.train(tiny.tiny_config(Path("planted"), "SOLVER.MAX_EPOCH", "1"))
    content = torch.load("planted/model_final.pth", weights_only=True)
    content["model"]["backbone.4.weight"] *= 1e6
    torch.save({"model": content["model"]}, "planted.pth")
    words = tiny.tiny_options(Path("crash"), *recorded.CRASH, "MODEL.WEIGHTS", "planted.pth")
    assert train_net.cli(words) == 2


def gallery() -> dict[str, Any]:
    """Write an extraction and indexes with the averaged weights of a run; return the search results."""
    model = Predictor("ema/model_best.pth", device="cpu")
    features = model.features(list(recorded.IMAGES))
    extraction, _ = extract(model, "Demo", "gallery.npz")
    expected: dict[str, Any] = {
        "features": features.tolist(),
        "extraction_sum": extraction.features.astype(float).sum(0).tolist(),
        "paths": list(map(str, extraction.paths)),
    }
    for kind in KINDS:
        build_index(extraction, f"{kind}.index", kind=kind)
        found = load_index(f"{kind}.index").search(features.numpy(), 3)
        expected[kind] = {"rows": found.rows.tolist(), "scores": found.scores.tolist()}
    return expected


def search() -> None:
    """Start a FastTune search, and kill it during a trial.

    The search runs from a copy of the code, because Ray's state contains the paths of source files.
    """
    shutil.copytree(ROOT / "projects/FastTune", "FastTune")
    shutil.copytree(ROOT / "fastamp", "fastamp")
    shutil.copyfile(ROOT / "tests/helpers/tiny.py", "tiny.py")
    env = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "FastTune/tune_net.py", *recorded.search_arguments(Path("search"))]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    while True:
        time.sleep(0.05)
        assert process.poll() is None, "the search exited early"
        reports = list(Path("search/search").glob("trial_*/run/reports.jsonl"))
        if len(reports) > 1 and any(2 <= len(path.read_text().splitlines()) <= 6 for path in reports):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"))
    parser.add_argument("--files", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.compare:
        return compare(*args.compare)
    if args.files:
        write_files(args.files)
    elif args.output:
        record(args.output)
    else:
        parser.error("one of OUTPUT, --compare and --files is required")
    return 0


if __name__ == "__main__":
    sys.exit(main())
