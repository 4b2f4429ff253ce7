"""Checkpoints: atomic writes, exact resume, no code execution, errors for damaged files."""

import logging
import os
import pickle
import warnings
import zipfile

import numpy as np
import pytest
import python2_pickle
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
from fastamp.cli import main
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


def test_checkpoint_save_and_resume_round_trip_is_exact(tmp_path):
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


def test_checkpoint_of_a_later_format_raises(tmp_path):
    path = Checkpointer(Model(), tmp_path).save("model")
    content = torch.load(path, weights_only=True)
    assert content["fastamp_format"] == 1 and "fastamp_format" not in read_checkpoint(path)
    torch.save(content | {"fastamp_format": 2}, path)
    with pytest.raises(WeightsError, match=r"model\.pth .*'2'"):
        read_checkpoint(path)


def test_failed_checkpoint_save_keeps_the_previous_file(tmp_path):
    checkpointer = Checkpointer(Model(), tmp_path)
    path = checkpointer.save("model_best")
    before = path.read_bytes()
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpointer.save("model_best", broken=lambda: None)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last_checkpoint", "model_best.pth"]


def test_saved_checkpoints_have_default_permissions(tmp_path):
    path = Checkpointer(Model(), tmp_path).save("model")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("wrap", ["model", "state_dict", None])
def test_load_accepts_bare_state_dict_and_model_or_state_dict_entry(tmp_path, wrap):
    model = Model()
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    state |= {"pixel_mean": torch.zeros(1, 3, 1, 1), "pixel_std": torch.ones(1, 3, 1, 1)}
    path = save({wrap: state, "epoch": np.float64(3)} if wrap else state, tmp_path / "weights.pth")
    other = Model()
    Checkpointer(other).load(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_checkpoint_with_numpy_scalars_is_loaded(tmp_path):
    path = save({"model": Model().state_dict(), "best": np.float32(1.5), "n": np.int64(3)}, tmp_path / "w.pth")
    assert read_checkpoint(path)["best"] == 1.5


def test_checkpoint_of_python_2_with_numpy_scalars_is_loaded(tmp_path, recwarn):
    """torchreid's older files: NumPy scalars, whose bytes are not UTF-8, optimizer and ``module.`` prefixes."""
    state = {f"module.{name}": value for name, value in Model().state_dict().items()}
    content = {"state_dict": state, "rank1": np.float64(0.9), "epoch": 60, "optimizer": {"state": {}, "lr": [3e-4]}}
    python2_pickle.save(content, tmp_path / "w.pth.tar")
    with pytest.raises(UnicodeDecodeError):  # PyTorch without the encoding
        torch.load(tmp_path / "w.pth.tar", weights_only=False)
    loaded = read_checkpoint(tmp_path / "w.pth.tar")
    assert loaded["rank1"] == 0.9 and loaded["epoch"] == 60
    assert all(torch.equal(value, state[f"module.{name}"]) for name, value in state_dict_in(loaded, "w").items())
    python2_pickle.save({"state_dict": state, "x": Evil(), "rank1": np.float64(0.9)}, tmp_path / "evil.pth.tar")
    with pytest.raises(WeightsError, match="execute code"):
        read_checkpoint(tmp_path / "evil.pth.tar")
    assert not recwarn.list


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_checkpoint_with_code_is_rejected_without_executing_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save({"model": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(WeightsError, match="evil.pth") as error:
        read_checkpoint(path)
    assert "system" in str(error.value)
    assert not (tmp_path / "executed").exists()


def test_read_checkpoint_error_names_the_damaged_file_and_the_cause(tmp_path):
    good = save(Model().state_dict(), tmp_path / "good.pth").read_bytes()
    cases = {
        "empty.pth": (b"", "empty"),
        "truncated.pth": (good[: len(good) // 2], "truncated"),
        "text.pth": (b"some text\n" * 50, "torch.save"),
        "image.pth": (b"\xff\xd8\xff\xe0" * 50, "torch.save"),
        "hello.pth": (b"hello\n", r"found: .*b'hello"),
        "pointer.pth": (b"version https://git-lfs.github.com/spec/v1\n", r"found: .*b'version https://git-lfs"),
        "pickle.pth": (b"\x80\x02}", "torch.save"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=message) as error:
            read_checkpoint(tmp_path / name)
        assert name in str(error.value) and "weights_only" not in str(error.value)
    with pytest.raises(WeightsError, match=r"god.pth\n.*good.pth"):
        read_checkpoint(tmp_path / "god.pth")
    with pytest.raises(WeightsError, match="folder"):
        read_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="xxx.pth"):
        read_checkpoint(f"{'x' * 5000}.pth")


def test_random_byte_damage_raises_only_weights_error(tmp_path, subtests):
    for seed in range(30):
        with subtests.test(seed=seed):
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
def test_checkpoint_without_state_dict_raises(tmp_path, content):
    with pytest.raises(WeightsError, match="x.pth"):
        state_dict_in(content, "x.pth")


def test_loading_weights_strips_module_prefixes_and_ignores_non_string_keys(tmp_path):
    state = {f"module.module.{key}": value for key, value in Model().state_dict().items()} | {0: torch.ones(2)}
    path = save(state, tmp_path / "x.pth")
    assert state_dict_in(read_checkpoint(path), path).keys() == Model().state_dict().keys()
    with pytest.raises(WeightsError, match="x.pth"):
        state_dict_in({0: torch.ones(2)}, "x.pth")


def test_read_checkpoint_error_names_rejected_type_and_omits_pytorch_advice(tmp_path):
    for value, name in ((np.uint16(3), "UInt16DType"), (np.zeros(3), "_reconstruct")):
        with pytest.raises(WeightsError, match=f"x.pth.*\n.*found: .*{name}\n") as error:
            read_checkpoint(save({"a": value}, tmp_path / "x.pth"))
        assert "safe_globals" not in str(error.value) and "weights_only" not in str(error.value)


CONVERSIONS = {
    "integers": lambda value: value.to(torch.int8),
    "complex": lambda value: value.to(torch.complex64),
    "sparse": torch.Tensor.to_sparse,
    "meta": lambda value: value.to("meta"),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_load_rejects_integer_complex_sparse_and_meta_weights(kind):
    state = Model().state_dict()
    state["backbone.0.weight"] = CONVERSIONS[kind](state["backbone.0.weight"])
    with pytest.raises(WeightsError, match="x.pth .* 1 .*backbone.0.weight"):
        load_model_state(Model(), state, source="x.pth")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_load_converts_weights_of_any_floating_point_dtype_to_float32(dtype):
    model = Model()
    load_model_state(
        model, {key: torch.ones_like(value, dtype=dtype) for key, value in model.state_dict().items()}, source="x"
    )
    assert all(value.dtype == torch.float32 and bool((value == 1).all()) for value in model.state_dict().values())


def test_loading_mismatched_weights_raises_and_leaves_the_model_unchanged():
    model = Model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"backbone.0.weight: file \(5, 5\), model \(4, 4\)"):
        load_model_state(model, Model(width=5).state_dict(), source="x")
    with pytest.raises(WeightsError, match=r"matched  0 \(0%\).* 0% of the backbone"):
        load_model_state(model, {"foo": torch.ones(1)}, source="x")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_min_match_is_the_minimum_fraction_of_matched_backbone_tensors():
    state = Model().state_dict()
    del state["backbone.0.weight"], state["backbone.0.bias"]
    with pytest.raises(WeightsError, match="MODEL.WEIGHTS_MIN_MATCH"):
        load_model_state(Model(), state, source="x")
    load_model_state(Model(), state, source="x", min_match=0.8)


def test_loading_logs_backbone_tensors_that_the_model_lacks(caplog):
    state = Model().state_dict() | {"backbone.9.weight": torch.ones(1), "backbone.fc.weight": torch.ones(1)}
    load_model_state(Model(), state, source="x.pth")
    assert "x.pth has 1 tensor " in caplog.text and "(backbone.9.weight)" in caplog.text


def test_classifier_with_another_shape_is_not_loaded():
    model, source = Model(classes=3), Model(classes=9)
    report = load_model_state(model, source.state_dict(), source="x")
    assert (report.other_shape, report.not_needed) == (["heads.weight"], [])
    assert "different number of identities" in str(report)
    assert torch.equal(model.backbone[0].weight, source.backbone[0].weight)
    assert model.heads.weight.shape == (3, 4)
    report = load_model_state(Model(classes=0), source.state_dict(), source="x")  # a model for evaluation
    assert report.other_shape == report.not_needed == ["heads.weight"]
    assert "(100%) of the model's tensors" in str(report) and "number of identities" not in str(report)


def test_empty_tensors_of_a_model_without_classes_are_not_loaded():
    model, state = nn.Linear(4, 0, bias=False), {"weight": torch.ones(9, 4)}
    report = load_model_state(model, state, source="x", min_match=0)
    assert report.not_needed == ["weight"] and model.weight.shape == (0, 4)


def test_resume_rejects_bare_weights_and_checkpoints_of_other_models(tmp_path):
    bare = save(Model().state_dict(), tmp_path / "bare.pth")
    with pytest.raises(WeightsError, match="bare.pth.*model, part"):
        Checkpointer(Model(), tmp_path, part=Part(1)).resume(bare)
    other = Checkpointer(Model(classes=9), tmp_path, part=Part(1)).save("other")
    with pytest.raises(WeightsError, match=r"other\.pth: .* 1 \(heads\.weight\)"):
        Checkpointer(Model(), tmp_path, part=Part(1)).resume(other)


# ---- checksums


def record_spans(path):
    """Return a dict of record name -> byte range (begin, end) for an uncompressed zip archive."""
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


def test_flipped_bit_in_any_byte_of_a_checkpoint_record_is_detected(tmp_path):
    path = save({"weight": torch.arange(6.0), "none": torch.zeros(0), "number": 3}, tmp_path / "w.pth")
    good = path.read_bytes()
    assert damaged_record(path) == ""
    for name, (begin, end) in record_spans(path).items():
        for at in range(begin, end):
            flip(path, at, bit=at % 8)
            assert damaged_record(path) == name
            with pytest.raises(WeightsError, match=f"w.pth .*{name}"):
                read_checkpoint(path)
            path.write_bytes(good)
    assert torch.equal(read_checkpoint(path)["weight"], torch.arange(6.0))


def test_pytorch_does_not_detect_a_flipped_bit(tmp_path):
    """Negative control: ``torch.load`` does not compare checksums, so it returns a wrong tensor without an error."""
    path = save({"weight": torch.arange(6.0)}, tmp_path / "w.pth")
    flip(path, next(begin for name, (begin, _) in record_spans(path).items() if name.endswith("data/0")) + 6, bit=7)
    assert not torch.equal(torch.load(path, weights_only=True)["weight"], torch.arange(6.0))


def test_checkpoints_without_checksums_are_loaded(tmp_path):
    state = {"weight": torch.arange(6.0)}
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "without.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert zipfile.ZipFile(tmp_path / "without.pth").testzip()  # zipfile reports a wrong checksum
    for name in ("old.pth", "without.pth"):
        assert torch.equal(read_checkpoint(tmp_path / name)["weight"], torch.arange(6.0))


# ---- the newest readable checkpoint


def make_run(folder, *names):
    """Save checkpoints with increasing modification times, and return their checkpointer."""
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


CAUSES = {
    "missing": "last_checkpoint .*model_0002.pth",
    "flipped": "model_0002.pth .*checksum",
    "empty": "model_0002.pth .*empty",
    "truncated": "model_0002.pth .*truncated",
    "garbage": "model_0002.pth .*torch.save",
}


@pytest.mark.parametrize("how", CAUSES)
def test_resume_falls_back_to_the_checkpoint_before_a_damaged_one(tmp_path, caplog, how):
    checkpointer = make_run(tmp_path, "model_0000", "model_0001", "model_best", "model_0002")
    damage(tmp_path / "model_0002.pth", how)
    assert checkpointer.last_checkpoint() == tmp_path / "model_0001.pth"
    (record,) = caplog.records
    cause, used = record.getMessage().split("\n")
    assert record.levelno == logging.WARNING and "model_0001.pth" in used
    with pytest.raises(WeightsError, match=CAUSES[how]):
        raise WeightsError(cause)


def test_newest_complete_checkpoint_is_used_without_last_checkpoint_file(tmp_path):
    checkpointer = make_run(tmp_path, "model_0003", "model_iter_0000002", "model_interrupted", "model_best")
    save({"model": Model().state_dict()}, tmp_path / "model_exported.pth")
    (tmp_path / "last_checkpoint").unlink()
    assert checkpointer.last_checkpoint() == tmp_path / "model_interrupted.pth"
    damage(tmp_path / "model_interrupted.pth", "flipped")
    assert checkpointer.last_checkpoint() == tmp_path / "model_iter_0000002.pth"


@pytest.mark.parametrize(
    "pointer", [b"", b"..", b"model_0009.pth", b"\xff\x00\xfe", b"x" * 9999, b"../../model_0001.pth"]
)
def test_invalid_last_checkpoint_file_is_ignored(tmp_path, pointer):
    checkpointer = make_run(tmp_path / "run", "model_0000")
    (tmp_path / "run/last_checkpoint").write_bytes(pointer)
    assert checkpointer.last_checkpoint() == tmp_path / "run/model_0000.pth"


def test_resume_error_lists_all_damaged_checkpoints(tmp_path):
    checkpointer = make_run(tmp_path, "model_best", "model_0000", "model_0001")
    damage(tmp_path / "model_0000.pth", "truncated")
    damage(tmp_path / "model_0001.pth", "flipped")
    with pytest.raises(WeightsError, match="(?s)model_0001.*checksum.*model_0000.*truncated"):
        checkpointer.last_checkpoint()


def test_model_best_is_used_only_if_last_checkpoint_names_it(tmp_path):
    checkpointer = make_run(tmp_path, "model_best")
    assert checkpointer.last_checkpoint() is None
    (tmp_path / "last_checkpoint").write_text("model_best.pth")
    assert checkpointer.last_checkpoint() == tmp_path / "model_best.pth"


def test_checkpointer_delete_keeps_the_checkpoint_named_in_last_checkpoint(tmp_path):
    checkpointer = make_run(tmp_path, "model_0000", "model_0001")
    checkpointer.delete(["model_0000", "model_0001", "model_0009"])
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["model_0001.pth"]


def test_remove_leftovers_deletes_incomplete_files_of_a_killed_save(tmp_path):
    checkpointer = make_run(tmp_path, "model_0000")
    left = ("model_0001.pth", "last_checkpoint", "config.yaml", "metrics.json", "report.html")
    for name in (*(f".{file}.abc.tmp" for file in left), ".other.tmp", "model_x.tmp"):
        (tmp_path / name).write_text("")
    checkpointer.remove_leftovers()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model_0000.pth", "last_checkpoint", ".other.tmp", "model_x.tmp"}


def test_reading_circular_or_broken_symbolic_links_raises(tmp_path):
    for name, target in (("a.pth", "b.pth"), ("b.pth", "a.pth"), ("c.pth", "nowhere.pth")):
        (tmp_path / name).symlink_to(target)
    for name in ("a.pth", "c.pth"):
        with pytest.raises(WeightsError, match=rf"{name} .*(b|nowhere)\.pth"):
            read_checkpoint(tmp_path / name)


@pytest.mark.integration
@pytest.mark.parametrize("parts", [1, 3])
def test_torchscript_archives_are_rejected_with_a_working_fix(tmp_path, recwarn, parts):
    """With three modules, the compressed code in the archive is larger than the weights."""
    parts = [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()][:parts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Sequential(*parts)), tmp_path / "model.pt")
    with pytest.raises(WeightsError, match=r"model\.pt .*TorchScript(.|\n)*convert-clip"):
        read_checkpoint(tmp_path / "model.pt")
    assert not recwarn.list
    # The suggested fix works.
    assert main(["convert-clip", str(tmp_path / "model.pt"), str(tmp_path / "weights.pth")]) == 0
    assert {"0.weight", "0.bias"} <= read_checkpoint(tmp_path / "weights.pth").keys()


def test_checkpoint_size_matches_the_written_file(tmp_path):
    content = {"weights": torch.zeros(1000), "text": "x"}
    write_checkpoint(tmp_path / "x.pth", content)
    assert checkpoint_size(content) == (tmp_path / "x.pth").stat().st_size


@pytest.mark.parametrize(
    "prefix",
    [
        "_orig_mod.",
        "module._orig_mod.",
        "_orig_mod.module.",
        "model.",
        "net.",
        "model._orig_mod.",
        "_forward_module.model.",
        "module.net.module.",
    ],
)
def test_prefixes_of_training_tools_are_stripped(prefix):
    state = {f"{prefix}backbone.layer{number}.weight": torch.zeros(1) for number in range(20)}
    found = state_dict_in({"state_dict": state | {"loss.centers": torch.zeros(1)}}, "x.ckpt")
    assert set(found) == {key.removeprefix(prefix) for key in state} | {"loss.centers"}


def test_prefixes_of_compiled_and_sharded_parts_are_stripped_anywhere():
    names = ("backbone._orig_mod.conv1.weight", "backbone.layer1._fsdp_wrapped_module._checkpoint_wrapped_module.0.w")
    found = state_dict_in(dict.fromkeys(names, torch.zeros(1)), "x.pth")
    assert set(found) == {"backbone.conv1.weight", "backbone.layer1.0.w"}


def test_a_file_without_a_matching_tensor_is_not_advised_to_lower_the_minimum():
    with pytest.raises(WeightsError) as error:
        load_model_state(Model(), {"lit.backbone.weight": torch.zeros(1)}, source="x")
    assert "lower MODEL.WEIGHTS_MIN_MATCH" not in str(error.value) and "lit.backbone.weight" in str(error.value)
