"""Default config, and the config of a command: from a file, KEY VALUE pairs and a plugin."""

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fastamp.config.config import CfgNode
from fastamp.config.defaults import KEYS
from fastamp.config.key import brief
from fastamp.config.projects import PLUGINS_KEY, PROJECTS_KEY, add_keys_of, list_projects, project_of, project_pairs
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import real_path
from fastamp.utils.plugins import import_plugin_file, load_installed_plugins, naming_distribution

logger = logging.getLogger(__name__)


@cache
def _defaults() -> CfgNode:
    cfg = CfgNode()
    cfg.__dict__["_declares"] = False
    cfg.add_keys(KEYS.values())
    return cfg


def check_is_config(cfg: Any) -> None:
    """Check that an argument is a config.

    Raises:
        TypeError: if ``cfg`` has no section ``MODEL``, e.g. because it is the path of a config file.
    """
    if not isinstance(cfg, dict) or "MODEL" not in cfg:
        path = repr(cfg) if isinstance(cfg, str) else '"my.yml"'
        raise TypeError(
            f"expected a config (CfgNode), got {brief(cfg)} ({type(cfg).__name__}).\n"
            f"  fix: from fastamp.config import read_config; cfg = read_config({path})"
        )


def get_cfg(plugin: str = "") -> CfgNode:
    """Return a new config with the default values, including the keys of installed plugins.

    Args:
        plugin: another plugin or project, see ``load_plugin``; "" (default) for none.

    Raises:
        ConfigError: if a plugin cannot be loaded.
    """
    cfg: CfgNode = _defaults().clone()
    for entry, module in load_installed_plugins().items():
        with naming_distribution(entry):
            add_keys_of(module, cfg)
    if plugin:
        load_plugin(plugin, cfg)
    return cfg


def read_config(
    config_file: str = "",
    opts: Sequence[Any] = (),
    *,
    plugin: str = "",
    define_keys: Callable[[CfgNode], None] | None = None,
) -> CfgNode:
    """Read a config file and override it with KEY VALUE pairs.

    Args:
        config_file: path of a YAML file or name of a recipe; "" for the defaults. Default "".
        opts: ``[KEY, VALUE, KEY, VALUE, ...]``. Default ().
        plugin: Python file that registers custom components, or name of a project, see ``load_plugin``; "" for none.
            Default "".
        define_keys: function that declares a project's keys in the config. Default None.

    Returns:
        The frozen config.

    Raises:
        ConfigError: if a file cannot be read, a key is unknown or a value is invalid.
    """
    cfg = get_cfg()
    if define_keys:
        define_keys(cfg)
    if plugin:
        load_plugin(plugin, cfg)
    cfg.merge_from_list(project_pairs(opts))
    if config_file:
        cfg.merge_from_file(config_file)
    cfg.merge_from_list(opts)
    cfg.freeze()
    return cfg


def load_plugin(path: str, cfg: CfgNode) -> None:
    """Run a Python file that registers custom components, and declare its config keys in ``cfg``.

    The file declares keys in ``KEYS``, as a built-in component does, or in a function ``add_config(cfg)``, or in both.

    Args:
        path: plugin file, which runs once per process, or name of a project in ``projects/``; or several, see
            ``split_plugins``.
        cfg: config to extend; it must not be frozen.

    Raises:
        ConfigError: if the file does not exist.
    """
    for plugin in split_plugins(path):
        _load_plugin_file(plugin, cfg)


def split_plugins(path: str) -> list[str]:
    """Split several plugins, separated as in the environment variable PATH; an existing file is not split."""
    return [path] if real_path(path).is_file() else path.split(os.pathsep)


def _load_plugin_file(path: str, cfg: CfgNode) -> None:
    file = real_path(path)
    project = path if path in list_projects() and not file.is_file() else project_of(file)
    if project:
        installed = list_projects()[project]
        if file.is_file() and not file.is_relative_to(real_path(installed)):
            logger.warning(
                "--plugin %s is a file of another copy: using the project %s of this installation, %s.\n"
                "  fix: to use the other copy, install it, or remove this one",
                path,
                project,
                installed,
            )
        cfg.merge_from_list([PROJECTS_KEY, [project]])
        return
    if not file.is_file():
        raise ConfigError(f"--plugin {path}: file not found.\n  fix: correct the path")
    if any(file == real_path(module.__file__) for module in load_installed_plugins().values() if module.__file__):
        return  # the installed plugin has declared its keys already
    try:
        plugin = import_plugin_file(file)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--plugin {path}: {error}.\n"
            "  fix: install the module, or add the folder that contains it to the environment variable PYTHONPATH"
        ) from error
    add_keys_of(plugin, cfg)
    cfg.__dict__["_plugins"] = tuple(dict.fromkeys((*cfg.__dict__.get("_plugins", ()), str(file))))
    cfg.merge_from_list([PLUGINS_KEY, cfg.__dict__["_plugins"]])
