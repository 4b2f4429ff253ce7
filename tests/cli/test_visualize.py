"""Command `fastamp visualize`."""

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


def test_run_folder_gives_all_figures(demo, run_folder, tmp_path):
    options = ("--device", "cpu", "--num", 1, "--length", 2, "TEST.PROTOCOL")
    assert draw(run_folder, "--output", tmp_path, *options, "no_camera") == 0
    names = {f"rank_list_{kind}.png" for kind in ("best", "worst", "random")}
    names |= {"cmc.png", "roc.png", "histogram.png", "grad_cam.png"}
    assert {path.name for path in (tmp_path / "Demo").iterdir()} == names
    for path in tmp_path.rglob("*.png"):
        with Image.open(path) as image:
            assert min(image.size) > 200 and len(image.convert("L").getcolors()) > 10
    assert (tmp_path / "curves.png").exists()


def test_kind_option_draws_only_the_chosen_figure(demo, checkpoint, tmp_path, capsys):
    assert draw(checkpoint, "--kind", "cmc", "--output", tmp_path, "--device", "cpu") == 0
    assert [path.name for path in tmp_path.rglob("*.png")] == ["cmc.png"]
    assert f"wrote {tmp_path}/Demo/cmc.png" in capsys.readouterr().out


def test_missing_matplotlib_error_names_the_pip_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "fastamp\[vis\]"'):
        draw(checkpoint)


def test_missing_file_or_invalid_number_is_an_error(tmp_path, checkpoint):
    with pytest.raises(WeightsError, match="model_best.pth"):
        draw(tmp_path)
    with pytest.raises(DataError, match=r"metrics.json"):
        draw(tmp_path / "x.pth", "--kind", "curves")
    with pytest.raises(ConfigError, match="--num 0"):
        draw(checkpoint, "--num", 0)


def test_unwritable_output_folder_is_an_error(run_folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/curves.png"):
        draw(run_folder, "--kind", "curves", "--output", tmp_path / "file")
