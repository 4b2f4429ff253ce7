"""Run a script written for FastReID without a change; see ``fastamp.fastreid.script``."""

import sys

from fastamp.engine import run_command_line
from fastamp.fastreid.script import run

if __name__ == "__main__":
    sys.exit(run_command_line(run))
