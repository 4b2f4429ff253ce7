#!/usr/bin/env python
"""Measure whether error rates of open-set decisions hold for other identities, over random splits of an extraction.

Each split chooses thresholds on half of the identities and measures the error rates on the others. The table states in
how many splits both rates agree, i.e. the 95 % confidence interval of their difference contains 0, for intervals over
identities and, as a negative control, for intervals that take all pairs and queries as independent.
"""

import argparse
from dataclasses import replace

import numpy as np
import torch
from scipy import stats
from tabulate import tabulate

from fastamp.evaluation import Identities
from fastamp.evaluation.error_rates import ErrorRate, difference_interval
from fastamp.evaluation.thresholds import calibrate
from fastamp.retrieval.features_file import read_features

RATES = ("far", "frr", "fpir")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "extraction", metavar="FILE.npz", help="output of `fastamp extract` with identities and cameras"
    )
    parser.add_argument("--far", type=float, default=0.001, help="false accept rate (default: %(default)s)")
    parser.add_argument("--frr", type=float, default=0.05, help="false reject rate (default: %(default)s)")
    parser.add_argument("--fpir", type=float, default=0.05, help="false-positive identification rate (%(default)s)")
    parser.add_argument("--splits", type=int, default=20, help="number of splits (default: %(default)s)")
    args = parser.parse_args()
    extraction = read_features(args.extraction)
    _, pids = np.unique(extraction.images.pids, return_inverse=True)
    ids = torch.from_numpy(pids.reshape(-1)), torch.from_numpy(np.array(extraction.images.camids, dtype=np.int64))
    calibrations = [
        calibrate(
            torch.from_numpy(np.array(extraction.matrix)),
            Identities(ids[0], ids[0], ids[1], ids[1]),
            metric=extraction.model.metric,
            seed=seed,
            **{name: vars(args)[name] for name in RATES},
        )
        for seed in range(args.splits)
    ]
    rows = []
    for name in RATES:
        pairs = [(vars(calibration.measured)[name], vars(calibration.chosen)[name]) for calibration in calibrations]
        naive = [tuple(map(independent, pair)) for pair in pairs]
        measured = 100 * np.mean([rate.rate for rate, _ in pairs])
        rows.append((name, f"{100 * vars(args)[name]:g} %", f"{measured:.3g} %", agreeing(pairs), agreeing(naive)))
    print(tabulate(rows, ("rate", "stated", "measured, mean", "agree", "agree if independent"), tablefmt="github"))


def agreeing(pairs: list[tuple[ErrorRate, ...]]) -> str:
    """Count the pairs of rates whose difference may be 0."""
    intervals = [difference_interval(first, second) for first, second in pairs]
    return f"{sum(low <= 0 <= high for low, high in intervals)} of {len(pairs)}"


def independent(rate: ErrorRate) -> ErrorRate:
    """Replace the interval by that of independent trials (Wilson)."""
    interval = stats.binomtest(rate.num_errors, rate.num_trials).proportion_ci(method="wilson")
    return replace(rate, low=interval.low, high=interval.high)


if __name__ == "__main__":
    main()
