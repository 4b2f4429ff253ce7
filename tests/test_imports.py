"""Tests of the import order of packages, and of packages that must be imported lazily."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ["utils", "config", "amp", "layers", "checkpoint", "demo", "data modeling solver evaluation", "diagnostics"]
LAYERS += ["report", "engine inference", "integrations", "serving tracking", "cli"]
LEVEL = {name: number for number, layer in enumerate(LAYERS) for name in layer.split()}


def violations(root):
    for path in sorted((root / "fastamp").rglob("*.py")):
        parts = path.relative_to(root / "fastamp").parts
        if len(parts) == 1 or parts[0] == "compat":  # names of FastReID for every package
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module] if node.module != "fastamp" else [f"fastamp.{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                names = (module or "").split(".")
                if names[0] != "fastamp" or len(names) < 2 or names[1] == parts[0] or names[1] not in LEVEL:
                    continue
                if LEVEL[names[1]] >= LEVEL[parts[0]]:
                    yield f"{path.relative_to(root)}:{node.lineno} imports {module}"


def test_packages_import_only_packages_below_them_in_the_import_order():
    assert list(violations(ROOT)) == []


def test_import_order_check_finds_violations(tmp_path):
    for name in ("amp", "data", "layers"):
        (tmp_path / "fastamp" / name).mkdir(parents=True)
    (tmp_path / "fastamp/amp/a.py").write_text("from fastamp.engine import hooks\nfrom fastamp import layers\n")
    (tmp_path / "fastamp/data/b.py").write_text("import fastamp.modeling\nfrom fastamp.utils import comm\n")
    assert len(list(violations(tmp_path))) == 3


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


def test_compat_modules_can_be_imported_first():
    """Each module is imported in its own forked process, after torch."""
    modules = [f"fastamp.compat.{path.stem}" for path in (ROOT / "fastamp/compat").glob("[!_]*.py")]
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
    assert "fastamp.compat.trainer" in modules and found.returncode == 0, found.stderr
