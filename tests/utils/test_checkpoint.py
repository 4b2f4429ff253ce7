"""Checkpoints: atomic, exact, never running code, and clear about what is wrong with a file."""

import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from fastamp.utils.checkpoint import Checkpointer, read_checkpoint, state_dict_in
from fastamp.utils.errors import WeightsError
from fastamp.utils.load_state import load_model_state


class Model(nn.Module):
    def __init__(self, width=4, classes=3):
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))
        self.heads = nn.Module()
        self.heads.classifiers = ("weight",)
        self.heads.weight = nn.Parameter(torch.zeros(classes, width))


class Part:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def save(state, path):
    torch.save(state, path)
    return path


def test_save_and_resume_are_exact(tmp_path):
    model, part = Model(), Part(7)
    checkpointer = Checkpointer(model, tmp_path, part=part)
    assert checkpointer.last_checkpoint() is None
    path = checkpointer.save("model_0001", extra=[1, 2.5, "x"])
    assert checkpointer.last_checkpoint() == path
    other, other_part = Model(), Part(0)
    extra = Checkpointer(other, tmp_path, part=other_part).resume(path)
    assert extra == {"extra": [1, 2.5, "x"]} and other_part.value == 7
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.load(path, weights_only=True)["part"] == {"value": 7}


def test_a_failing_save_leaves_the_former_file(tmp_path):
    checkpointer = Checkpointer(Model(), tmp_path)
    path = checkpointer.save("model_best")
    before = path.read_bytes()
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpointer.save("model_best", broken=lambda: None)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last_checkpoint", "model_best.pth"]


def test_written_files_have_ordinary_permissions(tmp_path):
    path = Checkpointer(Model(), tmp_path).save("model")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("wrap", ["model", "state_dict", None])
def test_forms_of_weights_files(tmp_path, wrap):
    model = Model()
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    state |= {"pixel_mean": torch.zeros(1, 3, 1, 1), "pixel_std": torch.ones(1, 3, 1, 1)}
    path = save({wrap: state, "epoch": np.float64(3)} if wrap else state, tmp_path / "weights.pth")
    other = Model()
    Checkpointer(other).load(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_numpy_scalars_are_allowed(tmp_path):
    path = save({"model": Model().state_dict(), "best": np.float32(1.5), "n": np.int64(3)}, tmp_path / "w.pth")
    assert read_checkpoint(path)["best"] == 1.5


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_code_in_a_file_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save({"model": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(WeightsError, match="never loads") as error:
        read_checkpoint(path)
    assert "system" in str(error.value)
    assert not (tmp_path / "executed").exists()


def test_broken_files_are_named(tmp_path):
    good = save(Model().state_dict(), tmp_path / "good.pth").read_bytes()
    cases = {
        "empty.pth": (b"", "it is empty"),
        "truncated.pth": (good[: len(good) // 2], "truncated"),
        "text.pth": (b"these are no weights\n" * 50, "no file that torch.save wrote"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=message) as error:
            read_checkpoint(tmp_path / name)
        assert name in str(error.value)
    with pytest.raises(WeightsError, match=r"does not exist\n  that folder has: .*good.pth"):
        read_checkpoint(tmp_path / "god.pth")
    with pytest.raises(WeightsError, match="is a folder"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_bytes_never_give_another_error(tmp_path, seed):
    content = bytearray(save(Model().state_dict(), tmp_path / "w.pth").read_bytes())
    rng = np.random.default_rng(seed)
    for _ in range(20):
        content[rng.integers(len(content))] = rng.integers(256)
    (tmp_path / "w.pth").write_bytes(content)
    try:
        read_checkpoint(tmp_path / "w.pth")
    except WeightsError as error:
        assert "w.pth" in str(error)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {"model": {"a": "b"}}, torch.ones(3)])
def test_files_without_a_state_dict(tmp_path, content):
    with pytest.raises(WeightsError, match="holds no state dict"):
        state_dict_in(content, "x.pth")


def test_other_entries_and_prefixes_do_not_disturb(tmp_path):
    state = {f"module.module.{key}": value for key, value in Model().state_dict().items()} | {0: torch.ones(2)}
    path = save(state, tmp_path / "x.pth")
    assert state_dict_in(read_checkpoint(path), path).keys() == Model().state_dict().keys()
    with pytest.raises(WeightsError, match="no state dict"):
        state_dict_in({0: torch.ones(2)}, "x.pth")


def test_what_is_not_loaded_is_named_without_pytorchs_advice(tmp_path):
    for value, name in ((np.uint16(3), "UInt16DType"), (np.zeros(3), "_reconstruct")):
        with pytest.raises(WeightsError, match=f"objects other than tensors.*\n.*{name}\n") as error:
            read_checkpoint(save({"a": value}, tmp_path / "x.pth"))
        assert "safe_globals" not in str(error.value) and "weights_only" not in str(error.value)


CONVERSIONS = {
    "integers": lambda value: value.to(torch.int8),
    "complex": lambda value: value.to(torch.complex64),
    "sparse": torch.Tensor.to_sparse,
    "without content": lambda value: value.to("meta"),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_tensors_that_are_no_weights_are_refused(kind):
    state = Model().state_dict()
    state["backbone.0.weight"] = CONVERSIONS[kind](state["backbone.0.weight"])
    with pytest.raises(WeightsError, match="x.pth are no floating-point numbers: 1 tensors .backbone.0.weight"):
        load_model_state(Model(), state, source="x.pth")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_floating_point_precision_are_taken(dtype):
    model = Model()
    load_model_state(
        model, {key: torch.ones_like(value, dtype=dtype) for key, value in model.state_dict().items()}, source="x"
    )
    assert all(value.dtype == torch.float32 and bool((value == 1).all()) for value in model.state_dict().values())


def test_weights_of_another_model_are_refused_and_nothing_changes():
    model = Model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"other shapes\n    backbone.0.weight: file \(5, 5\), model \(4, 4\)"):
        load_model_state(model, Model(width=5).state_dict(), source="x")
    with pytest.raises(WeightsError, match=r"matched  0 \(0%\) of the model's tensors, 0% of the backbone's"):
        load_model_state(model, {"foo": torch.ones(1)}, source="x")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_share_of_the_backbone_that_must_match():
    state = Model().state_dict()
    del state["backbone.0.weight"], state["backbone.0.bias"]
    with pytest.raises(WeightsError, match="MODEL.WEIGHTS_MIN_MATCH"):
        load_model_state(Model(), state, source="x")
    load_model_state(Model(), state, source="x", min_match=0.8)


def test_what_a_backbone_has_no_place_for_is_a_warning(caplog):
    state = Model().state_dict() | {"backbone.9.weight": torch.ones(1), "backbone.fc.weight": torch.ones(1)}
    load_model_state(Model(), state, source="x.pth")
    assert "the backbone in x.pth has 1 tensors that the model's does not have (backbone.9.weight)" in caplog.text


def test_only_the_classifier_may_differ_in_shape():
    model, source = Model(classes=3), Model(classes=9)
    load_model_state(model, source.state_dict(), source="x")
    assert torch.equal(model.backbone[0].weight, source.backbone[0].weight)
    assert model.heads.weight.shape == (3, 4)


def test_resume_refuses_what_is_no_checkpoint_of_this_run(tmp_path):
    bare = save(Model().state_dict(), tmp_path / "bare.pth")
    with pytest.raises(WeightsError, match="model, part missing; it is no checkpoint of such a run"):
        Checkpointer(Model(), tmp_path, part=Part(1)).resume(bare)
    other = Checkpointer(Model(classes=9), tmp_path, part=Part(1)).save("other")
    with pytest.raises(WeightsError, match=r"another model, 1 tensors differ \(heads.weight\)"):
        Checkpointer(Model(), tmp_path, part=Part(1)).resume(other)
