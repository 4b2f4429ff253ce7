"""Tests of damaged, unsupported and inconsistent files of features, which must raise only DataError."""

import io
import zipfile
from pathlib import Path

import evaluate_features
import numpy as np
import pytest

from fastamp.retrieval import npz
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.npz import write_arrays
from fastamp.utils.errors import DataError

FILES = Path(__file__).parents[1] / "reference/saved_gallery"
GALLERY = (FILES / "gallery.npz").read_bytes()


def arrays_of(path):
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def write(path, arrays):
    with path.open("wb") as file:
        write_arrays(file, {name: array for name, array in arrays.items() if array is not None})
    return path


def entry_field(content, offset_local, offset_central, value):
    """Change a 16-bit field in the local and the central zip header of ``features.npy``."""
    data = bytearray(content)
    local, central = content.index(b"PK\x03\x04"), content.index(b"PK\x01\x02")
    for place in (local + offset_local, central + offset_central):
        data[place : place + 2] = value.to_bytes(2, "little")
    return bytes(data)


def with_header(text, version=(1, 0)):
    """Return the bytes of an extraction in which the features have the npy header ``text``."""
    arrays, file = arrays_of(FILES / "gallery.npz"), io.BytesIO()
    features = arrays.pop("features")
    write_arrays(file, arrays)
    header = np.lib.format.magic(*version) + len(text).to_bytes(2, "little") + text.encode()
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("features.npy", header + features.tobytes())
    return file.getvalue()


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (30, 16), }"
DAMAGED = {
    "compression method": entry_field(GALLERY, 8, 10, 99),
    "version": entry_field(GALLERY, 4, 6, 99),
    "encrypted": entry_field(GALLERY, 6, 8, 1),
    "patched data": entry_field(GALLERY, 6, 8, 0x20),
    "version of arrays": with_header(HEADER, version=(7, 0)),
    "huge shape": with_header(HEADER.replace("30", "3" + "0" * 18)),
    "larger than any integer": with_header(HEADER.replace("30", "3" + "0" * 40)),
    "negative shape": with_header(HEADER.replace("30", "-30")),
    "shape of a boolean": with_header(HEADER.replace("30", "True")),
    "shape of a text": with_header(HEADER.replace("(30, 16)", "'30'")),
    "dtype of objects": with_header(HEADER.replace("<f4", "|O")),
    "unknown dtype": with_header(HEADER.replace("<f4", "<z9")),
    "huge dtype": with_header(HEADER.replace("<f4", "<U" + "9" * 9)),
    "nested header": with_header("(" * 900),
    "header that is code": with_header("__import__('os').getpid()"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_reading_damaged_or_unsupported_extraction_archives_raises(tmp_path, input_error, name):
    path = tmp_path / "bad.npz"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(DataError, match=r"bad\.npz(.|\n)*fastamp extract"):
        read_features(path)
    assert "bad.npz" in input_error(evaluate_features.cli, [str(path), "MODEL.DEVICE", "cpu"])


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_extractions_load_unless_they_are_damaged(tmp_path, method):
    path = tmp_path / "packed.npz"
    with zipfile.ZipFile(FILES / "gallery.npz") as source, zipfile.ZipFile(path, "w", method) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    assert np.array_equal(read_features(path).matrix, read_features(FILES / "gallery.npz").matrix)
    content = path.read_bytes()
    refused = 0
    for place in range(40, 400, 9):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            read_features(path)
        except DataError:
            refused += 1
    assert refused > 20


@pytest.mark.integration
def test_reading_an_extraction_with_a_flipped_bit_raises_only_data_error(tmp_path):
    path, refused = tmp_path / "flipped.npz", 0
    for place in range(0, len(GALLERY), 11):
        path.write_bytes(GALLERY[:place] + bytes([GALLERY[place] ^ 1 << place // 11 % 8]) + GALLERY[place + 1 :])
        try:
            read_features(path)
        except DataError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 100


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("width", [7, 9, 10**18])
def test_array_whose_header_shape_contradicts_its_size_raises(tmp_path, width, compressed):
    """A memory map with a larger shape would extend into the next array."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (5, width)}
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, header)
    stream.write(np.zeros((5, 8), dtype="<f4").tobytes())
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        archive.writestr("features.npy", stream.getvalue(), compress_type=method)
        archive.writestr("more.npy", b"x" * 1000)
    expected = pytest.raises(DataError, match=rf"features.*\(5, {width}\).*160 bytes")
    with expected, npz.open_arrays(tmp_path / "a.npz", "extraction", fix="none") as archive:
        npz.map_array(archive, "features")


@pytest.mark.parametrize("error", [AttributeError, NameError, AssertionError])
def test_programming_errors_while_reading_are_not_reported_as_damaged_files(error):
    with pytest.raises(error), npz.open_arrays(FILES / "gallery.npz", "extraction", fix="none"):
        raise error


def test_extraction_larger_than_memory_raises(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **arrays_of(FILES / "gallery.npz") | {"features": np.zeros((30, 10_000), np.float32)})
    assert read_features(path).matrix.shape == (30, 10_000)
    monkeypatch.setattr(npz, "available_memory", lambda: 10**6)
    with pytest.raises(DataError, match=r"bomb\.npz"):
        read_features(path)
    read_features(FILES / "gallery.npz")  # memory-mapped, so not limited


WRONG = {
    "features of one dimension": ({"features": np.zeros(30, np.float32)}, "features.*float32"),
    "features of another dtype": ({"features": np.zeros((30, 16))}, "features.*float64"),
    "no features": ({"features": np.zeros((0, 16), np.float32)}, "features.*\\(30, 0\\)|features.*\\(0, 16\\)"),
    "features without width": (
        {"features": np.zeros((30, 0), np.float32)},
        "features.*\\(30, 0\\)|features.*\\(0, 16\\)",
    ),
    "fewer paths": ({"paths": np.array(["a"] * 29)}, "paths"),
    "paths that are numbers": ({"paths": np.arange(30)}, "paths.*int64"),
    "pids that are fractions": ({"pids": np.full(30, 0.5)}, "pids.*float64"),
    "pids of two dimensions": ({"pids": np.zeros((30, 1), np.int64)}, "pids"),
    "no dimension": ({"camids": np.array(3)}, "camids"),
    "cameras that are dates": ({"camids": np.zeros(30, "datetime64[s]")}, "camids"),
    "splits that are numbers": ({"split": np.zeros(30, int)}, "split"),
    "boxes of three numbers": ({"boxes": np.zeros((30, 3), int)}, "boxes"),
    "many hashes": ({"config_hash": np.array(["a", "b"])}, "config_hash"),
    "a metric that is a number": ({"metric": np.array(1)}, "metric"),
    "an unknown metric": ({"metric": np.array("other")}, "metric.*'other'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_extraction_columns_of_wrong_shape_or_dtype_raise(tmp_path, name):
    changes, message = WRONG[name]
    path = write(tmp_path / "wrong.npz", arrays_of(FILES / "gallery.npz") | changes)
    with pytest.raises(DataError, match=rf"wrong\.npz.*({message})"):
        read_features(path)


def test_extraction_of_a_later_format_raises(tmp_path):
    with zipfile.ZipFile(FILES / "gallery.npz") as archive:
        assert npz.read_array(archive, "fastamp_format") == 1
    path = write(tmp_path / "later.npz", arrays_of(FILES / "gallery.npz") | {"fastamp_format": np.array(2)})
    with pytest.raises(DataError, match=r"later\.npz .*'2'"):
        read_features(path)
