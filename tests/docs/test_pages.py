"""The pages of the documentation and of the README: links, commands, config keys and Python code are correct."""

import re
from collections import Counter

import pytest
from documents import (
    ROOT,
    blocks,
    broken_links,
    command_error,
    commands,
    declared_keys,
    markdown_files,
    missing_blank_lines,
    python_errors,
    unknown_keys,
)
from pages import generated_pages

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in markdown_files()}
# Pages with names of other versions and programs.
OTHER_NAMES = ("CHANGELOG.md", "CONTRIBUTING.md", "docs/migration/")
# Commands with the key PROJECTS import projects.
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("unregistered")]


def problems(check, names=tuple(PAGES)):
    """Return page -> the findings of ``check(text)``, of the pages with findings."""
    assert len(names) > 50
    return {name: found for name in names if (found := check(PAGES[name]))}


@pytest.fixture(scope="module")
def generated():
    """Return path in the repository -> content, of the pages that the site's hook generates."""
    return {f"docs/{name}": text for name, text in generated_pages().items()}


def test_links_and_anchors_exist(generated, subtests):
    pages = PAGES | generated
    for name, text in pages.items():
        with subtests.test(name):
            assert broken_links(name, text, pages) == []


def test_lists_and_tables_follow_a_blank_line():
    assert problems(missing_blank_lines, [name for name in PAGES if name.startswith("docs/")]) == {}


def repeated_lines(text):
    """Return the headings and the long lines that occur more than once, except settings of diagrams."""
    lines = [line for line in text.splitlines() if line.startswith("## ") or (len(line) > 60 and line[:2] != "%%")]
    return [line for line, count in Counter(lines).items() if count > 1]


def test_pages_do_not_repeat_lines():
    assert problems(repeated_lines) == {}


def test_check_of_repetitions_finds_planted_ones():
    assert repeated_lines("# A\n## B\ntext\n## B\n" + 2 * ("long " * 20 + "\n")) == ["## B", "long " * 20]


def test_pages_say_first_what_their_readers_can_do():
    pages = [name for name in PAGES if name.startswith("docs/") and name != "docs/index.md"]
    assert problems(lambda text: not re.match(r"# .*\n\nAfter this page you ", text), pages) == {}


def test_commands_parse():
    def errors(text):
        declared = declared_keys(text)
        found = {str(command): command_error(command, declared) for command in commands(text)}
        return {command: error for command, error in found.items() if error}

    assert sum(len(commands(text)) for text in PAGES.values()) > 100
    assert problems(errors) == {}


def test_config_keys_exist():
    assert problems(unknown_keys, [name for name in PAGES if not name.startswith(OTHER_NAMES)]) == {}


def test_python_code_compiles_and_its_imports_exist():
    def errors(text):
        return [error for block in blocks(text, "python", "py") for error in python_errors(block)]

    assert sum(len(blocks(text, "python", "py")) for text in PAGES.values()) > 30
    assert problems(errors) == {}


def test_check_of_links_finds_planted_errors(generated):
    pages = PAGES | generated
    text = "[a](missing.md) [b](index.md#nowhere) [c](../README.md) [d](reference/config.md#SOLVER.NOPE) [e](#none)"
    assert len(broken_links("docs/index.md", text, pages)) == 5
    text = "# Here\n[a](guides/models.md) [d](reference/config.md#SOLVER.BASE_LR) [e](#here) `[f](code.md)`"
    assert broken_links("docs/index.md", text, pages | {"docs/index.md": text}) == []
    assert missing_blank_lines("text\n| a |\n|---|\n\n- x\n- y\n\ntext\n- z") == ["| a |", "- z"]


@pytest.mark.parametrize(
    "line",
    [
        "fastamp tarin Demo/quickstart",
        "fastamp train Demo/quickstart --num-gpus two",
        "fastamp train Demo/quickstart SOLVER.BASE_LRR 1",
        "fastamp train Demo/quickstart SOLVER.BASE_LR fast",
        "fastamp extract logs/x",
        "python tools/train_net.py --config-file X.yml --evaluate",
        "python tools/missing.py",
        "python tools/soak.py --kills 3",
        "python tools/benchmark/ranking.py --rounds many",
        "torchrun --nproc_per_node 2 tools/train_net.py --nothing",
    ],
)
def test_check_of_commands_finds_planted_errors(line):
    (command,) = commands(f"```sh\n{line}\n```")
    assert command_error(command, set())


@pytest.mark.parametrize(
    "line",
    [
        "fastamp train Demo/quickstart SOLVER.AMP=on --seeds 0 1",
        "CUDA_VISIBLE_DEVICES=0 python tools/train_net.py --config-file X.yml --eval-only",
        "python tools/benchmark/ranking.py --re-ranking",
        "fastamp config show logs/x > x.yml",
    ],
)
def test_check_of_commands_accepts_valid_commands(line):
    (command,) = commands(f"```sh\n{line}  # comment\n```")
    assert command_error(command, set()) == ""


def test_check_of_config_keys_finds_planted_errors():
    text = "```yaml\nSOLVER: {BASE_LRR: 1, AMP: {ENABLED: true}}\nMODEL.NAME: x\n```\n`SOLVER.NOPE 1` `SOLVER.AMP on`"
    assert unknown_keys(text) == ["SOLVER.BASE_LRR", "MODEL.NAME", "SOLVER.NOPE"]


def test_check_of_python_code_finds_planted_errors():
    assert python_errors("import fastamp\nfastamp.Predictor(")
    assert python_errors("from fastamp.engine import Trainer")
    assert python_errors("import fastamp\nfastamp.predictor()")
    assert python_errors("from fastamp.engine import DefaultTrainer, hooks\nimport elsewhere") == []


def test_architecture_shows_all_packages_and_the_modules_between_them_in_the_import_order():
    contributing = PAGES["CONTRIBUTING.md"].replace("\n", " ")
    order = contributing.split("Imports point down: `")[1].split("`")[0].removesuffix(" < tools")
    (chain,) = re.findall(r"^    (cli --> .*)", PAGES["docs/architecture.md"], re.MULTILINE)
    frames = {
        "{data, modeling, solver, evaluation}": "parts",
        "{engine, inference}": "run",
        "{serving, tracking}": "use",
    }
    expected = [frames.get(name, name) for name in reversed(order.split(" < "))]
    assert chain.split(" --> ") == expected
    shown = set(re.findall(r"^ +(\w+)\[", PAGES["docs/architecture.md"].partition("## Data flow")[0], re.MULTILINE))
    packages = {path.parent.name for path in (ROOT / "fastamp").glob("*/__init__.py")} - {"fastreid"}
    assert shown == packages | {"contracts", "feature_pass"}
