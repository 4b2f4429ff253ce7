"""The config: FastReID's keys and more, each with a default and a meaning."""

from fastamp.config.changes import describe_changes
from fastamp.config.channels import per_channel
from fastamp.config.config import CfgNode, FrozenConfigError, get_cfg
from fastamp.config.describe import describe_config, explain_key
from fastamp.config.key import Key

__all__ = [
    "CfgNode",
    "FrozenConfigError",
    "Key",
    "describe_changes",
    "describe_config",
    "explain_key",
    "get_cfg",
    "per_channel",
]
