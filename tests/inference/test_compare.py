"""Tests of image comparison, with genuine and impostor pairs as reference."""

import json
import shutil

import numpy as np
import pytest
import tiny
import torch
from command import run_command

from fastamp import Predictor
from fastamp.cli import compare as command
from fastamp.data.build import build_dataset
from fastamp.engine import DefaultTrainer
from fastamp.evaluation.pairs import PairScores
from fastamp.inference.extract import extract
from fastamp.inference.similarity import sample_pair_scores
from fastamp.utils.errors import DataError


@pytest.fixture
def two(demo):
    query, other = build_dataset("Demo").query[:2]
    return query.path, other.path


def without_pairs(checkpoint, path):
    content = torch.load(checkpoint, weights_only=True)
    del content["pairs"]
    torch.save(content, path)
    return path


def test_compare_uses_reference_pairs_stored_in_the_checkpoint(predictor, run_folder, two):
    comparison = predictor.compare(*two)
    a, b = predictor.features(list(two))
    assert comparison.score == pytest.approx(torch.cosine_similarity(a, b, dim=0).item(), abs=1e-5)
    assert comparison.metric == "cosine" and comparison.source == "Demo"
    same = predictor.compare(two[0], two[0])
    assert same.score == pytest.approx(1, abs=1e-5) and same.score <= 1
    assert same.genuine_fraction > 0.99 and same.impostor_fraction > 0.99
    text = comparison.describe()
    assert f"{100 * comparison.impostor_fraction:.1f} % of impostor pairs" in text
    assert f"lower than {100 * (1 - comparison.genuine_fraction):.1f} % of genuine pairs" in text
    final = torch.load(run_folder / "model_final.pth", weights_only=True)["pairs"]["Demo"]
    assert torch.equal(final["genuine"], comparison.pairs.genuine)


def test_pair_scores_from_extraction_equal_those_from_evaluation(predictor, checkpoint, two, tmp_path):
    extraction, _ = extract(predictor, "Demo", tmp_path / "demo.npz")
    sampled, found = (
        PairScores(**predictor.extra["pairs"]["Demo"]),
        sample_pair_scores(extraction, seed=predictor.cfg.TEST.SEED),
    )
    assert (sampled.num_genuine, sampled.num_impostor) == (found.num_genuine, found.num_impostor)
    assert torch.allclose(sampled.genuine, found.genuine, atol=1e-3)
    assert torch.allclose(sampled.impostor, found.impostor, atol=1e-3)
    bare = Predictor(without_pairs(checkpoint, tmp_path / "bare.pth"), device="cpu")
    nothing = bare.compare(*two)
    assert nothing.pairs is nothing.impostor_fraction is nothing.genuine_fraction is None
    assert "--reference" in nothing.describe()
    held = bare.compare(*two, reference=extraction.path)
    assert held.impostor_fraction == pytest.approx(predictor.compare(*two).impostor_fraction, abs=0.02)
    assert bare.compare(*two, reference=found).pairs is found
    # Training images have no query and gallery, so all pairs are used.
    train, _ = extract(predictor, "Demo", tmp_path / "train.npz", splits=["train"])
    assert sample_pair_scores(train, junk=None).num_genuine == 16 * 6 * 5


def test_compare_raises_if_reference_extraction_is_unusable(predictor, checkpoint, two, tmp_path):
    (tmp_path / "images").mkdir()
    image = tmp_path / "images" / "a.jpg"
    shutil.copy(two[0], image)
    extract(predictor, tmp_path / "images", tmp_path / "plain.npz")
    with pytest.raises(DataError, match="genuine"):
        predictor.compare(*two, reference=tmp_path / "plain.npz")
    other = Predictor(checkpoint, device="cpu", opts=["INPUT.SIZE_TEST", "(32, 32)"])
    with pytest.raises(DataError, match=predictor.config_hash):
        other.compare(*two, reference=tmp_path / "plain.npz")
    with pytest.raises(DataError, match="3 images"):
        predictor.compare(np.zeros((2, 8, 8, 3), np.uint8), two[0])


def test_compare_uses_euclidean_distance_if_configured(checkpoint, two):
    predictor = Predictor(checkpoint, device="cpu", opts=["TEST.METRIC", "euclidean"])
    comparison = predictor.compare(*two)
    a, b = predictor.features(list(two))
    assert comparison.score == pytest.approx((a - b).norm().item(), rel=1e-4)
    assert comparison.pairs is None  # pairs in the checkpoint are cosine similarities
    pairs = PairScores("euclidean", torch.linspace(0, 2 * comparison.score, 1001), torch.linspace(1, 9, 1001), 9, 9)
    text = predictor.compare(*two, reference=pairs).describe()
    assert "nearer than 100.0 % of impostor pairs; farther than 50.0 % of genuine pairs" in text


@pytest.mark.integration
def test_only_checkpoints_written_after_evaluation_contain_pairs(demo, tmp_path):
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "3", "TEST.EVAL_PERIOD", "2"))
    trainer.train()
    held = {path.name: "pairs" in torch.load(path, weights_only=True) for path in tmp_path.glob("model_*.pth")}
    evaluated = {"model_0001.pth", "model_best.pth", "model_final.pth"}
    assert held == {name: name in evaluated for name in held} and "model_0000.pth" in held
    # Resume from a checkpoint without pairs.
    without_pairs(tmp_path / "model_final.pth", tmp_path / "model_final.pth")
    DefaultTrainer(trainer.cfg).resume_or_load(resume=True)


def test_compare_command_prints_text_or_json(checkpoint, two, capsys):
    assert run_command(command, checkpoint, *two, "--device", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 <= found["impostor_share"] <= 1 and found["source"] == "Demo"
    assert run_command(command, checkpoint, *two, "--device", "cpu") == 0
    assert "cosine similarity" in capsys.readouterr().out


def test_compare_command_prints_no_lines_of_the_loading(checkpoint, two, capsys, caplog):
    assert run_command(command, checkpoint, *two, "--device", "cpu") == 0
    assert not [record for record in caplog.records if record.levelname == "INFO"]
    assert capsys.readouterr().out.count("\n") <= 5
