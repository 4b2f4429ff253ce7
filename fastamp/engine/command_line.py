"""What a command line says at its end: an exit code that means something, and a message without a traceback."""

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastamp.utils import comm
from fastamp.utils.errors import USER_ERROR_EXIT_CODE, UserError

GRACE_SECONDS = 2.0
"""How long the processes of a failed training have to say what they know."""


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


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, and what is to be said on stderr."""

    code: int
    message: str = ""


def resume_command() -> str:
    """Return the command that continues the run that this process is."""
    starter, program, words = ["python"], [sys.argv[0]], sys.argv[1:]
    path = Path(sys.argv[0])
    is_script = path.name in ("fastamp", "fastamp.exe")
    if is_script or path.parts[-2:] == ("fastamp", "__main__.py"):
        program, words = ["-m", "fastamp", words[0]], words[1:]  # --resume is an option of `train`
    if "TORCHELASTIC_RUN_ID" in os.environ:
        starter = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
    elif is_script:
        starter, program = ["fastamp"], program[2:]
    return shlex.join([*starter, *program, *(["--resume"] if "--resume" not in words else []), *words])


def run_command_line(command: Callable[[], Any]) -> int:
    """Run ``command`` and return the process's exit code.

    0: done. 2: the user's input was wrong; the message stands on stderr, without a traceback. 128 + the signal's
    number: interrupted, with the command that resumes. Any other exception is a bug and passes through.
    """
    outcome, rank = outcome_of(command), comm.get_rank()
    if rank > 0 and outcome.code != USER_ERROR_EXIT_CODE:
        return outcome.code  # an interruption is one of all ranks
    if rank > 0:
        # What is wrong for all ranks is said by rank 0: torchrun, when that has ended, ends this process too.
        time.sleep(2 * GRACE_SECONDS)
    say(outcome.message, rank)
    return outcome.code


def outcome_of(command: Callable[[], Any]) -> Outcome:
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
    except BrokenPipeError:  # whoever reads the output, e.g. head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Outcome(0)


def say(message: str, rank: int) -> None:
    """Print a message, if there is one, on stderr; ranks above 0 say who they are."""
    if message:
        print(f"rank {rank}: {message}" if rank else message, file=sys.stderr, flush=True)
