"""Tests of index files: damaged, unsupported and inconsistent ones must raise only DataError."""

import io
import zipfile
from pathlib import Path

import faiss
import numpy as np
import pytest

from fastamp.retrieval import index_file as module
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.index_file import read_index, write_index
from fastamp.retrieval.indices import INDEX_REGISTRY, InvertedLists
from fastamp.retrieval.npz import read_array, write_arrays
from fastamp.utils.errors import ConfigError, DataError

FILES = Path(__file__).parents[1] / "reference/saved_gallery"
FEATURES = read_features(FILES / "gallery.npz")
KINDS = ("ivf", "hnsw")


def read(path):
    return read_index(path, FEATURES)


def rebuilt(path, index, **changes):
    """Write an index file with the faiss data of ``index`` and the metadata of the IVF index, with ``changes``."""
    file = io.BytesIO()
    with zipfile.ZipFile(FILES / "ivf.index") as archive:
        meta = {name.removesuffix(".npy"): read_array(archive, name[:-4]) for name in archive.namelist()}
    with zipfile.ZipFile(index) as archive:
        size, crc = (read_array(archive, name) for name in ("size", "crc"))
    file.write(index.read_bytes()[: int(size)])
    write_arrays(file, meta | {"size": size, "crc": crc} | changes)
    path.write_bytes(file.getvalue())
    return path


def test_file_with_matching_metadata_loads(tmp_path):
    """Negative control for test_file_with_mismatching_metadata_raises."""
    for kind in KINDS:
        index = read(rebuilt(tmp_path / "a.index", FILES / f"{kind}.index", kind=np.array(kind)))
        assert isinstance(index, INDEX_REGISTRY.get(kind)) and index.faiss.ntotal == len(FEATURES)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("hnsw", {}, "kind 'ivf'(.|\n)*IndexHNSWFlat"),
        ("ivf", {"kind": np.array("hnsw")}, "kind 'hnsw'(.|\n)*IndexIVFFlat"),
        ("ivf", {"kind": np.array("other")}, "kind 'other'"),
        ("ivf", {"fingerprint": np.array("other")}, "another gallery"),
        ("ivf", {"size": np.array([1, 2])}, "damaged"),
        ("ivf", {"crc": np.array("a")}, "crc"),
        ("ivf", {"size": np.array(2**62)}, "damaged"),
        ("ivf", {"size": np.array(-1)}, "damaged"),
        ("ivf", {"fingerprint": np.array(3)}, "fingerprint"),
        ("ivf", {"effort": np.array(-1)}, "effort"),
        ("ivf", {"recall": np.array(2.0)}, "recall"),
        ("ivf", {"fastamp_format": np.array(2)}, "'2'"),
    ],
)
def test_file_with_mismatching_metadata_raises(tmp_path, kind, changes, message):
    path = rebuilt(tmp_path / "mixed.index", FILES / f"{kind}.index", **changes)
    with pytest.raises(DataError, match=rf"mixed\.index(.|\n)*{message}"):
        read(path)


def test_damaged_files_raise(tmp_path):
    for kind in KINDS:
        path, content = tmp_path / f"{kind}.index", (FILES / f"{kind}.index").read_bytes()
        middle = len(content) // 3
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (content[:-5], content[: len(content) // 2], b"", b"text", flipped):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=f"{kind}.index"):
                read(path)
    for missing in (tmp_path / "nowhere.index", FILES / "gallery.npz"):
        with pytest.raises(DataError, match=missing.name):
            read(missing)


def test_file_with_unsupported_kind_of_faiss_index_raises(tmp_path):
    """The file has valid metadata, but a faiss index of an unsupported kind."""
    path = tmp_path / "pq.index"
    index = faiss.IndexScalarQuantizer(16, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    index.train(np.random.default_rng(0).random((30, 16), dtype=np.float32))
    index.add(np.random.default_rng(0).random((30, 16), dtype=np.float32))
    faiss.write_index(index, str(path))
    content = path.read_bytes()
    size, crc = np.array(len(content)), np.array(zipfile.crc32(content))
    file = rebuilt(tmp_path / "meta.index", FILES / "ivf.index", size=size, crc=crc).read_bytes()
    with zipfile.ZipFile(FILES / "ivf.index") as archive:
        first = int(read_array(archive, "size"))
    path.write_bytes(content + file[first:])
    with pytest.raises(DataError, match=r"pq\.index"):
        read(path)


def test_failed_write_leaves_no_file(tmp_path, monkeypatch):
    index = InvertedLists.create(len(FEATURES), FEATURES.model.width, "cosine")
    with pytest.raises(ConfigError, match=r"no/a\.index.*No such file"):
        write_index(tmp_path / "no" / "a.index", index, FEATURES)

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, part):
            raise OSError(28, "No space left on device")

        def tell(self):
            return self.file.tell()

    write = module._write
    monkeypatch.setattr(module, "_write", lambda file, *rest: write(Full(file), *rest))
    with pytest.raises(ConfigError, match=r"a\.index.*No space left"):
        write_index(tmp_path / "a.index", index, FEATURES)
    assert not list(tmp_path.iterdir())
