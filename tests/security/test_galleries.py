"""Galleries of other people: one error for each database, which may contain anything."""

import itertools
import shutil
import sqlite3
import struct
import zipfile
import zlib

import numpy as np
import pytest
from fuzz import bounded

from fastamp.retrieval.candidates import Candidates
from fastamp.retrieval.gallery_store import DATABASE_FILE, Item
from fastamp.retrieval.index_file import write_index
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.retrieval.npz import read_array, write_arrays
from fastamp.retrieval.open_gallery import open_gallery
from fastamp.utils.errors import DataError, WriteError

WIDTH = 4
RECURSION = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
MODEL = "4 AS width, 'cosine' AS metric, '' AS config_hash, '' AS checkpoint"
HOSTILE = {
    "endless view": f"DROP TABLE items; CREATE VIEW items AS {RECURSION} i AS id, i AS number, '' AS name, "
    "'' AS identity, '' AS camera, NULL AS time, zeroblob(16) AS feature, 0 AS crc FROM n",
    "endless view of the model": f"DROP TABLE gallery; CREATE VIEW gallery AS {RECURSION} {MODEL}, i AS token FROM n",
    "trigger": "CREATE TRIGGER t AFTER DELETE ON items BEGIN DELETE FROM items; END",
    "index": "CREATE INDEX other ON items (abs(number))",
    "another table": "CREATE TABLE other (a)",
    "no table": "DROP TABLE items",
    "another format": "PRAGMA user_version = 2",
    "no model": "DELETE FROM gallery",
    "two models": "INSERT INTO gallery SELECT * FROM gallery",
    "large feature": "UPDATE items SET feature = zeroblob(30000000)",
    "short feature": "UPDATE items SET feature = x'00'",
    "infinite feature": None,
    "text as feature": "UPDATE items SET feature = 'abc'",
    "no feature": "UPDATE items SET feature = NULL",
    "large name": "UPDATE items SET name = hex(zeroblob(20000000))",
    "infinity as time": "UPDATE items SET time = 9e999",
    "distant time": "UPDATE items SET time = 1e17",
    "text as time": "UPDATE items SET time = 'noon'",
    "bytes as name": "UPDATE items SET name = x'ff'",
    "invalid text": "UPDATE items SET camera = CAST(x'ff' AS TEXT)",
    "no name": "UPDATE items SET name = NULL",
    "no id": "UPDATE items SET id = NULL",
    "bytes as id": "UPDATE items SET id = x'6100' WHERE id = 'a'",
    "zero in id": "UPDATE items SET id = CAST(x'6100' AS TEXT) WHERE id = 'a'",
    "negative number": "UPDATE items SET number = -1 WHERE id = 'a'",
    "text as checksum": "UPDATE items SET crc = 'abc'",
    "no width": "UPDATE gallery SET width = NULL",
    "text as width": "UPDATE gallery SET width = 'abc'",
    "large width": "DELETE FROM items; UPDATE gallery SET width = 9223372036854775807",
    "number as hash": "UPDATE gallery SET config_hash = x'ff'",
    "no token": "UPDATE gallery SET token = NULL",
}


@pytest.fixture
def gallery(tmp_path):
    with MutableGallery(tmp_path / "a.gallery", ModelId(WIDTH, "cosine", "hash", "model.pth")) as gallery:
        gallery.add([Item("a"), Item("b", picture=b"jpeg")], np.eye(2, WIDTH, dtype=np.float32))
    return tmp_path / "a.gallery"


def change(gallery, script):
    with sqlite3.connect(gallery / DATABASE_FILE) as connection:
        connection.executescript(f"PRAGMA journal_mode = DELETE; {script}")
    connection.close()


def test_hostile_databases_are_an_error(gallery, tmp_path, subtests):
    for kind, script in HOSTILE.items():
        with subtests.test(kind=kind):
            if script is None:
                feature = struct.pack("<4f", np.inf, 0, 0, 0)
                script = f"UPDATE items SET feature = x'{feature.hex()}', crc = {zlib.crc32(feature)}"
            copy = shutil.copytree(gallery, tmp_path / kind)
            change(copy, script)
            with bounded(60, 2**30), pytest.raises(DataError, match="fix:"):
                open_gallery(copy)


@pytest.mark.parametrize(
    "values", [{"time": np.inf}, {"time": np.nan}, {"time": 1e15}, {"name": None}, {"camera": 3}, {"identity": b"a"}]
)
def test_values_that_could_not_be_read_again_are_an_error(values):
    with pytest.raises(DataError, match=next(iter(values))):
        Item("a", **values)


@pytest.mark.parametrize("value", ["'text'", "5", "zeroblob(30000000)"])
def test_hostile_picture_is_an_error(gallery, value):
    change(gallery, f"UPDATE items SET picture = {value}")
    with bounded(60, 2**30), open_gallery(gallery) as opened, pytest.raises(DataError, match="fix:"):
        opened.picture("b")


def test_pages_that_are_linked_in_a_circle_are_an_error(gallery):
    """The pages of the table repeat: reading it would not end."""
    names = [f"{number:0100}" for number in range(3000)]
    with MutableGallery(gallery) as opened:
        opened.add([Item(name) for name in names], np.ones((len(names), WIDTH), np.float32))
    change(gallery, "")
    file = gallery / DATABASE_FILE
    content = bytearray(file.read_bytes())
    size = struct.unpack(">H", content[16:18])[0]
    with sqlite3.connect(file) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'items'").fetchone()
    connection.close()
    start = (root - 1) * size
    assert content[start] == 5  # an interior page of a table
    count = struct.unpack(">H", content[start + 3 : start + 5])[0]
    cells = struct.unpack(f">{count}H", content[start + 12 : start + 12 + 2 * count])
    assert count > 20
    # Each child of the root is a copy of it, at 15 levels: 20^15 pages.
    pages = [struct.unpack(">I", content[start + cell : start + cell + 4])[0] for cell in cells][:16]
    for level, page in enumerate(pages[:-1]):
        copied = bytearray(content[start : start + size])
        for cell in cells:
            copied[cell : cell + 4] = struct.pack(">I", pages[level + 1])
        copied[8:12] = struct.pack(">I", pages[level + 1])
        content[(page - 1) * size : page * size] = copied
    for cell in cells:
        content[start + cell : start + cell + 4] = struct.pack(">I", pages[0])
    file.write_bytes(content)
    with bounded(60, 2**30), pytest.raises(DataError, match="fix:"):
        open_gallery(gallery)


def test_numbers_that_are_used_up_are_an_error(gallery):
    change(gallery, "UPDATE sqlite_sequence SET seq = 9223372036854775807")
    with MutableGallery(gallery) as opened, pytest.raises(WriteError, match="fix:"):
        opened.add([Item("c")], np.ones((1, WIDTH), np.float32))


def test_hostile_candidates_are_not_used(tmp_path, subtests):
    gallery = MutableGallery(tmp_path / "a.gallery", ModelId(8, "cosine", "hash", "model.pth"))
    other = MutableGallery(tmp_path / "b.gallery", ModelId(16, "cosine", "hash", "model.pth"))
    other.fingerprint = gallery.fingerprint
    names, path = ["kind", "effort", "recall", "fingerprint", "size", "crc"], tmp_path / "candidates.index"
    values = [np.array("x"), np.zeros((2, 2)), np.array(-5), np.array(np.nan), np.zeros(0)]
    for name, value in itertools.product(names, values):
        with subtests.test(name=name, value=value):
            candidates = Candidates.train(np.eye(200, 8, dtype=np.float32), 200, gallery.model, {})
            candidates.add([Item("a", number=number) for number in range(200)], np.eye(200, 8, dtype=np.float32))
            candidates.effort, candidates.recall = 1, 0.99
            write_index(path, candidates, gallery)
            assert Candidates.read(path, gallery, {}).numbers == {*range(200)}
            assert Candidates.read(path, other, {}) is None
            content = path.read_bytes()
            with zipfile.ZipFile(path) as archive:
                arrays = {entry.removesuffix(".npy"): read_array(archive, entry[:-4]) for entry in archive.namelist()}
            size, arrays = int(arrays["size"]), arrays | {name: value}
            with path.open("wb") as file:
                file.write(content[:size])
                write_arrays(file, arrays)
            assert Candidates.read(path, gallery, {}) is None
