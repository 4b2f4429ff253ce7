"""Evaluate features saved by fastamp or another program in an .npz file.

The file contains query_features (Q, D), gallery_features (G, D), and query_pids, gallery_pids, query_camids and
gallery_camids as integers or text; cameras are optional with TEST.PROTOCOL no_camera and vehicleid. The output of
`fastamp extract` for a dataset is also accepted: features, pids, camids, and split with the values query and gallery.
No code in the file is executed. `fastamp config list TEST` lists the keys below TEST.

examples:
  fastamp evaluate-features features.npz
  fastamp evaluate-features features.npz TEST.RERANK=on --per-query queries.npz
"""

import argparse
import logging

from fastamp.cli.options import add_key_values
from fastamp.utils.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("features", metavar="FEATURES.npz", help="file of the features")
    parser.add_argument(
        "--config-file", default="", metavar="FILE", help="recipe or YAML file; only the keys below TEST are used"
    )
    parser.add_argument("--json", action="store_true", help="print mAP, mINP, Rank-1 and num_valid_queries as JSON")
    parser.add_argument("--per-query", metavar="OUT.npz", help="write ap, inp, valid and first_match of each query")
    add_key_values(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate the features and print the metrics."""
    from fastamp.config import read_config
    from fastamp.inference.evaluate_features import check, evaluate
    from fastamp.utils.files import check_outputs
    from fastamp.utils.logger import setup_logger

    setup_logger()
    if args.json:
        logging.getLogger("fastamp").setLevel(logging.ERROR)
    if len(args.opts) % 2:
        raise ConfigError(f"expected KEY VALUE pairs, got {' '.join(args.opts)}.\n  fix: add the missing key or value")
    cfg = read_config(args.config_file, ["MODEL.DEVICE", "auto", *args.opts])
    check_outputs(args.features, per_query=args.per_query)
    check(cfg, args.opts)
    evaluate(args.features, cfg, per_query=args.per_query, as_json=args.json)
    return 0
