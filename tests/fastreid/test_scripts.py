"""Scripts written as FastReID's documentation teaches, run without a change or with other imports."""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from PIL import Image

from fastamp.engine import run_command_line
from fastamp.fastreid import script

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def run(demo, tmp_path):
    """Function that runs a script for one epoch, and returns its output.

    With ``renamed``, the package name in its imports is changed; otherwise, the script is run as it is.
    """

    def run(name, *opts, renamed=False, args=()):
        text = (SCRIPTS / f"{name}.py").read_text()
        assert "import" in text and "fastamp" not in text
        (tmp_path / f"{name}.py").write_text(
            text.replace("from fastreid", "from fastamp.fastreid") if renamed else text
        )
        words = tiny.tiny_options(tmp_path / "run", "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1", *opts)
        config = dict(zip(words[::2], words[1::2], strict=True)) | {"MODEL.BACKBONE.NAME": "build_resnet_backbone"}
        config |= {"MODEL.BACKBONE.DEPTH": "18x", "MODEL.BACKBONE.FEAT_DIM": "512", "INPUT.SIZE_TRAIN": "(32, 16)"}
        config |= {"INPUT.SIZE_TEST": "(32, 16)", "MODEL.BACKBONE.PRETRAIN": "False"}
        tree = {}
        for key, value in config.items():
            node = tree
            for part in key.split(".")[:-1]:
                node = node.setdefault(part, {})
            node[key.split(".")[-1]] = yaml.safe_load(value) if not value.startswith("(") else value
        (tmp_path / "config.yml").write_text(yaml.safe_dump(tree))
        script = [str(tmp_path / f"{name}.py"), *args, "--config-file", str(tmp_path / "config.yml")]
        command = [sys.executable, *(() if renamed else ("-m", "fastamp.fastreid")), *script]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "FASTREID_DATASETS": str(demo)}
        found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
        return found.stdout

    return run


def test_custom_dataset_script_runs(run, demo):
    for split, people in (("train", range(1, 9)), ("query", (20, 21)), ("gallery", (20, 21, 22))):
        folder = demo / "my_shop" / split
        folder.mkdir(parents=True, exist_ok=True)
        for pid in people:
            for camera in (1, 2) if split == "train" else ((1,) if split == "query" else (2,)):
                for number in range(2):
                    color = (pid * 30 % 256, pid * 70 % 256, number)
                    Image.new("RGB", (16, 32), color).save(folder / f"{pid}_c{camera}_{number}.png")
    try:
        out = run("dataset", "SOLVER.IMS_PER_BATCH", "8", "DATALOADER.NUM_INSTANCE", "4")
    finally:
        shutil.rmtree(demo / "my_shop")  # the data root is shared with other tests
    assert "IDENTITIES 8 CAMERAS 2" in out and "MyShop" in out and "mAP" in out


def test_custom_backbone_head_and_model_script_runs(run):
    out = run("backbone", "MODEL.HEADS.CLS_LAYER", "CosSoftmax", "MODEL.HEADS.SCALE", "16", "MODEL.HEADS.MARGIN", "0.1")
    assert "loss_size" in out and "mAP" in out


@pytest.mark.parametrize("renamed", [False, True])
def test_custom_loss_script_runs(run, renamed):
    out = run("loss", renamed=renamed)
    assert "loss_contrastive" in out and "mAP" in out


def test_custom_evaluator_script_runs(run):
    out = run("evaluator")
    assert "RECALL ['Recall@1', 'metric']" in out and "USUAL True" in out
    assert out.count("Recall@1") >= 2


def test_custom_hook_and_trainer_script_runs(run, tmp_path):
    out = run("trainer")
    assert "STEPS True EPOCH 0" in out and "EVALUATED" in out
    words = out[out.index("BEGUN") :].split()
    assert words[1] == words[3] and int(words[5]) == int(words[1]) - 1 and words[6] == "True"
    assert '"twice"' in (tmp_path / "run" / "metrics.json").read_text()


def test_unchanged_script_starts_two_processes(run):
    out = run("loss", args=("--num-gpus", "2"))
    assert "loss_contrastive" in out and "mAP" in out


def test_script_that_cannot_run_gives_one_message(tmp_path, monkeypatch, capsys, subtests):
    cases = {
        "from fastreid.config import nothing": "nothing",
        "import fastreid.nothing": "fastreid.nothing",
        "import fastreid\nprint((fastreid)": "line 2",
    }
    if not torch.cuda.is_available():
        cases["import torch; torch.zeros(1).cuda()"] = "MODEL.DEVICE"
        torch.save(torch.zeros(1), tmp_path / "on_cpu.pth")
        cases[f"import torch; torch.load({str(tmp_path / 'on_cpu.pth')!r}, map_location='cuda')"] = "map_location"
    for name, value in (("meta_path", [*sys.meta_path]), ("path", [*sys.path]), ("argv", [])):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setenv("FASTAMP_FASTREID_SCRIPT", "")
    path = tmp_path / "script.py"
    for code, word in cases.items():
        with subtests.test(code):
            path.write_text(code)
            assert run_command_line(lambda: script.run([str(path)])) == 2
            message = capsys.readouterr().err
            assert word in message and "fix:" in message and str(path) in message and "Traceback" not in message
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastreid"]:
        del sys.modules[name]


def test_fastamp_takes_the_place_of_an_installed_fastreid(tmp_path):
    (tmp_path / "fastreid").mkdir()
    (tmp_path / "fastreid/__init__.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text("import fastreid, sys; print(fastreid.__file__, *sys.argv[1:], sys.path[0])")
    installed = str(tmp_path / "fastreid/__init__.py")
    command = [sys.executable, "-m", "fastamp.fastreid"]
    found = subprocess.run([*command, str(path), "--a"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.split() == [str(ROOT / "fastamp/fastreid/__init__.py"), "--a", str(tmp_path)]
    assert installed in found.stderr
    found = subprocess.run([*command, "--installed", str(path)], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.split()[0] == installed


def test_method_that_is_never_called_gives_a_warning():
    from fastamp.fastreid.engine import DefaultTrainer

    with pytest.warns(UserWarning, match="_detect_anomaly"):
        type("Trainer", (DefaultTrainer,), {"_detect_anomaly": lambda self, losses: None})
