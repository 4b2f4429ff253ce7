"""Arguments of commands that use a trained model."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastamp.cli.options import add_plugin_argument, split_key_values
from fastamp.cli.source import CONFIG, evaluation_config, model_source, resolve_source
from fastamp.utils.errors import ConfigError

if TYPE_CHECKING:
    from fastamp.inference import Predictor
    from fastamp.inference.feature_model import FeatureModel

SOURCE_HELP = (
    "checkpoint, run folder (its model_best.pth), packaged model, hf://user/name, name of `fastamp models`, or recipe "
    "or YAML file with MODEL.WEIGHTS"
)


EXPORTED_HELP = f"{SOURCE_HELP}; or exported .onnx, .xml or .tflite file"


def add_model_arguments(parser: argparse.ArgumentParser, help: str = SOURCE_HELP) -> None:
    """Add the arguments SOURCE, --device, --plugin and --opts; ``add_key_values`` adds KEY VALUE."""
    parser.add_argument("checkpoint", metavar="SOURCE", type=model_source, help=help)
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:N or mps (default: auto)")
    add_plugin_argument(parser)
    parser.add_argument(
        "--opts", nargs="+", default=[], metavar="KEY VALUE", help="the same as KEY VALUE without --opts"
    )


def add_camera_view_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments --camids, --viewids and --modality."""
    for name in ("camids", "viewids"):
        help_ = f"one per image, for a model with {'camera' if name == 'camids' else 'view'} embeddings"
        parser.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=help_)
    parser.add_argument(
        "--modality",
        nargs="+",
        choices=("visible", "infrared"),
        help="one for all images or one per image, for a model with a stem for each (default: MODEL.BACKBONE.MODALITY)",
    )


def predictor_of(args: argparse.Namespace, key_values: Sequence[str] = ()) -> "Predictor":
    """Create a ``Predictor`` from the arguments that ``add_model_arguments`` added, and from KEY VALUE pairs.

    Raises:
        UserError: if the checkpoint, the device or a KEY VALUE pair is invalid.
    """
    from fastamp.amp import resolve_device
    from fastamp.inference import Predictor

    given = split_key_values(args.opts)
    if len(given) % 2:
        raise ConfigError(
            f"--opts: expected KEY VALUE pairs, got {' '.join(given)}.\n  fix: add a value after the last key"
        )
    opts = [*given, *key_values]
    resolve_device(args.device, "--device")
    source = resolve_source(args.checkpoint)
    if source.kind != CONFIG and not args.plugin:
        return Predictor(source.path, device=args.device, opts=opts)
    cfg, _ = evaluation_config("", opts, plugin=args.plugin, source=args.checkpoint)
    return Predictor(cfg, device=args.device)


def model_of(args: argparse.Namespace, key_values: Sequence[str] = ()) -> "FeatureModel":
    """Create an ``ExportedModel`` if SOURCE is an ONNX, OpenVINO or TFLite file, otherwise a ``Predictor``.

    Raises:
        UserError: see ``predictor_of``; also if there are KEY VALUE pairs or another device for an exported file.
    """
    from fastamp.inference.runtime import ExportedModel, is_exported

    if not is_exported(args.checkpoint):
        return predictor_of(args, key_values)
    given = [*split_key_values(args.opts), *key_values]
    if given or args.plugin or args.device not in ("auto", "cpu"):
        option = " ".join(given) or (f"--plugin {args.plugin}" if args.plugin else f"--device {args.device}")
        raise ConfigError(
            f"{args.checkpoint} is an exported file, which runs on the CPU without a config; got {option}.\n"
            f"  fix: omit {option}, or use the checkpoint"
        )
    return ExportedModel(args.checkpoint)
