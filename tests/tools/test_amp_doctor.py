"""tools/amp_doctor.py: table, figure, JSON, suggested YAML and exit code."""

import json
import sys

import amp_doctor
import pytest
import tiny
import torch
import train_net
import yaml
from torch import nn

from fastamp.config import read_config
from fastamp.data import image_decoder
from fastamp.diagnostics.doctor import diagnose
from fastamp.diagnostics.doctor_report import FOLDER
from fastamp.modeling import BACKBONE_REGISTRY


@BACKBONE_REGISTRY.register()
def build_doctors_backbone(cfg):
    """Build the tiny backbone; multiply the weight of the second convolution by ``MODEL.BACKBONE.SIE_COE``."""
    net = tiny.build_tiny_backbone(cfg)
    with torch.no_grad():
        net[4].weight.mul_(cfg.MODEL.BACKBONE.SIE_COE)
    return net


def options(output, factor, *opts):
    backbone = ("MODEL.BACKBONE.NAME", "build_doctors_backbone", "MODEL.BACKBONE.SIE_COE", factor)
    return tiny.tiny_options(output, *backbone, "SOLVER.MAX_EPOCH", "2", *opts)


@pytest.mark.integration
def test_doctor_exits_with_0_and_writes_report_for_healthy_config(demo, tmp_path, capfd):
    assert amp_doctor.cli(options(tmp_path, "1", "SOLVER.AMP", "bf16")) == 0
    out = capfd.readouterr().out
    assert "SOLVER.AMP (bfloat16)" in out
    for words in ("float32     | reference", "[1/12] float32: first batch", "left", "zero gradients"):
        assert words in out
    report = json.loads((tmp_path / FOLDER / "report.json").read_text())
    assert report["healthy"] and report["verdicts"] == {"bfloat16": "ok", "float16": "ok"}
    assert report["low"][1]["loss_scale"] >= 1024 and report["float32"]["metrics"]["mAP"] > 0
    assert report["untrained"] and report["machine"]["versions"]["torch"] == torch.__version__


@pytest.mark.integration
def test_doctor_finds_float16_overflow_and_suggests_config_that_trains(demo, tmp_path, capfd):
    assert amp_doctor.cli(options(tmp_path, "1e6", "SOLVER.AMP", "fp16")) == 1
    out = capfd.readouterr().out
    assert "forward overflow in backbone.4 (Conv2d)" in out and "FORCE_FP32" in out
    report = json.loads((tmp_path / FOLDER / "report.json").read_text())
    assert not report["healthy"] and report["low"][1]["force_fp32"] == ["backbone.4"]
    # Train with the suggested lines.
    lines = out.split("Recommended config:\n")[1].split("\n\n")[0]
    assert yaml.safe_load(lines) == report["recommended"]
    (tmp_path / "fix.yml").write_text(lines)
    fixed = ["--config-file", str(tmp_path / "fix.yml"), *options(tmp_path / "fixed", "1e6")]
    assert train_net.cli(fixed) == 0
    saved = torch.load(tmp_path / "fixed/model_final.pth", weights_only=True)
    assert saved["policy"]["dtype"] == "float16" and saved["trainer"]["step"]["skipped_total"] == 0
    assert amp_doctor.cli(["--config-file", str(tmp_path / "fix.yml"), *options(tmp_path / "again", "1e6")]) == 0
    # bfloat16 needs no fix.
    assert amp_doctor.cli(["--dtypes", "bf16", *options(tmp_path / "bf16", "1e6", "SOLVER.AMP", "bf16")]) == 0


def test_doctor_checks_config_with_amp_off_as_if_enabled(demo, tmp_path, capfd):
    assert amp_doctor.cli(["--dtypes", "bfloat16", *options(tmp_path, "1", "SOLVER.AMP", "off")]) == 0
    assert "SOLVER.AMP True (" in capfd.readouterr().out


@pytest.mark.integration
def test_doctor_evaluates_weights_given_by_model_weights(demo, tmp_path, capfd):
    assert train_net.cli(options(tmp_path, "1", "SOLVER.AMP", "off")) == 0
    weights = ["MODEL.WEIGHTS", str(tmp_path / "model_final.pth")]
    arguments = ["--dtypes", "bf16", *options(tmp_path / "doctor", "1", "SOLVER.AMP", "off", *weights)]
    capfd.readouterr()
    assert amp_doctor.cli(arguments) == 0
    report = json.loads((tmp_path / "doctor" / FOLDER / "report.json").read_text())
    trained = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert report["float32"]["metrics"]["mAP"] == pytest.approx(
        [row["Demo/mAP"] for row in trained if "Demo/mAP" in row][-1]
    )
    assert not report["untrained"]


def test_doctor_checks_configured_dtype_even_if_dtypes_flag_omits_it(demo, tmp_path, capfd):
    assert amp_doctor.cli(["--dtypes", "bf16", *options(tmp_path, "1e6", "SOLVER.AMP", "fp16")]) == 1
    assert list(json.loads((tmp_path / FOLDER / "report.json").read_text())["verdicts"]) == ["float16", "bfloat16"]


def test_doctor_exits_with_1_if_no_operation_ran_in_low_precision(demo, tmp_path, capfd):
    forced = ("SOLVER.AMP", "bf16", "SOLVER.AMP.FORCE_FP32", "['Baseline']")
    assert amp_doctor.cli(["--dtypes", "bf16", *options(tmp_path, "1", *forced)]) == 1
    assert "ran no operation in bfloat16" in capfd.readouterr().out


@BACKBONE_REGISTRY.register()
def build_rare_backbone(cfg):
    """Build a tiny backbone that overflows float16 in evaluation if a batch has more than 16 images."""

    class Rare(nn.Module):
        def forward(self, x):
            return x * 1e6 * 1e-6 if len(x) > 16 and not self.training else x

    return nn.Sequential(*list(tiny.build_tiny_backbone(cfg))[:5], Rare(), *list(tiny.build_tiny_backbone(cfg))[5:])


@pytest.mark.integration
def test_doctor_finds_overflow_that_occurs_after_first_test_batch(demo, tmp_path, capfd):
    opts = ("MODEL.BACKBONE.NAME", "build_rare_backbone", "SOLVER.AMP", "fp16", "TEST.IMS_PER_BATCH", "30")
    assert amp_doctor.cli(["--dtypes", "fp16", *tiny.tiny_options(tmp_path, *opts)]) == 1
    report = json.loads((tmp_path / FOLDER / "report.json").read_text())
    assert report["verdicts"] == {"float16": "fails"} and "backbone.5 (Rare)" in report["low"][0]["failure"]
    # Evaluation in float32 is a fix and is checked as such.
    opts += ("SOLVER.AMP.EVAL_DTYPE", "float32")
    assert amp_doctor.cli(["--dtypes", "fp16", *tiny.tiny_options(tmp_path, *opts)]) == 0


def test_max_images_limits_number_of_images_evaluated_by_doctor(demo, tmp_path):
    cfg = read_config("", options(tmp_path, "1"))
    found = diagnose(cfg, dtypes=[torch.bfloat16], max_images=15)
    assert found.images[0] <= 15 and found.images[1] == 30 and found.float32.metrics["mAP"] > 0


@BACKBONE_REGISTRY.register()
def build_broken_backbone(cfg):
    """Build a backbone whose output is divided by zero."""

    class Broken(nn.Module):
        def forward(self, x):
            return x / x.new_zeros(())

    return nn.Sequential(*tiny.build_tiny_backbone(cfg), Broken())


def test_doctor_reports_model_that_is_non_finite_in_float32(demo, tmp_path, capfd):
    assert amp_doctor.cli(tiny.tiny_options(tmp_path, "MODEL.BACKBONE.NAME", "build_broken_backbone")) == 1
    out = capfd.readouterr().out
    assert "fails in float32" in out and "backbone.7 (Broken)" in out
    assert json.loads((tmp_path / FOLDER / "report.json").read_text())["problem"]


def test_doctor_writes_figure_of_layers(demo, tmp_path, capfd):
    pytest.importorskip("matplotlib")
    assert amp_doctor.cli(options(tmp_path, "1", "SOLVER.AMP", "bf16")) == 0
    assert (tmp_path / FOLDER / "layers.png").read_bytes().startswith(b"\x89PNG")


def test_doctor_without_matplotlib_logs_a_warning_and_skips_figure(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert amp_doctor.cli(["--dtypes", "bf16", *options(tmp_path, "1", "SOLVER.AMP", "bf16")]) == 0
    log = (tmp_path / "log.txt").read_text()
    assert "layers.png" in log and 'pip install "fastamp[vis]"' in log
    assert not (tmp_path / FOLDER / "layers.png").exists()


PARTS = """
import tiny
from fastamp.modeling import BACKBONE_REGISTRY

def add_config(cfg):
    cfg.define("MODEL.BACKBONE.MINE", 1.0, "A key of my own.")

@BACKBONE_REGISTRY.register()
def build_my_backbone(cfg):
    assert cfg.MODEL.BACKBONE.MINE == 2.0
    return tiny.build_tiny_backbone(cfg)
"""


@pytest.mark.integration
def test_doctor_loads_backbone_and_config_keys_from_plugin(demo, tmp_path, capfd):
    (tmp_path / "plugin.py").write_text(PARTS)
    opts = ("MODEL.BACKBONE.NAME", "build_my_backbone", "MODEL.BACKBONE.MINE", "2", "SOLVER.AMP", "bf16")
    arguments = ["--dtypes", "bf16", "--plugin", str(tmp_path / "plugin.py")]
    assert amp_doctor.cli([*arguments, *tiny.tiny_options(tmp_path / "out", *opts)]) == 0
    assert amp_doctor.cli(["--plugin", str(tmp_path / "none.py"), *tiny.tiny_options(tmp_path / "out")]) == 2
    assert "none.py" in capfd.readouterr().err


def test_doctor_exits_with_2_for_invalid_weights_config_or_flags(demo, tmp_path, input_error):
    for opts, words in (
        (["MODEL.WEIGHTS", "missing.pth"], "missing.pth"),
        (["SOLVER.AMP", "fp17"], "fp17"),
        (["DATASETS.TESTS", "Market1502"], "Market1502"),
    ):
        error = input_error(amp_doctor.cli, options(tmp_path, "1", *opts))
        assert words in error and "Traceback" not in error
    for flags in (["--dtypes", "int8"], ["--dtypes", "float32"], ["--batch", "1"], ["--images", "-3"]):
        with pytest.raises(SystemExit) as stop:
            amp_doctor.cli([*flags, *options(tmp_path, "1")])
        assert stop.value.code == 2


def test_doctor_with_env_flag_checks_machine(capfd):
    assert amp_doctor.cli(["--env"]) == 0
    out = capfd.readouterr().out
    assert "ten steps in bfloat16" in out and "no problems found" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_doctor_with_env_flag_reports_missing_cuda(capfd):
    assert amp_doctor.cli(["--env", "MODEL.DEVICE", "cuda"]) == 1
    assert "problem: PyTorch cannot use a GPU" in capfd.readouterr().out


def test_doctor_with_env_flag_exits_with_2_for_unknown_device(capfd):
    assert amp_doctor.cli(["--env", "MODEL.DEVICE", "nonsense"]) == 2
    assert "MODEL.DEVICE: unknown device 'nonsense'" in capfd.readouterr().err


def test_doctor_with_env_flag_exits_with_2_for_a_missing_decoder(capfd, monkeypatch):
    image_decoder.image_decoder.cache_clear()
    monkeypatch.setitem(image_decoder._LOADERS, "torchcodec", ("no-such-package", None))
    assert amp_doctor.cli(["--env", "INPUT.DECODER", "torchcodec"]) == 2
    assert "INPUT.DECODER" in capfd.readouterr().err
    image_decoder.image_decoder.cache_clear()


def test_doctor_with_env_flag_and_config_file_checks_machine_and_model(demo, tmp_path, capfd):
    config = tmp_path / "c.yml"
    config.write_text("SOLVER: {AMP: bf16}\n")
    arguments = ["--env", "--dtypes", "bf16", "--config-file", str(config), *options(tmp_path, "1")]
    assert amp_doctor.cli(arguments) == 0
    out = capfd.readouterr().out
    assert "ten steps in bfloat16" in out and "SOLVER.AMP (" in out
