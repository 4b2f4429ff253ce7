#!/usr/bin/env python
"""Turn weights of FastReID, torchreid or TransReID into a fastamp checkpoint: import_checkpoint.py IN OUT.

The model is that of --config-file and of KEY VALUE pairs; without a file it is recognized from the names and shapes in
IN, and the KEY VALUE pairs say what leaves no trace there. Prints what was matched, renamed, dropped and missing. With
MODEL.BACKBONE.DEPLOY True a RepVGG is written in its form for inference. Exit code 2 when the weights are of another
model.
"""

import argparse
import logging
import sys

from fastamp.engine import run_command_line
from fastamp.engine.setup import read_config
from fastamp.modeling import build_model
from fastamp.modeling.recognize import interpolation_keys, recognize
from fastamp.utils.checkpoint import Checkpointer
from fastamp.utils.errors import ConfigError, WeightsError, writing
from fastamp.utils.files import closed_stdout_allowed, expand, real_path
from fastamp.utils.load_state import adopt, classifiers, examples, load_model_state
from fastamp.utils.logger import setup_logger
from fastamp.utils.printable import printable
from fastamp.utils.weights_file import read_checkpoint, state_dict_in


def import_checkpoint(source: str, target: str, *, config_file: str, opts: list[str], parts: str) -> None:
    """Read ``source``, print the report, and write ``target``.

    Raises:
        ConfigError: ``target`` is ``source`` or cannot be written, or the config is wrong.
        WeightsError: ``source`` cannot be read, is of another model, or has weights that are not finite.
    """
    out = expand(target)
    if out.suffix != ".pth":
        raise ConfigError(f"{target}: a checkpoint's name ends with .pth")
    if real_path(out) == real_path(expand(source)):
        raise ConfigError(f"{target} is the file that is read; name another one")
    read_config(config_file, opts, parts=parts)  # what is wrong in them is said first
    content = read_checkpoint(source)
    state = state_dict_in(content, source)
    if not config_file:
        keys = recognize(state, source)
        print("recognized:", *(f"{key} {value!r}" if " " in value else f"{key} {value}" for key, value in keys.items()))
        print(
            "not told by a file, and as by default unless given as KEY VALUE: MODEL.BACKBONE.STEM_POOL, LAST_STRIDE, "
            "SIE_VIEWS (SIE_CAMERAS is the number of all embeddings); MODEL.HEADS.CLS_LAYER, SCALE, MARGIN, JPM.SHIFT, "
            "POOL_LAYER without weights; MODEL.PIXEL_MEAN, PIXEL_STD"
        )
        opts = [*(each for pair in keys.items() for each in pair), *opts]
    # No downloads: the weights are here.
    opts = ["MODEL.DEVICE", "cpu", *opts, "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.BACKBONE.PRETRAIN_PATH", ""]
    cfg = read_config(config_file, opts, parts=parts)
    if cfg.MODEL.META_ARCHITECTURE == "Distiller":  # what it leaves is a Baseline, and its teachers may not be here
        opts += ["MODEL.META_ARCHITECTURE", "Baseline"]
        cfg = read_config(config_file, opts, parts=parts)
    model = build_model(cfg)
    if cfg.MODEL.HEADS.NUM_CLASSES == 0:
        adopted, _ = adopt(model, state)
        found = [len(adopted[name]) for name in classifiers(model) if name in adopted]
        if found:
            cfg = read_config(config_file, [*opts, "MODEL.HEADS.NUM_CLASSES", str(found[0])], parts=parts)
            model = build_model(cfg)
    report = load_model_state(model, state, source=source, min_match=cfg.MODEL.WEIGHTS_MIN_MATCH)
    print(printable(str(report)))
    found = cfg.INPUT.INTERPOLATION if cfg.INPUT.INTERPOLATION_TEST == "same" else cfg.INPUT.INTERPOLATION_TEST
    for key, value in interpolation_keys(state).items():
        if found != value:
            print(f"note: test images are resized by {found}, but the weights were tested with {key} {value}")
    bad = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    if bad:
        raise WeightsError(
            f"{source}: {len(bad)} tensors are not finite{examples(bad)}; nothing was written\n"
            "  fix: take an earlier checkpoint, from before the training diverged"
        )
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        Checkpointer(model, out.parent).save(out.stem, tag=False, config=cfg.dump())
    print(f"written: {out}")


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN", help="weights file of another program, or of an older version")
    parser.add_argument("target", metavar="OUT", help="checkpoint to write, .pth")
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config of the model")
    parser.add_argument("--parts", default="", metavar="FILE", help="Python file that registers parts of your own")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values")
    args = parser.parse_intermixed_args(argv)
    setup_logger()
    logging.getLogger("fastamp.utils.load_state").setLevel(logging.WARNING)  # the report is printed here
    return run_command_line(
        lambda: import_checkpoint(
            args.source, args.target, config_file=args.config_file, opts=args.opts, parts=args.parts
        )
    )


if __name__ == "__main__":
    with closed_stdout_allowed():
        sys.exit(cli())
