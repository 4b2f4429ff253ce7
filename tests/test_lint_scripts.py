"""Tests of the scripts that .ci/lint runs: violations that are planted, and text that is accepted."""

import pytest
from assigned_attributes import foreign_assignments
from config_reads import instance_reads
from docstring_types import typed_lines
from glossary import banned_words, check_text


@pytest.mark.parametrize(
    "source",
    [
        '"""What a run does before its first step."""',
        'def share(x):\n    """Return whether x is finite."""',
        "x = 1  # nobody reads it",
        "raise ValueError(f'{key} is no key')",
        "def test_what_it_cannot_be_made_of(): ...",
        "print('some images are left out')",
    ],
)
def test_glossary_check_finds_planted_violations(source):
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
def test_glossary_check_accepts_code_spans_and_keys(source):
    assert check_text(source, "planted.py") == []


def test_glossary_check_skips_code_in_markdown():
    assert len(check_text("# What it does\n```sh\nnobody\n```\nAs nobody wrote, `nobody`.", "planted.md")) == 2


def test_glossary_check_reads_banned_words_from_the_glossary():
    assert banned_words()["floor"] == "baseline"


@pytest.mark.parametrize(
    "source, expected",
    [
        ("loader.start_iter = 4", ["1: loader.start_iter"]),
        ("def f(self):\n    self.model.preprocess = g", ["2: self.model.preprocess"]),
        ("for hook.period, x in pairs:\n    del x.store", ["1: hook.period", "2: x.store"]),
        ("a.total += 1", ["1: a.total"]),
        ("class A:\n    size: int\n    def f(self):\n        self.b = 1\ndef g(a):\n    a.size = a.b = 2", []),
        ("cfg.MODEL.DEVICE = 'cpu'", []),
    ],
)
def test_assignments_to_attributes_of_other_modules_are_found(source, expected):
    assert list(foreign_assignments(source)) == expected


@pytest.mark.parametrize(
    "section, line, violations",
    [
        ("Args", "size (int): edge", 1),
        ("Args", "x, y (Tensor, optional): (N,) edges", 1),
        ("Args", "start (int), end (int): edges", 1),
        ("Attributes", "size (int):", 1),
        ("Returns", "dict[str, list[int]]: sizes", 1),
        ("Yields", "np.ndarray | None: sizes", 1),
        ("Args", "size: edge (int)", 0),
        ("Returns", "(N,) float32: sizes", 0),
        ("Returns", "``(x, y)``: sizes", 0),
        ("Raises", "ValueError: if a size is 0", 0),
    ],
)
def test_types_in_docstrings_are_found(section, line, violations):
    source = f'class A:\n    def f(self):\n        """Sum.\n\n        {section}:\n            {line}\n        """'
    assert len(list(typed_lines(source))) == violations


@pytest.mark.parametrize(
    "source, expected",
    [
        ("class A:\n    def __init__(self, cfg: CfgNode):\n        pass", [(2, "A")]),
        ("class A:\n    def __init__(self, values: 'CfgNode | None'):\n        pass", [(2, "A")]),
        ("@dataclass\nclass A:\n    cfg: CfgNode", [(3, "A")]),
        ("class A:\n    def forward(self, x):\n        return self.cfg.MODEL", [(2, "A")]),
        ("class A:\n    @classmethod\n    def from_config(cls, cfg):\n        return cls(size=cfg.SIZE)", []),
        ("def build_a(cfg):\n    return A(cfg.SIZE)", []),
    ],
)
def test_instances_that_read_the_config_are_found(source, expected):
    assert list(instance_reads(source)) == expected
