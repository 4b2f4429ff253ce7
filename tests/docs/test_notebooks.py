"""Tests of the notebooks of the documentation: each runs in a kernel, in an empty folder."""

from pathlib import Path

import notebook
import pytest

FOLDER = Path(__file__).parents[2] / "docs/notebooks"


@pytest.mark.extras
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo", ["training finished in", "baseline", "rank_list_random.png"]),
        ("own-data", ["1 unreadable image", "training finished in", "entrance"]),
        ("search", ["training finished in", "Predictor(", "torch.Size([2, 512])", ".jpg", "cosine"]),
    ],
)
def test_notebook_of_the_documentation_runs(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(notebook.run_in_kernel(FOLDER / f"{name}.ipynb"))
    for part in expected:
        assert part in text, part
    assert "Traceback" not in text and "Error" not in text


def test_notebooks_have_no_stored_outputs():
    paths = sorted(FOLDER.glob("*.ipynb"))
    assert len(paths) == 3
    for path in paths:
        assert notebook.read_cells(path)
        assert '"outputs": []' in path.read_text() and "image/png" not in path.read_text(), path
