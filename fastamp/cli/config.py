"""List and explain config keys, and compare configs."""

import argparse
from pathlib import Path

from fastamp.cli.options import add_parts
from fastamp.config import CfgNode, describe_changes, describe_config, explain_key
from fastamp.engine.setup import merge_from_checkpoint, read_config
from fastamp.utils.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add list, explain and diff."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | explain | diff")
    listing = actions.add_parser("list", help="print the keys of a section, or all, with default and meaning")
    listing.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="a section or a key")
    explaining = actions.add_parser("explain", help="print all that is known of one key")
    explaining.add_argument("key", metavar="KEY")
    for each in (listing, explaining):
        each.add_argument("--config-file", default="", metavar="FILE", help="also print what this YAML file sets")
    comparing = actions.add_parser("diff", help="print the keys whose values differ between two configs")
    for name, letter in (("first", "A"), ("second", "B")):
        comparing.add_argument(name, metavar=letter, help="a YAML file, a checkpoint (.pth) or a run's folder")
    for each in (listing, explaining, comparing):
        add_parts(each)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    if args.action == "list":
        print(describe_config(args.prefix, read_config(args.config_file, [], parts=args.parts)))
    elif args.action == "explain":
        print(explain_key(args.key, read_config("", [], parts=args.parts), args.config_file))
    else:
        first, second = (config_of(source, args.parts) for source in (args.first, args.second))
        found = describe_changes(second, first.dump(), args.first)
        print("\n".join(found) or "no difference")
    return 0


def config_of(source: str, parts: str = "") -> CfgNode:
    """Return the whole config of a YAML file, a checkpoint or a run's folder.

    Raises:
        UserError: it cannot be read, or holds no config.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path /= "config.yaml"
        if not path.is_file():
            raise ConfigError(f"{source} is a folder without a config.yaml, and so no run's")
    if path.suffix != ".pth":
        return read_config(str(path), [], parts=parts)
    cfg = read_config("", [], parts=parts).clone()
    cfg.defrost()
    merge_from_checkpoint(cfg, path)
    return cfg
