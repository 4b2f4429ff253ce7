"""Messages of fastamp/checkpoint: weights files, weights of other models, resuming and pretrained weights."""

import io
import os
import sys
import tarfile
import warnings
import zipfile
from urllib.error import URLError

import hostile_pickles
import numpy as np
import pytest
import torch
from messages import Recorder
from torch import nn

from fastamp.checkpoint.adapters import adapters_in
from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.entries import checkpoint_of, merge_from_checkpoint
from fastamp.checkpoint.evaluated_weights import load_evaluated_weights
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.safetensors_file import write_packaged_model
from fastamp.checkpoint.torchscript_file import read_torchscript
from fastamp.checkpoint.weights_file import read_checkpoint, write_checkpoint
from fastamp.config import get_cfg
from fastamp.layers.lora import add_adapter
from fastamp.modeling import build_backbone

SITES = ["fastamp/checkpoint"]


class Model(nn.Module):
    """Model with five linear layers and a classifier."""

    def __init__(self, width=4, classes=3):
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))
        self.heads = nn.Module()
        self.heads.classifiers = ("weight",)
        self.heads.weight = nn.Parameter(torch.zeros(classes, width))


class State:
    """Checkpoint entry that rejects every state."""

    def state_dict(self):
        return {"value": 1}

    def load_state_dict(self, state):
        raise ValueError("the value differs")


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    weights_files(record)
    weights(record)
    run_checkpoints(record)
    stripped(record, request.getfixturevalue("run_folder"))
    adapters(record)
    packaged(record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(record.root / "cache"))
        pretrained(record, patch)


def saved(record, name, state):
    """Write a state with torch.save."""
    torch.save(state, record.root / name)
    return record.root / name


def flip_byte(path):
    """Flip a byte in a record of a file that was written by torch.save."""
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(6, dtype=np.float32).tobytes()) + 8] ^= 1
    path.write_bytes(data)


def weights_files(record):
    """Load files that are not weights."""
    good = saved(record, "good.pth", {"weight": torch.arange(6.0)})
    record.file("empty.pth")
    record.file("truncated.pth", good.read_bytes()[:-50])
    record.file("html.pth", "<html>not found</html>")
    record.file("exported.onnx", b"\x08\n")
    record.file("pointer.pth", "version https://git-lfs.github.com/spec/v1\n")
    record.file("flipped.pth", good.read_bytes())
    flip_byte(record.root / "flipped.pth")
    saved(record, "object.pth", {"a": np.zeros(3)})
    (record.root / "link.pth").symlink_to("nowhere.pth")
    with tarfile.open(record.root / "archive.pth", "w") as archive:
        archive.add(record.root / "html.pth", "good.pth")
    module = torch.jit.trace(nn.Identity(), torch.zeros(1))
    torch.jit.save(module, record.root / "no_tensors.pt")
    for name in ("good.pth", "no_tensors.pt"):
        with record(f"read_torchscript {name}"):
            read_torchscript(record.root / name)
    zeros = saved(record, "zeros.pth", {"weight": torch.zeros(100_000)})
    compressed = record.root / "compressed.pth"
    with zipfile.ZipFile(zeros) as source, zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), record.root / "script.pth")
    names = ["empty", "truncated", "html", "pointer", "flipped", "object", "link", "archive", "compressed", "script",
             "god"]  # fmt: skip
    for path in [record.root, record.root / "exported.onnx", *(record.root / f"{name}.pth" for name in names)]:
        with record(f"read_checkpoint {path}"):
            read_checkpoint(path)
    for title, code in hostile_pickles.PICKLES.items():
        hostile_pickles.write(code, record.root / "hostile.pth")
        with record(f"read_checkpoint of a pickle with {title}"):
            read_checkpoint(record.root / "hostile.pth")
    with record("read_checkpoint of a file that cannot be read"), pytest.MonkeyPatch.context() as patch:

        def refuse(*_, **__):
            raise PermissionError(13, "Permission denied")

        patch.setattr("builtins.open", refuse)
        patch.setattr(io, "open", refuse)
        read_checkpoint(good)
    for number, state in enumerate(([1, 2], {"a": 1}, {"model": {"a": "b"}})):
        record.train("MODEL.WEIGHTS", saved(record, f"no_state{number}.pth", state))
    with record("write_checkpoint into a folder that is missing"):
        write_checkpoint(record.root / "nowhere/a.pth", {"a": 1})


def transformer(depth):
    """Build a module with the names of a transformer's blocks."""
    blocks = [nn.ModuleDict({"norm1": nn.LayerNorm(4)}) for _ in range(depth)]
    return nn.ModuleDict({"backbone": nn.ModuleDict({"blocks": nn.ModuleList(blocks)})})


def weights(record):
    """Load weights of other models."""
    (record.root / "folder").mkdir()
    with record("checkpoint_of a folder without checkpoints"):
        checkpoint_of(record.root / "folder")
    state = Model().state_dict()
    cases = {
        "the same model": state,
        "another width": Model(width=5).state_dict(),
        "another number of classes": Model(classes=7).state_dict(),
        "other names": {"foo": torch.ones(1)},
        "half of the backbone": {key: value for key, value in state.items() if "heads" in key or "4" in key},
        "all but a bias": {key: value for key, value in state.items() if key != "backbone.0.bias"},
        "another layer as well": state | {"backbone.9.weight": torch.ones(4, 4)},
        "integers": state | {"backbone.0.weight": torch.ones(4, 4, dtype=torch.int64)},
    }
    for title, given in cases.items():
        with record(f"weights of {title}"):
            load_model_state(Model(), given, source="x.pth")

    with record("weights of a deeper transformer"):
        load_model_state(transformer(1), transformer(3).state_dict(), source="x.pth")

    class Old(Model):
        def adopt_state(self, state, prefix):
            return state

    with record("a model with adopt_state()"):
        load_model_state(Old(), state, source="x.pth")


def run_checkpoints(record):
    """Resume from invalid checkpoints."""
    folder = record.root / "checkpoints"
    run = Checkpointer(Model(), folder, part=State())
    run.save("model_0000")
    path = run.save("model_0001")
    bare = saved(record, "bare.pth", Model().state_dict())
    damaged = saved(record, "damaged.pth", {"model": Model().state_dict(), "part": {"value": torch.ones(3)}})
    other = Checkpointer(Model(classes=9), record.root / "other", part=State()).save("model_0000")
    for title, source in (("bare weights", bare), ("another model", other), ("another part", path),
                          ("another structure", damaged)):  # fmt: skip
        with record(f"resume from {title}"):
            run.resume(source)
    (folder / "model_0001.pth").write_bytes(b"")
    with record("resume where the newest checkpoint is damaged"):
        run.last_checkpoint()
    (folder / "last_checkpoint").write_text("model_0009.pth")
    with record("resume where last_checkpoint names a missing file"):
        run.last_checkpoint()
    (folder / "model_0000.pth").write_bytes(b"")
    with record("resume where every checkpoint is damaged"):
        run.last_checkpoint()
    (folder / "model_0000.pth").unlink()
    (folder / "model_0001.pth").unlink()
    with record("resume where no checkpoint is left"):
        run.last_checkpoint()


def stripped(record, run):
    """Trigger the messages of `fastamp strip`."""
    best = run / "model_best.pth"
    record.fastamp("strip", best, record.root / "stripped.txt")
    record.fastamp("strip", best, best)
    record.fastamp("strip", record.root / "bare.pth", record.root / "out.pth")
    record.fastamp("strip", best, record.root / "stripped.pth", output=True)
    record.train("--eval-only", "MODEL.WEIGHTS", record.root / "stripped.pth", "SOLVER.EMA", "True")
    record.train("--eval-only", "MODEL.WEIGHTS", best, "SOLVER.EMA", "True", "TEST.WEIGHTS", "average")
    record.fastamp("eval", "MODEL.WEIGHTS", record.root / "bare.pth")
    with record("a config in bare weights"):
        merge_from_checkpoint(get_cfg(), record.root / "bare.pth")
    with record("the EMA weights of a file without EMA"):
        load_evaluated_weights(Model(), saved(record, "five.pth", {"model": Model().state_dict()}), average="ema",
                               min_match=0.5)  # fmt: skip
    folder = record.root / "stripped_run"
    folder.mkdir()
    os.link(record.root / "stripped.pth", folder / "model_best.pth")
    (folder / "last_checkpoint").write_text("model_best.pth")
    record.train("--resume", "OUTPUT_DIR", folder)
    content = torch.load(best, weights_only=True)
    saved(record, "newer.pth", content | {"config": "NEW: {KEY: 1}"})
    record.fastamp("eval", "MODEL.WEIGHTS", record.root / "newer.pth")


def adapters(record):
    """Trigger the messages about files of LoRA adapters."""
    record.fastamp("strip", record.root / "stripped.pth", record.root / "out.pth", "--adapters")
    base, other, adapted = Model(), Model(), Model()
    for layer in adapted.backbone:
        add_adapter(layer, "weight", rank=2, alpha=1.0)
    adapted.backbone.load_state_dict(base.backbone.state_dict(), strict=False)
    paths = {name: saved(record, f"{name}.pth", {"model": model.state_dict()})
             for name, model in (("base", base), ("other", other), ("adapted", adapted))}  # fmt: skip
    small = saved(record, "adapters.pth", adapters_in(adapted.state_dict(), "adapted.pth"))
    with record("a file of adapters without base weights"):
        Checkpointer(adapted).load(small)
    with record("a file of adapters with other base weights"):
        Checkpointer(adapted, base=paths["other"]).load(small)
    with record("a file of adapters for a model without adapters"):
        Checkpointer(base, base=paths["base"]).load(small)
    with record("a model with adapters, loaded without adapters"):
        Checkpointer(Model()).load(paths["adapted"])


def packaged(record):
    """Read damaged packaged models."""
    folder = record.root / "packaged"
    folder.mkdir()
    write_packaged_model(folder, {"model": {"w": torch.ones(4)}, "config": "SEED: 1\n"})
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with record("a packaged model with a flipped bit"):
        read_checkpoint(weights)
    weights.write_bytes(content[:100])
    with record("a truncated packaged model"):
        read_checkpoint(weights)
    weights.write_bytes(content)
    (folder / "config.yaml").write_bytes(b"\xff")
    with record("a packaged model whose config is not text"):
        read_checkpoint(weights)
    with record("a packaged model without safetensors"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        patch.delitem(sys.modules, "safetensors.torch")
        read_checkpoint(weights)


def pretrained(record, patch):
    """Trigger the messages about pretrained weights."""

    def build(*opts):
        cfg = get_cfg()
        resnet = ("MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.BACKBONE.PRETRAIN", "True")
        cfg.merge_from_list([*resnet, *opts])
        build_backbone(cfg)

    def download(url, path, checksum=None):
        torch.save(weights, path)

    def fail(url, path, checksum=None):
        raise URLError("no network")

    def download_hostile(url, path, checksum=None):
        hostile_pickles.write(hostile_pickles.PICKLES["a key of shared tuples"], path)

    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512"])
    weights = build_backbone(cfg).state_dict()
    for title, function, opts in (
        ("offline", fail, ()),
        ("for gray images", download, ("INPUT.CHANNELS", "1")),
        ("without weights for this backbone", download, ("MODEL.BACKBONE.WITH_SE", "True")),
        ("from a file that is missing", download, ("MODEL.BACKBONE.PRETRAIN_PATH", str(record.root / "nowhere.pth"))),
        ("from the file of another depth", download, ("MODEL.BACKBONE.DEPTH", "50x", "MODEL.BACKBONE.FEAT_DIM", "2048",
         "MODEL.BACKBONE.PRETRAIN_PATH", str(saved(record, "resnet18.pth", weights)))),
        ("a hostile file", download_hostile, ("MODEL.BACKBONE.DEPTH", "34x")),
    ):  # fmt: skip
        patch.setattr(torch.hub, "download_url_to_file", function)
        with record(f"MODEL.BACKBONE.PRETRAIN True: {title}"):
            build(*opts)
