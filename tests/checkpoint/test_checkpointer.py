"""Checkpoints: atomic, exact, never running code, and clear about what is wrong with a file."""

import logging
import os
import pickle
import warnings
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import (
    checkpoint_size,
    damaged_record,
    read_checkpoint,
    state_dict_in,
    write_checkpoint,
)
from fastamp.utils.errors import WeightsError


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
        "image.pth": (b"\xff\xd8\xff\xe0" * 50, "no file that torch.save wrote"),
        "hello.pth": (b"hello\n", r"found: a file that begins with b'hello"),
        "pointer.pth": (b"version https://git-lfs.github.com/spec/v1\n", r"begins with b'version https://git-lfs"),
        "pickle.pth": (b"\x80\x02}", "no file that torch.save wrote"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=message) as error:
            read_checkpoint(tmp_path / name)
        assert name in str(error.value) and "weights_only" not in str(error.value)
    with pytest.raises(WeightsError, match=r"does not exist\n  that folder has: .*good.pth"):
        read_checkpoint(tmp_path / "god.pth")
    with pytest.raises(WeightsError, match="is a folder"):
        read_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="does not exist"):
        read_checkpoint(f"{'x' * 5000}.pth")


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


# ---- checksums


def record_spans(path):
    """Return name -> (begin, end) of each record's bytes in a zip archive without compression."""
    content, spans = path.read_bytes(), {}
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            head = record.header_offset
            begin = head + 30 + sum(int.from_bytes(content[head + at : head + at + 2], "little") for at in (26, 28))
            spans[record.filename] = (begin, begin + record.file_size)
    return spans


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def test_every_flipped_bit_in_a_record_is_found(tmp_path):
    path = save({"weight": torch.arange(6.0), "none": torch.zeros(0), "number": 3}, tmp_path / "w.pth")
    good = path.read_bytes()
    assert damaged_record(path) == ""
    for name, (begin, end) in record_spans(path).items():
        for at in range(begin, end):
            flip(path, at, bit=at % 8)
            assert damaged_record(path) == name
            with pytest.raises(WeightsError, match=f"w.pth .*cannot be loaded: its record {name} is not what was"):
                read_checkpoint(path)
            path.write_bytes(good)
    assert torch.equal(read_checkpoint(path)["weight"], torch.arange(6.0))


def test_pytorch_itself_takes_a_flipped_bit(tmp_path):
    """The negative control: why checksums are compared here."""
    path = save({"weight": torch.arange(6.0)}, tmp_path / "w.pth")
    flip(path, next(begin for name, (begin, _) in record_spans(path).items() if name.endswith("data/0")) + 6, bit=7)
    assert not torch.equal(torch.load(path, weights_only=True)["weight"], torch.arange(6.0))


def test_files_without_checksums_are_taken(tmp_path):
    state = {"weight": torch.arange(6.0)}
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "without.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert zipfile.ZipFile(tmp_path / "without.pth").testzip()  # what a plain test of the archive would refuse
    for name in ("old.pth", "without.pth"):
        assert torch.equal(read_checkpoint(tmp_path / name)["weight"], torch.arange(6.0))


# ---- the newest whole checkpoint


def make_run(folder, *names):
    """Save checkpoints, each later than the one before, and return their checkpointer."""
    checkpointer = Checkpointer(Model(), folder, part=Part(1))
    for second, name in enumerate(names):
        path = checkpointer.save(name, tag=name != "model_best")
        os.utime(path, (second, second))
    return checkpointer


def damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        flip(path, max(record_spans(path).values(), key=lambda span: span[1] - span[0])[0])
    else:
        path.write_bytes({"empty": b"", "truncated": path.read_bytes()[:-50], "garbage": os.urandom(999)}[how])


SAID = {
    "missing": "last_checkpoint names 'model_0002.pth', which is no file",
    "flipped": "model_0002.pth .*is not what was written, by the checksum",
    "empty": "model_0002.pth .*it is empty",
    "truncated": "model_0002.pth .*it is truncated",
    "garbage": "model_0002.pth .*it is no file that torch.save wrote",
}


@pytest.mark.parametrize("how", SAID)
def test_the_checkpoint_before_a_damaged_one(tmp_path, caplog, how):
    checkpointer = make_run(tmp_path, "model_0000", "model_0001", "model_best", "model_0002")
    damage(tmp_path / "model_0002.pth", how)
    assert checkpointer.last_checkpoint() == tmp_path / "model_0001.pth"
    (record,) = caplog.records
    said, taken = record.getMessage().split("\n")
    assert record.levelno == logging.WARNING and "taking" in taken and "model_0001.pth" in taken
    with pytest.raises(WeightsError, match=SAID[how]):
        raise WeightsError(said)


def test_the_newest_is_by_time_and_must_hold_all_that_a_run_needs(tmp_path):
    checkpointer = make_run(tmp_path, "model_0003", "model_iter_0000002", "model_interrupted", "model_best")
    save({"model": Model().state_dict()}, tmp_path / "model_exported.pth")
    (tmp_path / "last_checkpoint").unlink()
    assert checkpointer.last_checkpoint() == tmp_path / "model_interrupted.pth"
    damage(tmp_path / "model_interrupted.pth", "flipped")
    assert checkpointer.last_checkpoint() == tmp_path / "model_iter_0000002.pth"


@pytest.mark.parametrize(
    "pointer", [b"", b"..", b"model_0009.pth", b"\xff\x00\xfe", b"x" * 9999, b"../../model_0001.pth"]
)
def test_a_pointer_that_is_garbage(tmp_path, pointer):
    checkpointer = make_run(tmp_path / "run", "model_0000")
    (tmp_path / "run/last_checkpoint").write_bytes(pointer)
    assert checkpointer.last_checkpoint() == tmp_path / "run/model_0000.pth"


def test_when_none_is_whole_all_are_listed(tmp_path):
    checkpointer = make_run(tmp_path, "model_best", "model_0000", "model_0001")
    damage(tmp_path / "model_0000.pth", "truncated")
    damage(tmp_path / "model_0001.pth", "flipped")
    with pytest.raises(
        WeightsError, match=r"(?s)no checkpoint in .* is whole:.*model_0001.*checksum.*model_0000.*trunc"
    ):
        checkpointer.last_checkpoint()


def test_the_model_best_is_taken_by_its_name_alone(tmp_path):
    checkpointer = make_run(tmp_path, "model_best")
    assert checkpointer.last_checkpoint() is None
    (tmp_path / "last_checkpoint").write_text("model_best.pth")
    assert checkpointer.last_checkpoint() == tmp_path / "model_best.pth"


def test_deleting_leaves_what_last_checkpoint_names(tmp_path):
    checkpointer = make_run(tmp_path, "model_0000", "model_0001")
    checkpointer.delete(["model_0000", "model_0001", "model_0009"])
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["model_0001.pth"]


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    checkpointer = make_run(tmp_path, "model_0000")
    left = ("model_0001.pth", "last_checkpoint", "config.yaml", "metrics.json", "report.html")
    for name in (*(f".{each}.abc.tmp" for each in left), ".other.tmp", "model_x.tmp"):
        (tmp_path / name).write_text("")
    checkpointer.remove_leftovers()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model_0000.pth", "last_checkpoint", ".other.tmp", "model_x.tmp"}


def test_a_link_that_leads_back_or_nowhere(tmp_path):
    for name, target in (("a.pth", "b.pth"), ("b.pth", "a.pth"), ("c.pth", "nowhere.pth")):
        (tmp_path / name).symlink_to(target)
    for name in ("a.pth", "c.pth"):
        with pytest.raises(WeightsError, match=rf"{name} is a link to (b|nowhere)\.pth, which does not exist"):
            read_checkpoint(tmp_path / name)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_torchscript_archive_is_named_as_one(tmp_path, recwarn, parts):
    """Also where its code, which is compressed, is larger than its weights."""
    parts = [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()][:parts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Sequential(*parts)), tmp_path / "model.pt")
    with pytest.raises(WeightsError, match=r"model\.pt is a TorchScript archive(.|\n)*torch\.jit\.load\("):
        read_checkpoint(tmp_path / "model.pt")
    assert not recwarn.list
    # The advice works.
    fix = torch.jit.load(str(tmp_path / "model.pt"), map_location="cpu").state_dict()
    assert {"0.weight", "0.bias"} <= read_checkpoint(save(dict(fix), tmp_path / "weights.pth")).keys()


def test_the_size_of_a_checkpoint_is_that_of_its_file(tmp_path):
    content = {"weights": torch.zeros(1000), "text": "x"}
    write_checkpoint(tmp_path / "x.pth", content)
    assert checkpoint_size(content) == (tmp_path / "x.pth").stat().st_size
