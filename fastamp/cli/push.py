"""Package a trained model with a model card, and upload it to the Hugging Face Hub.

The package contains model.safetensors (the evaluated weights without training state), config.yaml and README.md (the
model card). A folder written by --to is uploaded as it is, so that the model card can be completed before. Uploading
requires `pip install "fastamp[hub]"` and a token with write permission (`hf auth login`, or HF_TOKEN).

examples:
  fastamp push logs/run user/name --license apache-2.0
  fastamp push logs/run user/name --license apache-2.0 --to model/
  fastamp push model/ user/name --private
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fastamp.cli.model_arguments import SOURCE_HELP
from fastamp.cli.options import add_plugin_argument
from fastamp.cli.source import CONFIG, model_source, resolve_source
from fastamp.utils.errors import ConfigError
from fastamp.utils.plural import mebibytes

if TYPE_CHECKING:
    from fastamp.inference.package import License


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("checkpoint", metavar="SOURCE", type=model_source, help=SOURCE_HELP)
    parser.add_argument("repository", metavar="USER/NAME", nargs="?", default="", help="name of the model on the Hub")
    parser.add_argument(
        "--to", metavar="FOLDER", default="", help="write the package to a new folder, without uploading"
    )
    parser.add_argument(
        "--license", default="", help="license of the weights, required: apache-2.0, cc-by-nc-4.0, other ..."
    )
    parser.add_argument("--license-name", default="", metavar="NAME", help="name of the license, for --license other")
    parser.add_argument("--license-link", default="", metavar="URL", help="URL of the license, for --license other")
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        help="metrics_eval.json of an evaluation of SOURCE (default: those of the training run)",
    )
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--update", action="store_true", help="add a commit to a repository that is not empty")
    add_plugin_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Package and upload the model, and print a summary."""
    from fastamp.inference.hub import find_token, upload
    from fastamp.inference.package import License

    if not (args.repository or args.to):
        raise ConfigError(
            "no destination.\n  fix: add USER/NAME to upload the model, or --to FOLDER to write it to a folder"
        )
    source = resolve_source(args.checkpoint)
    if source.kind == CONFIG:
        raise ConfigError(f"{args.checkpoint} is a config.\n  fix: give a run folder, checkpoint or packaged model")
    options = {"private": args.private, "update": args.update}
    if source.path.name == "model.safetensors":
        _reject_package_options(args)
        print(f"uploaded {upload(source.path.parent, args.repository, **options)}")
        return 0
    license = License(name=args.license, title=args.license_name, link=args.license_link)
    if args.to:
        _package(args, args.to, license)
        card = Path(args.to) / "README.md"
        print(f"next: complete {card}, then run: fastamp push {args.to} {args.repository or 'USER/NAME'}")
        return 0
    find_token(args.repository)
    with tempfile.TemporaryDirectory() as folder:
        package = f"{folder}/{args.repository.rpartition('/')[2]}"
        _package(args, package, license)
        print(f"uploaded {upload(Path(package), args.repository, **options)}")
    return 0


def _reject_package_options(args: argparse.Namespace) -> None:
    """Raise ConfigError if an option would change a folder that is already packaged."""
    names = ("to", "license", "license_name", "license_link", "metrics")
    given = ", ".join(f"--{name.replace('_', '-')}" for name in names if vars(args)[name])
    if given:
        raise ConfigError(
            f"{args.checkpoint} is already packaged and is uploaded as it is, without {given}.\n"
            "  fix: edit its README.md, or package the run folder or checkpoint again"
        )


def _package(args: argparse.Namespace, folder: str, license: "License") -> None:
    """Write the package to a folder, and print a summary."""
    from fastamp.inference.package import package

    parts = package(
        args.checkpoint,
        folder,
        license=license,
        repository=args.repository,
        metrics=args.metrics,
        plugin=args.plugin,
    )
    print(f"packaged {args.checkpoint}: {mebibytes(parts.bytes)}, weights: {parts.weights}, license: {license.name}")
    for dataset, metrics in parts.metrics.items():
        shown = ", ".join(f"{name} {metrics[name]:.2f}" for name in ("mAP", "Rank-1") if name in metrics)
        print(f"metrics in the model card: {dataset}{': ' if shown else ''}{shown}")
    if not parts.metrics:
        print("metrics in the model card: none recorded; add --metrics metrics_eval.json, written by `fastamp eval`")
