"""Evaluate a checkpoint, or the best checkpoint of a run folder, on the datasets in DATASETS.TESTS.

The config in the checkpoint is used, except for OUTPUT_DIR, MODEL.DEVICE and the image cache. With a recipe or YAML
file, its config is used, and MODEL.WEIGHTS is required. Metrics are written to OUTPUT_DIR/metrics_eval.json.

examples:
  fastamp eval logs/run
  fastamp eval logs/run/model_best.pth DATASETS.TESTS MSMT17 TEST.RERANK=on
  fastamp eval Market1501/sbs_R50-ibn MODEL.WEIGHTS market_sbs_R50-ibn.pth
"""

import argparse
import logging
from typing import Any

from fastamp.cli.options import add_plugin_argument, add_source_arguments
from fastamp.cli.source import evaluation_config, move_config
from fastamp.utils.arguments import add_launch_arguments

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_source_arguments(parser)
    add_launch_arguments(parser)
    add_plugin_argument(parser)
    parser.set_defaults(eval_only=True, resume=False)


def run(args: argparse.Namespace) -> int:
    """Launch the evaluation."""
    from fastamp.engine import launch

    args = move_config(args)
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
    return 0


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate in one process and return the metrics."""
    from fastamp.engine import DefaultTrainer, default_setup

    cfg, source = evaluation_config(args.config_file, args.opts, plugin=args.plugin, source=args.config_source)
    default_setup(cfg, args)
    logger.info("evaluation config: %s, with the keys from the command line", source)
    return DefaultTrainer.test_weights(cfg)
