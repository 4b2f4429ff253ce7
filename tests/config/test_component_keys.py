"""Config keys that components declare in their own files."""

import compileall
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastamp.cli.train import argument_parser
from fastamp.config import get_cfg, load_plugin, read_config
from fastamp.config.component_keys import component_keys, declared_keys
from fastamp.config.defaults import KEYS
from fastamp.config.key import Key
from fastamp.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
DECLARING = [path for path in sorted((ROOT / "fastamp").glob("*/**/*.py")) if "\nKEYS" in path.read_text()]
DECLARING = [path for path in DECLARING if not {"config", "project-template"} & set(path.parts[-3:])]


def test_config_keys_read_without_import_equal_imported_keys():
    assert len(DECLARING) > 20
    for path in DECLARING:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        assert declared_keys(path) == module.KEYS, path
        assert all(isinstance(key, Key) and KEYS[key.path] == key for key in module.KEYS), path


@pytest.mark.integration
def test_building_the_config_does_not_import_torch():
    code = "import sys; from fastamp.config import get_cfg; get_cfg(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.split() == ["False"]


@pytest.mark.integration
def test_installation_without_py_files_prints_an_error_with_a_fix(tmp_path):
    shutil.copytree(ROOT / "fastamp", tmp_path / "fastamp", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(tmp_path / "fastamp", quiet=1, legacy=True)
    for file in (tmp_path / "fastamp").rglob("*.py"):
        file.unlink()
    command = [sys.executable, "-m", "fastamp", "config", "list"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert ".py files" in done.stderr and "fix: " in done.stderr


@pytest.fixture
def package(tmp_path):
    """Package with two components whose files cannot be imported."""
    losses = tmp_path / "modeling/losses"
    losses.mkdir(parents=True)
    for name in ("b", "a"):
        (losses / f"{name}.py").write_text(
            f'"""A loss."""\n\nimport nothing_of_this_name\n\nKEYS = (\n    Key("MODEL.LOSSES.{name.upper()}", 1.0, '
            '"Weight.",  low=0),\n)\n\nraise SystemExit\n'
        )
    (losses / "none.py").write_text("OTHER_KEYS = ()\n")
    return tmp_path


def test_component_keys_are_sorted_by_file_name(package):
    keys = component_keys(package)
    assert list(keys) == ["MODEL.LOSSES.A", "MODEL.LOSSES.B"]
    cfg = get_cfg()
    cfg.add_keys(keys.values())
    assert list(cfg.MODEL.LOSSES)[-2:] == ["A", "B"] and cfg.MODEL.LOSSES.A == 1.0


def test_config_key_declared_by_two_components_raises(package):
    (package / "modeling/losses/c.py").write_text('\nKEYS = (Key("MODEL.LOSSES.B", 1.0, "Weight."),)\n')
    with pytest.raises(ValueError, match=r"c\.py.*MODEL\.LOSSES\.B"):
        component_keys(package)


def test_component_keys_skip_hidden_files_and_backup_copies(package):
    losses = package / "modeling/losses"
    for name in (".a.py", "._b.py", "a-copy.py", ".ipynb_checkpoints/a-checkpoint.py"):
        (losses / name).parent.mkdir(exist_ok=True)
        (losses / name).write_bytes(b'\nKEYS = (Key("MODEL.LOSSES.A", 1.0, "\xff"),)\n')
    (losses / ".#a.py").symlink_to("nobody@nowhere:1")
    assert list(component_keys(package)) == ["MODEL.LOSSES.A", "MODEL.LOSSES.B"]


def test_config_key_with_non_literal_argument_raises(tmp_path):
    file = tmp_path / "c.py"
    file.write_text('A = 1\nKEYS: tuple = (\n    Key("A.B", 1.0, "One."),\n\n    Key("A.C", 2.0, "Two."),\n)\n')
    assert [key.path for key in declared_keys(file)] == ["A.B", "A.C"]
    file.write_text('\nDEFAULT = 1.0\nKEYS = (Key("A.B", DEFAULT, "One."),)\n')
    with pytest.raises(ValueError, match=r"c\.py:3: .*DEFAULT"):
        declared_keys(file)


@pytest.mark.parametrize(
    "text, declared",
    [
        ("KEYS = ['a', 'b']", False),
        ("KEYS = (Key('MODEL.MINE', 1, 'Mine.'),)", True),
        ("KEYS = (Key('MODEL.MINE', 1, 'Mine.'),)\ndef add_config(cfg):\n    cfg.add_keys(KEYS)", True),
    ],
)
def test_load_plugin_declares_the_config_keys_of_the_plugin_file(tmp_path, text, declared):
    file = tmp_path / "plugin.py"
    file.write_text(f"from fastamp.config import Key\n{text}\n")
    cfg = get_cfg()
    load_plugin(str(file), cfg)
    assert ("MINE" in cfg.MODEL) == declared


def test_missing_plugin_file_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        read_config("", [], plugin=str(tmp_path / "nowhere.py"))


def plugin_files(folder):
    files = []
    for name in ("one", "two"):
        files.append(folder / f"{name}.py")
        files[-1].write_text(f"from fastamp.config import Key\nKEYS = (Key('MODEL.{name.upper()}', 1, 'Mine.'),)\n")
    return files


def test_plugin_with_a_syntax_error_raises_config_error(tmp_path):
    (tmp_path / "plugin.py").write_text("x = = 3\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"plugin\.py, line 1\n  fix:"):
            load_plugin(str(tmp_path / "plugin.py"), get_cfg())


def test_plugin_given_twice_loads_both_files(tmp_path):
    one, two = plugin_files(tmp_path)
    args = argument_parser().parse_args(["--plugin", str(one), "--plugin", str(two)])
    cfg = read_config("", ["MODEL.ONE", 3, "MODEL.TWO", 4], plugin=args.plugin)
    assert (str(one), str(two)) == cfg.PLUGINS and (cfg.MODEL.ONE, cfg.MODEL.TWO) == (3, 4)
    assert read_config("", [], plugin=argument_parser().parse_args([]).plugin).PLUGINS == ()


def test_saved_config_names_its_plugins(tmp_path, caplog):
    one, two = plugin_files(tmp_path)
    saved = tmp_path / "config.yaml"
    saved.write_text(read_config("", ["MODEL.ONE", 5], plugin=str(one)).dump())
    again = read_config(str(saved), [], plugin=str(one))
    assert again.MODEL.ONE == 5 and (str(one),) == again.PLUGINS and not caplog.records
    with pytest.raises(ConfigError, match="MODEL.ONE"):
        read_config(str(saved), [])
    assert f"--plugin {one}" in caplog.text
    moved = tmp_path / "elsewhere" / "one.py"
    moved.parent.mkdir()
    moved.write_text(one.read_text())
    assert (str(moved),) == read_config(str(saved), [], plugin=str(moved)).PLUGINS
    both = read_config(str(saved), [], plugin=f"{one}{os.pathsep}{two}").clone()
    assert (str(one), str(two)) == both.PLUGINS
