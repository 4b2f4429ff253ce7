"""Run processes of which one misses a collective operation: timeout_ranks.py FAULT RANK PROCESSES KEY VALUE ...

FAULT is ``sleeping`` or ``stopped`` (by SIGSTOP).
"""

import argparse
import os
import signal
import sys
import time

from forked import launch_forked

from fastamp.engine import run_command_line
from fastamp.utils import comm


def main(args: argparse.Namespace) -> None:
    """Wait for the process of rank ``args.rank``, which sleeps for ten minutes or is stopped."""
    comm.synchronize()
    if comm.get_rank() == args.rank:
        if args.fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    comm.synchronize()


if __name__ == "__main__":
    fault, rank, processes, *opts = sys.argv[1:]
    args = argparse.Namespace(config_file="", opts=opts, fault=fault, rank=int(rank))
    sys.exit(run_command_line(lambda: launch_forked(main, int(processes), args=(args,))))
