"""Processes that meet again and again until one fails: failing_launch.py FAULT RANK PROCESSES [MACHINES MACHINE URL].

A FAULT that is a path is none: each process makes a file of this name, with its process number as suffix, and waits.
Under torchrun PROCESSES and what follows are of no consequence.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from forked import launch_forked

from fastamp.engine import run_command_line
from fastamp.utils import comm
from fastamp.utils.errors import DataError


def main(fault: str, failing: int) -> None:
    # Like a worker that loads data it holds what its parent has open, also when that is dead.
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(8,), daemon=True).start()
    if "/" in fault:
        Path(f"{fault}.{os.getpid()}").touch()
        time.sleep(1000)
    for step in range(10000):
        if step == 5 and comm.get_rank() == failing:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "error":
                raise DataError("an image cannot be read")
            raise AssertionError("a bug")
        if fault == "stuck" and step == 5:
            time.sleep(1000)  # whatever it waits for, it does not notice
        comm.synchronize()


if __name__ == "__main__":
    fault, failing, processes, *machines = sys.argv[1:]
    numbers = (int(machines[0]), int(machines[1]), machines[2]) if machines else ()
    sys.exit(run_command_line(lambda: launch_forked(main, int(processes), *numbers, args=(fault, int(failing)))))
