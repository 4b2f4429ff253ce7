"""Synchronize processes repeatedly until one fails: failing_launch.py FAULT RANK PROCESSES [MACHINES MACHINE URL].

If FAULT is a path, no process fails: each creates a file with this path and its process ID as suffix, and waits. Under
torchrun, PROCESSES and the following arguments are ignored.
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
    # Like a data-loading worker, it inherits the open files of its parent and can outlive it.
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
            time.sleep(1000)  # simulates a process that does not react
        comm.synchronize()


if __name__ == "__main__":
    fault, failing, processes, *machines = sys.argv[1:]
    numbers = (int(machines[0]), int(machines[1]), machines[2]) if machines else ()
    sys.exit(run_command_line(lambda: launch_forked(main, int(processes), *numbers, args=(fault, int(failing)))))
