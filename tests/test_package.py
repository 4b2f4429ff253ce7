"""Files of the package: version, changelog, citation, workflows, container."""

import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml

import fastamp

ROOT = Path(__file__).parents[1]
# Files from which the wheel is built.
CONTENT = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "fastamp", "configs", "tools", "projects")
SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?")
GROUPS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


@pytest.mark.integration
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


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
WORKFLOW_LINTER = ("check-jsonschema", "--builtin-schema", "vendor.github-workflows")
LINTED = [
    # Linter, file, and an error to plant: text and its replacement.
    (("cffconvert", "--validate", "-i"), "CITATION.cff", "type: software", "type: programs"),
    (("hadolint",), "Dockerfile", "USER 10001", "USER root"),
    (("hadolint",), "Dockerfile.serve", "USER 10001", "USER root"),
    (("pre-commit", "validate-config"), ".pre-commit-config.yaml", "rev:", "revision:"),
    (WORKFLOW_LINTER, ".github/workflows/ci.yml", "runs-on:", "run-on:"),
    (WORKFLOW_LINTER, ".github/workflows/release.yml", "runs-on:", "run-on:"),
]


@pytest.mark.extras
@pytest.mark.parametrize(("command", "file", "text", "planted"), LINTED, ids=[file for _, file, *_ in LINTED])
def test_files_pass_their_linter(command, file, text, planted, tmp_path):
    program = shutil.which(command[0], path=Path(sys.executable).parent)
    assert program, f"{command[0]} is not installed"
    source = (ROOT / file).read_text(encoding="utf-8")
    copy = tmp_path / Path(file).name

    def lint(content):
        copy.write_text(content, encoding="utf-8")
        return subprocess.run([program, *command[1:], copy], capture_output=True, text=True, cwd=tmp_path)

    done = lint(source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert text in source and lint(source.replace(text, planted)).returncode != 0


def test_actions_are_pinned_to_commits_and_jobs_have_a_timeout():
    assert len(WORKFLOWS) == 2
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 90
            for step in job["steps"]:
                assert "run" in step or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])


def test_workflow_runs_on_the_supported_versions_of_python():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    tested = workflow["jobs"]["tests"]["strategy"]["matrix"]["python-version"]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert re.findall(r"Python :: (3\.\d+)", setup) == tested
    assert f'python_requires=">={tested[0]}"' in setup
    (oldest,) = [step["with"] for step in workflow["jobs"]["oldest"]["steps"] if "setup-python" in step.get("uses", "")]
    assert oldest == {"python-version": tested[0]}


def test_container_gets_the_files_of_the_wheel():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    included = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert included == {*CONTENT} and "*" in lines
