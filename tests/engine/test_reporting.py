"""Reports (TEST.REPORT) of training runs and evaluations."""

import dataclasses
import io
import json
import shutil
import textwrap

import pytest
import tiny
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from fastamp.data.thumbnails import SIZE
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.report import rank_list_image
from fastamp.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.integration


def test_training_and_evaluation_write_reports(demo, tmp_path, capfd):
    options = ("TEST.REPORT", "True", "TEST.EVAL_PERIOD", "1", "SOLVER.MAX_EPOCH", "2")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *options))
    trainer.train()
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    # The curves include the last evaluation, the counts the training images.
    for words in (
        "after epoch 2 of 2",
        "Demo: from",
        "<td>train</td><td>96</td><td>16</td>",
        "TEST.REPORT",
        ">Losses<",
    ):
        assert words in text, words
    weights = str(tmp_path / "model_best.pth")
    training = {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.name != "log.txt"}
    other = tmp_path / "other"
    for folder, name in ((tmp_path, "report_eval.html"), (other, "report.html")):
        metrics = DefaultTrainer.test_weights(tiny.tiny_config(folder, *options, "MODEL.WEIGHTS", weights))
        text = (folder / name).read_text(encoding="utf-8")
        assert weights in text and f"{metrics['mAP']:.1f}" in text and ">Losses<" in text, folder
    assert all(path.read_bytes() == content for path, content in training.items())
    assert sorted(path.name for path in other.glob("*.*")) == ["metrics_eval.json", "report.html"]
    # Curves are omitted for weights from another folder.
    strange = tmp_path / "other" / "model.pth"
    shutil.copy(weights, strange)
    DefaultTrainer.test_weights(tiny.tiny_config(tmp_path, *options, "MODEL.WEIGHTS", str(strange)))
    text = (tmp_path / "report_eval.html").read_text(encoding="utf-8")
    assert str(strange) in text and ">Losses<" not in text


def test_failed_report_write_keeps_training_and_evaluation_results(demo, tmp_path, caplog):
    for name in ("report.html", "report_eval.html"):
        (tmp_path / name / "in_the_way").mkdir(parents=True)
    cfg = tiny.tiny_config(tmp_path, "TEST.REPORT", "True", "SOLVER.MAX_EPOCH", "1")
    metrics = DefaultTrainer(cfg).train()
    assert metrics["mAP"] > 0 and (tmp_path / "model_final.pth").exists()
    assert "report.html cannot be written" in caplog.text
    caplog.clear()
    cfg.MODEL.WEIGHTS = str(tmp_path / "model_final.pth")
    with pytest.raises(ConfigError, match=r"report_eval\.html"):
        DefaultTrainer.test_weights(cfg)
    assert "evaluation results in percent" in caplog.text


def test_training_writes_no_report_by_default(run_folder):
    assert not (run_folder / "report.html").exists()


def test_tensorboard_shows_config_hyperparameters_and_worst_queries(demo, tmp_path):
    options = ("TEST.REPORT", "True", "TEST.EVAL_PERIOD", "1", "SOLVER.MAX_EPOCH", "2", "TRACKING.TAGS", "a")
    cfg = tiny.tiny_config(tmp_path, *options)
    DefaultTrainer(cfg).train()
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "tensors": 0}).Reload()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    # Scalars: all numbers of metrics.json, under shorter tags.
    for name, tag in {"loss_cls": "loss/cls", "total_loss": "loss/total", "lr": "lr", "Demo/mAP": "eval/mAP"}.items():
        found = [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]
        assert found == [(row["iteration"], pytest.approx(row[name])) for row in rows if name in row], name
    assert {tag.split("/")[0] for tag in events.Tags()["scalars"]} == {
        *("epoch", "eval", "loss", "lr", "precision", "speed")
    }
    # Text: the config.
    text = events.Tensors("config")[0].tensor_proto.string_val[0].decode()
    cfg = tiny.tiny_config(tmp_path, *options, "MODEL.HEADS.NUM_CLASSES", "16")
    assert textwrap.dedent(text) == cfg.dump()
    # Hyperparameters: those that differ from the defaults, and some that are always shown.
    plugin = events.summary_metadata
    start, end = (
        HParamsPluginData.FromString(plugin[f"_hparams_/session_{name}_info"].plugin_data.content)
        for name in ("start", "end")
    )
    hparams = start.session_start_info.hparams
    assert hparams["SOLVER.BASE_LR"].number_value == 1e-3 and hparams["SEED"].HasField("number_value")
    assert hparams["SOLVER.AMP.ENABLED"].HasField("bool_value") and "OUTPUT_DIR" not in hparams
    assert not any(name.startswith("TRACKING") for name in hparams)
    assert end.session_end_info.status == Status.Value("STATUS_SUCCESS")
    # Images: one row for each of the four worst queries, after each evaluation.
    images = events.Images("worst_queries/Demo")
    assert [image.step for image in images] == [5, 11]
    picture = Image.open(io.BytesIO(images[-1].encoded_image_string))
    assert picture.size == (images[-1].width, images[-1].height) and picture.height == 4 * (SIZE[1] + 10)
    frames = {picture.getpixel((column, row)) for row in (1, 155) for column in range(83, picture.width - 40, 82)}
    assert any(red > 150 and green < 90 for red, green, _ in frames)  # wrong matches come first


def test_tensorboard_shows_that_a_run_failed(demo, tmp_path):
    class Fail(HookBase):
        def after_step(self):
            raise DataError("an image is missing")

    trainer = DefaultTrainer(tiny.tiny_config(tmp_path))
    trainer.register_hooks([Fail()])
    with pytest.raises(DataError):
        trainer.train()
    plugin = EventAccumulator(str(tmp_path)).Reload().summary_metadata
    end = HParamsPluginData.FromString(plugin["_hparams_/session_end_info"].plugin_data.content)
    assert end.session_end_info.status == Status.Value("STATUS_FAILURE")


def test_image_of_rank_lists_shows_unreadable_images_as_empty(demo, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr("fastamp.engine.hooks.report.write_training_report", runs.append)
    DefaultTrainer(tiny.tiny_config(tmp_path, "TEST.REPORT", "True", "SOLVER.MAX_EPOCH", "1")).train()
    image_set = runs[0].sets[0]
    full = rank_list_image(image_set)
    missing = [item._replace(path=str(tmp_path / "missing.jpg")) for item in image_set.query]
    empty = rank_list_image(dataclasses.replace(image_set, query=missing))
    assert empty.size == full.size and empty.getpixel((40, 70)) == (255, 255, 255) != full.getpixel((40, 70))
    assert rank_list_image(dataclasses.replace(image_set, result=None)) is None
