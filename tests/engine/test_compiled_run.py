"""A run compiled with inductor: evaluation, resume and its checkpoint."""

import json
import os
import shutil

import compiled_ranks
import pytest
import tiny
import torch

from fastamp.engine.hooks import compilation
from fastamp.modeling import load_model
from fastamp.utils.compiled import compilation_of

pytestmark = [
    pytest.mark.export,
    pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="inductor needs a C++ compiler"),
]


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_compiled_run_is_evaluated_and_resumed_and_its_checkpoint_loads_in_eager(
    mode, demo, tmp_path, monkeypatch, caplog
):
    """The run accumulates gradients and has a weight average. Without dropout, it does not depend on random numbers."""
    caplog.set_level("INFO")
    monkeypatch.setattr(compilation, "COMPARED", 0)  # all steps except for the first are compiled
    options = (*compiled_ranks.OPTIONS, *compiled_ranks.COMPILED["inductor"][0], "MODEL.COMPILE_MODE", mode)
    options += ("SOLVER.CHECKPOINT_PERIOD", "1")
    torch.compiler.reset()
    trainer = tiny.trainer_of(tmp_path / "straight", *options)
    trainer.train()
    assert compilation_of(trainer.model).seconds > 0  # None after a failed compilation
    rows = [json.loads(line) for line in (tmp_path / "straight/metrics.json").read_text().splitlines()]
    assert any("Demo/mAP" in row for row in rows)
    log = (tmp_path / "straight/log.txt").read_text()
    assert "for training in" in log and "for evaluation in" in log

    stopped = tiny.trainer_of(tmp_path / "resumed", *options)
    stopped.register_hooks([tiny.StopAt(4)])
    with pytest.raises(tiny.Stopped):
        stopped.train()
    resumed = tiny.trainer_of(tmp_path / "resumed", *options)
    resumed.train()
    assert "after iteration 3" in caplog.text
    one, two = (torch.load(tmp_path / f"{name}/model_final.pth", weights_only=True) for name in ("straight", "resumed"))
    for expected, found in ((one["model"], two["model"]), (one["average"]["model"], two["average"]["model"])):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)

    path = tmp_path / "straight/model_final.pth"
    loaded = {backend: load_model(path, device="cpu", opts=["MODEL.COMPILE", backend]) for backend in ("off", "on")}
    assert compilation_of(loaded["off"].model) is None
    assert loaded["off"].model.state_dict().keys() == one["model"].keys() and "backbone.0.weight" in one["model"]
    batch = {"images": torch.randint(256, (8, 3, 64, 32), dtype=torch.uint8)}
    with torch.no_grad():
        eager, compiled = (found.model(batch) for found in loaded.values())
    assert compilation_of(loaded["on"].model).seconds > 0
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert eager.std(0).min() > 1e-4  # the features of the images differ
