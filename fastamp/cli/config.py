"""List and explain config keys, compare configs, and convert those of old releases of FastReID."""

import argparse
import logging
import sys
from pathlib import Path

import yaml

from fastamp.cli.options import add_plugin_argument
from fastamp.config import (
    RELEASES,
    CfgNode,
    changed_values,
    describe_changes,
    describe_config,
    explain_key,
    read_config,
)
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import write_atomically
from fastamp.utils.moved import renamed_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add list, explain, diff and convert."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | explain | diff | convert")
    listing = actions.add_parser("list", help="print the keys of a section, or all, with default and meaning")
    listing.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="a section or a key")
    explaining = actions.add_parser("explain", help="print all that is known of one key")
    explaining.add_argument("key", metavar="KEY")
    for each in (listing, explaining):
        each.add_argument("--config-file", default="", metavar="FILE", help="also print what this YAML file sets")
    comparing = actions.add_parser("diff", help="print the keys whose values differ between two configs")
    for name, letter in (("first", "A"), ("second", "B")):
        comparing.add_argument(name, metavar=letter, help="a YAML file, a checkpoint (.pth) or a run's folder")
    converting = actions.add_parser("convert", help="translate a config file of FastReID v0.1.1 or v1.0.0")
    converting.add_argument("file", metavar="OLD.yml", help="with the files that its _BASE_ names")
    converting.add_argument("--output", "-o", default="", metavar="NEW.yml", help="default: print it")
    converting.add_argument("--release", choices=RELEASES, default="", help="default: detect it from the keys")
    for each in (listing, explaining, comparing, converting):
        add_plugin_argument(each)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    if args.action == "list":
        print(describe_config(args.prefix, read_config(args.config_file, [], plugin=args.plugin)))
    elif args.action == "explain":
        print(explain_key(args.key, read_config("", [], plugin=args.plugin), args.config_file))
    elif args.action == "convert":
        convert(args.file, args.output, release=args.release, plugin=args.plugin)
    else:
        first, second = (config_of(source, args.plugin) for source in (args.first, args.second))
        found = describe_changes(second, first.dump(), args.first)
        print("\n".join(found) or "no difference")
    return 0


@renamed_arguments(parts="plugin")
def convert(source: str, output: str = "", *, release: str = "", plugin: str = "") -> None:
    """Write a config file of an old release of FastReID, with its bases and its defaults, in the present keys.

    What was translated, and what has no counterpart, goes to stderr line by line.

    Args:
        source: the YAML file.
        output: the file to write; "" prints it.
        release: whose config it is; "" detects it.
        plugin: see ``read_config``.

    Raises:
        ConfigError: the file cannot be read or translated, or ``output`` exists already.
        WriteError: ``output`` cannot be written.
    """
    if output and Path(output).exists():
        raise ConfigError(f"--output {output} exists already.\n  fix: choose another name, or remove the file")
    cfg = read_config("", [], plugin=plugin).clone()
    cfg.defrost()
    log, console = logging.getLogger("fastamp"), logging.StreamHandler(sys.stderr)
    level = log.level
    log.addHandler(console)
    log.setLevel(logging.INFO)
    try:
        cfg.merge_from_file(source, release=release)
    finally:
        log.removeHandler(console)
        log.setLevel(level)
    notes = cfg.translation_notes()
    if not notes:
        print(f"{source} has the present keys: nothing to translate", file=sys.stderr)
    title = notes[0] if notes else f"{source} with its bases"
    head = [title, *(note for note in notes if note.startswith("no counterpart")), "Other keys have their defaults."]
    text = "".join(f"# {line}\n" for line in head) + yaml.safe_dump(changed_values(cfg), sort_keys=False)
    if not output:
        print(text, end="")
        return
    write_atomically(Path(output), lambda file: file.write(text.encode()))
    print(f"wrote {output}")


@renamed_arguments(parts="plugin")
def config_of(source: str, plugin: str = "") -> CfgNode:
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
        return read_config(str(path), [], plugin=plugin)
    cfg = read_config("", [], plugin=plugin).clone()
    cfg.defrost()
    from fastamp.checkpoint.entries import merge_from_checkpoint

    merge_from_checkpoint(cfg, path)
    return cfg
