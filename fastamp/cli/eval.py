"""Evaluate the weights MODEL.WEIGHTS on the data sets DATASETS.TESTS.

Without --config-file, the config in the checkpoint is used, but for OUTPUT_DIR, MODEL.DEVICE and the image cache.
The metrics are written to OUTPUT_DIR/metrics_eval.json.
"""

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastamp.cli.options import add_plugin_argument
from fastamp.utils.arguments import add_process_arguments
from fastamp.utils.errors import ConfigError
from fastamp.utils.moved import renamed_arguments

if TYPE_CHECKING:
    from fastamp.config import CfgNode

logger = logging.getLogger(__name__)

# What belongs to the machine that trained, not to the model.
_OF_THE_MACHINE = ("OUTPUT_DIR", "DATALOADER.CACHE", "DATALOADER.CACHE_DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of a training that mean something here."""
    add_process_arguments(parser)
    add_plugin_argument(parser)
    parser.set_defaults(eval_only=True, resume=False)


def run(args: argparse.Namespace) -> int:
    """Start the processes that evaluate."""
    from fastamp.engine import launch

    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
    return 0


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate, and return the metrics."""
    from fastamp.engine import DefaultTrainer, default_setup

    cfg, source = evaluation_config(args.config_file, args.opts, plugin=args.plugin)
    default_setup(cfg, args)
    logger.info("config of the evaluation: %s, and the command line", source)
    return DefaultTrainer.test_weights(cfg)


@renamed_arguments(parts="plugin")
def evaluation_config(config_file: str, opts: Sequence[str], *, plugin: str = "") -> tuple["CfgNode", str]:
    """Return the config of a file, else of the checkpoint that is evaluated, else the defaults; and which it is.

    Args:
        config_file: path; empty for the checkpoint's own config.
        opts: KEY VALUE pairs over it, one after the other.
        plugin: see ``read_config``.

    Raises:
        ConfigError: a file, a key or a value is wrong, or MODEL.WEIGHTS is not set.
        WeightsError: the checkpoint cannot be read, or its config is not of this version.
    """
    from fastamp.checkpoint.entries import merge_if_config
    from fastamp.config import read_config

    given = read_config(config_file, opts, plugin=plugin)
    weights = given.MODEL.WEIGHTS
    if not weights:
        raise ConfigError("there are no weights to evaluate.\n  fix: add MODEL.WEIGHTS path/to/model_best.pth")
    if config_file:
        return given, config_file
    defaults = read_config("", [], plugin=plugin)
    cfg = defaults.clone()
    cfg.defrost()
    if not merge_if_config(cfg, weights):
        others = {"MODEL.WEIGHTS", "MODEL.DEVICE"}
        if not any(key.startswith("MODEL.") and key not in others for key in opts[::2]):
            raise ConfigError(
                f"{weights} holds no config, so that the model is not known.\n"
                "  fix: add --config-file X.yml, the config that it was trained with; or `python "
                "tools/import_checkpoint.py`, which recognizes many models, makes a checkpoint with a config of it"
            )
        return given, f"the defaults and the command line, since {weights} holds no config"
    values = {key.path: value for key, value in defaults.keys_below() if key.path in _OF_THE_MACHINE}
    values |= {"MODEL.DEVICE": "auto", "MODEL.COMPILE": "off", "MODEL.HEADS.NUM_CLASSES": 0}
    cfg.merge_from_other_cfg(values)
    cfg.merge_from_list(opts)
    cfg.freeze()
    return cfg, f"that in {weights}"
