"""Fine-tune a re-identification model on your own images.

The recipe is finetune/small_set. The model and the size of its images are those of FILE: of its config, or inferred
from the tensors of a file of another program; the size is then that of the recipe. Before the training, both halves of
the training identities are held out in turn: unless the fine-tuned weights are better on them, model_final.pth keeps
the initial weights.

examples:
  fastamp finetune model.pth csv:mine.csv
  fastamp finetune logs/market folder:photos SOLVER.MAX_EPOCH=5 OUTPUT_DIR=logs/mine
  fastamp finetune osnet_x0_25_msmt17.pth csv:mine.csv --dry-run
"""

import argparse
from pathlib import Path
from typing import Any

from fastamp.cli import train
from fastamp.cli.options import add_key_values, add_plugin_argument
from fastamp.cli.source import CONFIG, model_source, resolve_source
from fastamp.utils.arguments import add_launch_arguments
from fastamp.utils.errors import ConfigError

RECIPE = "finetune/small_set"
_SECTIONS = (
    *("MODEL.META_ARCHITECTURE", "MODEL.BACKBONE.", "MODEL.HEADS.", "MODEL.LORA.", "MODEL.PIXEL_"),
    *("INPUT.SIZE_", "INPUT.CHANNELS", "INPUT.INTERPOLATION"),
)
# Keys of the training of the weights, not of their model.
_EXCLUDED = ("MODEL.HEADS.NUM_CLASSES", "MODEL.BACKBONE.PRETRAIN", "MODEL.BACKBONE.PRETRAIN_PATH")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "weights",
        metavar="FILE",
        type=model_source,
        help="checkpoint, run folder, weights file of another program, or name of `fastamp models`",
    )
    parser.add_argument("data", metavar="DATA", help="dataset: csv:FILE, folder:FOLDER or a registered name")
    parser.add_argument("--dry-run", action="store_true", help="estimate time and memory, and exit")
    parser.add_argument(
        "--always",
        action="store_true",
        help="use the fine-tuned weights without the comparison on held-out identities, in half of the time",
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    add_launch_arguments(parser)
    add_plugin_argument(parser)
    add_key_values(parser)
    train.set_recipe(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train the recipe with the model of the weights file."""
    start = resolve_source(args.weights)
    if start.kind == CONFIG:
        raise ConfigError(
            f"FILE: expected a checkpoint, run folder or weights file, got the config {args.weights}.\n"
            "  fix: give the weights to start from; fastamp train starts from a config"
        )
    data = [item for key in ("DATASETS.NAMES", "DATASETS.TESTS") for item in (key, [args.data])]
    weights = ["MODEL.WEIGHTS", start.checkpoint]
    opts = [*model_keys(start.checkpoint, args.plugin), *weights, *data, *args.opts]
    args = argparse.Namespace(**vars(args) | {"opts": opts})
    return train.run(args) if args.always else train.run(args, main)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Decide by held-out identities whether to keep the initial weights, train, and return the metrics."""
    from fastamp.config import read_config
    from fastamp.engine.held_out import keep_keys, keeps_initial_weights

    cfg = train.training_config(args)
    recorded = Path(cfg.OUTPUT_DIR) / "config.yaml"
    if args.resume and recorded.is_file():
        swa = read_config(str(recorded), plugin=args.plugin).SOLVER.SWA
        kept = swa.ENABLED and swa.INITIAL_WEIGHT == 1
    else:
        kept = keeps_initial_weights(cfg)
    opts = [*args.opts, *(item for pair in keep_keys(cfg).items() for item in pair)] if kept else args.opts
    return train.main(argparse.Namespace(**vars(args) | {"opts": opts}))


def model_keys(checkpoint: str, plugin: str) -> list[Any]:
    """Return KEY VALUE pairs of the model in a weights file: from its config, else inferred from its tensors.

    Args:
        checkpoint: path of the weights file.
        plugin: Python file with custom components; empty for none.

    Raises:
        UserError: if the file cannot be read, or its model is not recognized.
    """
    from fastamp.checkpoint.entries import merge_if_config
    from fastamp.checkpoint.weights_file import read_checkpoint, state_dict_in
    from fastamp.config import get_cfg
    from fastamp.modeling.infer_config import infer_config

    cfg = get_cfg(plugin)
    keys: dict[str, Any]
    content = read_checkpoint(checkpoint)
    if merge_if_config(cfg, content, checkpoint):
        keys = {key.path: value for key, value in cfg.keys_below()}
        if cfg.MODEL.META_ARCHITECTURE == "Distiller":  # the file contains the student
            keys["MODEL.META_ARCHITECTURE"] = "Baseline"
    else:
        keys = dict(infer_config(state_dict_in(content, checkpoint), checkpoint, cfg))
    chosen = {key: value for key, value in keys.items() if key.startswith(_SECTIONS) and key not in _EXCLUDED}
    return [item for pair in chosen.items() for item in pair]
