"""Start a command line: one process here, and exit codes that mean something."""

import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

from fastamp.utils.errors import USER_ERROR_EXIT_CODE, ConfigError, UserError


class TrainingInterrupted(Exception):
    """A signal ended the training after its state was saved.

    Args:
        signal_number: the signal.
        saved: the checkpoint that was written.
    """

    def __init__(self, signal_number: int, saved: str) -> None:
        super().__init__(f"stopped by signal {signal_number}; saved {saved}")
        self.signal_number = signal_number
        self.saved = saved


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
) -> Any:
    """Call ``main_func(*args)``.

    Raises:
        ConfigError: more than one process was asked for, here or by torchrun.
    """
    processes = max(num_machines * num_gpus_per_machine, int(os.environ.get("WORLD_SIZE") or 1))
    if processes > 1:
        raise ConfigError(
            f"{processes} processes were asked for, but this version of fastamp trains in one process.\n"
            "  fix: --num-gpus 1 --num-machines 1, and python instead of torchrun"
        )
    return main_func(*args)


def resume_command() -> str:
    """Return the command that continues the run that this process is."""
    arguments = sys.argv if "--resume" in sys.argv else [sys.argv[0], "--resume", *sys.argv[1:]]
    return shlex.join(["python", *arguments])


def run_command_line(command: Callable[[], Any]) -> int:
    """Run ``command`` and return the process's exit code.

    0: done. 2: the user's input was wrong; the message stands on stderr, without a traceback. 128 + the signal's
    number: interrupted, with the command that resumes. Any other exception is a bug and passes through.
    """
    try:
        command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except TrainingInterrupted as interruption:
        print(f"{interruption}\nresume with:\n  {resume_command()}", file=sys.stderr)
        return 128 + interruption.signal_number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
