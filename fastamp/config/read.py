"""The config of a command: a file, KEY VALUE pairs, and keys of custom components."""

import importlib.util
import sys
from collections.abc import Callable, Sequence

from fastamp.config.config import CfgNode, get_cfg
from fastamp.config.key import Key
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import real_path


def read_config(
    config_file: str, opts: Sequence[str], *, parts: str = "", define_keys: Callable[[CfgNode], None] | None = None
) -> CfgNode:
    """Return the frozen config of a file and of KEY VALUE pairs over it.

    Args:
        config_file: path; empty for the defaults.
        opts: the pairs, one after the other.
        parts: file that registers custom components first, see ``load_parts``; empty is none.
        define_keys: declares keys of a project.

    Raises:
        ConfigError: a file, a key or a value is wrong.
    """
    cfg = get_cfg()
    if define_keys:
        define_keys(cfg)
    if parts:
        load_parts(parts, cfg)
    if config_file:
        cfg.merge_from_file(config_file)
    cfg.merge_from_list(opts)
    cfg.freeze()
    return cfg


def load_parts(path: str, cfg: CfgNode) -> None:
    """Run a Python file that registers custom components, and declare its config keys.

    These are the file's ``KEYS``, declared as in a component of fastamp, and those of its ``add_config(cfg)``.

    Raises:
        ConfigError: there is no such file.
    """
    file = real_path(path)
    if not file.is_file():
        raise ConfigError(f"--parts: there is no file {path}")
    name = f"fastamp_parts_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    parts = sys.modules[name]
    if hasattr(parts, "add_config"):
        parts.add_config(cfg)
    keys = getattr(parts, "KEYS", ())
    # A project may use that name for something else, or declare its KEYS in add_config itself.
    if isinstance(keys, (tuple, list)) and all(isinstance(key, Key) for key in keys):
        known = {key.path for key, _ in cfg.keys_below()}
        cfg.add_keys(key for key in keys if key.path not in known)
