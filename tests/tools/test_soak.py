"""What the soak looks at: that one value more or less is found, and that a broken checkpoint is no whole one."""

import json

import pytest
import soak
import torch


def make_run(folder, **changes):
    folder.mkdir()
    content = {"model": {"w": torch.ones(2)}, "trainer": {"iteration": 4, "best": None}, "random": (1, (2.0, "x"))}
    torch.save(content | {"config": f"OUTPUT_DIR: {folder}"} | changes, folder / "model_final.pth")
    (folder / "metrics.json").write_text("".join(json.dumps({"iteration": n}) + "\n" for n in (0, 2)))
    (folder / "last_checkpoint").write_text("model_final.pth")
    return folder


@pytest.mark.parametrize(
    "changes, place",
    [
        ({}, None),
        ({"model": {"w": torch.tensor([1.0, 1 + 2**-23])}}, ".model.w"),
        ({"model": {"w": torch.ones(2), "more": torch.ones(1)}}, ".model.more"),
        ({"trainer": {"iteration": 5, "best": None}}, ".trainer.iteration"),
        ({"random": (1, (2.0, "y"))}, ".random.1.1"),
    ],
)
def test_any_value_that_differs_is_found(tmp_path, changes, place):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", **changes)
    assert soak.differences(one, other) == ([place] if place else [])


def test_a_line_of_metrics_that_is_there_twice_is_found(tmp_path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    with (other / "metrics.json").open("a") as file:
        file.write('{"iteration": 2}\n')
    assert soak.differences(one, other) == ["the iterations in metrics.json"]


def test_a_truncated_checkpoint_is_not_whole(tmp_path):
    run = soak.Run(tmp_path / "none", [], tmp_path / "console")
    assert not run.is_whole() and run.newest_time() == 0
    run = soak.Run(make_run(tmp_path / "run"), [], tmp_path / "console")
    assert run.is_whole() and run.newest_time() > 0
    assert run.truncate() == "model_final.pth"
    assert not run.is_whole()


def test_bad_input(tmp_path, capsys):
    config = ["--config-file", "configs/Demo/quickstart.yml"]
    assert soak.cli([*config, "--kills", "2"]) == 2
    assert "--kills is 2" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert soak.cli([*config, "OUTPUT_DIR", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
