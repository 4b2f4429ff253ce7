"""Config tree with a default and a description of each key; it includes FastReID's keys."""

from fastamp.config.changes import changed_values, describe_changes
from fastamp.config.channels import per_channel
from fastamp.config.config import CfgNode, FrozenConfigError
from fastamp.config.describe import describe_config, explain_key
from fastamp.config.key import Key
from fastamp.config.read import check_is_config, get_cfg, load_plugin, read_config
from fastamp.config.releases import RELEASES
from fastamp.config.sizes import crop_size, fixed_input_size, input_size, size_key

__all__ = [
    "RELEASES",
    "CfgNode",
    "FrozenConfigError",
    "Key",
    "changed_values",
    "check_is_config",
    "crop_size",
    "describe_changes",
    "describe_config",
    "explain_key",
    "fixed_input_size",
    "get_cfg",
    "input_size",
    "load_plugin",
    "per_channel",
    "read_config",
    "size_key",
]
