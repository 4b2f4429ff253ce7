"""Generated pages: every config key, command, public name and recipe is described."""

import json

import models_table
import pytest
from api_pages import PACKAGES, api_pages, public_names
from commands_page import commands_page
from config_page import config_page
from documents import DOCS, anchors
from markdown_text import escape
from pages import notebook, top_level_file
from recipes_table import MARKER, recipes_table

from fastamp.cli import command_parser, commands
from fastamp.config.defaults import KEYS
from fastamp.config.recipes import list_recipes
from fastamp.zoo.catalog import list_entries

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def config():
    return config_page()


def entry(page, anchor):
    """Return the text from a heading with an anchor to the next heading."""
    return page.split(f"{{ #{anchor} }}\n")[1].partition("\n#")[0]


def test_each_config_key_has_an_anchor_and_its_meaning(config):
    assert set(KEYS) <= anchors(config)
    for path, key in KEYS.items():
        assert escape(key.meaning) in entry(config, path)


def test_config_key_has_default_choices_aliases_and_recipes(config):
    text = entry(config, "SOLVER.AMP.ON_FAILURE")
    assert "Default `error`" in text and "choices: error, bfloat16, float32" in text and "bf16 (bfloat16)" in text
    assert "greater than 0" in entry(config, "SOLVER.AMP.INIT_SCALE")
    assert "name in FastReID: SOLVER.AMP_ENABLED" in entry(config, "SOLVER.AMP.ENABLED")
    recipes = entry(config, "SOLVER.MAX_EPOCH").partition("`60` in ")[2].partition("; ")[0]
    assert {"Base-SBS", "VehicleID/bagtricks_R50-ibn"} <= set(recipes.split(", "))
    assert "EmbeddingHead" in entry(config, "MODEL.HEADS.NAME")


def test_each_command_has_its_arguments_and_examples():
    page = commands_page()
    assert set(commands()) <= anchors(page)
    for command in set(commands()) - {"help", "version"}:
        options = {option for action in command_parser(command)._actions for option in action.option_strings}
        assert [option for option in options - {"-h", "--help"} if option not in entry(page, command)] == []
    assert "fastamp train logs/run --resume\n" in entry(page, "train")
    assert "--release" in entry(page, "config-convert")


def test_each_public_name_of_a_package_is_described():
    pages = api_pages()
    assert {"fastamp.amp.LossScaler", "fastamp.amp.PrecisionPolicy"} <= anchors(pages["reference/api/amp.md"])
    for package, (_, modules) in PACKAGES.items():
        described = {name.rpartition(".")[2] for name in anchors(pages[f"reference/api/{package}.md"])}
        assert [name for module in modules for name in public_names(module) if name not in described] == []


def test_each_recipe_is_in_the_table():
    table = recipes_table()
    assert all(f"| `{name}` |" in table for name in list_recipes())
    assert MARKER in (DOCS / "recipes.md").read_text(encoding="utf-8")


def test_published_weights_are_listed_by_what_their_authors_state():
    page = (DOCS / "guides/choose-a-model.md").read_text(encoding="utf-8")
    orders = models_table.MARKER.findall(page)
    assert orders == ["accuracy", "size", "license"]
    assert not models_table.MARKER.search(models_table.insert_models_tables(page))
    by_name = {entry.name: entry for entry in list_entries()}
    listed = {}
    for order in orders:
        rows = [line.strip("| ").split(" | ") for line in models_table.models_table(order).splitlines()[2:]]
        assert rows and all(len(row) == 9 for row in rows)
        listed[order] = [(by_name[row[0].strip("`")], row[4], float(row[5])) for row in rows]
        for entry, test_set, mean_precision in listed[order]:
            assert entry.recipe and not entry.withdrawn and entry.loads != "no"
            assert any((found["test_set"], found.get("mAP")) == (test_set, mean_precision) for found in entry.results)
    for test_set in models_table.TEST_SETS:
        scores = [score for _, name, score in listed["accuracy"] if name == test_set]
        assert scores and scores == sorted(scores, reverse=True)
    sizes = [entry.size for entry, *_ in listed["size"]]
    assert sizes == sorted(sizes)
    assert {entry.commercial_use for entry, *_ in listed["license"]} == {"yes"}


def test_notebook_is_shown_as_code_and_text(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["a = 1"]},
    ]
    (tmp_path / "x.ipynb").write_text(json.dumps({"cells": cells}))
    text = "# Title\n\nText.\n\n```python\na = 1\n```\n\n[Download this notebook](x.ipynb)\n"
    assert notebook(tmp_path / "x.ipynb") == text


def test_links_of_top_level_files_are_relative_to_the_site():
    assert "](migration/fastreid.md#code)" in top_level_file("CHANGELOG.md")


@pytest.mark.parametrize(("text", "expected"), [("a_b*c", r"a\_b\*c"), ("`a_b` <c> | d", r"`a_b` \<c> \| d")])
def test_escape_keeps_code_spans(text, expected):
    assert escape(text) == expected
