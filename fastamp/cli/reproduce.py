"""Compare a published result with your own: evaluate a published file, or train a recipe, on the same test set.

NAME is either a name of `fastamp models` or a recipe. A published file is evaluated on each test set with published
figures, under their protocol; a recipe is trained once per seed and, if TEST.ALL_SPLITS is on, once per random split of
its training set. Each result is written to one JSON file: published and measured figures, the confidence interval, the
difference, the protocol, a fingerprint of the images, versions, hardware, time and memory. A result whose file exists
is not measured again. The page "Results" of the documentation lists the files in docs/results.

examples:
  fastamp reproduce fastreid_sbs_r50_market1501 --data /data
  fastamp reproduce Market1501/sbs_R50 --data /data --seeds 0 1 2
  fastamp reproduce --all --data /data --results my_results
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastamp.cli.options import add_key_values, add_plugin_argument, at_least
from fastamp.cli.source import evaluation_config, training_config
from fastamp.utils.arguments import add_launch_arguments
from fastamp.utils.errors import ConfigError, DataError, UserError, did_you_mean
from fastamp.utils.files import expand, folder_name
from fastamp.utils.plural import plural
from fastamp.utils.table import format_table

if TYPE_CHECKING:
    from fastamp.config import CfgNode
    from fastamp.engine.reproduction import Row
    from fastamp.zoo import Entry


@dataclass(frozen=True)
class Job:
    """Evaluation or training that measures one row per test set.

    Attributes:
        name, kind: see ``Row``.
        opts: config keys and values.
        files: test set -> file of its row.
        published, data: test set -> figures and fingerprint, see ``Row``.
    """

    name: str
    kind: str
    opts: Sequence[str]
    files: Mapping[str, Path]
    published: Mapping[str, Sequence[Mapping[str, Any]]]
    data: Mapping[str, Mapping[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "config_source", nargs="?", default="", metavar="NAME", help="name of `fastamp models`, or recipe"
    )
    parser.add_argument("--data", required=True, metavar="ROOT", help="data root, which contains the datasets")
    parser.add_argument(
        "--all", action="store_true", help="evaluate all published files whose test sets are below the data root"
    )
    parser.add_argument(
        "--seeds",
        type=at_least(0),
        nargs="+",
        default=[0],
        metavar="N",
        help="seeds of the trainings of a recipe (default: 0)",
    )
    parser.add_argument(
        "--results", default="docs/results", metavar="DIR", help="folder of the rows (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", default="logs/reproduce", metavar="DIR", help="folder of logs and trainings (default: %(default)s)"
    )
    parser.add_argument(
        "--accept-withdrawn",
        action="store_true",
        help="accept published weights that were trained on images withdrawn by their owner (DukeMTMC)",
    )
    add_launch_arguments(parser)
    add_plugin_argument(parser)
    add_key_values(parser)
    parser.set_defaults(eval_only=True, resume=True)


def run(args: argparse.Namespace) -> int:
    """Measure the rows; return 0, or 1 if --all could not measure a file whose test set exists.

    Raises:
        UserError: if an argument is invalid; or if --all finds no test set.
    """
    from fastamp.config.recipes import find_recipe, list_recipes
    from fastamp.data.datasets.base import ROOT_VARIABLES
    from fastamp.engine.reproduction import row_table
    from fastamp.zoo import find, matches, names

    if bool(args.config_source) == args.all:
        raise ConfigError("expected NAME or --all.\n  fix: give the name of a published file, a recipe, or --all")
    root = expand(args.data)
    if not root.is_dir():
        raise DataError(f"--data {root}: no such folder.\n  fix: give the folder that contains the datasets")
    os.environ[ROOT_VARIABLES[0]] = str(root.absolute())
    if args.all:
        return _run_all(args)
    if find_recipe(args.config_source):
        jobs = [_training(args)]
    elif matches(args.config_source):
        jobs = _evaluations(args, find(args.config_source))
    else:
        hint = did_you_mean(args.config_source, [*names(), *list_recipes()])
        raise ConfigError(
            f"no published weights and no recipe are named {args.config_source!r}.{hint}\n"
            "  fix: choose one of `fastamp models` or `fastamp recipes`"
        )
    print(format_table(*row_table([row for job in jobs for row in _rows_of(args, job)])))
    return 0


def _run_all(args: argparse.Namespace) -> int:
    """Evaluate all entries whose test sets exist, then list those that could not be evaluated."""
    from fastamp.engine.reproduction import row_table, targets_of
    from fastamp.zoo import list_entries

    rows, failed, missing = [], [], 0
    entries = [entry for entry in list_entries() if entry.recipe and entry.loads != "no" and targets_of(entry)]
    for number, entry in enumerate(entries, start=1):
        try:
            jobs = _evaluations(args, entry, only_existing=True)
        except UserError as error:  # an image is missing
            failed.append(f"{entry.name}: {error}")
            continue
        missing += not jobs
        for job in jobs:
            print(f"{number} of {len(entries)}: {entry.name} on {', '.join(job.files)}", flush=True)
            try:
                rows += _rows_of(args, job)
            except UserError as error:
                failed.append(f"{entry.name} on {', '.join(job.files)}: {error}")
    if missing == len(entries):
        raise DataError(
            f"--data {args.data}: no test set of the {plural(len(entries), 'published file')} is there.\n"
            '  fix: give the folder that contains the datasets, in the trees that the guide "Datasets" lists'
        )
    if rows:
        print(format_table(*row_table(rows)))
    print(f"without a test set in {args.data}: {plural(missing, 'published file')}")
    if failed:
        print("\n".join(["not measured:", *failed]))
    return int(bool(failed))


def _evaluations(args: argparse.Namespace, entry: "Entry", *, only_existing: bool = False) -> list[Job]:
    """Return one evaluation per test set and protocol of the published figures.

    Raises:
        UserError: if there are no such figures; or, without ``only_existing``, if a test set does not exist.
    """
    from fastamp.config import read_config
    from fastamp.data.build import build_dataset
    from fastamp.engine.reproduction import targets_of
    from fastamp.zoo import PREFIX

    targets = targets_of(entry)
    if not targets:
        raise ConfigError(
            f"{entry.name}: no published figure that fastamp can reproduce.\n"
            f"  found: figures on {', '.join(str(result['test_set']) for result in entry.results) or 'no test set'}\n"
            "  fix: choose another entry of `fastamp models`, or evaluate it with `fastamp eval`"
        )
    jobs = []
    for target in targets:
        keys = {
            "MODEL.WEIGHTS": f"{PREFIX}{entry.name}",
            "MODEL.WEIGHTS_ACCEPT_WITHDRAWN": args.accept_withdrawn,
            "DATASETS.TESTS": (target.dataset,),
            "OUTPUT_DIR": str(Path(args.runs) / folder_name(f"{entry.name}-{target.dataset}")),
        }
        settings = [*_words(target.keys), *args.opts]
        cfg = read_config("", ["MODEL.DEVICE", "auto", *settings], plugin=args.plugin)  # as in evaluation_config
        if only_existing:
            try:
                build_dataset(target.dataset, cfg)
            except DataError:  # not found
                continue
        opts = [*_words(keys), *settings]
        jobs.append(_job(args, entry.name, "evaluation", opts, cfg, {target.dataset: target.published}))
    return jobs


def _training(args: argparse.Namespace) -> Job:
    """Return the training of a recipe with all seeds."""
    from fastamp.config.recipes import recipe_name
    from fastamp.engine.reproduction import published_of_recipe

    name = recipe_name(args.config_source)
    opts = ["OUTPUT_DIR", str(Path(args.runs) / folder_name(name.replace("/", "-"))), *args.opts]
    cfg = training_config(_with_config(args, name, opts))
    return _job(
        args,
        name,
        "training",
        opts,
        cfg,
        {test: published_of_recipe(name, test, cfg.DATASETS.NAMES) for test in cfg.DATASETS.TESTS},
    )


def _job(
    args: argparse.Namespace,
    name: str,
    kind: str,
    opts: Sequence[str],
    cfg: "CfgNode",
    published: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Job:
    """Describe the images of each test set, and choose the file of its row.

    Raises:
        DataError: if a dataset does not exist.
    """
    from fastamp.amp import resolve_device
    from fastamp.data.build import build_dataset
    from fastamp.data.random_splits import evaluated_splits
    from fastamp.diagnostics.environment_queries import device_name
    from fastamp.engine.reproduction import fingerprint, row_file
    from fastamp.utils.version import __version__

    root, files, data = expand(args.data), {}, {}
    training: dict[str, Any] = {}
    configs = [cfg.with_values(values) for values in _splits(cfg)] if kind == "training" else [cfg]
    if kind == "training":
        for dataset in cfg.DATASETS.NAMES:
            items = [item for one in configs for item in build_dataset(dataset, one).train]
            training |= {f"{dataset} train": fingerprint(items, root)}
    for test in published:
        sources = [
            build_dataset(test, one.with_values(values))
            for one in configs
            for values in evaluated_splits(one, test).values()
        ]
        data[test] = training | {
            f"{test} {split}": fingerprint([item for source in sources for item in source.images_in(split)], root)
            for split in ("query", "gallery")
        }
        identity = {
            "kind": kind,
            "opts": [word for word in opts if not word.startswith(str(args.runs))],
            "data": data[test],
            "seeds": args.seeds if kind == "training" else [],
            "version": __version__,
            "device": device_name(resolve_device(cfg.MODEL.DEVICE, "MODEL.DEVICE")),
        }
        files[test] = row_file(Path(args.results), name, test, identity)
    return Job(name, kind, opts, files, published, data)


def _splits(cfg: "CfgNode") -> list[dict[str, Any]]:
    """Return the config values of each random split on which a model is trained; ``[{}]`` for that of the config."""
    from fastamp.data.random_splits import training_splits

    return training_splits(cfg) if cfg.TEST.ALL_SPLITS else [{}]


def _with_config(args: argparse.Namespace, recipe: str, opts: Sequence[str]) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | {"config_file": "", "config_source": recipe, "opts": opts})


def _words(keys: Mapping[str, Any]) -> list[str]:
    """Return config keys and values as words of the command line."""
    return [word for key, value in keys.items() for word in (key, str(value))]


def _rows_of(args: argparse.Namespace, job: Job) -> "list[Row]":
    """Return the rows of a job, which is launched if one of them does not exist."""
    from fastamp.engine import launch
    from fastamp.engine.reproduction import read_row

    if all(file.is_file() for file in job.files.values()):
        print("\n".join(f"{file} exists already: not measured again" for file in job.files.values()))
    else:
        launch(measure, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args, job))
    return [read_row(file) for file in job.files.values()]


def measure(args: argparse.Namespace, job: Job) -> None:
    """Evaluate or train in one process, and write the rows on rank 0."""
    import torch

    from fastamp.amp import PrecisionPolicy, resolve_device
    from fastamp.checkpoint.record import read_record
    from fastamp.diagnostics import environment_queries
    from fastamp.engine import DefaultTrainer, default_setup
    from fastamp.engine.evaluation import describe_protocol
    from fastamp.engine.reproduction import Row, difference, summarize, write_row
    from fastamp.engine.seeds import train_seeds
    from fastamp.evaluation.split_average import average_runs
    from fastamp.utils import comm
    from fastamp.utils.env import peak_memory_mb
    from fastamp.zoo import find, path_of

    began, results = time.monotonic(), []
    splits: list[dict[str, Any]] = [{}]
    if torch.cuda.is_initialized():  # another row has been measured
        torch.cuda.reset_peak_memory_stats()
    if job.kind == "training":
        cfg = training_config(_with_config(args, job.name, job.opts))
        splits = _splits(cfg)

        def train(seed_cfg: "CfgNode") -> dict[str, Any]:
            default_setup(seed_cfg, args)
            trainer = DefaultTrainer(seed_cfg)
            trainer.resume_or_load(resume=True)
            results.append(trainer.train())
            return results[-1]

        train_seeds(cfg, args.seeds, train, splits=splits)
    else:
        cfg, _ = evaluation_config("", job.opts, plugin=args.plugin)
        default_setup(cfg, args)
        results.append(DefaultTrainer.test_weights(cfg))
    if not comm.is_main_process():
        return
    device = resolve_device(cfg.MODEL.DEVICE, "MODEL.DEVICE")
    policy = PrecisionPolicy.from_config(cfg, device).for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)
    for test, file in job.files.items():
        of_test = [result if len(job.files) == 1 else result[test] for result in results]
        if len(splits) > 1:
            runs = [of_test[start : start + len(splits)] for start in range(0, len(of_test), len(splits))]
            of_test = [average_runs(of_seed) for of_seed in runs]
        measured, interval = summarize(of_test)
        row = Row(
            name=job.name,
            kind=job.kind,
            dataset=test,
            protocol=describe_protocol(cfg, policy),
            published=job.published[test],
            measured=measured,
            interval=interval,
            difference=difference(measured, job.published[test]),
            data=job.data[test],
            settings=dict(zip(args.opts[::2], args.opts[1::2], strict=True)),
            versions=environment_queries.versions(),
            hardware={"device": environment_queries.device_name(device), "system": environment_queries.system()},
            seconds=round(time.monotonic() - began, 1),
            peak_memory_mib=round(peak_memory_mb(device), 1),
            date=date.today().isoformat(),
            seeds=args.seeds if job.kind == "training" else (),
            sha256="" if job.kind == "training" else read_record(path_of(find(job.name)))["sha256"],
        )
        write_row(row, file)
        print(f"wrote {file}")
