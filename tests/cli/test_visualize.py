"""Command `fastamp visualize`: figures of a run or a checkpoint, and invalid arguments."""

import argparse
import sys

import pytest
from PIL import Image

from fastamp.cli import visualize
from fastamp.utils.errors import ConfigError, DataError, WeightsError


def draw(*words):
    parser = argparse.ArgumentParser()
    visualize.add_arguments(parser)
    return visualize.run(parser.parse_intermixed_args([str(word) for word in words]))


def test_visualize_draws_all_figures_of_a_run_folder(demo, run_folder, tmp_path):
    options = ("--device", "cpu", "--num", 1, "--length", 2, "TEST.PROTOCOL")
    assert draw(run_folder, "--output", tmp_path, *options, "no_camera") == 0
    names = {f"rank_list_{kind}.png" for kind in ("best", "worst", "random")}
    names |= {"cmc.png", "roc.png", "histogram.png", "grad_cam.png"}
    assert {path.name for path in (tmp_path / "Demo").iterdir()} == names
    for path in tmp_path.rglob("*.png"):
        with Image.open(path) as image:
            assert min(image.size) > 200 and len(image.convert("L").getcolors()) > 10
    assert (tmp_path / "curves.png").exists()


def test_visualize_kind_option_draws_only_the_chosen_figure(demo, checkpoint, tmp_path, capsys):
    assert draw(checkpoint, "--kind", "cmc", "--output", tmp_path, "--device", "cpu") == 0
    assert [path.name for path in tmp_path.rglob("*.png")] == ["cmc.png"]
    assert f"wrote {tmp_path}/Demo/cmc.png" in capsys.readouterr().out


def test_visualize_error_names_pip_extra_if_matplotlib_is_missing(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "fastamp\[vis\]"'):
        draw(checkpoint)


def test_visualize_rejects_missing_files_and_num_0(tmp_path, checkpoint):
    with pytest.raises(WeightsError, match="model_best.pth"):
        draw(tmp_path)
    with pytest.raises(DataError, match=r"metrics.json"):
        draw(tmp_path / "x.pth", "--kind", "curves")
    with pytest.raises(ConfigError, match="--num 0"):
        draw(checkpoint, "--num", 0)


def test_visualize_rejects_an_unwritable_output_folder(run_folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/curves.png"):
        draw(run_folder, "--kind", "curves", "--output", tmp_path / "file")
