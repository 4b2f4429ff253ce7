"""Plugins of installed distributions."""

import importlib
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import yaml

from fastamp.config import read_config
from fastamp.utils import plugins
from fastamp.utils.errors import ConfigError

MODULE = """
from torch import nn
from fastamp.config import Key
from fastamp.modeling import LOSS_REGISTRY

KEYS = (Key("MODEL.LOSSES.ZERO.SCALE", 2.0, "Zero loss: loss weight."),)
print("imported", __name__)


@LOSS_REGISTRY.register()
class ZeroLoss(nn.Module):
    loss_name = "loss_zero"

    @classmethod
    def from_config(cls, cfg):
        return cls()

    def forward(self, outputs, targets):
        return 0.0 * outputs["features"].float().sum()
"""


@pytest.fixture
def install(tmp_path):
    """Function that installs a distribution my-losses 1.2 with one module into a folder; it returns the folder."""

    def write(source, module="my_losses"):
        folder = tmp_path / "site"
        info = folder / "my_losses-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-losses\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nmine = {module}\n")
        return folder

    return write


@pytest.fixture
def installed(install, monkeypatch):
    """Like ``install``, but in this process."""

    def use(*args):
        monkeypatch.syspath_prepend(install(*args))
        importlib.invalidate_caches()
        monkeypatch.setattr(plugins, "_loaded", {})
        plugins.installed_plugins.cache_clear()

    yield use
    monkeypatch.undo()
    plugins.installed_plugins.cache_clear()


def run(code, folder, **variables):
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | variables,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.integration
def test_components_and_keys_of_a_plugin_are_found_and_imported_once(install):
    code = """
        import pickle, sys
        from fastamp.cli import main
        assert main(["help"]) == 0 and "my_losses" not in sys.modules
        from fastamp.config import get_cfg, read_config
        assert "my_losses" not in sys.modules
        options = ["MODEL.LOSSES.NAME", "ZeroLoss", "MODEL.HEADS.NUM_CLASSES", "2", "MODEL.BACKBONE.PRETRAIN", "False"]
        cfg = read_config("", [*options, "MODEL.LOSSES.ZERO.SCALE", "3", "MODEL.DEVICE", "cpu"])
        assert cfg.MODEL.LOSSES.ZERO.SCALE == 3.0 and get_cfg().MODEL.LOSSES.ZERO.SCALE == 2.0
        from fastamp.modeling import build_model
        print([type(loss).__name__ for loss in build_model(cfg).losses.values()])
        main(["version"])
    """
    status, out, err = run(code, install(MODULE))
    assert status == 0, err
    assert out.count("imported my_losses") == 1
    assert "['ZeroLoss']" in out
    assert "plugin mine my-losses 1.2" in out


@pytest.mark.integration
def test_predictor_loads_a_checkpoint_of_a_plugin(install, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    values = yaml.safe_load(content["config"])
    values["MODEL"]["LOSSES"]["ZERO"] = {"SCALE": 4.0}
    torch.save(content | {"config": yaml.safe_dump(values)}, tmp_path / "model.pth")
    code = f"""
        import tiny  # registers the backbone of the checkpoint
        from fastamp import Predictor
        print(Predictor({str(tmp_path / "model.pth")!r}, device="cpu").cfg.MODEL.LOSSES.ZERO)
    """
    folder = install(MODULE)
    status, out, err = run(code, folder)
    assert status == 0 and "SCALE: 4.0" in out, err
    status, _, err = run(code, folder, FASTAMP_PLUGINS="off")
    assert status == 1 and "MODEL.LOSSES.ZERO" in err


@pytest.mark.integration
def test_spawned_process_finds_components_by_a_pickled_config(install):
    code = """
        from fastamp.modeling import LOSS_REGISTRY
        assert "ZeroLoss" in LOSS_REGISTRY and "ZeroLoss" in list(LOSS_REGISTRY) and LOSS_REGISTRY.get("ZeroLoss")
    """
    status, out, err = run(code, install(MODULE))
    assert status == 0 and out.count("imported") == 1, err


@pytest.mark.integration
def test_plugins_can_be_disabled(install):
    code = """
        import sys
        from fastamp.config import read_config
        assert "ZERO" not in read_config("", []).MODEL.LOSSES and "my_losses" not in sys.modules
    """
    status, _, err = run(code, install(MODULE), FASTAMP_PLUGINS="off")
    assert status == 0, err


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import does_not_exist", "does_not_exist"),
        ("1 / 0", "ZeroDivisionError"),
        ("def add_config(cfg):\n    cfg.define('SEED', 1, 'Seed.')", "SEED"),
    ],
)
def test_errors_name_the_distribution(source, problem, installed):
    installed(source, "broken_losses")
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            read_config("", [])
        assert all(text in str(caught.value) for text in ("my-losses 1.2", "broken_losses", problem, "FASTAMP_PLUGINS"))
    sys.modules.pop("broken_losses", None)


def test_plugin_flag_with_the_file_of_an_installed_plugin_changes_nothing(installed, tmp_path):
    installed(
        "from fastamp.config import Key\n\n\ndef add_config(cfg):\n    cfg.define('OWN', 1, 'Own.')\n", "own_keys"
    )
    assert read_config("", ["OWN", "2"], plugin=str(tmp_path / "site/own_keys.py")).OWN == 2
