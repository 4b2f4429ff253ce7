"""Convert a weights file of FastReID, torchreid or TransReID to a fastamp checkpoint.

--config-file defines the model. Without --config-file, the model is inferred from the parameter names and shapes in IN.
KEY VALUE pairs override the config, e.g. to set keys that cannot be inferred. The command prints which tensors were
matched, renamed, dropped and missing. With MODEL.BACKBONE.DEPLOY True, RepVGG weights are written in deploy form. The
exit code is 2 if the weights do not match the model.

Weights files from self-supervised training or PyTorch Lightning often contain several models, or a backbone whose
parameter names have a prefix. --prefix selects the tensors with this prefix, e.g. --prefix teacher.backbone. for DINO;
nested dicts are searched as well. If the weights do not match without --prefix, the error message lists the prefixes of
all backbones found in IN.

examples:
  fastamp import market_bot_R50.pth imported.pth
  fastamp import market_sbs_R50-ibn.pth imported.pth --config-file Market1501/sbs_R50-ibn
"""

import argparse

from fastamp.cli.options import add_key_values, add_plugin_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("source", metavar="IN", help="weights file of another project, or of an older version")
    parser.add_argument("target", metavar="OUT", help="checkpoint to write, .pth")
    parser.add_argument("--config-file", default="", metavar="FILE", help="recipe or YAML file of the model")
    parser.add_argument("--prefix", default="", help="use only the tensors below this prefix, e.g. teacher.backbone.")
    add_plugin_argument(parser)
    add_key_values(parser)


def run(args: argparse.Namespace) -> int:
    """Convert the file and print a report."""
    from fastamp.inference.import_checkpoint import import_checkpoint
    from fastamp.utils.logger import setup_logger

    setup_logger()
    import_checkpoint(
        args.source, args.target, config_file=args.config_file, opts=args.opts, plugin=args.plugin, prefix=args.prefix
    )
    return 0
