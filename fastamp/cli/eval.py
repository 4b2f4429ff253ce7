"""Evaluate the weights in MODEL.WEIGHTS on the datasets in DATASETS.TESTS.

Without --config-file, the config in the checkpoint is used, except for OUTPUT_DIR, MODEL.DEVICE and the image cache.
Metrics are written to OUTPUT_DIR/metrics_eval.json.

examples:
  fastamp eval MODEL.WEIGHTS logs/run/model_best.pth
  fastamp eval MODEL.WEIGHTS logs/run/model_best.pth DATASETS.TESTS MSMT17 TEST.RERANK on
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

# Keys of the machine that trained, not of the model.
_MACHINE_KEYS = ("OUTPUT_DIR", "DIST_TIMEOUT_MINUTES", "DATALOADER.CACHE", "DATALOADER.CACHE_DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_process_arguments(parser)
    add_plugin_argument(parser)
    parser.set_defaults(eval_only=True, resume=False)


def run(args: argparse.Namespace) -> int:
    """Launch the evaluation."""
    from fastamp.engine import launch

    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
    return 0


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate in one process and return the metrics."""
    from fastamp.engine import DefaultTrainer, default_setup

    cfg, source = evaluation_config(args.config_file, args.opts, plugin=args.plugin)
    default_setup(cfg, args)
    logger.info("evaluation config: %s, with the keys from the command line", source)
    return DefaultTrainer.test_weights(cfg)


@renamed_arguments(parts="plugin")
def evaluation_config(config_file: str, opts: Sequence[str], *, plugin: str = "") -> tuple["CfgNode", str]:
    """Read the config of an evaluation from a file, else from the checkpoint, else from the defaults.

    Args:
        config_file: path of a YAML file; "" for the config in the checkpoint.
        opts: ``[KEY, VALUE, ...]`` pairs that override this config.
        plugin: see ``read_config``.

    Returns:
        ``(config, source)``: the frozen config, and a description of where it was read from.

    Raises:
        ConfigError: if a file, key or value is invalid, or MODEL.WEIGHTS is not set.
        WeightsError: if the checkpoint cannot be read or its config is incompatible.
    """
    from fastamp.checkpoint.entries import merge_if_config
    from fastamp.config import read_config

    given = read_config(config_file, opts, plugin=plugin)
    weights = given.MODEL.WEIGHTS
    if not weights:
        raise ConfigError(
            "MODEL.WEIGHTS is not set, so there is no model to evaluate.\n"
            "  fix: add MODEL.WEIGHTS path/to/model_best.pth to the command"
        )
    if config_file:
        return given, config_file
    defaults = read_config("", [], plugin=plugin)
    cfg = defaults.clone()
    cfg.defrost()
    if not merge_if_config(cfg, weights):
        not_the_model = {"MODEL.WEIGHTS", "MODEL.DEVICE"}
        if not any(key.startswith("MODEL.") and key not in not_the_model for key in opts[::2]):
            raise ConfigError(
                f"{weights} contains no config, so the model is unknown.\n"
                "  fix: add --config-file X.yml with the config of the training, or convert the weights with "
                "tools/import_checkpoint.py, which infers the config of many models"
            )
        return given, f"the defaults, because {weights} contains no config"
    values = {key.path: value for key, value in defaults.keys_below() if key.path in _MACHINE_KEYS}
    values |= {"MODEL.DEVICE": "auto", "MODEL.COMPILE": "off", "MODEL.HEADS.NUM_CLASSES": 0}
    cfg.merge_from_other_cfg(values)
    cfg.merge_from_list(opts)
    cfg.freeze()
    return cfg, f"from {weights}"
