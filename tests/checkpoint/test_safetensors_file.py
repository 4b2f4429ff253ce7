"""Tests of model.safetensors: bit-identical tensors, checksum, damaged and foreign files."""

import json
import struct
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastamp.checkpoint import Checkpointer, read_checkpoint
from fastamp.checkpoint.safetensors_file import write_packaged_model
from fastamp.utils.errors import ConfigError, WeightsError


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def roundtrip(folder, state, **entries):
    write_packaged_model(folder, {"model": state, "config": "SEED: 3\n", **entries})
    return read_checkpoint(folder / "model.safetensors")


def test_tensors_of_every_layout_and_dtype_are_restored_bit_for_bit(tmp_path):
    base = torch.randn(6, 8)
    image = torch.randn(2, 3, 4, 5)
    nan = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    state = {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "row of a shared storage": base[2],
        "tied": base,
        "tied again": base,
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels_last": image.to(memory_format=torch.channels_last),
        "scalar": torch.tensor(7),
        "no classes": torch.zeros(0, 16),
        "parameter": nn.Parameter(torch.randn(3)),
        "special values": nan,
        **{str(dtype): torch.arange(5).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
        **{str(dtype): torch.arange(5).to(dtype) for dtype in (torch.int32, torch.uint8, torch.bool)},
    }
    found = roundtrip(tmp_path, state)["model"]
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(other), bits(tensor.detach())), name
        assert other.is_contiguous()


def test_model_with_tied_weights_and_buffers_is_restored(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(4)

    model, other = Tied(), Tied()
    model.norm(torch.randn(8, 4))
    roundtrip(tmp_path, model.state_dict())
    Checkpointer(other, min_match=0).load(tmp_path / "model.safetensors")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert other.first.weight is other.second.weight and other.norm.num_batches_tracked == 1


def test_entries_and_config_are_restored(tmp_path):
    scores = torch.rand(1001)
    entries = {"policy": {"dtype": "bfloat16", "tf32": False}, "pairs": {"Demo": {"genuine": scores, "n": 3}}}
    found = roundtrip(tmp_path, {"w": torch.ones(1)}, **entries, optimizer={"state": 1})
    assert found.keys() == {"model", "config", "policy", "pairs"} and found["config"] == "SEED: 3\n"
    assert found["policy"] == entries["policy"] and found["pairs"]["Demo"]["n"] == 3
    assert torch.equal(found["pairs"]["Demo"]["genuine"], scores)


def test_files_of_other_programs_are_bare_state_dicts(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors", {"format": "pt"})
    found = read_checkpoint(tmp_path / "other.safetensors")
    assert found.keys() == {"model"} and torch.equal(found["model"]["w"], torch.ones(2))


def with_header(content, edit):
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def set_metadata(key, value):
    return lambda content: with_header(content, lambda header: header["__metadata__"].update({key: value}))


def test_damaged_and_hostile_files_are_rejected(tmp_path, subtests):
    cases = [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[:-4],
        lambda content: content + b"more",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"\x80\x02" + content,
        lambda content: struct.pack("<Q", 2**60) + content[8:],
        lambda content: content.replace(b'"w"', b'"v"'),
        set_metadata("fastamp", '{"policy": {"dtype": "float16"}}'),
        set_metadata("fastamp", "{"),
        set_metadata("fastamp", "[" * 100_000),
        set_metadata("fastamp", "[]"),
        set_metadata("sha256", "0" * 64),
        set_metadata("fastamp", '{"pairs": {"dtype": "os.system", "values": []}}'),
        lambda content: with_header(content, lambda header: header["w"].update(dtype="F4")),
        lambda content: with_header(content, lambda header: header["w"].update(shape=[2**40, 2**40])),
    ]
    for damage in cases:
        with subtests.test(damage=damage):
            roundtrip(tmp_path, {"w": torch.arange(4.0)}, policy={"dtype": "float32"})
            path = tmp_path / "model.safetensors"
            path.write_bytes(damage(path.read_bytes()))
            with pytest.raises(WeightsError, match=r"model\.safetensors"):
                read_checkpoint(path)


def test_packaged_model_of_a_later_format_is_rejected(tmp_path):
    roundtrip(tmp_path, {"w": torch.ones(1)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(set_metadata("fastamp_format", "2")(path.read_bytes()))
    with pytest.raises(WeightsError, match=r"model\.safetensors .*'2'"):
        read_checkpoint(path)


def test_pickle_with_the_suffix_of_safetensors_is_not_unpickled(tmp_path):
    class Run:
        def __reduce__(self):
            return (print, ("executed",))

    path = tmp_path / "model.safetensors"
    torch.save({"model": Run()}, path)
    with pytest.raises(WeightsError):
        read_checkpoint(path)


def test_config_that_is_not_text_is_rejected(tmp_path):
    roundtrip(tmp_path, {"w": torch.ones(1)})
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(WeightsError, match=r"config\.yaml"):
        read_checkpoint(tmp_path / "model.safetensors")


def test_missing_safetensors_package_is_explained(tmp_path, monkeypatch):
    roundtrip(tmp_path, {"w": torch.ones(1)})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch")
    with pytest.raises(ConfigError, match="fastamp.hub"):
        read_checkpoint(tmp_path / "model.safetensors")
