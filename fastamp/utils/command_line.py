"""Exit codes and error messages of the command line."""

import errno
import os
import resource
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastamp.utils.color import color_message
from fastamp.utils.errors import USER_ERROR_EXIT_CODE, UserError
from fastamp.utils.files import discard_stdout, stdout_has_no_reader
from fastamp.utils.lock import unlock_all
from fastamp.utils.terminal_text import sanitize_terminal_text

_RENDEZVOUS_PORT = 29400  # torchrun's own choice


@dataclass(frozen=True)
class Outcome:
    """Exit status of a process.

    Attributes:
        code: exit code.
        message: message for stderr. Empty if there is nothing to print.
        rank: rank of the process.
        kind: ``"cause"`` if the process itself failed, ``"consequence"`` if the process failed because another process
            ended, ``"timeout"`` if the process waited too long for another process, ``"lost"`` if the process ended
            without reporting an outcome or did not respond.
    """

    code: int
    message: str = ""
    rank: int = 0
    kind: Literal["cause", "consequence", "timeout", "lost"] = "cause"


class TrainingInterrupted(Exception):
    """Raised after a stop signal, once the training state has been saved.

    Args:
        signal_number: number of the signal.
        saved: path of the saved checkpoint.
    """

    def __init__(self, signal_number: int, saved: str) -> None:
        super().__init__(f"stopped by signal {signal_number}; saved {saved}")
        self.signal_number = signal_number
        self.saved = saved


def resume_command() -> str:
    """Return the shell command that resumes the current run.

    Under torchrun, the command must be run on every machine.
    """
    script, *arguments = sys.argv
    path, command = Path(script), []
    is_console_script = path.name in ("fastamp", "fastamp.exe")
    spec = sys.modules["__main__"].__spec__
    if is_console_script or path.parts[-2:] == ("fastamp", "__main__.py"):
        program, command = ["-m", "fastamp"], [arguments.pop(0)]  # `--resume` follows the subcommand
    elif spec is not None:  # python -m package.module
        program = ["-m", spec.name.removesuffix(".__main__")]
        if os.path.abspath(script) != spec.origin:  # the module runs a script
            program.append(script)
    elif script.endswith(".py") or not os.access(script, os.X_OK):
        program = [script]
    else:  # console script of a project
        program = ["--no-python", script]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        starter = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
        if machines != "1":
            endpoint = f"{os.environ['MASTER_ADDR']}:{_RENDEZVOUS_PORT}"
            starter += ["--nnodes", machines, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        starter += program
    elif is_console_script:
        starter = ["fastamp"]
    else:
        starter = [script] if program[0] == "--no-python" else ["python", *program]
    resume = [] if "--resume" in arguments else ["--resume"]
    return shlex.join([*starter, *command, *resume, *arguments])


def run_command_line(command: Callable[[], Any]) -> int:
    """Run ``command`` and return the exit code for the process.

    User errors are printed to stderr without a traceback. If signal n interrupts training, the command that resumes the
    run is printed. In multi-process runs, ``launch`` handles both cases in the same way and terminates all processes
    with the same exit code. Any other exception terminates a multi-process run with exit code 1.

    Args:
        command: called without arguments.

    Returns:
        0 after success, 2 after a user error or if a file is inaccessible, 128 + n after signal n.

    Raises:
        Exception: any other exception that ``command`` raises, which indicates a bug.
    """
    try:
        outcome = run_and_capture(command)
    finally:
        unlock_all()
    print_exit_message(outcome)
    return outcome.code


def run_and_capture(command: Callable[[], Any]) -> Outcome:
    """Run ``command`` and return its exit code and message as an ``Outcome``; see ``run_command_line``."""
    try:
        command()
        sys.stdout.flush()
    except UserError as error:
        return Outcome(USER_ERROR_EXIT_CODE, f"error: {error}")
    except TrainingInterrupted as interruption:
        message = f"{interruption}\nresume with:\n  {resume_command()}"
        return Outcome(128 + interruption.signal_number, message)
    except KeyboardInterrupt:
        return Outcome(130, "interrupted")
    except BrokenPipeError:
        if not stdout_has_no_reader():
            raise
        discard_stdout()  # the reader, e.g. head, has exited
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return Outcome(
                USER_ERROR_EXIT_CODE,
                f"error: too many open files{f': cannot open {error.filename}' if error.filename else ''}.\n"
                f"  found: limit of {limit} open files per process (ulimit -n)\n"
                "  fix:   raise the limit (ulimit -n 4096, docker run --ulimit nofile=4096)",
            )
        # File names come from config keys and flags, so these errors are the user's.
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP) or not isinstance(error.filename, str):
            raise
        name = error.filename if len(error.filename) <= 200 else f"{error.filename[:200]}..."
        return Outcome(
            USER_ERROR_EXIT_CODE,
            f"error: cannot access file: {error.strerror}.\n"
            f"  found: {name} ({len(error.filename)} characters)\n"
            "  fix:   correct the path in the config key or flag, or change the permissions of the file",
        )
    return Outcome(0)


def print_exit_message(outcome: Outcome) -> None:
    """Print the message of an outcome to stderr. If the rank is above 0, the message starts with the rank."""
    if outcome.message:
        who = f"rank {outcome.rank}: " if outcome.rank and outcome.kind != "lost" else ""
        text = sanitize_terminal_text(f"{who}{outcome.message}")
        print(color_message(text, sys.stderr), file=sys.stderr, flush=True)
