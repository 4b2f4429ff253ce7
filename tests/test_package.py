"""Files of the package: version, changelog, citation."""

import importlib.util
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml

import fastamp

ROOT = Path(__file__).parents[1]
SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?")
GROUPS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_version_is_semantic_and_defined_in_one_place():
    assert SEMANTIC.fullmatch(fastamp.__version__)
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == fastamp.__version__
    assert f'"{fastamp.__version__}"' not in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_citation_has_the_version_and_license_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == fastamp.__version__
    assert f'license="{citation["license"]}"' in (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.mark.extras
def test_citation_is_valid(tmp_path):
    assert importlib.util.find_spec("cffconvert"), "cffconvert is not installed"

    def validate(text):
        (tmp_path / "CITATION.cff").write_text(text, encoding="utf-8")
        command = [sys.executable, "-c", "from cffconvert.cli.cli import cli; cli()", "--validate"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).returncode == 0

    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert validate(text)
    assert not validate(text.replace("type: software", "type: programs"))


def test_changelog_has_the_format_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    title, unreleased, *releases = re.findall(r"^#{1,2} .*$", text, re.MULTILINE)
    assert (title, unreleased) == ("# Changelog", "## [Unreleased]")
    dates = []
    for heading in releases:
        found = re.fullmatch(rf"## \[({SEMANTIC.pattern})\] - (\d{{4}}-\d\d-\d\d)( \[YANKED\])?", heading)
        assert found, heading
        dates.append(date.fromisoformat(found[6]))
    assert dates == sorted(dates, reverse=True)
    if releases:
        assert releases[0].startswith(f"## [{fastamp.__version__}]")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        groups = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert groups == [group for group in GROUPS if group in groups]


def test_changelog_links_to_files_and_headings_that_exist():
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            file, _, anchor = target.partition("#")
            assert (ROOT / file).is_file(), target
            headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert not anchor or anchor in anchors, target
