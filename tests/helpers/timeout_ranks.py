"""Run two processes of which the first waits for the other in a collective operation: timeout_ranks.py KEY VALUE ..."""

import argparse
import sys
import time

from forked import launch_forked

from fastamp.engine import run_command_line
from fastamp.utils import comm


def main(args: argparse.Namespace) -> None:
    """Wait on rank 0 for rank 1, which sleeps for a minute."""
    if comm.get_rank() == 1:
        time.sleep(60)
    comm.synchronize()


if __name__ == "__main__":
    args = argparse.Namespace(config_file="", opts=sys.argv[1:])
    sys.exit(run_command_line(lambda: launch_forked(main, 2, args=(args,))))
