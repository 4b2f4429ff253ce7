"""Models that do not fit into memory: ConfigError with the key and the sizes, and exit codes."""

import re

import pytest
import tiny
import torch
import train_net

from fastamp.amp.device_errors import is_out_of_memory
from fastamp.cli import main
from fastamp.config import get_cfg, read_config
from fastamp.modeling import BACKBONE_REGISTRY, build_model, out_of_memory
from fastamp.utils import env
from fastamp.utils.errors import ConfigError


@BACKBONE_REGISTRY.register()
def build_unchecked_backbone(cfg):
    """Create a parameter with ``torch.Tensor``, for which the size is not checked before allocation."""
    return torch.nn.ParameterList([torch.nn.Parameter(torch.Tensor(cfg.MODEL.HEADS.EMBEDDING_DIM, 2048))])


def config(*opts):
    return read_config("", tiny.tiny_options("unused", "MODEL.HEADS.NUM_CLASSES", "7", *opts))


def test_out_of_memory_error_contains_config_key_and_memory_sizes(monkeypatch):
    monkeypatch.setattr(out_of_memory, "available_memory", lambda: 10**9)
    with pytest.raises(ConfigError) as error:
        build_model(config("MODEL.HEADS.EMBEDDING_DIM", "50000000"))
    text = str(error.value)
    assert all(value in text for value in ("(50000000, 16, 1, 1)", "3.2 GB", "1.0 GB"))
    assert "MODEL.HEADS.EMBEDDING_DIM 50000000" in text and "fix: lower MODEL.HEADS.EMBEDDING_DIM" in text


def test_memory_check_does_not_change_initial_weights(monkeypatch):
    states = []
    for available in (10**9, None):
        monkeypatch.setattr(out_of_memory, "available_memory", lambda available=available: available)
        torch.manual_seed(0)
        states.append(build_model(config("MODEL.HEADS.EMBEDDING_DIM", "2048")).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0] | states[1])


@pytest.mark.parametrize(
    "opts, key",
    [
        (("MODEL.HEADS.NUM_CLASSES", "1000000000"), "MODEL.HEADS.NUM_CLASSES"),
        (("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "1000000000"), "MODEL.QUEUE_SIZE"),
        (("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.HEADS.EMBEDDING_DIM", "40000000"), "MODEL.HEADS.EMBEDDING_DIM"),
    ],
)
def test_out_of_memory_error_names_config_key_to_lower(monkeypatch, opts, key):
    monkeypatch.setattr(out_of_memory, "available_memory", lambda: 10**9)
    with pytest.raises(ConfigError, match=f"fix: lower {key}"):
        build_model(config(*opts))


def test_failed_allocation_names_config_key_if_available_memory_is_unknown(monkeypatch):
    """The size exceeds the address space of a process on x86-64, 128 TB."""
    monkeypatch.setattr(out_of_memory, "available_memory", lambda: None)
    for name in ("build_tiny_backbone", "build_unchecked_backbone"):
        opts = ("MODEL.BACKBONE.NAME", name, "MODEL.HEADS.EMBEDDING_DIM", str(10**13))
        with pytest.raises(ConfigError, match=r"GB(.|\n)*MODEL\.HEADS\.EMBEDDING_DIM"):
            build_model(config(*opts))


def test_only_out_of_memory_errors_are_converted_to_config_errors():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(KeyError("out of memory"))
    with pytest.raises(RuntimeError, match="other"), out_of_memory.explain_out_of_memory(get_cfg()):
        raise RuntimeError("other")


@pytest.mark.integration
def test_training_exits_with_code_2_if_model_exceeds_memory(demo, tmp_path, input_error):
    options = tiny.tiny_options(tmp_path, "MODEL.HEADS.EMBEDDING_DIM", "1000000000000")
    err = input_error(train_net.cli, options)
    assert "error: the model does not fit into memory" in err and "Traceback" not in err


@pytest.mark.integration
def test_commands_exit_with_code_2_if_checkpoint_config_exceeds_memory(demo, checkpoint, tmp_path, capfd):
    """The commands build the model from the config in the checkpoint."""
    content = torch.load(checkpoint, weights_only=True)
    text, count = re.subn(r"EMBEDDING_DIM: 0\b", "EMBEDDING_DIM: 1000000000000", content["config"])
    assert count == 1
    path = tmp_path / "hostile.pth"
    torch.save(content | {"config": text}, path)
    image = str(next(demo.rglob("*.png"), None) or next(demo.rglob("*.jpg")))
    for argv in (
        ["compare", str(path), image, image],
        ["extract", str(path), "Demo", "-o", str(tmp_path / "out.npz")],
        ["export", str(path), str(tmp_path / "out.onnx")],
    ):
        assert main(argv) == 2, argv
        err = capfd.readouterr().err
        assert "the model does not fit into memory" in err and "Traceback" not in err, err


def test_available_memory_respects_memory_limit_of_container(tmp_path, monkeypatch):
    if env.available_memory() is None:
        pytest.skip("available memory is unknown on this system")
    folder = tmp_path
    (folder / "limit").write_text("1000000\n")
    (folder / "used").write_text("900000\n")
    (folder / "memory.stat").write_text("anon 5\nactive_file 100\ninactive_file 200\n")
    group = (str(folder), "limit", "used", ("active_file", "inactive_file"))
    monkeypatch.setattr(env, "_MEMORY_GROUPS", (group,))
    assert env.available_memory() == 100_300
    (folder / "limit").write_text("max\n")
    assert env.available_memory() > 100_300
