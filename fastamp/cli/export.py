"""Export a trained model to ONNX or torch.export, and check the file against PyTorch."""

import argparse

PRECISIONS = ("float32", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file that a run wrote, e.g. logs/x/model_best.pth")
    parser.add_argument("output", metavar="OUT", help="OUT.onnx, or OUT.pt2 for torch.export")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="fp16: the features stay float32")
    parser.add_argument(
        "--normalization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="images in 0..255, with mean and standard deviation in the file; else they are normalized by the caller",
    )
    parser.add_argument(
        "--l2", action=argparse.BooleanOptionalAction, default=False, help="features of length 1 instead of any"
    )
    parser.add_argument(
        "--data", metavar="DATASET", help="test set to compare on; default: the config's first, if it is there"
    )
    parser.add_argument(
        "--max-images", type=int, default=1000, help="compare whole identities of about so many images; 0: all"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.1, metavar="POINTS", help="of mAP that may be lost; default 0.1"
    )
    parser.add_argument("--opset", type=int, help="of ONNX; default: PyTorch's choice")
    parser.add_argument("--device", default="auto", help="where PyTorch computes what is compared with")
    parser.add_argument("opts", metavar="KEY VALUE", nargs="*", help="changes of the checkpoint's config")


def run(args: argparse.Namespace) -> int:
    """Export, and print how near the file is to the model."""
    from fastamp.inference import Predictor
    from fastamp.inference.export import export

    report = export(
        Predictor(args.checkpoint, device=args.device, opts=args.opts),
        args.output,
        precision=args.precision,
        normalization=args.normalization,
        l2=args.l2,
        data=args.data,
        max_images=args.max_images,
        tolerance=args.tolerance,
        opset=args.opset,
    )
    print(report.table())
    print(f"wrote {report.path} ({report.format}, {report.size / 2**20:.1f} MiB)")
    return 0
