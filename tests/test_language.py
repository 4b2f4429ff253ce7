"""Tests of the language check: planted violations, accepted code spans, and the text of the repository."""

import pytest
from language import banned_words, check_paths, check_text


@pytest.mark.parametrize(
    "source",
    [
        '"""What a run does before its first step."""',
        'def share(x):\n    """Return whether x is finite."""',
        "x = 1  # nobody reads it",
        "raise ValueError(f'{key} is no key')",
        '"""Mirror the behaviour of PyTorch."""',
        "def neighbour_ids(): ...",
        "def test_what_it_cannot_be_made_of(): ...",
        "print('some images are left out')",
    ],
)
def test_language_check_finds_planted_violations(source):
    assert len(check_text(source, "planted.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Check the loss for NaN; there is no synchronization."""',
        "import torch\nx = torch.floor(y)  # ``TEST.FLOORS`` is the old spelling",
        "cfg['TEST.FLOORS'] = 'TEST.FLOORS is an alias'",
        "def test_whole_batch_is_padded(): ...",
    ],
)
def test_language_check_accepts_code_spans_and_keys(source):
    assert check_text(source, "planted.py") == []


def test_language_check_skips_code_in_markdown():
    assert len(check_text("# What it does\n```sh\ncolour\n```\nIn one colour, `colour`.", "planted.md")) == 2


def test_language_check_reads_banned_words_from_the_glossary():
    assert banned_words()["floor"] == "baseline"


def test_repository_text_passes_the_language_check():
    assert not (findings := check_paths(["."])), "\n".join(map(str, findings))
