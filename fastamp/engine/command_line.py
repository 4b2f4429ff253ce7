"""What a command line says at its end: an exit code that means something, and a message without a traceback."""

import errno
import os
import resource
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastamp.engine.failure_monitor import Outcome
from fastamp.utils.errors import USER_ERROR_EXIT_CODE, UserError
from fastamp.utils.files import discard_stdout, stdout_has_no_reader
from fastamp.utils.lock import unlock_all
from fastamp.utils.moved import moved_names
from fastamp.utils.terminal_text import sanitize_terminal_text

__getattr__ = moved_names(
    __name__, {"outcome_of": f"{__name__}.run_and_capture", "say": f"{__name__}.print_exit_message"}
)

_RENDEZVOUS_PORT = 29400  # torchrun's own choice


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


def resume_command() -> str:
    """Return the command that continues the run that this process is; under torchrun that of every machine."""
    script, *arguments = sys.argv
    path, command = Path(script), []
    is_console_script = path.name in ("fastamp", "fastamp.exe")
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if is_console_script or path.parts[-2:] == ("fastamp", "__main__.py"):
        program, command = ["-m", "fastamp"], [arguments.pop(0)]  # the flag is one of `train`
    elif spec is not None:  # python -m package.module
        program = ["-m", spec.name.removesuffix(".__main__")]
    elif script.endswith(".py") or not os.access(script, os.X_OK):
        program = [script]
    else:  # a console script of a project's
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
    """Run ``command`` and return the process's exit code.

    0: done. 2: the user's input was wrong, or a file that it names cannot be reached; the message stands on stderr,
    without a traceback. 128 + the signal's number: interrupted, with the command that resumes. Any other exception is a
    bug and passes through. What fails inside ``launch`` among several processes ends there, with the same codes and
    messages, and 1 for a bug.
    """
    try:
        outcome = run_and_capture(command)
    finally:
        unlock_all()
    print_exit_message(outcome)
    return outcome.code


def run_and_capture(command: Callable[[], Any]) -> Outcome:
    """Run ``command``; see ``run_command_line``."""
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
        discard_stdout()  # its reader, e.g. head, has stopped
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return Outcome(
                USER_ERROR_EXIT_CODE,
                f"error: too many files are open{f' to open {error.filename}' if error.filename else ''}.\n"
                f"  found: the limit is {limit} for each process (ulimit -n)\n"
                "  fix:   a higher limit (ulimit -n 4096, docker run --ulimit nofile=4096)",
            )
        # Names come from keys and flags, and any look at one of these may fail so.
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP) or not isinstance(error.filename, str):
            raise
        name = error.filename if len(error.filename) <= 200 else f"{error.filename[:200]}..."
        return Outcome(
            USER_ERROR_EXIT_CODE,
            f"error: a file cannot be reached: {error.strerror}.\n"
            f"  found: {name} ({len(error.filename)} characters)\n"
            "  fix:   change the key or the flag that names it, or who may read it",
        )
    return Outcome(0)


def print_exit_message(outcome: Outcome) -> None:
    """Print an outcome's message, if it has one, on stderr; ranks above 0 say who they are."""
    if outcome.message:
        who = f"rank {outcome.rank}: " if outcome.rank and outcome.kind != "lost" else ""
        print(sanitize_terminal_text(f"{who}{outcome.message}"), file=sys.stderr, flush=True)
