"""Run a script written for FastReID without a change: ``python -m fastamp.fastreid SCRIPT.py ARGS...``.

In this process, and in those that the script starts with ``launch``, ``import fastreid`` imports fastamp.
"""

import argparse
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from fastamp.engine import run_command_line
from fastamp.fastreid import provide_fastreid
from fastamp.utils.errors import ConfigError, UserError

_SCRIPT = "FASTAMP_FASTREID_SCRIPT"
"""Environment variable with the path of the script, for the processes that it starts."""

_NO_CUDA = (
    "no NVIDIA driver",
    "not compiled with CUDA",
    "No CUDA GPUs are available",
    "on a CUDA device but torch.cuda",
)
"""Parts of PyTorch's messages about a missing CUDA device."""


def execute(script: str, namespace: dict[str, Any]) -> None:
    """Execute a script in a namespace, with its folder as ``sys.path[0]``.

    Args:
        script: path of the script.
        namespace: globals of the script; ``__file__`` is set.

    Raises:
        UserError: if the script has a syntax error, imports a name that FastReID does not have, or uses CUDA without a
            CUDA device.
    """
    path = Path(script)
    sys.path[0] = str(path.resolve().parent)
    namespace.update(__file__=script, __doc__=None)
    try:
        exec(compile(path.read_bytes(), script, "exec"), namespace)
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}\n  fix: correct the line"
        ) from error
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("fastreid", "fastamp"):
            raise
        raise ConfigError(
            f"{script}: {error}.\n"
            "  fix: correct the import; docs/migration/fastreid.md lists the names that are missing"
        ) from error
    except (RuntimeError, AssertionError) as error:
        if not any(cause in str(error) for cause in _NO_CUDA):
            raise
        raise UserError(
            f"{script} uses CUDA, and this machine has no CUDA device: {error}\n"
            "  fix: replace .cuda() by .to(cfg.MODEL.DEVICE), map_location by cfg.MODEL.DEVICE, and set the key to cpu"
        ) from error


def run(argv: list[str] | None = None) -> None:
    """Parse the command line and run the script.

    Args:
        argv: arguments; None (default) for those of the process.

    Raises:
        ConfigError: if the script does not exist, or FastReID is to be used and is not installed.
        UserError: see ``execute``.
    """
    parser = argparse.ArgumentParser(prog="python -m fastamp.fastreid", description=__doc__)
    parser.add_argument("--installed", action="store_true", help="import the installed FastReID instead of fastamp")
    parser.add_argument("script", metavar="SCRIPT.py", help="script that imports fastreid")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")
    args = parser.parse_args(argv)
    if not os.path.isfile(args.script):
        raise ConfigError(f"{args.script}: no such file.\n  fix: give the path of a script that imports fastreid")
    spec = PathFinder.find_spec("fastreid", [os.path.dirname(os.path.abspath(args.script)), *sys.path])
    installed = spec and spec.origin  # None for a folder that is not a package
    if args.installed and not installed:
        raise ConfigError("--installed: FastReID is not installed.\n  fix: install it, or remove --installed")
    sys.argv = [args.script, *args.args]
    if args.installed:
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if installed:
        print(f"using fastamp as fastreid, instead of {installed} (--installed uses that one)", file=sys.stderr)
    provide_fastreid()
    main = sys.modules["__main__"]
    # A process that launch starts runs this module, see below, to import what the script defines. Its argv[0] differs.
    os.environ[_SCRIPT] = args.script
    vars(main).update(__spec__=importlib.util.find_spec("fastamp.fastreid.script"))
    execute(args.script, vars(main))


if __name__ == "__main__":
    sys.exit(run_command_line(run))
elif __name__ == "__mp_main__":
    provide_fastreid()
    execute(os.environ[_SCRIPT], globals())
