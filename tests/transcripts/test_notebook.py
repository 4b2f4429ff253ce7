"""Transcript of a notebook: a new process trains, predicts and makes mistakes, without default_setup."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import notebook
import pytest

pytestmark = pytest.mark.integration

NOTEBOOK = Path(__file__).with_name("notebook.ipynb")


def run_by_exec(folder):
    """Run the cells in a new process in ``folder`` and return the output of each."""
    done = subprocess.run(
        [sys.executable, notebook.__file__, str(NOTEBOOK)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", [False, True], ids=["exec", "nbclient"])
def test_notebook_trains_and_predicts_with_log_and_explanations(kernel, demo, tmp_path, monkeypatch):
    if kernel and not all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel")):
        pytest.skip("needs nbclient and ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.chdir(tmp_path)
    outputs = notebook.run_in_kernel(NOTEBOOK) if kernel else run_by_exec(tmp_path)
    config, training, metrics, predictor, features, comparison, model, mistakes, again = outputs

    assert config.strip() == "2"
    for text in ("epoch 1/2", "epoch 2/2", "new best score", "training finished in", "next:", "| train "):
        assert text in training, text
    for text in ("training 2 epochs of 3 iterations", "training finished in"):
        assert training.count(text) == 1, text  # no duplicate handlers
    assert "raw pixels" in metrics
    assert "Predictor('logs/notebook/model_best.pth', model=Baseline" in predictor and "precision: " in predictor
    assert "torch.Size([5, 512])" in features and "torch.Size([2, 512])" in model
    assert "cosine" in comparison
    kinds = ("DataError", "TypeError", "ValueError", "ConfigError", "TypeError")
    lines = [line for line in mistakes.splitlines() if line.partition(":")[0] in kinds]
    assert [line.partition(":")[0] for line in lines] == list(kinds) and mistakes.count("fix: ") == len(kinds)
    for text in outputs:
        assert "Traceback" not in text and "too many indices" not in text and "has no attribute" not in text
        assert "Warning: " not in text.replace("WARNING: ", ""), text
    assert "['evaluation', 'previous-1']" in again or "['previous-1']" in again
    log = (tmp_path / "logs/notebook/log.txt").read_text()
    assert log.count("training finished in") == 1 and "epoch 2/2" in log
