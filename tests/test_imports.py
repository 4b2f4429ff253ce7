"""Tests of packages that must be imported lazily."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]


def test_importing_fastamp_does_not_import_torch():
    code = "import fastamp, sys; print(fastamp.__version__, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.split()[1] == "False"


def test_importing_fastamp_packages_does_not_import_optional_packages():
    code = (
        "import sys\n"
        "optional = ('matplotlib', 'ray', 'timm', 'onnx', 'faiss', 'tensorboard', 'scipy', 'h5py')\n"
        "for name in (*optional, 'pytorch_metric_learning'):\n"
        "    sys.modules[name] = None\n"
        "import fastamp.engine, fastamp.data, fastamp.modeling, fastamp.evaluation, fastamp.solver"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_images_are_read_and_models_built_without_importing_torchvision():
    """Its import takes as long as that of PyTorch."""
    code = (
        "import sys, fastamp.inference.image_folder\nfrom fastamp.data.image_decoder import image_decoder\n"
        "from fastamp.config import get_cfg\nfrom fastamp.modeling import build_model\n"
        "build_model(get_cfg().with_values({'MODEL.DEVICE': 'cpu', 'MODEL.BACKBONE.PRETRAIN': False}))\n"
        "assert image_decoder('torchvision').decode is not None and 'torchvision' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_modules_of_fastreid_can_be_imported_first():
    """Each module and package is imported in its own forked process, after torch."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "fastamp/fastreid").rglob("*.py")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    code = (
        "import importlib, os, sys, torch\n"
        "for name in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        importlib.import_module(name)\n"
        "        os._exit(0)\n"
        "    if os.wait()[1]:\n"
        "        sys.exit(f'{name} cannot be imported first')"
    )
    found = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    assert {"fastamp.fastreid.utils.comm", "fastamp.fastreid.layers"} <= {*modules}


def test_scripts_import_names_that_exist():
    files = [*(ROOT / "tools").rglob("*.py"), *(ROOT / "projects").rglob("*.py")]
    nodes = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    imports = [(file, node) for file, node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    names = {
        (file, node.module, alias.name)
        for file, node in imports
        if node.module.partition(".")[0] == "fastamp"
        for alias in node.names
    }
    missing = [
        f"{file.relative_to(ROOT)}: {module}.{name}"
        for file, module, name in sorted(names)
        if not hasattr(__import__(module, fromlist=[name]), name)  # also imports a module of this name
    ]
    assert names and not missing
