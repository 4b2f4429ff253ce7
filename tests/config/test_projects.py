"""Projects: plugins that recipes load by themselves."""

import pickle
import shutil
import subprocess
import sys

import pytest
from components import unregister_projects

import fastamp.config.projects as projects
import fastamp.config.recipes as recipes
from fastamp.cli import main
from fastamp.config import get_cfg, load_plugin, read_config
from fastamp.config.projects import project_of
from fastamp.config.recipes import find_recipe
from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.utils.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder of projects with one project, ``Colors``, which declares a key and has a package and two recipes."""
    root = tmp_path / "projects"
    package, configs = root / "Colors" / "colors_of_test", root / "Colors" / "configs"
    package.mkdir(parents=True)
    configs.mkdir()
    (package / "__init__.py").write_text("DEFAULT = 2\n")
    (root / "Colors" / "plugin.py").write_text(
        "from colors_of_test import DEFAULT\n"
        "from fastamp.config import Key\n"
        "KEYS = (Key('MODEL.COLORS', DEFAULT, 'Number of colors.'),)\n"
    )
    (configs / "base.yml").write_text("MODEL: {COLORS: 3}\n")
    (configs / "demo.yml").write_text("_BASE_: base.yml\nSEED: 7")
    (root / "Search" / "configs").mkdir(parents=True)
    (root / "Search" / "configs" / "space.yml").write_text("SEED: 1\n")

    for module in (projects, recipes):
        original = module.resource_folder
        replacement = lambda name, original=original: root if name == "projects" else original(name)  # noqa: E731
        monkeypatch.setattr(module, "resource_folder", replacement)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield root
    for name in set(sys.modules) - modules:
        if "colors_of_test" in name or str(root) in name:
            del sys.modules[name]


def test_recipe_below_a_project_loads_the_plugin_and_names_the_project(folder):
    cfg = read_config(str(folder / "Colors/configs/demo.yml"))
    assert (cfg.PROJECTS, cfg.MODEL.COLORS, cfg.SEED) == (("Colors",), 3, 7)
    assert read_config("Colors/demo").dump() == cfg.dump() == read_config("Colors/demo.yml").dump()


def test_config_of_a_run_needs_no_plugin_argument(folder, tmp_path):
    text = read_config("Colors/demo").dump()
    other = get_cfg()
    other.merge_saved(text)
    assert other.dump() == text
    (tmp_path / "config.yaml").write_text(text)
    assert read_config(str(tmp_path / "config.yaml")).dump() == text


def test_file_outside_of_the_project_with_a_base_in_the_project(folder, tmp_path):
    (tmp_path / "mine.yml").write_text("_BASE_: Colors/demo.yml\nMODEL: {COLORS: 5}\n")
    assert read_config(str(tmp_path / "mine.yml")).MODEL.COLORS == 5


def test_key_value_pairs_and_plugin_argument_name_a_project(folder):
    cfg = read_config("", ["MODEL.COLORS", "4", "PROJECTS", "[Colors]"])
    assert (cfg.MODEL.COLORS, cfg.PROJECTS) == (4, ("Colors",))
    for plugin in ("Colors", str(folder / "Colors" / "plugin.py")):
        assert read_config("", ["MODEL.COLORS", "4"], plugin=plugin).PROJECTS == ("Colors",)
    assert get_cfg().with_values({"PROJECTS": ["Colors"]}).MODEL.COLORS == 2
    cfg = get_cfg()
    load_plugin("Colors", cfg)
    cfg.merge_from_list(["PROJECTS", "[]"])
    assert cfg.PROJECTS == ("Colors",)  # its keys remain declared
    assert "COLORS" not in get_cfg().MODEL


def test_unknown_project_is_an_error_with_the_choices(folder):
    with pytest.raises(ConfigError, match="choices: Colors"):
        read_config("", ["PROJECTS", "[Colers]"])


def test_unpickled_config_registers_the_components_of_its_projects(folder):
    cfg = read_config("Colors/demo")
    text = pickle.dumps(cfg)
    name = next(name for name in sys.modules if name.startswith("fastamp_plugin_") and str(folder) in name)
    del sys.modules[name]
    assert pickle.loads(text).dump() == cfg.dump() and name in sys.modules


def test_only_folders_with_a_plugin_are_projects(folder):
    assert project_of(folder / "Search/configs/space.yml") == "" and find_recipe("Search/space") is None
    assert project_of(folder / "Colors/configs/none.yml") == "Colors"


def test_recipes_prints_a_copy_that_works_in_any_folder(folder, capsys, tmp_path):
    assert main(["recipes", "Colors"]) == 0
    assert capsys.readouterr().out.split() == ["Colors/base", "Colors/demo"]
    assert main(["recipes", "Colors/demo"]) == 0
    copy = tmp_path / "copy.yml"
    copy.write_text(capsys.readouterr().out)
    assert "_BASE_: Colors/base.yml" in copy.read_text()
    assert read_config(str(copy)).dump() == read_config("Colors/demo").dump()


def test_failing_plugin_can_be_loaded_again_after_a_correction(folder):
    file = folder / "Colors" / "plugin.py"
    text = file.read_text()
    file.write_text("raise RuntimeError('half')\n")
    with pytest.raises(RuntimeError):
        read_config("Colors/demo")
    file.write_text(text)
    assert read_config("Colors/demo").MODEL.COLORS == 3


@pytest.mark.integration
def test_projects_of_the_repository_load_in_a_process_of_their_own():
    code = (
        "from fastamp.config.projects import list_projects\n"
        "from fastamp.config.recipes import list_project_recipes\n"
        "from fastamp.config import read_config\n"
        "for name in list_projects(): read_config('', ['PROJECTS', [name]])\n"
        "for name in list_project_recipes(): assert read_config(name).PROJECTS, name\n"
        "read_config('', ['PROJECTS', list(list_projects())])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.integration
def test_training_without_a_project_imports_none_and_has_none_of_their_keys():
    code = (
        "import sys\n"
        "import fastamp.cli, fastamp.engine, fastamp.inference\n"
        "from fastamp.config import read_config\n"
        "from fastamp.utils.resources import resource_folder\n"
        "cfg = read_config('Demo/quickstart')\n"
        "files = [getattr(module, '__file__', None) or '' for module in list(sys.modules.values())]\n"
        "assert not [file for file in files if file.startswith(str(resource_folder('projects')))]\n"
        "assert 'OVERHAUL' not in cfg.KD and 'REC_PATH' not in cfg.DATASETS and 'DSR' not in cfg.TEST\n"
        "cfg = read_config('FastFace/demo')\n"  # control
        "files = [getattr(module, '__file__', None) or '' for module in list(sys.modules.values())]\n"
        "assert [file for file in files if file.startswith(str(resource_folder('projects')))]\n"
        "assert 'REC_PATH' in cfg.DATASETS\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def copied(folder, tmp_path):
    """The project in another copy of the repository, as a clone next to an installed package."""
    return shutil.copytree(folder, tmp_path / "clone" / "projects")


def test_recipe_of_another_copy_loads_the_installed_project(copied):
    assert read_config(str(copied / "Colors/configs/demo.yml")).PROJECTS == ("Colors",)


@pytest.mark.parametrize("recipe", ["", "Colors/configs/demo.yml"])
def test_plugin_of_another_copy_is_that_of_this_installation_with_a_warning(recipe, copied, caplog):
    cfg = read_config(recipe and str(copied / recipe), plugin=str(copied / "Colors/plugin.py"))
    assert cfg.PROJECTS == ("Colors",) and "another copy" in caplog.text


def test_error_for_the_key_of_a_project_names_it(folder, tmp_path):
    (tmp_path / "own.yml").write_text("MODEL: {COLORS: 5}\n")
    with pytest.raises(ConfigError) as error:
        read_config(str(tmp_path / "own.yml"))
    assert "MODEL.COLORS" in str(error.value) and "PROJECTS: [Colors]" in str(error.value)
    assert read_config(str(tmp_path / "own.yml"), ["PROJECTS", "[Colors]"]).MODEL.COLORS == 5


@pytest.mark.parametrize(
    "text, project",
    [
        ("TEST: {RECALLS: [1]}", "FastRetri"),
        ("UNSUPERVISED: {EPS: 0.5}", "Unsupervised"),
        ("CLIPREID: {STAGE1: {MAX_EPOCH: 1}}", "CLIPReID"),
        ("MODEL: {LOSSES: {BCE: {SCALE: 1.0}}}", "FastAttr"),
        ("TEST: {DSR: {ENABLED: True}}", "PartialReID"),
    ],
)
def test_error_for_keys_of_the_projects_in_the_repository_names_the_project(text, project, tmp_path):
    (tmp_path / "own.yml").write_text(text)
    with pytest.raises(ConfigError, match=project):
        read_config(str(tmp_path / "own.yml"))


def test_plugin_that_needs_a_missing_module_is_an_error_without_a_traceback(tmp_path):
    (tmp_path / "plugin.py").write_text("import module_that_does_not_exist\n")
    with pytest.raises(ConfigError, match="module_that_does_not_exist"):
        read_config(plugin=str(tmp_path / "plugin.py"))


def test_project_registers_again_after_the_tests_of_a_file(unregistered):
    sys.path.append(str(projects.list_projects()["CLIPReID"]))
    import clipreid.tokenizer  # noqa: F401  the package stays when its other modules are removed

    was_registered = "CLIPReID" in META_ARCH_REGISTRY  # by a test of another file
    for _ in range(2):
        with unregister_projects():
            projects.import_project("CLIPReID")
            assert "CLIPReID" in META_ARCH_REGISTRY
        assert ("CLIPReID" in META_ARCH_REGISTRY) == was_registered
