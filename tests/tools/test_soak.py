"""tools/soak.py: differences between runs, and damaged checkpoints."""

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
    "changes, path",
    [
        ({}, None),
        ({"model": {"w": torch.tensor([1.0, 1 + 2**-23])}}, ".model.w"),
        ({"model": {"w": torch.ones(2), "more": torch.ones(1)}}, ".model.more"),
        ({"trainer": {"iteration": 5, "best": None}}, ".trainer.iteration"),
        ({"random": (1, (2.0, "y"))}, ".random.1.1"),
    ],
)
def test_soak_finds_values_that_differ_between_checkpoints(tmp_path, changes, path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", **changes)
    assert soak.differences(one, other) == ([path] if path else [])


def test_soak_finds_duplicate_line_in_metrics_json(tmp_path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    with (other / "metrics.json").open("a") as file:
        file.write('{"iteration": 2}\n')
    assert soak.differences(one, other) == ["iterations in metrics.json"]


def test_soak_detects_that_truncated_checkpoint_is_not_loadable(tmp_path):
    run = soak.Run(tmp_path / "none", [], tmp_path / "console")
    assert not run.is_loadable() and run.newest_time() == 0
    run = soak.Run(make_run(tmp_path / "run"), [], tmp_path / "console")
    assert run.is_loadable() and run.newest_time() > 0
    assert run.truncate() == "model_final.pth"
    assert not run.is_loadable()


def test_soak_exits_with_2_for_invalid_kills_or_output_dir(tmp_path, input_error):
    config = ["--config-file", "configs/Demo/quickstart.yml"]
    assert "--kills" in input_error(soak.cli, [*config, "--kills", "2"])
    (tmp_path / "file").touch()
    assert "OUTPUT_DIR" in input_error(soak.cli, [*config, "OUTPUT_DIR", str(tmp_path)])
