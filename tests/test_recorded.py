"""Tests of compatibility with an earlier version: files load, runs resume identically, names and keys exist.

``tests/reference/recorded`` contains the files and documents how they were written.
"""

import copy
import importlib
import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import amp_replay
import numpy as np
import preloaded
import pytest
import record
import recorded
import tiny
import torch
import tune_net
from autotuner.search import read_outcomes
from autotuner.trial import run_trial
from recorded import FILES, RUNS, STOP

import fastamp
from fastamp import Predictor
from fastamp.config import CfgNode, get_cfg
from fastamp.config.defaults import current_path
from fastamp.diagnostics.crash import CrashDump
from fastamp.engine import DefaultTrainer
from fastamp.inference.features_file import read_extraction
from fastamp.inference.index import KINDS, load_index
from fastamp.utils.errors import ConfigError

HELPERS = Path(__file__).parent / "helpers"
FACTS = json.loads((FILES / "recorded.json").read_text())
EXPECTED = FACTS["expected"]
LARGEST_DISTANCE = 0.03
"""Maximum difference of weights on another machine, relative to their change since the interruption.

Measured: at most 0.0075 with other instruction sets or threads; at least 0.088 without an average, moments, a queue or
a teacher. Other states change counters, which are compared exactly on every machine.
"""
LATER = re.compile(r"trainer/step/recently_skipped/")
"""Entries of checkpoints that the stored files do not have yet."""

REMOVED = {
    "fastamp.amp.doctor.Soundness",
    "fastamp.amp.doctor.check_soundness",
    "fastamp.cli.doctor.LOW",
    "fastamp.config.defaults.define",
    "fastamp.data.transforms.geometry.PADDING_MODES",
    "fastamp.evaluation.rank.ranks_of",
    "fastamp.modeling.recognize.FAMILIES",
    "fastamp.report.markup",
    "fastamp.report.style",
    *(
        f"fastamp.report.sections.{name}_section"
        for name in ["config", "data", "environment", "health", "results", "training"]
    ),
    *(f"fastamp.report.svg.{name}" for name in ("COLOURS", "chart", "drawing")),
}
"""Undocumented names that were removed without a successor. Documented names keep an alias instead."""


def same_machine():
    return recorded.machine() == FACTS["machine"]


def read(path):
    return torch.load(path, weights_only=True)


def stored(name):
    return read(FILES / name / "model_interrupted.pth")


def resumable(folder, name, content=None):
    """Copy a stored run folder, optionally with modified checkpoint content."""
    shutil.copytree(FILES / name, folder / name)
    if content is not None:
        torch.save(content, folder / name / "model_interrupted.pth")
    return folder / name


@pytest.fixture(scope="module")
def straight(demo_root, tmp_path_factory):
    """Function that trains a run without interruption; returns the checkpoints at the recorded stop and at the end."""
    found = {}

    def train(name):
        if name not in found:
            kept, folder = recorded.KeepWeights(), tmp_path_factory.mktemp(name)
            recorded.train(recorded.config(folder, name), kept)
            found[name] = kept.weights, read(folder / "model_final.pth")
        return found[name]

    return train


def assert_same_end(start, first, second, *, exact):
    """Check that two trainings with equal checkpoints at ``start`` have equal final checkpoints."""
    parts = [key for key in first if key not in ("config", "policy", "pairs", "random")]
    ours, theirs = (
        {name: value for name, value in recorded.flat({key: content[key] for key in parts}) if not LATER.match(name)}
        for content in (first, second)
    )
    assert ours.keys() == theirs.keys()
    tensors = {key for key, value in ours.items() if isinstance(value, torch.Tensor)}
    hooks = {key for key in ours if key.startswith("trainer/hooks/")}
    assert {key: ours[key] for key in ours.keys() - tensors - hooks} == {
        key: theirs[key] for key in theirs.keys() - tensors - hooks
    }
    if exact:
        assert [key for key in sorted(tensors) if not torch.equal(ours[key], theirs[key])] == []
        return
    for part in {"model", "average"} & first.keys():
        prefix = "average/model/" if part == "average" else "model/"
        names = [key for key in sorted(tensors) if key.startswith(prefix) and ours[key].is_floating_point()]
        moved = sum((ours[key] - start[key.removeprefix(prefix)]).square().sum() for key in names).sqrt()
        distance = sum((ours[key] - theirs[key]).square().sum() for key in names).sqrt()
        assert distance <= LARGEST_DISTANCE * moved, part


def resume_and_compare(straight, name, folder):
    start, end = straight(name)
    exact = same_machine()
    if exact:
        weights = stored(name)["model"]
        assert [key for key, value in start.items() if not torch.equal(value, weights[key])] == []
    recorded.train(recorded.config(folder, name), resume=True)
    assert_same_end(start, end, read(folder / "model_final.pth"), exact=exact)


@pytest.mark.parametrize("name", RUNS)
def test_run_resumed_from_recorded_checkpoint_equals_uninterrupted_run(demo, tmp_path, straight, name):
    """Bit-identical on the machine that wrote the file; elsewhere within a tolerance that a lost state exceeds."""
    content = stored(name)
    assert content["trainer"]["iteration"] == STOP and STOP % content["trainer"]["iters_per_epoch"]
    folder = resumable(tmp_path, name)
    resume_and_compare(straight, name, folder)
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "lr" in row] == [1, 3, 5, 7, 9, 11]


def lose_average(content):
    content["average"]["model"] = {key: content["model"][key] for key in content["average"]["model"]}


def lose_updates(content):
    content["average"]["updates"] = 0


def lose_scale(content):
    content["trainer"]["step"]["scaler"] = {"scale": 65536.0, "good_steps": 0}


def lose_moments(content):
    for state in content["optimizer"]["state"].values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def lose_buffers(content):
    for key, value in content["model"].items():
        if key.startswith(("memory", "ema", "key_encoder", "average")):
            value.zero_()


def lose_steps(content):
    content["trainer"]["steps_taken"] = 0


@pytest.mark.parametrize(
    "name, lose",
    [
        ("ema", lose_average),
        ("swa", lose_updates),
        ("fp16", lose_scale),
        ("accumulation", lose_moments),
        ("accumulation", lose_steps),
        ("moco", lose_buffers),
        ("distiller", lose_buffers),
    ],
)
def test_comparison_of_resumed_runs_detects_a_lost_state(demo, tmp_path, straight, name, lose):
    """Negative control: one state in the checkpoint is reset before the run resumes."""
    content = stored(name)
    before = copy.deepcopy(content)
    lose(content)
    changed = dict(recorded.flat(content))
    assert any(
        not torch.equal(value, changed[key]) if isinstance(value, torch.Tensor) else value != changed[key]
        for key, value in recorded.flat(before)
    )
    with pytest.raises(AssertionError):
        resume_and_compare(straight, name, resumable(tmp_path, name, content))


# ---- hooks: states are stored by class name; a state without a hook would be dropped silently


def assert_hooks_continue(content, cfg):
    """Check that each hook state after resuming equals the stored state and differs from that of a new hook."""
    new = DefaultTrainer(cfg).trainer.state_dict()["hooks"]
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=True)
    found = list(trainer.trainer.state_dict()["hooks"].values())
    states = {name: state for name, state in content["trainer"]["hooks"].items() if state}
    assert states and [name for name, state in states.items() if state not in found] == []
    assert all(state not in new.values() for state in states.values())
    return states


def config_of(name, folder):
    return recorded.config(folder, name) if name in RUNS else tiny.tiny_config(folder, *recorded.TWO_RANKS)


@pytest.mark.parametrize("name", RUNS)
def test_resume_restores_recorded_hook_states(demo, tmp_path, name):
    states = assert_hooks_continue(stored(name), config_of(name, resumable(tmp_path, name)))
    assert len(states) == 2  # best metric, and names of periodic checkpoints


@pytest.mark.parametrize("name", ["EvalHook", "PeriodicCheckpointer"])
def test_comparison_of_hook_states_detects_a_renamed_hook(demo, tmp_path, name):
    """Negative control: a renamed hook class."""
    content = stored("ema")
    content["trainer"]["hooks"][f"{name}Renamed"] = content["trainer"]["hooks"].pop(name)
    with pytest.raises(AssertionError, match=f"{name}Renamed"):
        assert_hooks_continue(content, config_of("ema", resumable(tmp_path, "ema", content)))


def test_resumed_two_rank_run_from_recorded_checkpoint_equals_uninterrupted_run(demo_root, demo, tmp_path):
    def run(folder, *flags):
        done = preloaded.run(HELPERS / "ranks.py", *flags, folder, "2", *recorded.TWO_RANKS)
        assert done.returncode == 0, done.stderr

    folder, content = resumable(tmp_path, "two_ranks"), stored("two_ranks")
    run(tmp_path / "straight")
    run(folder, "--resume")
    steps = torch.load(tmp_path / "straight/steps.pth", weights_only=True)
    start = content["model"] | steps[content["trainer"]["iteration"] - 1]
    first, second = (read(path / "model_final.pth") for path in (tmp_path / "straight", folder))
    assert len(first["random"]["others"]) == content["trainer"]["processes"] - 1 == 1
    if same_machine():
        assert all(torch.equal(value, content["model"][key]) for key, value in start.items())
    assert_same_end(start, first, second, exact=same_machine())


# ---- other files


def test_recorded_crash_dump_can_be_replayed(capfd):
    crash = CrashDump.read(FILES / "amp_crash")
    assert crash.location["module"] == "backbone.4" and crash.iteration == 2
    assert amp_replay.cli([str(FILES / "amp_crash")]) == 1
    said = capfd.readouterr().out
    assert "reproduced" in said and "NOT" not in said and "backbone.4" in said
    recorded_losses, now = ([row[n] for row in re.findall(r"^loss_\w+ +(\S+) +(\S+)", said, re.M)] for n in (0, 1))
    assert recorded_losses and (not same_machine() or recorded_losses == now)
    assert amp_replay.cli([str(FILES / "amp_crash"), "SOLVER.AMP", "bf16"]) == 0


def test_recorded_extraction_and_indices_load_with_equal_results():
    extraction = read_extraction(FILES / "inference/gallery.npz")
    assert extraction.features.astype(float).sum(0).tolist() == EXPECTED["extraction_sum"]
    assert list(map(str, extraction.paths)) == EXPECTED["paths"]
    queries = np.array(EXPECTED["features"], dtype=np.float32)
    for kind in KINDS:
        found = load_index(FILES / f"inference/{kind}.index").search(queries, 3)
        assert found.rows.tolist() == EXPECTED[kind]["rows"], kind
        np.testing.assert_allclose(found.scores, EXPECTED[kind]["scores"], atol=0 if same_machine() else 1e-5)


def test_predictor_with_averaged_weights_reproduces_recorded_features(monkeypatch):
    model = Predictor(FILES / "ema/model_best.pth", device="cpu")
    features, expected = model.features(list(recorded.IMAGES)), torch.tensor(EXPECTED["features"])
    if same_machine():
        assert torch.equal(features, expected)
    torch.testing.assert_close(features, expected, rtol=1e-2, atol=1e-2)  # in bfloat16
    assert model.config_hash == read_extraction(FILES / "inference/gallery.npz").config_hash


# ---- FastTune


def test_recorded_fasttune_trial_continues_from_its_checkpoint(demo, tmp_path):
    (path,) = (FILES / "search/search").glob("trial_*/run/model_tune.pth")
    content, before = read(path), rows(path.with_name("reports.jsonl"))
    done = content["trainer"]["iteration"] // content["trainer"]["iters_per_epoch"]
    ends = {}
    for name, checkpoint in (("straight", None), ("resumed", path)):
        scores = ends[name] = {}
        cfg = get_cfg()
        cfg.merge_from_other_cfg(CfgNode.load_cfg(content["config"]))
        cfg.merge_from_list(["OUTPUT_DIR", str(tmp_path / name)])
        cfg = with_the_search_split(cfg)
        failure = run_trial(
            cfg,
            lambda metrics, file, scores=scores: scores.update({metrics["epoch"]: metrics["score"]}),
            checkpoint=checkpoint,
        )
        assert failure == ""
    assert list(ends["resumed"]) == list(range(done + 1, cfg.SOLVER.MAX_EPOCH + 1))
    if same_machine():
        assert (
            ends["straight"] == {row["epoch"]: row["score"] for row in before if row["epoch"] <= done} | ends["resumed"]
        )


def with_the_search_split(cfg):
    """Return ``cfg`` with the training and validation split of the stored search."""
    from autotuner.split import register_split

    facts = json.loads((FILES / "search/search/search.json").read_text())
    train, validation = register_split(cfg, facts["TUNE.VAL_FRACTION"], facts["--seed"])
    cfg.merge_from_list(["DATASETS.NAMES", train, "DATASETS.TESTS", validation, "MODEL.HEADS.NUM_CLASSES", "0"])
    return cfg


@pytest.mark.tune
def test_recorded_killed_fasttune_search_can_be_resumed(demo, tmp_path, monkeypatch, capfd):
    ray = pytest.importorskip("ray")
    if FACTS["ray"] != ray.__version__ or FACTS["python"].split(".")[:2] != sys.version.split(".")[:2]:
        pytest.skip(f"Ray pickles by its own version and Python's: {FACTS['ray']}, {FACTS['python']}")
    ray.shutdown()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), str(Path(fastamp.__file__).parents[1])]))
    shutil.copytree(FILES / "search", "search")
    facts = json.loads(Path("search/search/search.json").read_text())
    facts["--parts"] = str(tmp_path / "parts.py")
    Path("search/search/search.json").write_text(json.dumps(facts))
    before = {path.parent.parent.name: rows(path) for path in Path("search/search").glob("trial_*/run/reports.jsonl")}
    assert len(before) == 2
    assert tune_net.cli(["--resume", *recorded.search_arguments(Path("search"))]) == 0, capfd.readouterr()
    outcomes = read_outcomes(Path("search/search"))
    assert len(outcomes) == 3 and all(not each.failure and each.score for each in outcomes)
    told = {path.parent.parent.name: rows(path) for path in Path("search/search").glob("trial_*/run/reports.jsonl")}
    for name, reports in before.items():
        after = told[name]
        assert after[: len(reports)] == reports and [row["epoch"] for row in after] == list(range(1, len(after) + 1))
        if not (FILES / f"search/search/{name}/run/model_tune.pth").is_file():
            assert after == reports
        elif after == reports:  # Ray ran the new trial first and stopped this one
            others = [each for each in told.values() if each is not after and len(each) >= len(after)]
            assert any(each[len(after) - 1]["score"] > after[-1]["score"] for each in others)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- names and keys


def test_recorded_public_names_can_be_imported():
    """Moved names may raise a DeprecationWarning."""
    missing = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for module, names in json.loads((FILES / "names.json").read_text())["modules"].items():
            try:
                imported = importlib.import_module(module)
            except ModuleNotFoundError as error:
                missing.append(error.name)
                continue
            missing += [f"{module}.{name}" for name in names if not hasattr(imported, name)]
    assert sorted(missing) == sorted(REMOVED)


def test_recorded_commands_still_exist():
    there = recorded.commands()
    stored_names = json.loads((FILES / "names.json").read_text())["commands"]
    assert {where: [name for name in names if name not in there[where]] for where, names in stored_names.items()} == {
        where: [] for where in stored_names
    }


def test_recorded_config_keys_still_have_their_defaults():
    before, now = json.loads((FILES / "keys.json").read_text()), recorded.keys()
    before["keys"] = {current_path(key): value for key, value in before["keys"].items()}
    changed = [
        f"{table}: {key}: {value} -> {now[table].get(key)}"
        for table, values in before.items()
        for key, value in values.items()
        if now[table].get(key) != value
    ]
    assert changed == []


def test_recorded_config_key_aliases_are_still_accepted():
    spellings, cfg = json.loads((FILES / "keys.json").read_text()), get_cfg()
    for old, new in spellings["renamed"].items():
        cfg.merge_from_list([old, "True"])
        assert {key.path: value for key, value in cfg.keys_below()}[new] is True
    for section, key in spellings["shorthands"].items():
        cfg.merge_from_list([section, "fp16"])
        assert cfg[section.split(".")[0]][section.split(".")[1]][key] == "float16"
    for old, new in spellings["old releases"].items():
        with pytest.raises(ConfigError, match=re.escape(new)):
            get_cfg().merge_from_list([old, "1"])


def test_comparison_of_records_detects_a_difference_in_one_bit(tmp_path, capsys):
    one = {"weights": torch.tensor([1.0, float("nan")]), "loss": 0.1}
    changed = {"weights": one["weights"].clone(), "loss": np.nextafter(0.1, 1).item(), "mAP": 1.0}
    changed["weights"][0] = 1.0 + 2**-23
    for folder, values in (("a", one), ("b", one), ("c", changed)):
        (tmp_path / folder).mkdir()
        torch.save(values, tmp_path / folder / "run.pth")
    assert record.compare(tmp_path / "a", tmp_path / "b") == 0
    assert record.compare(tmp_path / "a", tmp_path / "c") == 1
    said = capsys.readouterr().out
    assert all(f"run: {key}: " in said for key in changed)
