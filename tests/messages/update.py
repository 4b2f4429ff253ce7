"""Update the snapshot of messages: `python tests/messages/update.py [SECTION ...]`; review the diff afterwards."""

import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    os.environ["UPDATE_MESSAGES"] = "1"
    sections = sys.argv[1:]
    select = ["-k", " or ".join(f"[{section}]" for section in sections)] if sections else []
    sys.exit(pytest.main(["-q", "-n", "0", "-m", "", str(Path(__file__).with_name("test_messages.py")), *select]))
