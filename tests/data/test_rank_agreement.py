"""Ranks whose data differ: an error on all ranks, which names the first image that differs."""

import json
from pathlib import Path

import preloaded
import pytest

pytestmark = pytest.mark.integration

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def found(demo_root, tmp_path_factory):
    """Message of each case on both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    process = preloaded.run(HELPERS / "data_ranks.py", folder, FASTAMP_DATASETS=str(demo_root))
    assert process.returncode == 0, process.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_both_ranks_have_the_same_message(found):
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("case", "what", "row"),
    [
        ("order", "the training set", 4),
        ("identity", "identities", 8),
        ("missing", "missing on rank 1", 96),
        ("test set", "the test set PerRank", 11),
        ("test column", "column side", 2),
        ("evaluation", "the test set PerRank", 11),
    ],
)
def test_first_image_that_differs_is_named(found, case, what, row):
    text = found[0][case]
    assert what in text and f"image {row} is" in text and "fix:" in text


def test_equal_data_are_accepted(found):
    assert found[0]["equal"] == ""
