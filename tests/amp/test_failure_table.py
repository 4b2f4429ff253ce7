"""The table of failures in the guide to mixed precision lists exactly the failures that the tests reproduce."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/mixed-precision.md"


def marked_tests(path):
    """Return test name -> (cases of its ``failure`` marks, source), for each test of a file."""
    return {
        node.name: (
            [
                mark.args[0].value
                for mark in node.decorator_list
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.failure"
            ],
            ast.unparse(node),
        )
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.fixture(scope="module")
def cases():
    """Return case -> list of (file, source of the test)."""
    found = defaultdict(list)
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "@pytest.mark.failure(" in path.read_text(encoding="utf-8"):
            for marked, source in marked_tests(path).values():
                for case in marked:
                    found[case].append((path, source))
    return found


def test_table_lists_the_failures_of_the_tests(cases):
    table = GUIDE.read_text(encoding="utf-8").partition("| failure | plain PyTorch | fastamp |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]
    assert all(len(row) == 3 and all(row) for row in rows)
    assert sorted(row[0] for row in rows) == sorted(cases)


def test_each_failure_is_reproduced_in_plain_pytorch(cases):
    """The name or the code of a test of each case contains ``plain``."""
    assert [case for case, tests in cases.items() if not any("plain" in source for _, source in tests)] == []


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("test_*failures*.py")), ids=lambda path: path.stem)
def test_each_test_of_a_failure_names_its_case(path):
    unmarked = [name for name, (cases, _) in marked_tests(path).items() if not cases]
    assert unmarked == [], f'add @pytest.mark.failure("case"), where case is a row of the table in {GUIDE}'
