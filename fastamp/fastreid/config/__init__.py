"""Config tree, with FastReID's ``configurable``."""

from fastamp.config import CfgNode, get_cfg
from fastamp.fastreid.config.config import configurable

__all__ = ["CfgNode", "configurable", "get_cfg"]
