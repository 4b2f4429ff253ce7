"""Export a trained model to ONNX, OpenVINO, torch.export, TorchScript or TFLite, and compare it with PyTorch.

examples:
  fastamp export logs/run model.onnx
  fastamp export logs/run/model_best.pth model.pt2 --precision fp16 --l2
  fastamp export logs/run model --format openvino
  fastamp export logs/run model.onnx --preprocess inside --color-order bgr
  fastamp export logs/run model.onnx --precision int8
"""

import argparse
from pathlib import Path

from fastamp.cli.model_arguments import add_model_arguments, predictor_of
from fastamp.cli.options import add_key_values, dataset_argument
from fastamp.utils.choices import EXPORT_PRECISIONS
from fastamp.utils.errors import ConfigError
from fastamp.utils.plural import mebibytes

FORMATS = {
    "onnx": ".onnx",
    "openvino": ".xml",
    "torch-export": ".pt2",
    "torchscript": ".ts",
    "tflite": ".tflite",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_model_arguments(parser)
    parser.add_argument(
        "output", metavar="OUT", help=f"output file; its suffix selects the format: {', '.join(FORMATS.values())}"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="format; its suffix is appended to OUT without one (default: that of OUT)",
    )
    parser.add_argument(
        "--precision",
        choices=EXPORT_PRECISIONS,
        default="float32",
        help="precision of the exported model, whose features are always float32; int8 for ONNX, "
        "OpenVINO and TFLite (default: %(default)s)",
    )
    parser.add_argument(
        "--preprocess",
        choices=("outside", "inside"),
        default="outside",
        help="resize images outside or inside the exported model; inside, it takes uint8 images (B, H, W, C) of any "
        "size (default: %(default)s)",
    )
    parser.add_argument(
        "--color-order",
        choices=("rgb", "bgr"),
        default="rgb",
        help="order of the channels with --preprocess inside: rgb, or bgr as in OpenCV (default: %(default)s)",
    )
    parser.add_argument(
        "--normalization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take images in 0..255 and normalize them in the exported model; otherwise the caller normalizes them",
    )
    parser.add_argument("--l2", action=argparse.BooleanOptionalAction, default=False, help="L2-normalize the features")
    parser.add_argument(
        "--data",
        metavar="DATASET",
        help="test dataset for the comparison (default: the first of DATASETS.TESTS, if available)",
    )
    parser.add_argument(
        "--max-images",
        type=int,
        default=1000,
        help="approximate number of images to compare, in whole identities; 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="POINTS",
        help="maximum loss of mAP, in percentage points (default: 0.1; for int8 0.5)",
    )
    parser.add_argument(
        "--calibration-images",
        type=int,
        metavar="N",
        help="number of images of the training set with which int8 is calibrated (default: 256)",
    )
    parser.add_argument(
        "--license",
        default="",
        help="license of the weights, for the metadata (default: of the model card, or unknown)",
    )
    parser.add_argument("--license-name", default="", metavar="NAME", help="name of the license, for --license other")
    parser.add_argument("--license-link", default="", metavar="URL", help="URL of the license, for --license other")
    parser.add_argument("--opset", type=int, help="ONNX opset version (default: chosen by PyTorch)")
    add_key_values(parser, dest="key_values")


def run(args: argparse.Namespace) -> int:
    """Export the model and print the comparison."""
    from fastamp.inference.export import export
    from fastamp.inference.package import License

    given = {"name": args.license, "title": args.license_name, "link": args.license_link}
    with dataset_argument("--data"):
        report = export(
            predictor_of(args, args.key_values),
            _path(args.output, args.format),
            precision=args.precision,
            normalization=args.normalization,
            l2=args.l2,
            data=args.data,
            max_images=args.max_images,
            tolerance=args.tolerance,
            opset=args.opset,
            preprocess=args.preprocess,
            color_order=args.color_order,
            license=License(**given) if any(given.values()) else None,
            calibration_images=args.calibration_images,
        )
    print(report.table())
    print(f"wrote {report.path} ({report.format}, {mebibytes(report.size)})")
    return 0


def _path(output: str, format: str | None) -> Path:
    """Return the output file, with the suffix of ``--format`` if it has none."""
    path, suffix = Path(output), FORMATS.get(format or "", "")
    if suffix and path.name and path.suffix not in FORMATS.values():
        return path.with_name(path.name + suffix)
    if suffix and path.suffix != suffix:
        raise ConfigError(
            f"--format {format} writes {suffix} files; got {output}.\n  fix: omit the suffix, or omit --format"
        )
    return path
