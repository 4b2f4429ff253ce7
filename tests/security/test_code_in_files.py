"""Tests of checkpoints, arrays and caches that contain code, which must not be executed when they are read."""

import io
import itertools
import os
import pickle
import struct
import tarfile
import zipfile

import amp_replay
import evaluate_features
import import_checkpoint
import numpy as np
import pytest
import tiny
import torch
import train_net
from PIL import Image

from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.data.cache import ImageCache
from fastamp.data.datasets.base import ImageItem
from fastamp.data.datasets.cuhk03_files import new_split
from fastamp.data.decode import read_image
from fastamp.utils.errors import DataError, WeightsError


class Evil:
    """Object that creates the file ``marker`` in the working directory when it is unpickled."""

    def __init__(self, function=os.system, argument="touch marker"):
        self.made = function, (argument,)

    def __reduce__(self):
        return self.made


class Scalar:
    """Object that is pickled like a NumPy scalar, with a function call in place of the dtype."""

    def __reduce__(self):
        return np.float64(0).__reduce__()[0], (Evil(), b"\0" * 8)


def legacy(content, path):
    torch.save(content, path, _use_new_zipfile_serialization=False)


def old_tar(content, path):
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            data = pickle.dumps(content, protocol=2)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def hand_made_zip(content, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr("archive/version", "3\n")


def plain_pickle(content, path):
    path.write_bytes(pickle.dumps(content))


CONTENTS = {
    "a value": {"model": Evil()},
    "deep": {"model": {"a": torch.ones(2)}, "trainer": {"hooks": [({"best": (1, [Evil()])},)]}},
    "eval": {"model": Evil(eval, "open('marker', 'w')")},
    "a scalar": {"model": {"a": torch.ones(2)}, "epoch": Scalar()},
    "a key": {"model": {"a": torch.ones(2)}, ("b", Evil()): 1},
}
WRITERS = {"zip": torch.save, "legacy": legacy, "tar": old_tar, "by hand": hand_made_zip, "pickle": plain_pickle}


def test_unrestricted_unpickling_executes_code_in_a_checkpoint(here):
    """Negative control: the checkpoint of the other tests executes its code if unpickling is not restricted."""
    torch.save(CONTENTS["deep"], here / "evil.pth")
    torch.load(here / "evil.pth", weights_only=False)
    assert (here / "marker").exists()


def test_reading_a_checkpoint_with_code_raises_without_executing_it(here, subtests):
    for writer, content in itertools.product(WRITERS, CONTENTS):
        with subtests.test(writer=writer, content=content):
            path = here / "evil.pth"
            WRITERS[writer](CONTENTS[content], path)
            with pytest.raises(WeightsError, match=r"evil\.pth"):
                read_checkpoint(path)
            assert not (here / "marker").exists()


@pytest.mark.integration
def test_commands_reject_a_checkpoint_that_contains_code(demo, here, input_error):
    output = here / "output"
    output.mkdir()
    evil = output / "evil.pth"
    torch.save(CONTENTS["deep"], evil)
    (output / "last_checkpoint").write_text("evil.pth")
    (here / "teacher.yml").write_text("MODEL: {BACKBONE: {NAME: build_tiny_backbone, FEAT_DIM: 16}}")
    run = tiny.tiny_options(output)
    resnet = (
        "MODEL.BACKBONE.NAME",
        "build_resnet_backbone",
        "MODEL.BACKBONE.DEPTH",
        "18x",
        "MODEL.BACKBONE.FEAT_DIM",
        "512",
    )
    resnet += ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(evil))
    teacher = (
        "MODEL.META_ARCHITECTURE",
        "Distiller",
        "KD.MODEL_CONFIG",
        "('teacher.yml',)",
        "KD.MODEL_WEIGHTS",
        f"('{evil}',)",
    )
    commands = [
        (train_net.cli, [*run, "MODEL.WEIGHTS", str(evil)]),
        (train_net.cli, ["--eval-only", *run, "MODEL.WEIGHTS", str(evil)]),
        (train_net.cli, ["--resume", *run]),
        (train_net.cli, [*run, *resnet]),
        (train_net.cli, [*run, *teacher]),
        (import_checkpoint.cli, [str(evil), "out.pth"]),
    ]
    for command, argv in commands:
        stderr = input_error(command, argv)
        assert "evil.pth" in stderr and "Traceback" not in stderr, stderr
    with pytest.raises(WeightsError):
        amp_replay.replay(str(evil))
    assert not (here / "marker").exists() and not (here / "out.pth").exists()


def test_compressed_checkpoint_is_not_decompressed(tmp_path):
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**8)
    with pytest.raises(WeightsError, match=r"bomb\.pth.* 100000000 bytes"):
        read_checkpoint(path)


def test_checkpoint_in_a_multi_disk_zip_archive_raises(tmp_path):
    stream = io.BytesIO()
    torch.save({"model": {"a": torch.ones(2)}}, stream)
    content = stream.getvalue()
    end = content.rindex(b"PK\x05\x06")
    elsewhere = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 2)
    (tmp_path / "split.pth").write_bytes(content[:200] + elsewhere + content[end:])
    with pytest.raises(WeightsError, match=r"split\.pth"):
        read_checkpoint(tmp_path / "split.pth")


def test_features_file_with_object_or_oversized_arrays_is_rejected(here, input_error):
    arrays = {name: np.array([Evil()], dtype=object) for name in ("query_features", "gallery_features", "query_pids")}
    np.savez(here / "evil.npz", **arrays)
    assert "evil.npz" in input_error(evaluate_features.cli, [str(here / "evil.npz")])
    # The header claims 10^15 numbers.
    header = np.lib.format.magic(1, 0) + struct.pack("<H", 118)
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10**6,), }".replace(b"10**6", b"1000000000000000")
    with zipfile.ZipFile(here / "huge.npz", "w") as archive:
        archive.writestr("query_features.npy", header + text.ljust(117) + b"\n")
    assert "huge.npz" in input_error(evaluate_features.cli, [str(here / "huge.npz")])
    assert not (here / "marker").exists()


def test_cuhk03_mat_file_that_contains_a_pickle_raises(here):
    (here / "evil.mat").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match=r"evil\.mat"):
        new_split(here / "evil.mat", [])
    assert not (here / "marker").exists()


def test_pickle_in_the_image_cache_is_not_loaded(here):
    Image.new("RGB", (4, 4), "red").save(here / "a.png")
    items, arguments = [ImageItem(str(here / "a.png"), "a", 0)], {"where": "disk", "folder": str(here / "cache")}
    store = ImageCache(items, (3, 4, 4), lambda number: read_image(items[number].path), **arguments)
    path = store.path
    store.close()
    del store
    path.write_bytes(pickle.dumps(Evil()))
    store = ImageCache(items, (3, 4, 4), lambda number: read_image(items[number].path), **arguments)
    assert store.images[0, 0].eq(255).all() and not (here / "marker").exists()
