"""The documentation site builds without warnings, and a wrong link is one."""

import re
import shutil
import subprocess
import sys

import pytest
from documents import ROOT

pytestmark = pytest.mark.extras


def build(config, site):
    """Run ``mkdocs build --strict`` and return the process."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    process = build(ROOT / "mkdocs.yml", folder)
    assert process.returncode == 0, process.stderr
    return folder


def test_site_contains_generated_pages(site):
    config = (site / "reference/config/index.html").read_text(encoding="utf-8")
    assert 'id="SOLVER.AMP.ENABLED"' in config
    assert 'id="train"' in (site / "reference/commands/index.html").read_text(encoding="utf-8")
    predictor = (site / "reference/api/inference/index.html").read_text(encoding="utf-8")
    assert 'id="fastamp.inference.Predictor.features"' in predictor
    guide = (site / "guides/mixed-precision/index.html").read_text(encoding="utf-8")
    assert re.search(r'<a href="[./]*reference/config/#SOLVER.AMP.PREFLIGHT"><code>', guide)
    assert not (site / "hooks").exists()


def test_search_finds_config_keys(site):
    assert "reference/config/#SOLVER.AMP.ENABLED" in (site / "search/search_index.json").read_text(encoding="utf-8")


def test_pages_of_the_site_load_no_files_from_other_servers(site):
    loaded = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?://[^"]*)"')
    assert {url for page in site.rglob("*.html") for url in loaded.findall(page.read_text(encoding="utf-8"))} == set()


def test_wrong_links_fail_the_build(tmp_path):
    wrong = ("nowhere.md", "reference/config.md#SOLVER.NOPE", "guides/models.md#nowhere")
    for name in ("docs", "configs", "fastamp"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "docs/index.md").open("a", encoding="utf-8") as page:
        page.write("\n" + " ".join(f"[a]({link})" for link in wrong))
    process = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert process.returncode != 0
    assert [link for link in wrong if f"'{link}'" not in process.stderr] == []
