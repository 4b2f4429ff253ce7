"""What a config asks for and this version does not do yet."""

from fnmatch import fnmatchcase

from fastamp.config.config import CfgNode
from fastamp.config.defaults import NOT_YET


def unsupported_settings(cfg: CfgNode) -> list[str]:
    """Return one message for each key that asks for something which this version does not do yet.

    Args:
        cfg: a whole config.

    Returns:
        messages that name the key, its value and the default; empty when all that is asked for is done.
    """
    keys = {key.path: (key, value) for key, value in cfg.keys_below()}
    changed = {path for path, (key, value) in keys.items() if value != key.default}
    messages = []
    for pattern in NOT_YET:
        for path in sorted(changed):
            key, value = keys[path]
            if fnmatchcase(path, pattern):
                messages.append(
                    f"{path} is {value!r}, which this version does not support yet (default: {key.default!r})"
                )
    return messages
