"""Group images into identities, without labels: k-reciprocal Jaccard distances, and DBSCAN or HDBSCAN.

The input is the output of `fastamp extract` or, with --model, a folder, CSV file or dataset, whose features are written
next to the CSV file. The CSV file has the columns path and cluster; images in no cluster are
outliers, -1. Where identities are known, the purity of the clusters and their normalized mutual information with the
identities are printed. Memory grows with the number of similar images, not with the square of the number of images.

examples:
  fastamp extract logs/run photos/ -o photos.npz
  fastamp cluster photos.npz
  fastamp cluster photos.npz --eps 0.5 --page clusters.html -o groups.csv
  fastamp cluster photos/ --model logs/run --page clusters.html
  fastamp cluster photos.npz --method hdbscan
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fastamp.cli.model_arguments import SOURCE_HELP, predictor_of
from fastamp.cli.options import add_plugin_argument, at_least
from fastamp.cli.source import model_source
from fastamp.utils.errors import ConfigError
from fastamp.utils.plural import plural

if TYPE_CHECKING:
    from fastamp.retrieval.features import Features

EPS, MIN_SAMPLES, K1, K2 = 0.6, 4, 30, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "features",
        metavar="FEATURES.npz",
        help="output of `fastamp extract`; with --model a folder, CSV file or dataset",
    )
    parser.add_argument(
        "--model", metavar="SOURCE", type=model_source, help=f"extract the features with this model: {SOURCE_HELP}"
    )
    add_plugin_argument(parser)
    parser.add_argument(
        "--output",
        "-o",
        metavar="OUT.csv",
        help="output file (default: FEATURES_clusters.csv in the same folder; with --model in the current folder)",
    )
    parser.add_argument("--page", metavar="OUT.html", help="also write a page with images of the clusters")
    parser.add_argument(
        "--method",
        choices=("dbscan", "hdbscan"),
        default="dbscan",
        help="hdbscan needs no --eps, and scikit-learn: pip install fastamp[cluster] (default: %(default)s)",
    )
    parser.add_argument(
        "--eps",
        type=float,
        default=EPS,
        help="largest Jaccard distance of neighbors, between 0 and 1; larger values give larger clusters and fewer "
        "outliers (default: %(default)s)",
    )
    parser.add_argument(
        "--min-samples",
        type=at_least(1),
        default=MIN_SAMPLES,
        metavar="N",
        help="neighbors of an image, itself included, that make it the core of a cluster; with hdbscan the smallest "
        "cluster (default: %(default)s)",
    )
    parser.add_argument(
        "--k1",
        type=at_least(1),
        default=K1,
        metavar="N",
        help="nearest neighbors for the reciprocity test, itself included; choose about the number of images of an "
        "identity (default: %(default)s)",
    )
    parser.add_argument(
        "--k2", type=at_least(1), default=K2, metavar="N", help="neighbors that are averaged (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:N or mps (default: auto)")


def run(args: argparse.Namespace) -> int:
    """Cluster the images, write the files and print a summary."""
    from fastamp.amp import resolve_device
    from fastamp.evaluation.clustering import Clustering, describe_few_clusters
    from fastamp.inference.cluster import cluster, describe_dominant_cluster, write_csv, write_page
    from fastamp.retrieval.features_file import read_features
    from fastamp.utils.files import check_outputs
    from fastamp.utils.logger import setup_logger

    setup_logger()
    if not args.model and Path(args.features).is_dir():
        raise ConfigError(
            f"{args.features} is a folder: its features are not extracted yet.\n"
            "  fix: add --model with a checkpoint or run folder, or run fastamp extract first"
        )
    options = Clustering(eps=args.eps, min_samples=args.min_samples, k1=args.k1, k2=args.k2, method=args.method)
    source = Path(args.features)
    folder = Path() if args.model else source.parent
    output = Path(args.output) if args.output else folder / f"{source.stem.replace(':', '_')}_clusters.csv"
    check_outputs(source, output=output, page=args.page)
    device = resolve_device(args.device, "--device")
    extraction = _extract(args, output.with_suffix(".npz")) if args.model else read_features(source)
    labels, quality, names = cluster(extraction, options, device=device)
    print(quality)
    write_csv(output, extraction, labels)
    print(f"wrote {output}")
    if args.page:
        write_page(Path(args.page), extraction, labels, quality, names)
        print(f"wrote {args.page}")
    if warning := describe_dominant_cluster(extraction, labels, options, device=device):
        print(warning, file=sys.stderr)
    if problem := describe_few_clusters(quality, options, eps="--eps", min_samples="--min-samples"):
        print(problem, file=sys.stderr)
        return 1
    return 0


def _extract(args: argparse.Namespace, output: Path) -> "Features":
    """Extract the features of the images to ``output``; a repeated call continues an interrupted extraction."""
    from fastamp.inference.extract import check_output, extract

    check_output(output)
    model = argparse.Namespace(checkpoint=args.model, device=args.device, plugin=args.plugin, opts=[])
    extraction, skipped = extract(predictor_of(model), args.features, output, skip_corrupt=True)
    if skipped:
        print(f"skipped {plural(len(skipped), 'unreadable image')}:", *skipped, sep="\n  ")
    print(f"wrote {output}")
    return extraction
