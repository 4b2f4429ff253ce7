"""tools/benchmark/open_set.py: stated and measured rates agree on features of a network."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastamp.retrieval.npz import write_arrays

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def test_table_counts_agreeing_splits(tmp_path):
    with np.load(ROOT / "tests/reference/demo_features.npz") as file:
        features, pids, camids = (file[name] for name in ("features", "pids", "camids"))
    texts = {name: np.array(name) for name in ("config_hash", "checkpoint")} | {"metric": np.array("cosine")}
    columns = {"pids": pids.astype(np.int64), "camids": camids.astype(np.int64), "paths": pids.astype(str)}
    with (tmp_path / "features.npz").open("wb") as file:
        write_arrays(file, columns | texts | {"features": features.astype(np.float32)})
    command = [sys.executable, ROOT / "tools/benchmark/open_set.py", tmp_path / "features.npz", "--splits", "5"]
    done = subprocess.run(map(str, [*command, "--far", "0.01"]), capture_output=True, text=True, check=True)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["far", "1 %"], ["frr", "5 %"], ["fpir", "5 %"]]
    assert all(int(row[3].split()[0]) >= 4 for row in rows) and int(rows[0][4].split()[0]) <= 4
