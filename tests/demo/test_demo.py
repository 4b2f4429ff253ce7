"""Demo dataset: reproducible files in the layout of Market-1501, written completely or not at all."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import defaultdict

import numpy as np
import pytest
from PIL import Image

from fastamp.data.datasets.demo import Demo
from fastamp.demo import generate_demo, is_complete
from fastamp.demo.picture import draw_picture
from fastamp.demo.wardrobe import (
    BAGS,
    HAIR_STYLES,
    LOWERS,
    PATTERNS,
    SLEEVES,
    draw_appearance,
    draw_lookalike,
    draw_people,
)
from fastamp.utils.atomic_dir import _machine
from fastamp.utils.errors import DataError

SMALL = {
    "train_identities": 6,
    "test_identities": 4,
    "images_per_identity": 6,
    "distractors": 10,
    "image_size": (64, 32),
}
NAME = re.compile(r"(-1|\d{4})_c([1-6])s[1-3]_\d{6}_\d{2}\.jpg")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "set"
    generate_demo(folder, **SMALL, workers=1)
    return folder


def digest(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def build_folders(folder):
    return list(folder.parent.glob(f".{folder.name}.building-*"))


def pictures(folder, split):
    """Return a list of (pid, camera), one entry for each image in a split."""
    found = []
    for path in (folder / split).iterdir():
        match = NAME.fullmatch(path.name)
        assert match, f"{path.name} is not a Market-1501 file name"
        found.append((int(match[1]), int(match[2])))
    return found


@pytest.mark.integration
def test_loading_the_demo_dataset_removes_abandoned_build_folders(small, tmp_path):
    """Loading an existing dataset removes the build folders of ended processes, but not those of running processes."""
    root = tmp_path / "root"
    folder = root / Demo.folder
    shutil.copytree(small, folder)
    with subprocess.Popen([sys.executable, "-c", ""]) as exited:
        pass
    host = _machine()
    builds = {
        f"{host}-{exited.pid}-{'0' * 32}": False,
        f"{host}-{os.getpid()}-{'0' * 32}": True,
        f"{host}.other-{exited.pid}-{'0' * 32}": True,
        f"{socket.gethostname()}-{exited.pid}-{'0' * 32}": True,  # a container with the same host name
        f"other-1-{'0' * 32}": True,  # of another machine, recent
        f"other-1-{'1' * 32}": False,  # of another machine, abandoned
    }
    for name in builds:
        (root / f".{folder.name}.building-{name}" / "query").mkdir(parents=True)
    old = root / f".{folder.name}.building-other-1-{'1' * 32}"
    for path in (old / "query", old):
        os.utime(path, (0, 0))
    Demo(root)
    remaining = {path.name.split("building-")[1] for path in build_folders(folder)}
    assert remaining == {name for name, stays in builds.items() if stays}


@pytest.mark.parametrize("workers", [1, 3, None])
def test_generate_demo_with_same_arguments_writes_identical_files(small, tmp_path, workers):
    generate_demo(tmp_path / "again", **SMALL, workers=workers)
    assert digest(tmp_path / "again") == digest(small)


def test_generate_demo_with_another_seed_writes_different_images(small, tmp_path):
    generate_demo(tmp_path / "other", **SMALL, seed=1)
    assert not set(digest(tmp_path / "other").values()) & set(digest(small).values())


def test_demo_files_match_requested_counts_and_image_size(small):
    counts = {split: len(pictures(small, split)) for split in ("bounding_box_train", "query", "bounding_box_test")}
    assert counts == {"bounding_box_train": 36, "query": 8, "bounding_box_test": 16 + 10 + 1}
    manifest = json.loads((small / "demo.json").read_text(encoding="utf-8"))
    assert manifest["images"] == counts
    assert manifest["seed"] == 0
    for path in small.rglob("*.jpg"):
        with Image.open(path) as image:
            assert (image.size, image.mode, image.format) == ((32, 64), "RGB", "JPEG")


def test_demo_train_and_test_identities_are_disjoint(small):
    train = {pid for pid, _ in pictures(small, "bounding_box_train")}
    query = {pid for pid, _ in pictures(small, "query")}
    gallery = {pid for pid, _ in pictures(small, "bounding_box_test")}
    assert len(train) == 6 and len(query) == 4
    assert not train & (query | gallery)
    assert gallery == query | {0, -1}


@pytest.mark.parametrize(("images_per_identity", "cameras"), [(4, 2), (4, 6), (5, 3), (7, 3), (13, 6)])
def test_every_demo_query_has_a_match_from_another_camera(tmp_path, images_per_identity, cameras):
    sizes = {**SMALL, "train_identities": 1, "distractors": 0, "image_size": (32, 16)}
    sizes.update(images_per_identity=images_per_identity, cameras=cameras)
    generate_demo(tmp_path / "set", **sizes)
    cameras_of = defaultdict(set)
    for pid, camera in pictures(tmp_path / "set", "bounding_box_test"):
        cameras_of[pid].add(camera)
    queries = pictures(tmp_path / "set", "query")
    assert len(set(queries)) == len(queries) == 8, "queries of one person come from different cameras"
    assert all(cameras_of[pid] - {camera} for pid, camera in queries)


def test_generate_demo_does_not_modify_a_complete_dataset(small):
    before = {path: path.stat().st_mtime_ns for path in small.rglob("*")}
    generate_demo(small, **SMALL, progress=lambda done, total: pytest.fail("images were drawn again"))
    assert {path: path.stat().st_mtime_ns for path in small.rglob("*")} == before


def test_generate_demo_calls_progress_for_every_image(tmp_path):
    calls = []
    generate_demo(tmp_path / "set", **SMALL, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 71) for done in range(1, 72)]


def test_interrupted_demo_generation_leaves_no_files(tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_demo(tmp_path / "set", **SMALL, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_killed_demo_generation_leaves_no_folder_and_next_one_succeeds(small, tmp_path):
    folder = tmp_path / "set"
    script = (
        "from fastamp.demo import generate_demo\n"
        f"generate_demo({str(folder)!r}, progress=lambda done, total: print(done, flush=True))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline().strip() == b"1"
    process.kill()
    process.communicate()
    (abandoned,) = build_folders(folder)
    assert not folder.exists() and not is_complete(folder) and not is_complete(abandoned)

    generate_demo(folder, **SMALL)
    assert digest(folder) == digest(small)
    assert build_folders(folder) == []


def test_demo_generation_keeps_a_dataset_completed_in_the_meantime(small, tmp_path):
    folder = tmp_path / "set"

    def overtake(done, total):
        if done == total:
            generate_demo(folder, **SMALL)
            first_inode.append(folder.stat().st_ino)

    first_inode = []
    generate_demo(folder, **SMALL, progress=overtake)
    assert [folder.stat().st_ino] == first_inode, "the first dataset stays"
    assert digest(folder) == digest(small)
    assert build_folders(folder) == []


def test_concurrent_demo_generations_produce_one_complete_dataset(small, tmp_path):
    folder, errors = tmp_path / "set", []
    start = threading.Barrier(2)

    def generate():
        try:
            start.wait()
            generate_demo(folder, **SMALL)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=generate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert digest(folder) == digest(small)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("damage", ["missing picture", "missing split", "broken manifest", "older version"])
def test_corrupt_or_outdated_demo_dataset_is_generated_again(small, tmp_path, damage):
    folder = tmp_path / "set"
    shutil.copytree(small, folder)
    assert is_complete(folder)
    manifest = folder / "demo.json"
    if damage == "missing picture":
        next((folder / "query").iterdir()).unlink()
    elif damage == "missing split":
        shutil.rmtree(folder / "query")
    elif damage == "broken manifest":
        manifest.write_text("{", encoding="utf-8")
    else:
        manifest.write_text(
            json.dumps({**json.loads(manifest.read_text(encoding="utf-8")), "version": "0"}), encoding="utf-8"
        )
    assert not is_complete(folder)
    generate_demo(folder, **SMALL)
    assert digest(folder) == digest(small)
    assert list(tmp_path.iterdir()) == [folder]


def test_generate_demo_fills_an_empty_folder(tmp_path):
    (tmp_path / "set").mkdir()
    generate_demo(tmp_path / "set", **SMALL)
    assert is_complete(tmp_path / "set")


def test_generate_demo_does_not_overwrite_a_folder_with_other_files(small, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.jpg").write_bytes(b"mine")
    (tmp_path / "file").write_bytes(b"mine")
    for name in ("photos", "file"):
        with pytest.raises(DataError, match=f"{name} .*demo.json"):
            generate_demo(tmp_path / name, **SMALL)
    assert (tmp_path / "photos" / "mine.jpg").read_bytes() == b"mine"
    with pytest.raises(DataError, match=r"seed 0 .*3"):
        generate_demo(small, **SMALL, seed=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_identities": 0},
        {"test_identities": 0},
        {"images_per_identity": 3},
        {"distractors": -1},
        {"cameras": 1},
        {"image_size": (128, 8)},
        {"seed": -1},
        {"workers": 0},
    ],
)
def test_generate_demo_raises_if_an_argument_is_out_of_range(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("_size")):
        generate_demo(tmp_path / "set", **{**SMALL, **wrong})
    assert list(tmp_path.iterdir()) == []


def test_lookalikes_are_adjacent_and_differ_in_at_most_three_details():
    people = draw_people(np.random.default_rng(0), 40, 2, 0.5)
    assert len(set(people)) == 40
    shared = [sum(a == b for a, b in zip(vars(one).values(), vars(other).values(), strict=True))
              for one, other in zip(people[0::2], people[1::2], strict=True)]  # fmt: skip
    assert all(len(vars(people[0])) - 3 <= count < len(vars(people[0])) for count in shared[:10])
    assert max(shared[10:]) < len(vars(people[0])) - 4


def test_every_pattern_bag_hairstyle_and_garment_can_be_drawn():
    rng = np.random.default_rng(0)
    person = draw_appearance(rng)
    seen = defaultdict(set)
    while any(
        len(seen[name]) < len(choices)
        for name, choices in {
            "pattern": PATTERNS, "bag": BAGS, "hair": HAIR_STYLES, "lower": LOWERS, "sleeve": SLEEVES,
        }.items()
    ):  # fmt: skip
        person = draw_lookalike(rng, draw_appearance(rng))
        for name in ("pattern", "bag", "hair", "lower", "sleeve"):
            seen[name].add(getattr(person, name))
        image = draw_picture(rng, person, int(rng.integers(6)), 1, seed=0, image_size=(64, 32))
        assert image.size == (32, 64)
        assert np.asarray(image).std() > 5


def test_empty_boxes_of_cameras_beyond_the_sixth_can_be_drawn():
    rng = np.random.default_rng(0)
    for camera in range(6, 9):
        assert draw_picture(rng, None, camera, 1, seed=0, image_size=(64, 32)).size == (32, 64)


def test_badly_cropped_images_with_objects_below_the_image_can_be_drawn():
    person = draw_appearance(np.random.default_rng(0))
    for seed in range(100):
        image = draw_picture(np.random.default_rng(seed), person, 0, 1, seed=1, image_size=(32, 16), bad_box=True)
        assert image.size == (16, 32)
