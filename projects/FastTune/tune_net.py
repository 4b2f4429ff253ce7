#!/usr/bin/env python
"""Search hyperparameters; alias of `fastamp tune`."""

import argparse
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType

from autotuner.disk import check_disk
from autotuner.final import final_table, train_recipes, write_final
from autotuner.importance import importances
from autotuner.picture import draw_trials
from autotuner.results import table, write_results
from autotuner.search import (
    Outcome,
    best_first,
    concurrent_trials,
    read_outcomes,
    run_search,
    start_ray,
    winner_of,
)
from autotuner.settings import Search, is_mutable
from autotuner.space import BATCH, IDENTITIES, IMAGES, Space, default_space, read_space
from autotuner.split import VAL_FRACTION, define_keys, split_training

from fastamp.amp import requested_device, resolve_device
from fastamp.cli import run_command
from fastamp.cli.source import training_config
from fastamp.config import CfgNode, get_cfg
from fastamp.data import build_reid_test_loader
from fastamp.data.datasets.base import ImageItem
from fastamp.diagnostics.config_check import check_config
from fastamp.engine import DefaultTrainer
from fastamp.engine.loggers import check_loggers, has_tracker
from fastamp.utils.command_line import TrainingInterrupted, print_exit_message, run_and_capture
from fastamp.utils.errors import ConfigError, writing
from fastamp.utils.files import ignore_closed_stdout, real_path
from fastamp.utils.logger import setup_logger
from fastamp.utils.signals import handling

logger = logging.getLogger("fastamp.fasttune")
_SECONDS_TO_STOP = 10.0


def read_recipe(args: argparse.Namespace) -> tuple[CfgNode, float]:
    """Return ``(cfg, val_fraction)``: the trials' base config without TUNE keys, and the value of TUNE.VAL_FRACTION."""
    with_ours = training_config(args, define_keys=define_keys)
    cfg = get_cfg(args.plugin)
    cfg.merge_from_other_cfg({name: value for name, value in with_ours.items() if name != VAL_FRACTION.split(".")[0]})
    cfg.freeze()
    check_config(cfg)
    check_loggers(cfg)
    return cfg, with_ours.TUNE.VAL_FRACTION


def choose_space(args: argparse.Namespace, cfg: CfgNode) -> Space:
    """Read the search space from the --space file, else from the default file for the recipe.

    With --scheduler pbt, the default space is limited to keys that can change during training.
    """
    if args.space:
        return read_space(args.space, cfg)
    file = default_space(args.config_source or args.config_file)
    space = read_space(file, cfg)
    if args.scheduler == "pbt":
        space = Space([parameter for parameter in space.parameters.values() if is_mutable(parameter.key)])
    logger.info("search space: %s (--space %s)", ", ".join(space.parameters), file)
    return space


def largest_value(cfg: CfgNode, space: Space, key: str) -> int:
    """Return the largest value of ``key`` in the search space; its config value if the space does not contain it."""
    if key in space.parameters:
        return max(space.parameters[key].extremes())
    return next(value for config_key, value in cfg.keys_below() if config_key.path == key)


def largest_batch(cfg: CfgNode, space: Space) -> int:
    """Return the largest batch size that a sample can have."""
    if IDENTITIES in space.parameters:
        return int(largest_value(cfg, space, IDENTITIES) * largest_value(cfg, space, IMAGES))
    if {BATCH, IMAGES} & set(space.parameters):
        # Rounding to a multiple of the images per identity may increase the batch.
        return int(largest_value(cfg, space, BATCH) + largest_value(cfg, space, IMAGES))
    return cfg.SOLVER.IMS_PER_BATCH


def check_data(cfg: CfgNode, space: Space, training: list[ImageItem]) -> None:
    """Check the test sets and the batch sizes before the first trial.

    Raises:
        ConfigError: if a batch in the search space has more images or identities than the training split.
        DataError: if a test set is missing, or has no query or gallery images.
    """
    for name in cfg.DATASETS.TESTS:
        build_reid_test_loader(cfg, name)
    identities = len({item.pid for item in training})
    if IDENTITIES in space.parameters and largest_value(cfg, space, IDENTITIES) > identities:
        raise ConfigError(
            f"search space: {IDENTITIES} is up to {largest_value(cfg, space, IDENTITIES)}, but the training split has "
            f"{identities} identities.\n  fix: lower {IDENTITIES}, or {VAL_FRACTION}, the held-out fraction"
        )
    # If IDENTITIES is searched, SOLVER.IMS_PER_BATCH of the recipe is not used.
    batch = largest_batch(cfg, space) if IDENTITIES in space.parameters else largest_value(cfg, space, BATCH)
    if batch > len(training):
        raise ConfigError(
            f"search space: {BATCH} can be {batch}, but the training split has only {len(training)} images.\n"
            f"  fix: lower {BATCH}"
        )


def grace_epochs(cfg: CfgNode, space: Space, images: int) -> int:
    """Return the number of epochs after which warm-up and freezing have ended for every sample."""
    fewest = max(1, images // int(largest_batch(cfg, space) * largest_value(cfg, space, "SOLVER.ACCUM_STEPS")))

    def epochs(name: str) -> int:
        in_epochs = largest_value(cfg, space, f"SOLVER.{name}_EPOCHS")
        if in_epochs and f"SOLVER.{name}_EPOCHS" not in space.parameters:
            return in_epochs  # overrides the iterations
        return max(in_epochs, math.ceil(largest_value(cfg, space, f"SOLVER.{name}_ITERS") / fewest))

    return max(epochs("WARMUP"), epochs("FREEZE") if cfg.MODEL.FREEZE_LAYERS else 0)


def gpus_of_a_trial(cfg: CfgNode, args: argparse.Namespace) -> float:
    """Return the GPUs per trial: --gpus-per-trial, else 1 if the config trains on a GPU, else 0."""
    if ":" in cfg.MODEL.DEVICE:
        raise ConfigError(
            f"MODEL.DEVICE is {cfg.MODEL.DEVICE}, but Ray assigns a device to each trial.\n"
            "  fix: set MODEL.DEVICE to cuda"
        )
    needs_gpu = cfg.MODEL.DEVICE.startswith("cuda")
    if not args.address:
        needs_gpu = resolve_device(requested_device(cfg)).type == "cuda"
    return float(needs_gpu) if args.gpus_per_trial is None else args.gpus_per_trial


def report_interruption(number: int, *, scheduler: str) -> int:
    """Print how to continue a search that a signal stopped; return the exit code."""

    def stop() -> None:
        raise TrainingInterrupted(number, "the trials, trials.csv and best_config.yaml under OUTPUT_DIR")

    outcome = run_and_capture(stop)
    if scheduler == "hyperband":
        message = (
            "interrupted: a search with --scheduler hyperband cannot be resumed.\n"
            "  fix: start a new search with another OUTPUT_DIR; --scheduler asha can be resumed"
        )
        outcome = replace(outcome, message=message)
    print_exit_message(outcome)
    return outcome.code


@contextmanager
def stopped_by_signals(finish: Callable[[int], int]) -> Iterator[None]:
    """Stop a search within seconds on SIGINT or SIGTERM, which clusters send to preempted machines.

    If the signal also ended Ray's processes, Ray would wait for them for a minute; this process exits after 10 seconds.
    Results are written after each trial, and trials resume from their last evaluation, so nothing is lost.

    Args:
        finish: called with the signal number when the search has stopped, or if Ray does not stop in time; returns the
            exit code.

    Raises:
        SystemExit: if a signal is received.
    """
    received: list[int] = []

    def end() -> None:
        code = finish(received[0])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if received:  # a second signal ends the process at once
            end()
        received.append(number)
        timer.start()
        raise KeyboardInterrupt

    timer = threading.Timer(_SECONDS_TO_STOP, end)
    timer.daemon = True
    with handling(interrupt, (signal.SIGINT, signal.SIGTERM)):
        try:
            yield
        except BaseException as error:
            if not received:
                raise
            import ray

            ray.shutdown()  # not at exit, where the timer could not end Ray's waiting
            raise SystemExit(finish(received[0])) from error
        finally:
            timer.cancel()


def narrowed(search: Search, outcomes: list[Outcome], *, trials: int, images: int) -> Search:
    """Return a search with HyperOpt and ASHA in a smaller space around the winner of ``search``.

    Args:
        search: settings of the finished search.
        outcomes: outcomes of the finished search, best first.
        trials: number of trials of the new search.
        images: number of training images.
    """
    good = [outcome.values for outcome in outcomes[: max(1, len(outcomes) // 3)]]
    space = search.space.narrowed(outcomes[0].values, good)
    return replace(
        search,
        title="refine",
        folder=search.folder.parent / "refine",
        space=space,
        algorithm="hyperopt",
        scheduler="asha",
        trials=trials,
        trials_flag="--then-refine",
        with_recipe=False,
        grace_epochs=grace_epochs(search.cfg, space, images),
    )


def run_stages(args: argparse.Namespace, search: Search, *, images: int) -> int:
    """Run all stages of the search and write the results; return the exit code."""
    cfg, space, output = search.cfg, search.space, search.folder.parent
    outcomes = run_search(search, resume=args.resume)
    if args.then_refine and winner_of(outcomes):
        refinement = narrowed(search, outcomes, trials=args.then_refine, images=images)
        outcomes = best_first([*outcomes, *run_search(refinement, resume=args.resume)])
    elif args.resume:
        outcomes = best_first([*outcomes, *read_outcomes(output / "refine")])
    logger.info("\n%s", table(outcomes, space))
    explained = importances([outcome for outcome in outcomes if outcome.score is not None], space)
    if explained:
        logger.info("importance of the keys: %s", ", ".join(f"{key} {value:.2f}" for key, value in explained.items()))
    picture = draw_trials(outcomes, space, output / "trials.png")
    for path in [*write_results(outcomes, cfg, space, output), *([picture] if picture else [])]:
        logger.info("wrote %s", path)
    failed = sum(bool(outcome.failure) for outcome in outcomes)
    if failed:
        logger.warning(
            "%d of %d trials failed.\n  fix: see the column 'failure' in trials.csv for the cause",
            failed,
            len(outcomes),
        )
    winner = winner_of(outcomes)
    if winner is None:
        logger.error("no trial was evaluated%s", f": {outcomes[0].failure}" if outcomes else "")
        return 1
    best = space.apply(cfg, winner.values)
    if args.train_best:
        # The folder has the winner's name, since a stage added on resume may find another winner.
        recipes = {"default": ("default", cfg), "best": (f"best_{winner.name}", best)}
        results = train_recipes(recipes, args.seeds, search, resume=args.resume)
        logger.info("\n%s", final_table(results))
        logger.info("wrote %s", write_final(results, output / "final.csv"))
        return int(not any(result.metrics for result in results["best"]))
    values = {"MODEL.WEIGHTS": str(winner.folder / "model_best.pth"), "OUTPUT_DIR": str(output / "winner")}
    if args.address:
        values["MODEL.DEVICE"] = "auto"  # this machine may have another device than the cluster
    best = best.with_values(values)
    logger.info("evaluating the winner, %s, on the test set (trained without the held-out identities)", winner.name)
    DefaultTrainer.test_weights(best)
    return 0


def run(args: argparse.Namespace) -> int:
    """Run the search with the arguments of ``fastamp tune``, and evaluate or train the winner; return the exit code.

    Raises:
        ConfigError: if an argument is invalid.
        SystemExit: if a signal stops the search.
    """
    if args.pbt and args.scheduler not in (None, "pbt"):
        raise ConfigError(f"--pbt and --scheduler {args.scheduler} cannot be combined.\n  fix: remove one of them")
    if args.pbt:
        args.scheduler = "pbt"
    args.srch_algo = args.srch_algo or ("random" if args.scheduler == "pbt" else "hyperopt")
    args.scheduler = args.scheduler or ("hyperband" if args.srch_algo == "bohb" else "asha")
    cfg, fraction = read_recipe(args)
    output = real_path(cfg.OUTPUT_DIR)
    with writing(cfg.OUTPUT_DIR):
        setup_logger(cfg.OUTPUT_DIR)
    if has_tracker(cfg) and not cfg.TRACKING.TRIALS:
        logger.info("the experiment trackers in LOGGERS are not used in trials; to use them, set TRACKING.TRIALS True")
    space = choose_space(args, cfg)
    # Prepare the data once, so that errors are found before any trial starts.
    training, _, _ = split_training(cfg, fraction, args.seed)
    check_data(cfg, space, training)
    search = Search(
        title="search",
        folder=output / "search",
        cfg=cfg,
        space=space,
        algorithm=args.srch_algo,
        scheduler=args.scheduler,
        trials=args.num_trials,
        seed=args.seed,
        fraction=fraction,
        grace_epochs=grace_epochs(cfg, space, len(training)),
        cpus=args.cpus_per_trial,
        gpus=gpus_of_a_trial(cfg, args),
        max_concurrent=args.max_concurrent,
        max_failures=args.max_failures,
        plugin=str(real_path(args.plugin)) if args.plugin else "",
    )
    start_ray(search, address=args.address)
    finish = partial(report_interruption, scheduler=args.scheduler)
    with stopped_by_signals(finish):  # after ray.init, which installs its own handler
        check_disk(search, len({item.pid for item in training}), concurrent=concurrent_trials(search))
        return run_stages(args, search, images=len(training))


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("tune", argv)


if __name__ == "__main__":
    with ignore_closed_stdout():
        sys.exit(cli())
