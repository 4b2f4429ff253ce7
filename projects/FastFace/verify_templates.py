#!/usr/bin/env python
"""Print the true-accept rate of pairs of templates, as in IJB-B and IJB-C, at false-accept rates from 1e-6 to 0.1.

The features of the images are those of `fastamp extract`. Images are found by their file names.

examples:
  fastamp extract logs/fastface folder:IJBC/aligned TEST.FLIP.ENABLED True -o ijbc.npz
  python projects/FastFace/verify_templates.py --templates face_tid_mid.txt --pairs template_pair_label.txt ijbc.npz
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from tabulate import tabulate

from fastamp.engine import run_command_line
from fastamp.retrieval.features_file import read_features
from fastamp.utils.errors import DataError

sys.path.append(str(Path(__file__).parent))

RATES = np.array([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])


def main(args: argparse.Namespace) -> None:
    """Print the rates."""
    from fastface.templates import pair_scores, read_table, template_features, true_accept_rates

    images, templates, media = read_table(args.templates, ("image", "template", "medium"))
    first, second, label = read_table(args.pairs, ("template", "template", "label"))
    extraction = read_features(args.features)
    paths = extraction.images.paths.tolist()
    rows = {Path(path).name: row for row, path in enumerate(paths)}
    if len(rows) < len(paths):
        raise DataError(
            f"{args.features}: {len(paths)} images have {len(rows)} different names, but the lists contain "
            "names only.\n  fix: extract the features of one folder"
        )
    missing = [name for name in images.tolist() if Path(name).name not in rows]
    if missing:
        raise DataError(
            f"{args.features} has no features of {len(missing)} of {len(images)} images, e.g. {missing[0]}.\n"
            "  fix: extract the features of all images"
        )
    features = np.asarray(extraction.matrix[[rows[Path(name).name] for name in images.tolist()]], dtype=np.float64)
    if args.normalize:
        features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    scores = pair_scores(*template_features(features, templates, media), first, second)
    same = label == 1
    accept_rates = true_accept_rates(scores, same, RATES)
    impostors = int((~same).sum())
    table = [
        (f"{rate:g}", f"{100 * value:.2f}" if rate * impostors >= 1 else f"- (needs {1 / rate:.0f} pairs)")
        for rate, value in zip(RATES, accept_rates, strict=True)
    ]
    print(
        f"{len(np.unique(templates))} templates, {int(same.sum())} pairs of one identity, {impostors} of different ones"
    )
    print(tabulate(table, headers=["false-accept rate", "true-accept rate in percent"], disable_numparse=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", help="file of `fastamp extract`")
    parser.add_argument("--templates", type=Path, required=True, help="rows: image template medium")
    parser.add_argument("--pairs", type=Path, required=True, help="rows: template template label (1: one identity)")
    parser.add_argument("--normalize", action="store_true", help="give all images of a template the same weight")
    arguments = parser.parse_args()
    sys.exit(run_command_line(lambda: main(arguments)))
