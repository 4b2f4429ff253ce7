"""List and explain config keys, print and compare configs, and convert configs from old FastReID releases.

examples:
  fastamp config list SOLVER.AMP
  fastamp config list logs/run SOLVER
  fastamp config explain SOLVER.BASE_LR
  fastamp config explain Market1501/sbs_R50-ibn LR
  fastamp config show Market1501/sbs_R50-ibn SOLVER.AMP=on
  fastamp config diff logs/a logs/b/model_best.pth
  fastamp config convert old.yml -o new.yml
"""

import argparse
import logging
import sys
from pathlib import Path

import yaml

from fastamp.cli.options import add_key_values, add_plugin_argument
from fastamp.cli.source import CONFIG, check_one_config, config_of, is_source, model_source, resolve_source
from fastamp.config import (
    RELEASES,
    CfgNode,
    changed_values,
    describe_changes,
    describe_config,
    explain_key,
    get_cfg,
    read_config,
)
from fastamp.config.releases import NO_COUNTERPART
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import write_atomically

_SOURCE = "recipe, YAML file, checkpoint or run folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands list, explain, show, diff and convert."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | explain | show | diff | convert")
    listing = actions.add_parser("list", help="print config keys with default and description")
    explaining = actions.add_parser("explain", help="print all details of one key")
    for subparser in (listing, explaining):
        subparser.add_argument(
            "source",
            nargs="?",
            default="",
            metavar="SOURCE",
            type=model_source,
            help=f"{_SOURCE}, whose values are also printed",
        )
        subparser.add_argument(
            "--config-file", default="", metavar="FILE", help="recipe or YAML file, instead of SOURCE"
        )
    listing.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="section or key (default: all keys)")
    explaining.add_argument(
        "key", metavar="KEY", help="config key or its last part, in any case; FastReID's names are accepted"
    )
    showing = actions.add_parser("show", help="print a complete config as YAML")
    showing.add_argument("source", metavar="SOURCE", type=model_source, help=_SOURCE)
    add_key_values(showing)
    comparing = actions.add_parser("diff", help="print the differences between two configs")
    for name, letter in (("first", "A"), ("second", "B")):
        comparing.add_argument(name, metavar=letter, type=model_source, help=_SOURCE)
    converting = actions.add_parser("convert", help="convert a config file from FastReID v0.1.1 or v1.0.0")
    converting.add_argument("file", metavar="OLD.yml", help="config file; its _BASE_ files are merged")
    converting.add_argument("--output", "-o", default="", metavar="NEW.yml", help="output file (default: stdout)")
    converting.add_argument(
        "--release",
        choices=RELEASES,
        default="",
        help="FastReID release of the file (default: detected from its keys)",
    )
    for subparser in (listing, explaining, showing, comparing, converting):
        add_plugin_argument(subparser)


def run(args: argparse.Namespace) -> int:
    """Run one of the subcommands."""
    if args.action == "list":
        source, prefix = args.source, args.prefix
        if not prefix and not _names_source(source):
            source, prefix = "", source
        print(describe_config(prefix, _config_of(source, args)))
    elif args.action == "explain":
        if not args.source and _names_source(args.key):
            raise ConfigError(f"no key to explain, only {args.key}.\n  fix: add a key, e.g. SOLVER.BASE_LR")
        cfg, source = _config_of(args.source, args), args.source or args.config_file
        is_file = source and resolve_source(source).kind == CONFIG
        print(explain_key(args.key, cfg, source if is_file else "", components=component_choices))
    elif args.action == "show":
        cfg = config_of(args.source, args.plugin)
        cfg.merge_from_list(args.opts)
        print(cfg.dump(), end="")
    elif args.action == "convert":
        convert(args.file, args.output, release=args.release, plugin=args.plugin)
    else:
        first, second = (config_of(source, args.plugin) for source in (args.first, args.second))
        print("\n".join(describe_changes(second, first.dump(), args.first)) or "no difference")
    return 0


def _names_source(word: str) -> bool:
    """Return True if a word names a config rather than a key."""
    return is_source(word) or "/" in word


def _config_of(source: str, args: argparse.Namespace) -> CfgNode:
    """Read the config of SOURCE or ``--config-file``; without them, the defaults."""
    if source:
        check_one_config(source, args.config_file)
    source = source or args.config_file
    return config_of(source, args.plugin) if source else read_config("", [], plugin=args.plugin)


def component_choices() -> dict[str, list[str]]:
    """Return the component names that each config key accepts, including those of plugins."""
    from fastamp.engine import train_loop  # noqa: F401  registers all components
    from fastamp.modeling.losses.pml import supported_names
    from fastamp.solver.build import optimizer_names
    from fastamp.utils.registry import registered_names

    names = registered_names()
    names["DATASETS.NAMES"] += ["csv:FILE", "folder:FOLDER"]
    names["DATASETS.TESTS"] = names["TEST.PRECISE_BN.DATASET"] = names["DATASETS.NAMES"]
    names["MODEL.BACKBONE.NAME"].append("timm/NAME")
    losses, names["MODEL.LOSSES.PML.MINER"] = supported_names()
    names["MODEL.LOSSES.NAME"] += [f"pml/{name}" for name in losses] or ["pml/NAME"]
    names["SOLVER.OPT"] = [*optimizer_names(), "LAMB"]
    names["SOLVER.TRAINER"].insert(0, "auto")
    return names


def convert(source: str, output: str = "", *, release: str = "", plugin: str = "") -> None:
    """Translate a config file from an old FastReID release to the current keys.

    The result includes the values of the base files (``_BASE_``) and the defaults of the release. Translated keys, and
    keys without a counterpart, are printed to stderr.

    Args:
        source: YAML file.
        output: file to write; "" prints the result. Default "".
        release: FastReID release that the file was written for; "" detects the release. Default "".
        plugin: see ``read_config``.

    Raises:
        ConfigError: if the file cannot be read or translated, or ``output`` exists.
        WriteError: if ``output`` cannot be written.
    """
    if output and Path(output).exists():
        raise ConfigError(
            f"--output {output}: this file exists already.\n  fix: choose another name, or delete the file"
        )
    cfg = get_cfg(plugin)
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
        print(f"{source}: nothing to translate: all keys are current", file=sys.stderr)
    title = notes[0] if notes else f"{source} with its base files"
    head = [
        title,
        *(note for note in notes if note.startswith(NO_COUNTERPART)),
        "Other keys have their default values.",
    ]
    text = "".join(f"# {line}\n" for line in head) + yaml.safe_dump(changed_values(cfg), sort_keys=False)
    if not output:
        print(text, end="")
        return
    write_atomically(Path(output), lambda file: file.write(text.encode()))
    print(f"wrote {output}")
