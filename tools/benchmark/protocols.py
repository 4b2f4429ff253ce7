#!/usr/bin/env python
"""Compare the time of each protocol with that of market1501, on one generated test set.

The protocols run in turns in one process; a ratio is between the medians over the rounds. For protocols with random
galleries, the ratio per trial is the ratio divided by the number of trials. Under recall_at_k, which is not in the
default list, all images are queries, so that it ranks more queries. Visible-infrared protocols get queries from
the cameras 3 and 6 and gallery images from 1, 2, 4 and 5; the column clothes has three outfits per identity.
"""

import argparse
import statistics
import sys
import time

import torch
from tabulate import tabulate

from fastamp.evaluation import PROTOCOL_REGISTRY, Identities, Protocol, compute_metrics

PROTOCOLS = (
    "market1501", "no_camera", "cloth_changing", "same_clothes", "mars", "sysu_all_single", "sysu_all_multi",
    "llcm", "llcm_sampled_queries", "prcc",
)  # fmt: skip
# Standard deviation of the image component of a feature; that of the identity component is 1.
NOISE = 2.7


def generate(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, Identities]:
    """Generate features in one cluster per identity, and identities, cameras and clothes."""
    random = torch.Generator().manual_seed(0)
    centers = torch.randn(args.identities, args.width, generator=random)
    features, pids, camids, clothes = [], [], [], []
    for count, cameras in ((args.queries, (3, 6)), (args.gallery, (1, 2, 4, 5))):
        pids.append(torch.randint(args.identities, (count,), generator=random))
        features.append(centers[pids[-1]] + NOISE * torch.randn(count, args.width, generator=random))
        camids.append(torch.tensor(cameras)[torch.randint(len(cameras), (count,), generator=random)])
        clothes.append(3 * pids[-1] + torch.randint(3, (count,), generator=random))
    return *features, Identities(*pids, *camids, {"clothes": (clothes[0], clothes[1])})


def main() -> None:
    """Print a table with the seconds of each protocol, and their ratio to market1501."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("queries", 11659), ("gallery", 82161), ("identities", 3060), ("width", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--protocols", nargs="+", default=PROTOCOLS, help="default: those with the same queries")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, on a machine with other load")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    queries, gallery, identities = generate(args)
    seconds: dict[str, list[float]] = {name: [] for name in dict.fromkeys(("market1501", *args.protocols))}
    scores = {}
    for number in range(args.rounds):
        for name, times in seconds.items():
            protocol = Protocol(rule=PROTOCOL_REGISTRY.get(name)(), resamples=0)
            start = clock()
            metrics = compute_metrics(queries, gallery, identities, protocol).metrics()
            times.append(clock() - start)
            scores[name] = metrics["mAP"]
            print(f"round {number + 1} of {args.rounds}: {name} {times[-1]:.2f} s", file=sys.stderr)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = []
    for name, median in medians.items():
        rule, ratio = PROTOCOL_REGISTRY.get(name)(), median / medians["market1501"]
        trials = rule.num_trials if rule.draws else 1
        rows.append((name, f"{median:.2f}", f"{ratio:.2f}", trials, f"{ratio / trials:.2f}", f"{scores[name]:.2f}"))
    print(f"{args.queries} queries, {args.gallery} gallery images, width {args.width}, {args.rounds} rounds")
    headers = ["protocol", "s", "x market1501", "trials", "x per trial", "mAP"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
