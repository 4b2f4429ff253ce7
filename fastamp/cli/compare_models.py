"""Compare models on one test set: accuracy with paired intervals, latency, throughput, size and precision.

Each model is a SOURCE: a checkpoint, run folder, exported file or name of `fastamp models`. Prints one table and the
differences of each pair of models, and writes models.json and models.png. Intervals (95 %, bootstrap) are over the
identities of the queries. Times are medians of alternating measurements of preprocessed images.

examples:
  fastamp compare-models logs/a logs/b model_int8.onnx --data Market1501
  fastamp compare-models osnet_x1_0_msmt17 fastreid_sbs_r50_msmt17 --data csv:mine.csv --device cuda
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastamp.cli.model_arguments import EXPORTED_HELP, model_of
from fastamp.cli.options import add_plugin_argument, at_least, dataset_argument
from fastamp.cli.source import model_source
from fastamp.utils.errors import ConfigError, writing
from fastamp.utils.table import format_table

if TYPE_CHECKING:
    from fastamp.inference.model_comparison import ModelComparison, ModelResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("models", nargs="+", metavar="SOURCE", type=model_source, help=EXPORTED_HELP)
    parser.add_argument("--data", required=True, metavar="NAME", help="test set, as in DATASETS.TESTS")
    parser.add_argument("--device", default="auto", help="device of checkpoints (default: auto)")
    parser.add_argument("--batch", type=at_least(1), default=32, help="images of a batch (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least(1), default=20, help="timings of each model (default: %(default)s)")
    parser.add_argument(
        "--output", default="logs/compare_models", metavar="DIR", help="folder of the files (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_plugin_argument(parser)
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="keys of the test set and protocol, below TEST or DATASETS",
    )


def run(args: argparse.Namespace) -> int:
    """Compare the models; return 1 if a model could not be compared, else 0."""
    from fastamp.cli.options import split_key_values
    from fastamp.config import read_config
    from fastamp.inference.model_comparison import compare_models
    from fastamp.report.figures import panel_figure, write_figure
    from fastamp.utils.files import write_atomically
    from fastamp.zoo import entry_of

    if len(set(args.models)) < max(2, len(args.models)):
        raise ConfigError(
            f"expected at least two different models, got {', '.join(args.models)}.\n  fix: give each model once"
        )
    opts = split_key_values(args.opts)
    other = [key for key in opts[::2] if not key.startswith(("TEST.", "DATASETS."))]
    if other:
        raise ConfigError(f"{other[0]} does not describe the test set or the protocol.\n  fix: remove it")
    cfg = read_config("", opts, plugin=args.plugin)
    common = {"device": args.device, "plugin": args.plugin, "opts": []}
    named = {entry.name if (entry := entry_of(source)) else source: source for source in args.models}
    with dataset_argument("--data"):
        comparison = compare_models(
            list(named),
            lambda name: model_of(argparse.Namespace(checkpoint=named[name], **common)),
            args.data,
            cfg,
            batch=args.batch,
            rounds=args.rounds,
        )
    content = _content(comparison)
    folder = Path(args.output)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            folder / "models.json", lambda file: file.write(json.dumps(content, indent=1).encode() + b"\n")
        )
    write_figure(panel_figure([comparison.panel()]), folder / "models.png")
    if args.json:
        print(json.dumps(content))
    else:
        print(_text(comparison))
        print(f"wrote {folder / 'models.json'} and {folder / 'models.png'}")
    return int(bool(comparison.failures))


def _content(comparison: "ModelComparison") -> dict[str, Any]:
    """Return the comparison as JSON values, without the results of each query."""
    models = [{name: value for name, value in vars(model).items() if name != "ranking"} for model in comparison.models]
    differences = [
        {"better": better, "worse": worse, "metrics": [asdict(row) for row in rows]}
        for (better, worse), rows in comparison.differences.items()
    ]
    return {**vars(comparison), "models": models, "differences": differences}


def _text(comparison: "ModelComparison") -> str:
    headers = [
        "model",
        "mAP",
        "Rank-1",
        "ms, 1 image",
        f"images/s, {comparison.batch} images",
        "MiB",
        "device",
        "precision",
    ]
    lines = [
        f"{comparison.dataset}: {comparison.protocol}; {comparison.threads} threads; latency: median and quartiles",
        format_table([_cells(model) for model in comparison.models], headers),
    ]
    for (better, worse), rows in comparison.differences.items():
        row = next(row for row in rows if row.metric == "mAP")
        is_clear = "" if row.low > 0 else ", which includes 0"
        lines.append(
            f"mAP: {better} better than {worse} by {row.difference:.1f}, {row.low:.1f} to {row.high:.1f}{is_clear}"
        )
    lines += [f"not compared: {source}: {error}" for source, error in comparison.failures.items()]
    return "\n".join(lines)


def _cells(model: "ModelResult") -> list[str]:
    intervals = model.metrics.get("intervals", {})
    cells = [model.name]
    for name in ("mAP", "Rank-1"):
        low_high = " ({:.1f} to {:.1f})".format(*intervals[name]) if name in intervals else ""
        cells.append(f"{model.metrics[name]:.1f}{low_high}")
    low, median, high = model.latency_ms
    cells += [f"{median:.1f} ({low:.1f} to {high:.1f})", f"{model.images_per_s:.0f}", f"{model.size_mib:.1f}"]
    return [*cells, model.device, model.precision]
