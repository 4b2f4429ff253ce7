"""The wheel, built from the source distribution: commands that need files of the package, from an empty folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastamp

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # builds a wheel and starts processes that import PyTorch
CONTENT = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "fastamp", "configs", "tools", "projects")
IGNORED = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Function that runs ``fastamp`` of a wheel, installed in a new virtual environment, in an empty folder."""
    root = tmp_path_factory.mktemp("wheel")
    source, environment, folder = root / "source", root / "venv", root / "empty"
    for path in (source, folder):
        path.mkdir()
    for name in CONTENT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name, **({"ignore": IGNORED} if copy is shutil.copytree else {}))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words):
        return subprocess.run([*map(str, words)], capture_output=True, text=True, cwd=folder, env=variables)

    def check(*words):
        done = run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    sdist = (
        "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]); build_meta.build_sdist(sys.argv[2])"
    )
    check(sys.executable, "-c", sdist, source, root / "dist")
    (archive,) = (root / "dist").glob("*.tar.gz")
    check(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", root / "dist", archive)
    (wheel,) = (root / "dist").glob("*.whl")
    check(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", environment)
    # The dependencies are those of the environment that runs the tests, which may itself be a virtual environment.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    check(*pip, "--python", environment / "bin/python", "install", "-q", "--no-deps", "--no-index", "-I", wheel)
    assert not list(folder.iterdir())
    run.folder = folder
    run.python = environment / "bin/python"
    run.fastamp = lambda *words: run(environment / "bin/fastamp", *words)
    run.check = lambda *words: check(environment / "bin/fastamp", *words)
    return run


def test_wheel_is_installed_with_complete_metadata(installed):
    code = (
        "import fastamp, importlib.metadata; print(fastamp.__file__)\n"
        "print(importlib.metadata.distribution('fastamp').read_text('METADATA'))"
    )
    done = installed(installed.python, "-c", code)
    file, text = done.stdout.split("\n", 1)
    assert file.startswith(str(installed.python.parents[1]))
    pages = re.findall(r"https?://[^\s)>\"]+", text.partition("\n\n")[0])
    assert pages == [
        "https://github.com/JDAI-CV/fast-reid"
    ]  # a page that exists, and none of fastamp before it has one
    assert f"\nVersion: {fastamp.__version__}\n" in text
    for name in ("Summary", "Keywords", "Classifier", "Project-URL", "License", "Requires-Python"):
        assert f"\n{name}" in f"\n{text}", name


def test_wheel_contains_the_marker_of_types_and_prints_the_schema(installed):
    (packages,) = installed.python.parents[1].glob("lib/python*/site-packages")
    assert (packages / "fastamp/py.typed").is_file()
    schema = json.loads(installed.check("schema"))
    assert "BASE_LR" in schema["properties"]["SOLVER"]["properties"]


def test_demo_of_the_wheel_trains_above_its_baselines(installed):
    sizes = ("INPUT.SIZE_TRAIN=(64, 32)", "INPUT.SIZE_TEST=(64, 32)")
    installed.check("demo", *sizes, "SOLVER.MAX_EPOCH=2", "TEST.EVAL_PERIOD=2", "OUTPUT_DIR=demo")
    folder = installed.folder / "demo"
    assert (folder / "report.html").is_file() and (folder / "model_best.pth").is_file()
    rows = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    (row,) = (row for row in rows if "Demo/mAP" in row)
    assert row["Demo/mAP"] > row["Demo/baseline raw pixels/mAP"], row


def test_installed_recipes_are_listed_printed_and_read(installed):
    recipes = installed.check("recipes").split()
    assert {"Market1501/sbs_R50-ibn", "Demo/quickstart", "VeRi/vit_base"} <= set(recipes)
    projects = [plugin.parent for plugin in ROOT.glob("projects/*/plugin.py")]
    of_projects = sum(len(list(folder.glob("configs/*.y*ml"))) for folder in projects)
    assert len(recipes) == len(list(ROOT.glob("configs/*/*.yml"))) + of_projects
    assert "_BASE_: configs/Base-SBS.yml" in installed.check("recipes", "Market1501/sbs_R50-ibn")
    for name in ("Market1501/sbs_R50-ibn", "Market1501/sbs_R50-ibn.yml"):
        assert "OUTPUT_DIR: logs/market1501/sbs_R50-ibn" in installed.check("config", "show", name)
    done = installed.fastamp("train", "Market1501/sbs_R50-ibn")
    assert done.returncode == 2 and "Market1501 not found" in done.stderr


def test_installed_init_writes_a_project_with_a_valid_config(installed):
    installed.check("init", "my_project")
    folder = installed.folder / "my_project"
    out = installed.check("config", "show", "my_project/config.yml", "SEED=3", "--plugin", folder / "components.py")
    assert "UnitNormLoss" in out and "OUTPUT_DIR: logs/my_project" in out and "SEED: 3" in out


def test_installed_benchmark_tune_and_completion_find_their_files(installed):
    assert "train_step" in installed.check("benchmark")
    assert "--network" in installed.check("benchmark", "train_step", "--help")
    assert "Demo/quickstart" in installed.check("completion")
    done = installed.fastamp("tune", "VeRi/vit_base")
    assert done.returncode == 2 and "bagtricks.yml" in done.stderr, done.stderr  # the installed search spaces


def test_recipes_of_projects_load_from_the_wheel(installed):
    names = [name for name in installed.check("recipes").split() if name.startswith("Fast")]
    assert {"FastAttr/demo", "FastClas/demo", "FastDistill/demo", "FastFace/r50_ir", "FastRetri/demo"} <= {*names}
    for name in ("FastAttr/pa100", "FastDistill/sbs_r34"):
        assert f"(set to: [{name.partition('/')[0]}])" in installed.check("config", "list", name), name
