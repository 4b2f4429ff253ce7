"""Tests of the mutable gallery: equality with naive search after random changes, durability, filters and commands."""

import io
import json
import os
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path

import gallery_writer
import numpy as np
import PIL.Image
import pytest
import torch
from command import run_command
from preloaded import Run

from fastamp import Predictor
from fastamp.cli import compare as compare_command
from fastamp.cli import gallery as command
from fastamp.cli import main
from fastamp.cli import search as search_command
from fastamp.data.build import build_dataset
from fastamp.data.decode import MAX_PIXELS
from fastamp.inference.export import export
from fastamp.inference.extract import extract
from fastamp.inference.gallery_source import Adding, add_images
from fastamp.inference.search_terms import SearchTerm
from fastamp.retrieval import mutable_gallery as module
from fastamp.retrieval.candidates import Candidates
from fastamp.retrieval.gallery import Conditions
from fastamp.retrieval.gallery_store import Item, format_time, parse_time
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.mutable_gallery import MissingItemError, MutableGallery
from fastamp.retrieval.open_gallery import open_gallery
from fastamp.retrieval.search import search
from fastamp.utils.errors import ConfigError, DataError, WeightsError, WriteError

WIDTH = 16
KILLS = int(os.environ.get("FASTAMP_TEST_KILLS", "8"))


def model(metric="cosine", width=WIDTH):
    return ModelId(width, metric, "hash", "model.pth")


def naive_search(stored, queries, k, metric):
    """Return ids (Q, k) and scores (Q, k) from a loop over all pairs."""
    found = []
    for query in queries.astype(np.float64):
        scores = {}
        for item_id, feature in stored.items():
            vector = feature.astype(np.float64)
            cosine = query @ vector / (np.linalg.norm(query) * np.linalg.norm(vector))
            scores[item_id] = cosine if metric == "cosine" else -np.linalg.norm(query - vector)
        found.append(sorted(scores.items(), key=lambda pair: -pair[1])[:k])
    ids = [[item_id for item_id, _ in row] for row in found]
    return ids, np.abs([[score for _, score in row] for row in found]) if metric != "cosine" else np.array(
        [[score for _, score in row] for row in found]
    )


def check_equal(gallery, stored, random):
    queries = random.standard_normal((3, WIDTH)).astype(np.float32)
    ids, scores = naive_search(stored, queries, 5, gallery.model.metric)
    found = search(queries, gallery, 5)
    assert found.images.further["id"].tolist() == ids
    assert np.allclose(found.scores, scores, atol=1e-5)  # float32 sums of 16 products


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_search_equals_a_naive_search_after_random_changes(tmp_path, metric):
    random, stored = np.random.default_rng(0), {}
    gallery = MutableGallery(tmp_path / "a.gallery", model(metric))
    other = MutableGallery(tmp_path / "a.gallery")  # as another process
    for number in range(40):
        action = random.choice(["add", "update", "remove"]) if len(stored) > 20 else "add"
        size = int(random.integers(1, 9))
        features = random.standard_normal((size, WIDTH)).astype(np.float32)
        if action == "add":
            ids = [f"{number}-{row}" for row in range(size)]
        else:
            ids = random.choice(sorted(stored), size, replace=False).tolist()
        changing = gallery if number % 3 else other
        if action == "remove":
            changing.remove(ids)
            stored = {item: feature for item, feature in stored.items() if item not in ids}
        else:
            getattr(changing, action)([Item(item, name=f"{number}") for item in ids], features)
            stored |= dict(zip(ids, features, strict=True))
            assert changing.item(ids[0]).name == f"{number}"
        assert len(search(features, gallery, 1).rows) == size and len(gallery) == len(stored)
        check_equal(gallery, stored, random)
    check_equal(other, stored, random)
    check_equal(MutableGallery(tmp_path / "a.gallery"), stored, random)


def test_candidates_are_compared_exactly_and_follow_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLAT_UP_TO", 1000)
    random = np.random.default_rng(0)
    centers = 3 * random.standard_normal((150, WIDTH))
    features = (centers.repeat(10, 0) + random.standard_normal((1500, WIDTH))).astype(np.float32)
    for metric in ("cosine", "euclidean"):
        gallery = MutableGallery(tmp_path / metric, model(metric))
        gallery.add([Item(f"{row}") for row in range(1500)], features)
        assert gallery.wants_candidates and gallery.kind == "flat" and gallery.recall is None
        recall = gallery.build_candidates()
        assert not gallery.wants_candidates and gallery.kind == "ivfpq" and gallery.recall == recall >= 0.98
        gallery.remove([f"{row}" for row in range(0, 300, 2)])
        gallery.update([Item(f"{row}") for row in range(1, 100, 2)], features[:50])
        gallery.add([Item(f"new {row}") for row in range(200)], features[300:500] + 0.01)
        loaded = MutableGallery(tmp_path / metric)
        assert loaded.kind == "ivfpq" and loaded.recall == recall
        queries = (centers[:40] + random.standard_normal((40, WIDTH))).astype(np.float32)
        exact = search(queries, gallery, 10, exact=True)
        for opened in (gallery, loaded):
            found = search(queries, opened, 10)
            ids = zip(found.images.further["id"].tolist(), exact.images.further["id"].tolist(), strict=True)
            assert np.mean([len({*a} & {*b}) for a, b in ids]) >= 9  # of 10
            same = found.images.further["id"] == exact.images.further["id"]
            assert same[:, 0].mean() > 0.9
            assert np.allclose(found.scores[same], exact.scores[same], atol=1e-4)  # not of the product codes
        assert search(queries[:1], gallery, 1500, effort=1).rows.shape == (1, 1500)  # fewer candidates than k


def test_approximate_index_is_not_used_if_its_recall_is_low_or_its_file_is_wrong(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "FLAT_UP_TO", 1000)
    features = np.random.default_rng(0).standard_normal((1200, WIDTH)).astype(np.float32)
    for name in ("a", "b"):
        gallery = MutableGallery(tmp_path / name, model())
        gallery.add([Item(f"{row}") for row in range(1200)], features)
    monkeypatch.setattr(module, "WANTED_RECALL", 1.1)
    assert gallery.build_candidates() is None and gallery.kind == "flat"
    assert "remains exact" in caplog.text
    monkeypatch.setattr(module, "WANTED_RECALL", 0.0)
    assert gallery.build_candidates() is not None
    file = tmp_path / "b/candidates.index"
    content = file.read_bytes()
    (tmp_path / "a/candidates.index").write_bytes(content)
    assert MutableGallery(tmp_path / "a").kind == "flat" and "of another gallery" in caplog.text
    file.write_bytes(content[:-100])
    assert MutableGallery(tmp_path / "b").kind == "flat" and "damaged" in caplog.text
    assert Candidates.read(file, gallery, {}) is None


def test_candidates_are_built_while_the_gallery_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLAT_UP_TO", 1000)
    random = np.random.default_rng(0)
    features = random.standard_normal((1500, WIDTH)).astype(np.float32)
    gallery = MutableGallery(tmp_path / "a", model())
    gallery.add([Item(f"{row}") for row in range(1500)], features)
    train = Candidates.train

    def change_while_training(*args):
        thread = threading.Thread(
            target=lambda: (gallery.remove(["3"]), gallery.add([Item("new")], features[:1] + 0.1))
        )
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        rows = dict(gallery._row_of_number)
        gallery._row_of_number.clear()  # as while the changes of another process are read
        try:
            return train(*args)
        finally:
            gallery._row_of_number.update(rows)

    monkeypatch.setattr(Candidates, "train", change_while_training)
    monkeypatch.setattr(module, "WANTED_RECALL", 0.0)
    gallery.build_candidates()
    assert "3" not in gallery and len(gallery.index.numbers) == len(gallery) == 1500
    assert search(features[:1] + 0.1, gallery, 1, effort=1000).images.further["id"].tolist() == [["new"]]


def test_search_reads_the_changes_of_another_writer_before_its_terms_not_after_them(tmp_path):
    features = np.eye(3, WIDTH, dtype=np.float32)
    gallery = MutableGallery(tmp_path / "a", model())
    gallery.add([Item(name) for name in "abc"], features)

    class LastId(SearchTerm):
        @classmethod
        def from_model(cls, text, model):
            return cls()

        def rows(self, gallery):
            row = gallery.columns["id"].tolist().index("c")
            MutableGallery(tmp_path / "a").remove(["a"])  # c gets its row
            return np.array([row])

        scores = None

    class Model(Predictor):
        config_hash, checkpoint, stored_calibration = "hash", Path("model.pth"), None

        def __init__(self):
            pass

    found = Model().search(None, gallery, features=torch.from_numpy(features[:1]), terms=[LastId()])
    assert found.images.further["id"].tolist() == [["c"]]
    assert sorted(search(features[:1], gallery).images.further["id"][0].tolist()) == ["b", "c"]


def test_changes_of_another_process_are_read_without_the_other_items(tmp_path, monkeypatch):
    features, read = np.eye(8, WIDTH, dtype=np.float32), []
    gallery, normalized = MutableGallery(tmp_path / "a", model()), module.normalized
    gallery.add([Item(name) for name in "abcdef"], features[:6])
    other = MutableGallery(tmp_path / "a")
    monkeypatch.setattr(module, "normalized", lambda rows, metric: read.append(len(rows)) or normalized(rows, metric))
    other.remove(["b", "f"])
    gallery.refresh()
    assert not read and sorted(item.id for item in gallery.items) == ["a", "c", "d", "e"]
    other.add([Item("g")], features[6:7])
    other.update([Item("c", "new")])
    other.update([Item("d")], features[7:])
    read.clear()
    gallery.refresh()
    assert read == [3] and gallery.item("c").name == "new"
    for opened in (gallery, other, MutableGallery(tmp_path / "a")):
        found = search(features[[0, 2, 4, 6, 7]], opened, 1)
        assert found.images.further["id"][:, 0].tolist() == ["a", "c", "e", "g", "d"] and np.allclose(found.scores, 1)
        numbers = [item.number for item in opened.items]
        assert len(opened) == 5 and len({*numbers}) == 5 and [opened._row_of_number[n] for n in numbers] == [*range(5)]


def test_items_on_the_disk_are_read_later_if_there_is_no_memory_for_them(tmp_path, monkeypatch):
    gallery = MutableGallery(tmp_path / "a", model())
    features = np.eye(4, WIDTH, dtype=np.float32)
    gallery.add([Item("a")], features[:1])
    with monkeypatch.context() as patch:
        patch.setattr(module.np, "empty", raise_memory_error)
        with pytest.raises(MemoryError):
            gallery.add([Item("b"), Item("c")], features[1:3])
    gallery.add([Item("d")], features[3:])
    assert [gallery.item(name).id for name in ("a", "d")] == ["a", "d"] and "b" in gallery
    assert search(features, gallery, 1).images.further["id"][:, 0].tolist() == ["a", "b", "c", "d"]


def raise_memory_error(*args, **options):
    raise MemoryError


def acknowledged(lines, stored):
    """Apply printed changes to item -> version; return the result, and the change that was not acknowledged or {}."""
    started = {}
    for line in lines:
        if line.startswith("start"):
            started = {word.partition(":")[0]: int(word.partition(":")[2]) for word in line.split()[1:]}
        elif line == "done":
            stored = {item: version for item, version in (stored | started).items() if version >= 0}
            started = {}
    return stored, started


def kill_writer(folder, seed, seconds):
    """Run the writer, kill it ``seconds`` after its first change, and return the lines that it printed."""
    reader, writer = os.pipe()
    run = Run([gallery_writer.__file__, str(folder), str(seed)], {}, stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as output:
        first = output.readline()
        time.sleep(seconds)
        os.kill(run.pid, signal.SIGKILL)
        # A line that was cut off by the kill was not acknowledged.
        lines = [line.strip() for line in [first, *output] if line.endswith("\n")]
    run.finish()
    return lines


def check_contents(folder, lines, stored):
    """Check that all acknowledged changes are stored, and all or nothing of the last one; return the items."""
    expected, started = acknowledged(lines, stored)
    after = {item: version for item, version in (expected | started).items() if version >= 0}
    with MutableGallery(folder) as gallery:
        found = {item.id: int(item.name) for item in gallery.items}
        assert found in (expected, after)
        queries = np.stack([gallery_writer.feature(item, version) for item, version in found.items()])
        result = search(queries, gallery, 1)
    assert result.images.further["id"][:, 0].tolist() == list(found) and np.allclose(result.scores, 1, atol=1e-5)
    return found


@pytest.mark.integration
def test_no_acknowledged_change_is_lost_if_the_process_is_killed(tmp_path):
    folder, stored, changes, random = tmp_path / "a.gallery", {}, 0, np.random.default_rng(0)
    for seed in range(KILLS):
        lines = kill_writer(folder, seed, random.uniform(0, 0.5))
        changes += lines.count("done")
        stored = check_contents(folder, lines, stored)
    assert changes > 2 * KILLS


@pytest.mark.integration
def test_check_for_lost_changes_detects_a_lost_change(tmp_path):
    folder = tmp_path / "a.gallery"
    lines = kill_writer(folder, 0, 0.3)
    stored, started = acknowledged(lines, {})
    with MutableGallery(folder) as gallery:
        gallery.remove([next(item_id for item_id in stored if item_id not in started)])
    with pytest.raises(AssertionError):
        check_contents(folder, lines, {})


def test_command_suggests_the_nearest_id(tmp_path, input_error):
    with MutableGallery(tmp_path / "a.gallery", model()) as gallery:
        gallery.add([Item(f"photos/{name}.jpg") for name in ("door", "gate")], np.eye(2, WIDTH, dtype=np.float32))
    words = ["gallery", "remove", str(tmp_path / "a.gallery"), "photos/gate.jpg"]
    assert "'photos/door.jpg'" in input_error(main, [*words, "photos/dor.jpg"])
    assert main(words) == 0  # had not been removed


def test_invalid_changes_change_nothing(tmp_path, monkeypatch):
    gallery = MutableGallery(tmp_path / "a.gallery", model())
    features = np.eye(3, WIDTH, dtype=np.float32)
    gallery.add([Item(name) for name in "abc"], features)
    for change in (
        lambda: gallery.add([Item("d"), Item("a")], features[:2]),
        lambda: gallery.add([Item("d"), Item("d")], features[:2]),
        lambda: gallery.add([Item("d")], features),
        lambda: gallery.add([Item("d")], features[:1] * np.nan),
        lambda: gallery.update([Item("a", "x"), Item("d")]),
        lambda: gallery.remove(["a", "d"]),
        lambda: gallery.remove(["a", "a"]),
        lambda: gallery.item("d"),
        lambda: Item(""),
        lambda: Item("a" * 501),
    ):
        with pytest.raises(DataError):
            change()
    with pytest.raises(MissingItemError):
        gallery.remove(["d"])
    with pytest.raises(ZeroDivisionError), monkeypatch.context() as patch:
        patch.setattr(type(gallery._store), "write", lambda *_: 1 / 0)
        gallery.add([Item("d")], features[:1])
    for opened in (gallery, MutableGallery(tmp_path / "a.gallery")):
        assert [item.id for item in opened.items] == ["a", "b", "c"] and opened.items[0].name == ""
        assert search(features, opened, 1).images.further["id"][:, 0].tolist() == ["a", "b", "c"]


def test_items_that_exist_are_skipped_or_replaced(tmp_path):
    gallery, features = MutableGallery(tmp_path / "a.gallery", model()), np.eye(4, WIDTH, dtype=np.float32)
    gallery.add([Item("a", picture=b"jpeg"), Item("b")], features[:2])
    assert gallery.add([Item("a", "x"), Item("c")], features[2:], existing="skip") == [1]
    assert gallery.item("a").name == "" and gallery.picture("a") == b"jpeg"
    assert gallery.add([Item("d"), Item("a", "x")], features[[0, 2]], existing="replace") == [0, 1]
    assert gallery.item("a").name == "x" and gallery.picture("a") == b"jpeg" and len(gallery) == 4
    assert search(features, gallery, 1).images.further["id"][:, 0].tolist() == ["d", "b", "a", "c"]
    with pytest.raises(ConfigError, match="existing"):
        gallery.add([Item("e")], features[:1], existing="other")


def test_metadata_pictures_and_conditions(tmp_path):
    gallery = MutableGallery(tmp_path / "a.gallery", model())
    times = [0.0, 10.5, None, 30.0]
    items = [Item(f"{n}", f"n{n}", f"p{n % 2}", f"c{n // 2}", times[n], b"jpeg") for n in range(4)]
    gallery.add(items, np.eye(4, WIDTH))
    gallery.update([Item("3", "new", camera="c9")])  # keeps feature and picture
    loaded = MutableGallery(tmp_path / "a.gallery")
    for opened in (gallery, loaded):
        assert [opened.picture(item_id) for item_id in ("0", "3", "none")] == [b"jpeg", b"jpeg", None]
        assert opened.item("3") == Item("3", "new", camera="c9") and opened.item("1").time == 10.5
        found = search(np.eye(4, WIDTH)[3:], opened, 1)
        assert (found.images.paths[0, 0], found.images.pids[0, 0], found.images.cameras[0, 0]) == ("new", "-1", "c9")
        assert opened.rows_where(Conditions(cameras=["c0"])).tolist() == [0, 1]
        assert opened.rows_where(Conditions(identities=["p0"], cameras=["c1"])).tolist() == [2]
        assert opened.rows_where(Conditions(after=0.0, before=10.5)).tolist() == [0]
        assert opened.rows_where(Conditions(after=10.5)).tolist() == [1]
        result = search(np.ones((1, WIDTH)), opened, 5, where=Conditions(cameras=["c0"]))
        assert sorted(result.images.further["id"][0].tolist()) == ["0", "1"] and result.searched == 2
        result = search(np.ones((2, WIDTH)), opened, 5, where=Conditions(cameras=["c8"]))
        assert result.rows.shape == (2, 0) and result.searched == 0
    gallery.remove(["0"])
    assert gallery.picture("0") is None
    assert parse_time(format_time(1769862600.5)) == 1769862600.5
    assert parse_time("2026-01-31T14:30") == parse_time("2026-01-31T16:30:00+02:00") == parse_time("2026-01-31T14:30Z")
    with pytest.raises(ConfigError):
        parse_time("yesterday")
    with pytest.raises(ConfigError):
        parse_time("9999-12-31T23:59:59-12:00")  # year 10000 in UTC, which could not be written


def test_damaged_galleries_and_other_models_are_errors(tmp_path):
    folder = tmp_path / "a.gallery"
    with MutableGallery(folder, model()) as gallery:
        gallery.add([Item("a")], np.ones((1, WIDTH)))
    with pytest.raises(DataError, match="model.pth(.|\n)*other.pth"):
        MutableGallery(folder, ModelId(WIDTH, "cosine", "other", "other.pth"))
    assert len(MutableGallery(folder, model())) == 1
    with sqlite3.connect(folder / "items.db") as connection:
        connection.execute("UPDATE items SET feature = zeroblob(64)")
    connection.close()
    with pytest.raises(DataError, match="'a'"):
        MutableGallery(folder)
    (folder / "items.db").write_bytes(b"no database, but text that is long enough" * 100)
    with pytest.raises(DataError, match="damaged"):
        MutableGallery(folder)
    with pytest.raises(DataError, match="items.db"):
        MutableGallery(tmp_path)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        MutableGallery(tmp_path, model())
    with pytest.raises(WriteError):
        MutableGallery(tmp_path / "missing" / "a.gallery", model())


@pytest.mark.parametrize("replaced", [False, True])
def test_changes_after_the_files_were_removed_are_errors(tmp_path, replaced):
    folder = tmp_path / "a.gallery"
    with MutableGallery(folder, model()) as gallery:
        gallery.add([Item("a")], np.ones((1, WIDTH)))
        folder.rename(tmp_path / "old.gallery")
        if replaced:
            MutableGallery(folder, model()).close()
        # SQLite would write to the removed file, and the item would be lost.
        with pytest.raises(WriteError, match=str(folder)):
            gallery.add([Item("b")], np.ones((1, WIDTH)))
        assert len(gallery) == 1
        for read in (lambda: search(np.ones((1, WIDTH)), gallery), lambda: gallery.picture("a"), gallery.refresh):
            with pytest.raises(WriteError, match=str(folder)):
                read()


@pytest.mark.parametrize("name", ["items.db", "items.db-wal", "items.db-shm", ""])
def test_changes_are_not_acknowledged_if_a_file_is_removed_before_or_during_the_commit(tmp_path, name):
    for during in (False, True):
        folder = tmp_path / f"{during}.gallery"
        with MutableGallery(folder, model()) as gallery:
            gallery.add([Item("a")], np.ones((1, WIDTH)))
            MutableGallery(folder).close()  # the files remain while a connection is open
            gallery.add([Item("b")], np.ones((1, WIDTH)))

            def remove(*_, folder=folder):
                if name:
                    (folder / name).unlink()
                else:  # a file instead of the folder
                    folder.rename(folder.with_suffix(".old"))
                    folder.write_text("")

            if during:
                gallery._store._connection.create_function("remove_files", 0, remove)
                gallery._store._connection.execute(
                    "CREATE TEMP TRIGGER during AFTER INSERT ON main.items BEGIN SELECT remove_files(); END"
                )
            else:
                remove()
            with pytest.raises(WriteError, match=r"\.gallery"):
                gallery.add([Item("c")], np.ones((1, WIDTH)))
            assert len(gallery) == 2


def test_unreadable_query_is_found_before_the_gallery_is_extracted(demo, checkpoint, tmp_path):
    images = [item.path for item in build_dataset("Demo").query[:2]]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.png").write_bytes(Path(images[0]).read_bytes())
    (tmp_path / "empty.png").touch()
    with pytest.raises(DataError, match=r"empty\.png"):
        run_command(search_command, checkpoint, images[1], tmp_path / "empty.png", "--gallery", tmp_path / "photos")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.png", "photos"]


def test_gallery_and_search_commands(demo, predictor, checkpoint, tmp_path, capsys):
    images = [item.path for item in build_dataset("Demo").query[:4]]
    folder = tmp_path / "people.gallery"
    options = ("--model", checkpoint, "--device", "cpu")
    assert run_command(command, "add", folder, *images[:2], *options, "--camera", "door", "--time", "2026-01-31") == 0
    assert run_command(command, "add", folder, *images, *options) == 0
    assert "added 2 items" in (out := capsys.readouterr().out) and "skipped 2 that existed" in out
    assert run_command(command, "list", folder, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == images and [row["camera"] for row in rows] == ["door", "door", "", ""]
    gallery = open_gallery(folder, of=predictor)
    assert isinstance(gallery, MutableGallery)
    assert PIL.Image.open(io.BytesIO(gallery.picture(images[0]))).format == "JPEG"
    expected = predictor.features(images)
    assert torch.allclose(torch.tensor(gallery._matrix), torch.nn.functional.normalize(expected), atol=1e-5)
    words = (checkpoint, images[2], "--gallery", folder, "-k", 2, "--device", "cpu", "--json")
    assert run_command(search_command, *words) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["found"][0]["id"] == images[2] and found["found"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert run_command(search_command, *words, "--camera", "door", "--before", "2026-02-01") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert {row["id"] for row in found["found"]} == {*images[:2]} and found["found"][0]["camera"] == "door"
    assert run_command(search_command, *words[:-1], "--camera", "none") == 0
    assert "no images" in capsys.readouterr().out
    assert run_command(command, "remove", folder, images[2]) == 0 and run_command(command, "list", folder) == 0
    assert "3 items, exact search" in capsys.readouterr().out
    for wrong in (("--index", tmp_path / "a.index"), ("--kind", "ivf")):
        with pytest.raises(ConfigError, match="mutable"):
            run_command(search_command, *words, *wrong)
    with pytest.raises(MissingItemError):
        run_command(command, "remove", folder, "x")
    with pytest.raises(ConfigError, match="--model"):
        run_command(command, "add", folder, images[0])
    with pytest.raises(DataError, match="x.jpg"):
        run_command(command, "add", folder, "x.jpg", *options)


@pytest.fixture
def photos(demo, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, item in enumerate(build_dataset("Demo").query[:4]):
        shutil.copy(item.path, folder / f"{number}.jpg")
    return folder


def test_unreadable_photos_lose_no_others(photos, checkpoint, tmp_path, capsys, caplog):
    gallery, options = tmp_path / "a.gallery", ("--model", checkpoint, "--device", "cpu")
    heic = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(200)
    for name, content in (("1.jpg", b"damaged"), ("2.jpg", heic), ("9.HEIC", heic)):
        (photos / name).write_bytes(content)
    with pytest.raises(DataError, match=r"(?s)1\.jpg.*--skip-corrupt"):
        run_command(command, "add", gallery, photos, *options)
    assert [item.name for item in MutableGallery(gallery).items] == ["0.jpg", "3.jpg"]
    assert "1 HEIC file" in caplog.text and "9.HEIC" in caplog.text
    assert run_command(command, "add", tmp_path / "b.gallery", photos, *options, "--skip-corrupt", "--no-pictures") == 0
    out = capsys.readouterr().out
    assert "skipped 2 unreadable images" in out and "added 2 items" in out
    assert f"{photos / '2.jpg'}: it is a HEIC image" in out and f"{photos / '1.jpg'}: cannot identify" in out
    assert [item.name for item in MutableGallery(tmp_path / "b.gallery").items] == ["0.jpg", "3.jpg"]
    bad = tmp_path / "bad"
    shutil.copytree(photos, bad, ignore=shutil.ignore_patterns("0.jpg", "3.jpg"))
    assert run_command(command, "add", tmp_path / "b.gallery", bad, *options, "--skip-corrupt") == 0
    assert "added 0 items" in capsys.readouterr().out


def test_ids_do_not_depend_on_the_current_folder(photos, checkpoint, tmp_path, capsys, monkeypatch):
    options = ("--model", checkpoint, "--device", "cpu")
    monkeypatch.chdir(tmp_path)
    assert run_command(command, "add", "a.gallery", "photos", *options) == 0
    monkeypatch.chdir(photos)
    for source in (".", photos, "0.jpg", "../photos/./1.jpg"):
        assert run_command(command, "add", "../a.gallery", source, *options) == 0
        assert "added 0 items" in capsys.readouterr().out
    extraction, _ = extract(Predictor(checkpoint, device="cpu"), ".", tmp_path / "x.npz")
    assert run_command(command, "add", tmp_path / "a.gallery", extraction.path) == 0
    assert "added 0 items" in capsys.readouterr().out
    assert [item.id for item in MutableGallery(tmp_path / "a.gallery").items] == [f"photos/{n}.jpg" for n in range(4)]
    assert run_command(command, "remove", "../a.gallery", "2.jpg", "photos/3.jpg") == 0
    assert len(MutableGallery(tmp_path / "a.gallery")) == 2


@pytest.mark.integration
def test_commands_with_an_exported_model(demo, predictor, tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    images = [item.path for item in build_dataset("Demo").query[:3]]
    folder, model = tmp_path / "people.gallery", tmp_path / "model.onnx"
    export(predictor, model, data="")
    assert run_command(command, "add", folder, *images, "--model", model) == 0
    capsys.readouterr()
    for source in (model, predictor.checkpoint):  # features of both can be compared
        assert run_command(search_command, source, images[1], "--gallery", folder, "-k", 1, "--json") == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert found["found"][0]["id"] == images[1] and found["found"][0]["score"] > 0.999
    assert run_command(compare_command, model, images[0], images[0]) == 0
    assert "cosine similarity 1.0000" in capsys.readouterr().out
    shutil.copy(images[1], tmp_path)
    assert run_command(search_command, model, images[1], "--gallery", tmp_path, "-k", 1, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert Path(found["found"][0]["path"]).name == Path(images[1]).name
    monkeypatch.setattr("fastamp.inference.image_folder._IN_MEMORY_UP_TO", 0)
    with pytest.raises(ConfigError, match="gallery add"):
        run_command(search_command, model, images[1], "--gallery", tmp_path)
    for wrong in (["--opts", "TEST.METRIC", "euclidean"], ["--device", "cuda"]):
        with pytest.raises(ConfigError, match="exported file"):
            run_command(search_command, model, images[1], "--gallery", folder, *wrong)


def test_wrong_group_is_reported_before_the_model_is_loaded(demo, predictor, tmp_path):
    extraction, _ = extract(predictor, "Demo", tmp_path / "a.npz", splits=["query"])
    image = build_dataset("Demo").query[0].path
    with pytest.raises(ConfigError, match="'specie'.*identity, camera"):
        run_command(search_command, "damaged.pth", image, "--gallery", extraction.path, "--group-by", "specie")
    with pytest.raises(WeightsError):  # the group exists, but not the model
        run_command(search_command, "damaged.pth", image, "--gallery", extraction.path, "--group-by", "identity")


def test_extracted_features_are_added_without_the_model(demo, predictor, tmp_path, capsys):
    extraction, _ = extract(predictor, "Demo", tmp_path / "a.npz", splits=["query", "gallery"])
    folder = tmp_path / "a.gallery"
    assert run_command(command, "add", folder, extraction.path) == 0
    count = len(extraction)
    assert f"added {count} items" in capsys.readouterr().out
    result = predictor.search(extraction.images.paths[0], folder, 5)
    flat = predictor.search(extraction.images.paths[0], extraction.path, 5)
    assert np.array_equal(result.images.further["id"], flat.images.paths) and np.allclose(result.scores, flat.scores)
    assert result.images.pids[0, 0] == str(flat.images.pids[0, 0]) and len(result.images.cameras[0, 0])
    assert run_command(command, "add", folder, extraction.path, "--replace", "--camera", "x") == 0
    assert {item.camera for item in MutableGallery(folder).items} == {"x"}
    camera = extraction.images.cameras[0]
    for source in (extraction.path, folder):
        found = predictor.search(extraction.images.paths[0], source, 5, conditions=Conditions(cameras=[camera]))
        assert set(found.images.cameras[0]) == ({camera} if source == extraction.path else set())
    with pytest.raises(ConfigError, match="no times"):
        predictor.search(extraction.images.paths[0], extraction.path, conditions=Conditions(after=0.0))


def test_images_that_only_the_model_accepts_are_added_with_pictures(predictor, tmp_path, monkeypatch):
    monkeypatch.setattr(predictor, "transforms", predictor.transforms._replace(max_pixels=2 * MAX_PIXELS))
    PIL.Image.new("L", (10_001, MAX_PIXELS // 10_000)).save(tmp_path / "large.jpg")
    assert add_images(tmp_path / "a.gallery", [str(tmp_path / "large.jpg")], predictor) == (1, 0, [])
    gallery = MutableGallery(tmp_path / "a.gallery")
    assert gallery.picture(gallery.items[0].id)


def test_a_gallery_whose_reading_failed_is_read_again(tmp_path, monkeypatch):
    gallery = MutableGallery(tmp_path / "a.gallery", model())
    MutableGallery(tmp_path / "a.gallery").add([Item("a"), Item("b")], np.eye(2, WIDTH))  # as another process

    def failing(*_):
        raise WriteError("the database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(gallery._store, "read", failing)
        with pytest.raises(WriteError):
            search(np.eye(1, WIDTH), gallery, 2)
    assert search(np.eye(1, WIDTH), gallery, 2).images.further["id"].tolist() == [["a", "b"]]


def test_readable_features_of_no_images_raise(predictor):
    with pytest.raises(DataError):
        predictor.readable_features([])


@pytest.mark.parametrize("replace", [False, True])
def test_items_that_another_process_adds_meanwhile_are_skipped_or_replaced(replace, demo, predictor, tmp_path):
    paths = [query.path for query in build_dataset("Demo").query[:4]]
    folder = tmp_path / "a.gallery"

    class Slow:
        """Model whose features are computed while another call adds the first two images."""

        def __getattr__(self, name):
            return getattr(predictor, name)

        def readable_features(self, needed):
            assert add_images(folder, paths[:2], predictor, Adding(camera="fast")) == (2, 0, [])
            return predictor.readable_features(needed)

    counts = add_images(folder, paths, Slow(), Adding(camera="slow", replace=replace))
    assert counts == ((4, 0, []) if replace else (2, 2, []))
    gallery = MutableGallery(folder)
    cameras = {item.id: item.camera for item in gallery.items}
    assert sorted(cameras) == sorted(paths)
    assert [cameras[path] for path in paths] == ["slow" if replace else "fast"] * 2 + ["slow"] * 2
    nearest = search(predictor.require_features(paths), gallery, 1).images.further["id"][:, 0]
    assert nearest.tolist() == paths
    with pytest.raises(DataError, match="1 of 1 "):
        gallery.add([Item(paths[0])], np.ones((1, gallery.model.width), np.float32))
