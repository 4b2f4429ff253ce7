"""Tests that a run writes only to OUTPUT_DIR and prints no terminal escape sequences."""

import logging
import os

import pytest
import tiny
import train_net
from PIL import Image

from fastamp.data.cache import ImageCache
from fastamp.data.datasets.base import ImageItem
from fastamp.data.decode import read_image
from fastamp.utils.errors import DataError
from fastamp.utils.files import folder_name
from fastamp.utils.logger import setup_logger
from fastamp.utils.terminal_text import sanitize_terminal_text


@pytest.mark.parametrize(
    "name", ["csv:/data/../../x.csv", "folder:../..", "..", ".", "", "a\\..\\b", "x" * 5000, "é" * 300]
)
def test_evaluation_folder_name_is_a_single_path_component_for_any_dataset(tmp_path, name):
    folder = tmp_path / "evaluation" / folder_name(name)
    folder.mkdir(parents=True)
    assert folder.resolve().parent == (tmp_path / "evaluation").resolve()


def test_evaluation_folder_names_of_different_datasets_differ():
    names = ["a/b", "a%2Fb", "a_b", "..", "%2E%2E", "x" * 5000, "x" * 5001, "Market1501", "csv:mine.csv"]
    assert len({folder_name(name) for name in names}) == len(names)
    assert folder_name("Market1501") == "Market1501"


@pytest.mark.integration
def test_evaluation_writes_only_into_output_dir_if_the_dataset_path_contains_parent_folders(demo, tmp_path, capfd):
    data = tmp_path / "deep" / "data"
    data.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (32, 64), (number * 60, 0, 0)).save(data / f"{number}.png")
    lines = [f"{n}.png,{n // 2},{n % 2},{('query', 'gallery')[n % 2]}" for n in range(4)]
    (data / "mine.csv").write_text("\n".join(["path,pid,camid,split", *lines]))
    name = f"csv:{data}{'/..' * (len(data.parts) - 1)}{data}/mine.csv"
    output = tmp_path / "output"
    options = ("DATASETS.TESTS", name, "TEST.PER_QUERY", "True", "SOLVER.MAX_EPOCH", "1")
    assert train_net.cli(tiny.tiny_options(output, *options)) == 0
    assert [path.parents[2] for path in tmp_path.rglob("per_query.npz")] == [output]


@pytest.mark.integration
def test_training_does_not_write_through_links_out_of_output_dir(demo, tmp_path, input_error):
    output, precious = tmp_path / "output", tmp_path / "precious"
    output.mkdir()
    precious.write_text("mine")
    (output / "log.txt").symlink_to(precious)
    assert "log.txt" in input_error(train_net.cli, tiny.tiny_options(output))
    assert precious.read_text() == "mine"
    (output / "log.txt").unlink()
    for name in ("config.yaml", "metrics.json", "last_checkpoint", "model_final.pth"):
        (output / name).symlink_to(precious)
    assert train_net.cli(tiny.tiny_options(output, "SOLVER.MAX_EPOCH", "1")) == 0
    assert precious.read_text() == "mine"


@pytest.mark.integration
def test_training_with_circular_links_in_output_dir_exits_with_2(demo, here, capfd):
    output = here / "output"
    (output / "evaluation").mkdir(parents=True)
    (output / "evaluation/a").symlink_to("b")
    (output / "evaluation/b").symlink_to("a")
    (output / "log.txt").symlink_to("log.txt")
    assert train_net.cli(tiny.tiny_options(output)) == 2
    assert "Too many levels of symbolic links" in (err := capfd.readouterr().err) and "Traceback" not in err


def test_image_cache_in_memory_raises_if_the_folder_is_not_private(tmp_path, monkeypatch):
    monkeypatch.setattr("fastamp.data.cache._SHARED_MEMORY", tmp_path)
    folder = tmp_path / f"fastamp-cache-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    items = [ImageItem(str(tmp_path / "a.png"), "a", 0)]
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="DATALOADER.CACHE ram"):
        ImageCache(items, (3, 4, 4), lambda number: read_image(items[0].path), where="ram")
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(DataError, match="DATALOADER.CACHE ram"):
        ImageCache(items, (3, 4, 4), lambda number: read_image(items[0].path), where="ram")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_terminal_escape_sequences_in_messages_are_escaped(tmp_path, input_error, capsys):
    assert sanitize_terminal_text("a\x1b[2Jb\r\u202ec\ud880\n\té") == "a\\x1b[2Jb\\r\\u202ec\\ud880\n\té"
    setup_logger(tmp_path)
    logging.getLogger("fastamp").warning("reading %s", "\x1b]0;owned\x07 \udcff")
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        assert "reading \\x1b]0;owned\\x07 \\udcff" in text and "\x1b]" not in text
    with pytest.raises(SystemExit):
        train_net.cli(["--num-gpus", "x"])
    capsys.readouterr()
    assert "\\x1b[31mnone.yml" in input_error(train_net.cli, ["--config-file", "\x1b[31mnone.yml"])
