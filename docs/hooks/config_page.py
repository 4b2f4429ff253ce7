"""Reference of the config keys: default, type, constraints, meaning, and the recipes that set each key."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from markdown_text import escape

from fastamp.cli.config import component_choices
from fastamp.config import Key, get_cfg
from fastamp.config.defaults import KEYS
from fastamp.config.describe import key_facts
from fastamp.config.files import read_layers
from fastamp.config.key import show_value

CONFIGS = Path(__file__).parents[2] / "configs"
_UNFOLDED = 6  # number of files that are listed without folding
_INTRODUCTION = """---
search: {boost: 2}
---

# Config keys

After this page you know each config key: its default, the values it accepts, and the recipes that set it.

Set a key in a YAML file, on the command line (`fastamp train SOURCE SOLVER.BASE_LR 3e-4`) or in Python
(`cfg.SOLVER.BASE_LR = 3e-4`). `fastamp config explain KEY` prints the same description. Files without a folder, such as
`Base-SBS`, are the bases of recipes: a recipe inherits the values of its base unless it sets them itself.
"""


def config_page() -> str:
    """Return the page as Markdown. The anchor of a key or section is its name."""
    sections: dict[str, list[Key]] = defaultdict(list)
    for key in KEYS.values():
        sections[key.path.rpartition(".")[0]].append(key)
    used, choices = values_in_recipes(), cache(component_choices)
    lines = [_INTRODUCTION]
    for section, keys in sections.items():
        lines.append(f"## {section} {{ #{section} }}\n" if section else "## Run\n")
        lines += [_describe(key, choices, used[key.path]) for key in keys]
    return "\n".join(lines)


def values_in_recipes() -> dict[str, dict[str, list[str]]]:
    """Return key -> value, as text -> names of the files below ``configs/`` that set the key to this value."""
    used: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(CONFIGS.rglob("*.yml")):
        source, mapping = read_layers(path)[-1]  # the file itself, after its bases
        for key, value in get_cfg().changes(mapping, source):
            used[key][show_value(value)].append(path.relative_to(CONFIGS).with_suffix("").as_posix())
    return used


def _describe(key: Key, choices: Callable[[], Mapping[str, Sequence[str]]], used: Mapping[str, Sequence[str]]) -> str:
    first, *facts = key_facts(key, choices)
    lines = [escape(key.meaning), "", f"Default `{show_value(key.default)}`; {first}.", ""]
    lines += [f"- {fact}" for fact in facts]
    if used:
        values = [f"`{value}` in {', '.join(files)}" for value, files in used.items()]
        number = sum(map(len, used.values()))
        text = "; ".join(values)
        lines.append(f"- set to {text}" if number <= _UNFOLDED else f'\n??? note "Set in {number} files"\n    {text}')
    return "\n".join([f"#### {escape(key.path)} {{ #{key.path} }}\n", *lines, ""])
