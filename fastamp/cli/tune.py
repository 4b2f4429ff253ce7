"""Search hyperparameters with Ray Tune (FastTune).

Trials are ordinary trainings that are evaluated on held-out training identities (the fraction TUNE.VAL_FRACTION); only
the winner is evaluated on the test set. OUTPUT_DIR contains best_config.yaml, trials.csv, trials.png and the trials of
each stage. The exit code is 1 if no trial was evaluated.

examples:
  fastamp tune Market1501/bagtricks_R50 --num-trials 20 SOLVER.AMP=on
  fastamp tune my.yml --space space.yml --num-trials 40 --then-refine 12
"""

import argparse
import sys

from fastamp.cli.options import add_plugin_argument, add_source_arguments, at_least
from fastamp.utils.resources import resource_folder

ALGORITHMS = ("hyperopt", "bohb", "optuna", "random")
SCHEDULERS = ("asha", "hyperband", "pbt", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_source_arguments(parser)
    parser.add_argument("--space", default="", metavar="FILE", help="YAML file of the search space "
                        "(default: that of the recipe)")  # fmt: skip
    parser.add_argument("--num-trials", type=at_least(1), default=20, help="number of trials (default: %(default)s)")
    parser.add_argument("--srch-algo", choices=ALGORITHMS, help="search algorithm (default: hyperopt; random with pbt)")
    parser.add_argument("--scheduler", choices=SCHEDULERS, help="trial scheduler (default: asha; hyperband with bohb)")
    parser.add_argument("--pbt", action="store_true", help="alias of --scheduler pbt")
    parser.add_argument("--then-refine", type=at_least(1), default=0, metavar="N",
                        help="run N more trials with hyperopt in a third of each range around the winner")  # fmt: skip
    parser.add_argument("--train-best", action="store_true",
                        help="compare winner and recipe, trained with several seeds on all identities")  # fmt: skip
    parser.add_argument(
        "--seeds", type=at_least(1), default=3, help="number of seeds of --train-best (default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the search in OUTPUT_DIR")
    parser.add_argument(
        "--address", default="", help="address of a running Ray cluster; auto for the cluster of this machine"
    )
    parser.add_argument(
        "--cpus-per-trial", type=_resource_amount, default=1, help="CPUs per trial (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus-per-trial",
        type=_resource_amount,
        help="GPUs per trial, may be a fraction (default: 1 if the config trains on a GPU)",
    )
    parser.add_argument(
        "--max-concurrent",
        type=at_least(1),
        default=0,
        help="maximum number of concurrent trials (default: as many as fit)",
    )
    parser.add_argument(
        "--max-failures", type=at_least(1), default=0, help="maximum restarts of a crashed trial (default: 0)"
    )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        help="seed of the sampling and of the validation split (default: 0)",
    )
    add_plugin_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Run the search in the project FastTune and return the exit code."""
    folder = str(resource_folder("projects/FastTune"))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import tune_net

    return tune_net.run(args)


def _resource_amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (0 < number <= 1 or (number > 1 and number.is_integer())):
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1] or an integer above 1, got {text!r}")
    return number
