"""Type checking with mypy; the levels are in pyproject.toml."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLANTED = {
    "fastamp/config/sizes.py": "\n\ndef _planted(number: int) -> str:\n    return number\n",
    "fastamp/evaluation/pairs.py": "\n\ndef _planted(number):\n    return number\n",
    "fastamp/inference/images.py": "\n\ndef _planted() -> None:\n    as_list(1, 2, 3)\n",
    "fastamp/engine/seeds.py": "\n\ndef _planted() -> None:\n    undefined_name(1)\n",
}


def check_types(folder):
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir=/dev/null"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.extras
def test_types_are_consistent_and_planted_errors_are_found(tmp_path):
    done = check_types(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fastamp", tmp_path / "fastamp", ignore=ignore)
    for file, code in PLANTED.items():
        with (tmp_path / file).open("a", encoding="utf-8") as stream:
            stream.write(code)
    done = check_types(tmp_path)
    assert done.returncode == 1
    for file in PLANTED:
        assert f"{file}:" in done.stdout, (file, done.stdout)
