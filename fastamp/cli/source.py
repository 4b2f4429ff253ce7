"""First argument of a command: a recipe, YAML file, checkpoint, run folder, packaged model, published or Hub model."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastamp.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from fastamp.config import CfgNode

CONFIG, CHECKPOINT, RUN = "config", "checkpoint", "run folder"
HUB_PREFIX, ZOO_PREFIX = "hf://", "zoo:"
_YAML = (".yml", ".yaml")
# Keys of the machine that trained, not of the model.
_MACHINE_KEYS = ("OUTPUT_DIR", "DIST_TIMEOUT_MINUTES", "DATALOADER.CACHE", "DATALOADER.CACHE_DIR", "INPUT.DECODER")


def model_source(text: str) -> str:
    """Mark an argument of argparse as SOURCE by ``type=model_source``: it may be a name of the catalog.

    ``with_published_files`` replaces the name before the command runs, and the command gets ``--accept-withdrawn``.
    """
    return text


def add_accept_withdrawn(parser: argparse.ArgumentParser) -> None:
    """Add ``--accept-withdrawn`` to the parsers, also those of subcommands, that have a SOURCE."""
    for action in list(parser._actions):
        if action.nargs == argparse.PARSER and isinstance(action.choices, dict):
            for subparser in action.choices.values():
                add_accept_withdrawn(subparser)
    if any(action.type is model_source for action in parser._actions):
        parser.add_argument(
            "--accept-withdrawn",
            action="store_true",
            help="accept published weights that were trained on images withdrawn by their owner (DukeMTMC)",
        )


def with_published_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with the path of the file, downloaded if missing, instead of each name of the catalog.

    Raises:
        UserError: see ``fastamp.zoo.checkpoint``.
    """
    parsers = [parser]
    for action in parser._actions:
        if action.nargs == argparse.PARSER and isinstance(action.choices, dict):
            parsers += [action.choices[name] for name in (vars(args)[action.dest],) if name in action.choices]
    values = vars(args)
    for action in [action for parser in parsers for action in parser._actions if action.type is model_source]:
        given = values.get(action.dest)
        paths = [_published_file(text, values["accept_withdrawn"]) for text in _as_list(given)]
        values = values | {action.dest: paths if isinstance(given, list) else paths[0] if paths else given}
    return argparse.Namespace(**values)


def _as_list(given: str | list[str] | None) -> list[str]:
    return given if isinstance(given, list) else [given] if given else []


def _published_file(text: str, accept_withdrawn: bool) -> str:
    """Return the path of the file that ``text`` names in the catalog; paths, recipes and others are unchanged."""
    from fastamp.config.recipes import find_recipe

    is_prefixed = text.startswith(ZOO_PREFIX)
    if not is_prefixed and ("/" in text or Path(text).expanduser().exists() or find_recipe(text)):
        return text  # without importing PyTorch
    from fastamp.zoo import checkpoint, matches

    return str(checkpoint(text, accept_withdrawn=accept_withdrawn)) if is_prefixed or matches(text) else text


@dataclass(frozen=True)
class Source:
    """Config or model that the first argument of a command names.

    Attributes:
        text: the argument.
        kind: ``CONFIG`` (a recipe or YAML file), ``CHECKPOINT`` (also the weights of a packaged model) or ``RUN``.
        path: path of the file or folder.
    """

    text: str
    kind: str
    path: Path

    @property
    def checkpoint(self) -> str:
        """Path of the checkpoint, or of the best checkpoint of the run folder; empty for a config.

        Raises:
            WeightsError: if the run folder has no checkpoint.
        """
        from fastamp.checkpoint.entries import checkpoint_of

        return "" if self.kind == CONFIG else str(checkpoint_of(self.path))


def resolve_source(text: str | os.PathLike[str]) -> Source:
    """Find the recipe, YAML file, checkpoint, run folder or packaged model that a command names.

    ``hf://user/name`` or ``hf://user/name@revision`` is downloaded from the Hub. An existing file or folder has
    precedence over a recipe. A missing file with a suffix is not an error here: reading it reports more details.

    Raises:
        ConfigError: if ``text`` is neither an existing path nor a recipe.
        WeightsError: if a model cannot be downloaded.
    """
    from fastamp.config.recipes import find_recipe, list_recipes
    from fastamp.zoo import names

    text = os.fspath(text)
    if text.startswith(HUB_PREFIX):
        from fastamp.inference.hub import download

        path = download(text.removeprefix(HUB_PREFIX))
    else:
        path = Path(text).expanduser()
    if path.is_dir():
        weights = path / "model.safetensors"
        is_run = any(path.glob("model_*.pth")) or not weights.is_file()
        return Source(text, RUN, path) if is_run else Source(text, CHECKPOINT, weights)
    if not path.exists():
        if recipe := find_recipe(text):
            return Source(text, CONFIG, recipe)
        if not path.suffix:
            raise ConfigError(
                f"{text!r} was not found.{did_you_mean(text, [*list_recipes(), *names()])}\n"
                "  expected: a recipe, YAML file, checkpoint, run folder, or name of published weights\n"
                "  fix: correct the path, or choose one of `fastamp recipes` or `fastamp models`"
            )
    return Source(text, CONFIG if path.suffix.lower() in _YAML else CHECKPOINT, path)


def is_source(text: str) -> bool:
    """Return True if ``text`` is spelled as a YAML file or checkpoint, or is an existing run folder or a recipe."""
    from fastamp.config.recipes import find_recipe

    if text.startswith((HUB_PREFIX, ZOO_PREFIX)):
        return True
    if ":" in text:  # csv:FILE
        return False
    path = Path(text).expanduser()
    return (
        path.suffix in (*_YAML, ".pth", ".safetensors")
        or (path / "config.yaml").is_file()
        or find_recipe(text) is not None
    )


def config_of(
    source: str | os.PathLike[str], plugin: str = "", *, define_keys: "Callable[[CfgNode], None] | None" = None
) -> "CfgNode":
    """Read the complete config of a recipe, YAML file, checkpoint or run folder; the result is not frozen.

    In the config of a checkpoint or run folder no key counts as set (``CfgNode.is_set``), since it contains all keys.

    Raises:
        UserError: if ``source`` cannot be read or contains no config.
    """
    from fastamp.config import read_config
    from fastamp.config.files import FOLDERS_KEY

    resolved = resolve_source(source)
    path = resolved.path
    if resolved.kind == RUN:
        path /= "config.yaml"
        if not path.is_file():
            raise ConfigError(
                f"{resolved.text}: not a run folder: config.yaml not found.\n"
                "  fix: give a run folder, YAML file or checkpoint"
            )
    defaults = read_config("", [], plugin=plugin, define_keys=define_keys)
    cfg = defaults.clone()
    cfg.defrost()
    if resolved.kind == CHECKPOINT:
        from fastamp.checkpoint.entries import merge_from_checkpoint
        from fastamp.checkpoint.weights_file import read_checkpoint

        merge_from_checkpoint(cfg, read_checkpoint(path), path)
        return cfg
    cfg.merge_from_file(path)
    if resolved.kind == RUN:
        complete, cfg = cfg, defaults.clone()
        cfg.defrost()
        cfg.merge_saved(complete.dump())
        cfg.merge_from_other_cfg({FOLDERS_KEY: complete.saved_in()})
    return cfg


def move_config(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with a recipe or YAML file in ``config_file`` instead of SOURCE.

    ``launch`` reads the timeout and the device of the processes from ``config_file``.

    Raises:
        ConfigError: if SOURCE is neither an existing path nor a recipe, or there are two configs.
    """
    if not args.config_source or resolve_source(args.config_source).kind != CONFIG:
        return args
    check_one_config(args.config_source, args.config_file)
    return argparse.Namespace(**vars(args) | {"config_file": args.config_source, "config_source": ""})


def check_one_config(source: str, config_file: str) -> None:
    """Raise ConfigError if a command has both SOURCE and ``--config-file``."""
    if config_file:
        raise ConfigError(f"got two configs, {source} and --config-file {config_file}.\n  fix: remove one of them")


def training_config(
    args: argparse.Namespace, *, define_keys: "Callable[[CfgNode], None] | None" = None, with_weights: bool = False
) -> "CfgNode":
    """Read the config of a training from SOURCE, ``--config-file`` and KEY VALUE.

    A run folder is also OUTPUT_DIR. A checkpoint is also MODEL.WEIGHTS, and OUTPUT_DIR and the image cache keep their
    defaults. The number of classes is that of the training set again, except with ``--resume``, which continues with
    the same classes.

    Args:
        args: arguments of the command line; ``config_source``, ``plugin`` and ``resume`` are optional.
        define_keys: see ``read_config``. Default None.
        with_weights: also set MODEL.WEIGHTS for a run folder. Default False.

    Raises:
        UserError: if SOURCE, a key or a value is invalid.
    """
    from fastamp.config import read_config

    text, plugin = vars(args).get("config_source", ""), vars(args).get("plugin", "")
    if not text:
        return read_config(args.config_file, args.opts, plugin=plugin, define_keys=define_keys)
    check_one_config(text, args.config_file)
    resolved = resolve_source(text)
    if resolved.kind == CONFIG:
        return read_config(text, args.opts, plugin=plugin, define_keys=define_keys)
    cfg = config_of(text, plugin, define_keys=define_keys)
    if resolved.kind == RUN:
        cfg.OUTPUT_DIR = text
        if with_weights:
            cfg.MODEL.WEIGHTS = resolved.checkpoint
    else:
        cfg.merge_from_other_cfg(_machine_defaults() | {"MODEL.WEIGHTS": resolved.checkpoint})
    if not vars(args).get("resume", False):
        cfg.MODEL.HEADS.NUM_CLASSES = 0  # DATASETS.NAMES may differ from that of the stored config
    cfg.merge_from_list(args.opts)
    cfg.freeze()
    return cfg


def _pairs_of(key: str, opts: Sequence[str]) -> list[str]:
    """Return the ``KEY VALUE`` pairs of one key."""
    return [text for pair in zip(opts[::2], opts[1::2], strict=True) if pair[0] == key for text in pair]


def evaluation_config(
    config_file: str, opts: Sequence[str], *, plugin: str = "", source: str = ""
) -> tuple["CfgNode", str]:
    """Read the config of an evaluation from a file, else from the checkpoint, else from the defaults.

    Args:
        config_file: path of a YAML file or name of a recipe; "" for the config in the checkpoint.
        opts: ``[KEY, VALUE, ...]`` pairs that override this config.
        plugin: see ``read_config``.
        source: checkpoint or run folder, which sets MODEL.WEIGHTS, or a recipe or YAML file; "" for none. Default "".

    Returns:
        ``(config, source)``: the frozen config, and a description of where it was read from.

    Raises:
        ConfigError: if a file, key or value is invalid, or MODEL.WEIGHTS is not set.
        WeightsError: if the checkpoint cannot be read or its config is incompatible.
    """
    from fastamp.checkpoint.entries import merge_if_config
    from fastamp.checkpoint.weights_file import read_checkpoint
    from fastamp.config import get_cfg, read_config
    from fastamp.zoo import checkpoint

    resolved = resolve_source(source) if source else None
    if resolved and resolved.kind == CONFIG:
        check_one_config(source, config_file)
        config_file = source
    elif resolved:
        opts = ["MODEL.WEIGHTS", resolved.checkpoint, *opts]
    # The config in a checkpoint can name projects, which declare keys in ``opts``.
    applied_opts = opts if config_file or len(opts) % 2 else _pairs_of("MODEL.WEIGHTS", opts)
    given = read_config(config_file, applied_opts, plugin=plugin)
    weights = given.MODEL.WEIGHTS
    if weights.startswith(ZOO_PREFIX) and not config_file:
        weights = str(checkpoint(weights, accept_withdrawn=given.MODEL.WEIGHTS_ACCEPT_WITHDRAWN))
        opts = [*opts, "MODEL.WEIGHTS", weights]
    if not weights:
        raise ConfigError(
            "MODEL.WEIGHTS is not set.\n"
            "  fix: give a checkpoint or run folder, or add MODEL.WEIGHTS path/to/model_best.pth"
        )
    if config_file:
        return given, config_file
    cfg = get_cfg(plugin)
    if not merge_if_config(cfg, read_checkpoint(weights), weights):
        not_the_model = {"MODEL.WEIGHTS", "MODEL.DEVICE"}
        if not any(key.startswith("MODEL.") and key not in not_the_model for key in opts[::2]):
            raise ConfigError(
                f"{weights} contains no config, so the model is unknown.\n"
                "  fix: add --config-file X.yml with the config of the training, or convert the weights with "
                "`fastamp import`, which infers the config of many models"
            )
        given = read_config("", opts, plugin=plugin)
        return given, f"the defaults, because {weights} contains no config"
    model = {
        "MODEL.DEVICE": "auto",
        "MODEL.COMPILE": "off",
        "MODEL.HEADS.NUM_CLASSES": 0,
        "MODEL.BACKBONE.SCAN": "torch",
    }
    cfg.merge_from_other_cfg(_machine_defaults() | model)
    cfg.merge_from_list(opts)
    cfg.freeze()
    return cfg, f"from {weights}"


def _machine_defaults() -> dict[str, object]:
    from fastamp.config import get_cfg

    return {key.path: value for key, value in get_cfg().keys_below() if key.path in _MACHINE_KEYS}
