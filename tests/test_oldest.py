""".ci/oldest --smoke: a few tests on the oldest supported Python, with the minimum version of each requirement."""

import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.integration
def test_oldest_supported_versions():
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    try:
        urllib.request.urlopen(f"{index.rstrip('/')}/uv/", timeout=60).close()
    except urllib.error.HTTPError:
        pass  # it was reached
    except OSError as error:
        pytest.skip(f"the package registry {index} cannot be reached: {error}")
    # The variables of this test run are not those of the other one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    done = subprocess.run(["bash", ".ci/oldest", "--smoke"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
