"""Command `fastamp visualize`: figures of a run or a checkpoint, and invalid arguments."""

import argparse
import sys

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from fastamp.cli import visualize
from fastamp.data.datasets.base import ImageItem
from fastamp.evaluation import Protocol
from fastamp.evaluation.retrieval_examples import RankList
from fastamp.report import figures
from fastamp.utils import fonts
from fastamp.utils.errors import ConfigError, DataError, WeightsError

FONTS = fonts._font_files()


def draw(*words):
    parser = argparse.ArgumentParser()
    visualize.add_arguments(parser)
    return visualize.run(parser.parse_intermixed_args([str(word) for word in words]))


@pytest.mark.integration
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


@pytest.mark.integration
@pytest.mark.parametrize("file_format, start", [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_visualize_writes_figures_for_papers(demo, checkpoint, tmp_path, file_format, start):
    options = ("--kind", "rank-lists", "cmc", "--num", 1, "--length", 2, "--output", tmp_path, "--device", "cpu")
    assert draw(checkpoint, "--format", file_format, "--dpi", 200, *options) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "Demo").iterdir()}
    assert {f"rank_list_worst.{file_format}", f"cmc.{file_format}"} <= files.keys()
    assert all(content.startswith(start) for content in files.values())
    assert file_format == "svg" or b"/FontFile2" in files["cmc.pdf"]  # embedded TrueType fonts


def test_visualize_dpi_sets_the_size_of_the_image(demo, checkpoint, tmp_path):
    sizes = []
    for dpi in (60, 120):
        draw(checkpoint, "--kind", "cmc", "--dpi", dpi, "--output", tmp_path / str(dpi), "--device", "cpu")
        with Image.open(tmp_path / str(dpi) / "Demo" / "cmc.png") as image:
            sizes.append(image.size)
    assert sizes[1] == (2 * sizes[0][0], 2 * sizes[0][1])
    with pytest.raises(ConfigError, match=r"--dpi.* 5\b"):
        draw(checkpoint, "--dpi", 5)


def test_figures_draw_names_and_files_and_escape_characters_without_a_font(tmp_path, monkeypatch):
    monkeypatch.setattr(fonts, "_font_files", lambda: tuple(p for p in FONTS if p.name == "DejaVuSans.ttf"))
    figure = figures.new_figure(2, 2)
    figure.suptitle("Анна 中 $x")
    figures.write_figure(figure, tmp_path / "a.svg")
    (title,) = [text.get_text() for text in figure.findobj(Text) if "x" in text.get_text()]
    assert title == r"Анна \u4e2d $x" and (tmp_path / "a.svg").stat().st_size > 1000


@pytest.mark.filterwarnings("error")  # matplotlib warns of characters that it draws as boxes
@pytest.mark.parametrize("name", ["محمد علي", "דוד", "नमस्ते", "李雷"])
def test_figures_draw_no_boxes_for_names_in_any_script(tmp_path, monkeypatch, name):
    monkeypatch.setattr(fonts, "_font_files", lambda: tuple(p for p in FONTS if p.name == "DejaVuSans.ttf"))
    figure = figures.new_figure(2, 2)
    figure.suptitle(name)
    figures.write_figure(figure, tmp_path / "a.png")
    (title,) = [text.get_text() for text in figure.findobj(Text) if text.get_text()]
    assert (title == name) == (name in ("محمد علي", "דוד"))


def test_names_below_the_images_of_a_rank_list_fit_after_escaping(tmp_path, monkeypatch):
    monkeypatch.setattr(fonts, "_font_files", lambda: tuple(p for p in FONTS if p.name == "DejaVuSans.ttf"))
    item = ImageItem(str(tmp_path / "前门摄像头 0001.jpg"), "前门摄像头的人员", "大厅东侧的摄像头")
    ranked = RankList(0, np.array([0]), np.array([0.5], dtype=np.float32), np.array([True]), 1.0, 1)
    figure = figures.rank_list_figure([ranked], [item], [item], Protocol())
    figures.write_figure(figure, tmp_path / "a.png")
    labels = [line for axes in figure.axes for line in axes.get_xlabel().split("\n")]
    names = [line for line in labels if "\\u" in line or line.endswith(".jpg")]
    assert len(names) == 6 and max(map(len, names)) <= 15
    assert sum(line.endswith("0001.jpg") for line in labels) == 2


def test_visualize_error_names_pip_extra_if_matplotlib_is_missing(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "fastamp\[vis\]"'):
        draw(checkpoint)


def test_visualize_rejects_missing_files_and_num_0(tmp_path, checkpoint):
    with pytest.raises(WeightsError, match="model_best.pth"):
        draw(tmp_path)
    with pytest.raises(DataError, match=r"metrics.json"):
        draw(tmp_path / "x.pth", "--kind", "curves")
    with pytest.raises(SystemExit):
        draw(checkpoint, "--num", 0)


def test_visualize_rejects_an_unwritable_output_folder(run_folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/curves.png"):
        draw(run_folder, "--kind", "curves", "--output", tmp_path / "file")
