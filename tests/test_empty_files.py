"""Empty files are named as such, in the same words, by all readers."""

from pathlib import Path

import pytest

from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.data.datasets.custom import CsvDataset
from fastamp.data.datasets.file_utils import read_lines
from fastamp.data.decode import read_image
from fastamp.data.split_table import Table
from fastamp.evaluation import Protocol
from fastamp.inference.evaluate_features import read_arrays
from fastamp.retrieval.features_file import read_features
from fastamp.utils.errors import DataError, UserError


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("image.jpg", read_image),
        ("table.csv", CsvDataset),
        ("split.csv", lambda path: Table(Path(path))),
        ("list.txt", lambda path: read_lines("Some", Path(path))),
        ("features.npz", read_features),
        ("arrays.npz", lambda path: read_arrays(path, Protocol())),
        ("weights.pth", read_checkpoint),
        ("weights.safetensors", read_checkpoint),
    ],
)
def test_empty_file(tmp_path, name, read):
    path = tmp_path / name
    path.touch()
    with pytest.raises(UserError, match=rf"{name}.* empty"):
        read(str(path))


def test_empty_first_line_of_a_table_is_no_empty_file(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("\na.jpg,1\n")
    with pytest.raises(DataError, match="path,pid"):
        CsvDataset(path)
