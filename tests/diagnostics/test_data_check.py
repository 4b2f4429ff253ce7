"""Dataset checks find each problem added to a dataset, and no problem in a valid dataset."""

import csv
import json
import re
import shutil
from pathlib import Path

import check_data
import numpy as np
import pytest
from dataset_trees import TREES
from naive_ranking import protocol_of
from PIL import Image

from fastamp.cli.check_data import text
from fastamp.config import get_cfg
from fastamp.data.build import build_dataset, build_reid_test_loader
from fastamp.data.contact_sheet import contact_sheet
from fastamp.data.datasets.custom import CsvDataset
from fastamp.diagnostics.clean_dataset import write_clean
from fastamp.diagnostics.data_check import check_dataset
from fastamp.diagnostics.findings import Finding, Report
from fastamp.evaluation import Protocol
from fastamp.utils import fonts


@pytest.fixture
def folder(tmp_path):
    """CSV dataset of nine identities, six of them for training, with four images each from two cameras."""
    rng = np.random.default_rng(0)
    rows = ["path,pid,camid,split"]
    for pid in range(9):
        for number in range(4):
            smooth = Image.fromarray(rng.integers(0, 256, (12, 6, 3), dtype=np.uint8)).resize((32, 64))
            smooth.save(tmp_path / f"{pid}_{number}.jpg", quality=95)
            split = "train" if pid < 6 else "query" if number == 0 else "gallery"
            rows.append(f"{pid}_{number}.jpg,{pid},{number % 2},{split}")
    (tmp_path / "set.csv").write_text("\n".join(rows))
    return tmp_path


def edit(folder, old, new):
    file = folder / "set.csv"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def findings_of(folder, name="set.csv"):
    report = check_dataset(build_dataset(f"csv:{folder / name}"))
    return {finding.fault: finding for finding in report.findings}, report


def test_valid_dataset_has_no_findings(folder):
    by_fault, report = findings_of(folder)
    assert not by_fault and not report.has_errors
    assert report.rows == [("train", 24, 6, 2), ("query", 3, 3, 1), ("gallery", 9, 3, 2)]
    assert report.sizes == {(32, 64): 36}


def corrupt(folder):
    (folder / "3_1.jpg").write_bytes(b"nothing")


def truncate(folder):
    content = (folder / "3_1.jpg").read_bytes()
    (folder / "3_1.jpg").write_bytes(content[: len(content) * 2 // 3])


def missing(folder):
    (folder / "3_1.jpg").unlink()


def shared_identity(folder):
    edit(folder, "2_0.jpg,2,0,train", "2_0.jpg,7,0,train")


def no_match(folder):
    edit(folder, "7_0.jpg,7,0,query", "7_0.jpg,70,0,query")


def same_camera(folder):
    for number in (1, 3):
        edit(folder, f"7_{number}.jpg,7,1,gallery", f"7_{number}.jpg,7,0,gallery")


def copy(folder):
    shutil.copy(folder / "4_2.jpg", folder / "8_3.jpg")


def near_duplicate(folder):
    with Image.open(folder / "4_2.jpg") as image:
        image.resize((48, 100)).save(folder / "8_3.jpg", quality=60)


def two_labels(folder):
    shutil.copy(folder / "4_2.jpg", folder / "5_3.jpg")


def listed_twice(folder):
    edit(folder, "4_2.jpg,4,0,train", "4_2.jpg,4,0,train\n4_2.jpg,4,0,train")


def single_image(folder):
    edit(folder, "5_0.jpg,5,0,train", "5_0.jpg,500,0,train")


@pytest.mark.integration
@pytest.mark.parametrize(
    "plant, fault, example, is_error",
    [
        (corrupt, "unreadable images", "3_1.jpg (line 15): cannot identify", True),
        (truncate, "unreadable images", "3_1.jpg (line 15): image file is truncated", True),
        (missing, "unreadable images", "3_1.jpg (line 15): No such file or directory", True),
        (shared_identity, "identities in both training and test", "7", True),
        (no_match, "queries without a gallery image of their identity", "7_0.jpg", True),
        (same_camera, "queries whose only matches are from the same camera", "7_0.jpg", True),
        (copy, "images in both train and gallery", "8_3.jpg", True),
        (near_duplicate, "near-duplicates between train and gallery", "8_3.jpg", False),
        (two_labels, "images of train listed under several identities", "5_3.jpg", True),
        (listed_twice, "images of train listed more than once", "4_2.jpg", False),
        (single_image, "identities with a single training image", "500", False),
    ],
)
def test_check_dataset_finds_only_the_planted_problem(folder, plant, fault, example, is_error):
    plant(folder)
    by_fault, report = findings_of(folder)
    assert example in by_fault[fault].examples[0] and by_fault[fault].count == 1
    assert report.has_errors == is_error == by_fault[fault].is_error
    # Planting some problems leaves an identity with one image.
    assert set(by_fault) - {"identities with a single training image"} <= {fault}


def test_line_that_a_random_split_uses_as_query_and_gallery_is_reported_as_repetition(folder):
    lines = [line.rpartition(",")[0] for line in (folder / "set.csv").read_text().splitlines()]
    (folder / "random.csv").write_text("\n".join(lines))
    query = Path(build_dataset(f"csv:{folder / 'random.csv'}").query[0].path).name
    (folder / "random.csv").write_text("\n".join([*lines, next(line for line in lines if line.startswith(query))]))
    finding = findings_of(folder, "random.csv")[0]["images in both query and gallery"]
    assert finding.count == 1 and query in finding.examples[0] and "repetitions" in finding.fix


def test_single_training_identity_is_reported_as_error(folder):
    for pid in range(1, 6):
        for number in range(4):
            edit(folder, f"{pid}_{number}.jpg,{pid},", f"{pid}_{number}.jpg,0,")
    assert findings_of(folder)[0]["only one training identity"].is_error


@pytest.mark.integration
def test_check_data_command_writes_contact_sheet_and_sets_exit_code(folder, tmp_path, input_error, capsys):
    output = tmp_path / "out"
    name = f"csv:{folder / 'set.csv'}"
    assert check_data.cli([name, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "| train   |       24 |" in out and "ERROR" not in out and "32 x 64" in out
    with Image.open(output / "contact_sheet.png") as sheet:
        assert sheet.width > 500 and len(sheet.getcolors(10**6)) > 100
    corrupt(folder)
    assert check_data.cli([name, "--output", str(output)]) == 1
    assert "ERROR: 1 unreadable image\n" in capsys.readouterr().out
    assert "Did you mean 'Market1501'?" in input_error(check_data.cli, ["Marked1501", "--output", str(output)])


def test_different_16_bit_images_are_not_near_duplicates(tmp_path):
    rng = np.random.default_rng(0)
    rows = ["path,pid,split"]
    for number in range(12):
        pixels = rng.integers(0, 1000, (32, 16), dtype=np.uint16)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{number // 2},{'train' if number < 6 else 'query' if number % 2 else 'gallery'}")
    (tmp_path / "set.csv").write_text("\n".join(rows))
    assert not findings_of(tmp_path)[0]


def test_folder_dataset_with_numeric_identities_has_no_findings(tmp_path):
    for pid in range(1, 9):
        (tmp_path / str(pid)).mkdir()
        for number in range(3):
            pixels = np.random.default_rng([pid, number]).integers(0, 256, (32, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / str(pid) / f"{number}.png")
    dataset = build_dataset(f"folder:{tmp_path}")
    assert not check_dataset(dataset).findings
    assert {dataset.identity(item.pid) for item in dataset.query} < {str(pid) for pid in range(1, 9)}


def test_check_data_prints_report_if_output_cannot_be_written(folder, capsys):
    (folder / "file").write_text("no folder")
    assert check_data.cli([f"csv:{folder / 'set.csv'}", "--output", str(folder / "file")]) == 2
    assert "| train   |       24 |" in capsys.readouterr().out


def test_demo_dataset_has_no_errors(tmp_path):
    import tiny

    tiny.make_demo(tmp_path)
    from fastamp.data.datasets.demo import Demo

    report = check_dataset(Demo(root=str(tmp_path)))
    assert not report.has_errors, json.dumps([finding.fault for finding in report.findings])
    assert sum(report.sizes.values()) == sum(row[1] for row in report.rows) and Path(tmp_path).exists()


@pytest.mark.integration
def test_write_clean_excludes_the_bad_rows_and_the_file_trains(folder, tmp_path, capsys):
    import tiny

    for plant in (corrupt, shared_identity, copy, listed_twice):
        plant(folder)
    edit(folder, "0_0.jpg,0,0,train", "0_0.jpg,,0,train")  # an invalid line
    edit(folder, "7_0.jpg,7,0,query", "7_0.jpg,70,0,query")
    edit(folder, "path,pid,camid,split", "path,pid,camid,split,hat")
    lines = (folder / "set.csv").read_text().splitlines()
    (folder / "set.csv").write_text("\n".join([lines[0], *(f"{line},h{n}" for n, line in enumerate(lines[1:], 2))]))
    clean = tmp_path / "new" / "clean.csv"
    argv = [f"csv:{folder / 'set.csv'}", "--output", str(tmp_path), "--write-clean", str(clean)]
    assert check_data.cli(argv) == 1
    out = capsys.readouterr().out
    assert "ERROR: 1 invalid line\n" in out and f"wrote {clean}" in out and "line 2: no value for pid" in out
    assert check_data.cli(argv) == 2  # an existing file is kept
    by_fault, report = findings_of(clean.parent, "clean.csv")
    assert not report.has_errors and "images of train listed more than once" not in by_fault
    text = clean.read_text()
    for name in ("3_1.jpg", "2_0.jpg", "0_0.jpg", "7_0.jpg"):
        assert f"{name}," not in text
    assert text.startswith("path,pid,split,camid,hat\n") and f"{folder}/5_0.jpg,5,train,0,h23\n" in text
    tiny.train(tmp_path / "run", "DATASETS.NAMES", f"csv:{clean}", "DATASETS.TESTS", f"csv:{clean}",
               "DATALOADER.NUM_INSTANCE", "4", "SOLVER.IMS_PER_BATCH", "12")  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("protocol, kept", [("market1501", 35), ("cuhk03", 35), ("no_camera", 36), ("vehicleid", 36)])
def test_queries_with_matches_of_the_same_camera_are_valid_if_the_protocol_ignores_cameras(
    folder, tmp_path, capsys, protocol, kept
):
    same_camera(folder)
    clean = tmp_path / "clean.csv"
    argv = [f"csv:{folder / 'set.csv'}", "--output", str(tmp_path), "--write-clean", str(clean)]
    assert check_data.cli([*argv, "TEST.PROTOCOL", protocol]) == (kept == 35)
    assert ("from the same camera" in capsys.readouterr().out) == (kept == 35)
    assert len(clean.read_text().splitlines()) - 1 == kept


@pytest.mark.parametrize("protocol, is_error", [("market1501", True), ("no_camera", True), ("vehicleid", False)])
def test_query_without_a_gallery_image_is_valid_only_if_the_protocol_draws_queries(folder, protocol, is_error):
    no_match(folder)
    dataset, protocol = build_dataset(f"csv:{folder / 'set.csv'}"), protocol_of(protocol)
    report = check_dataset(dataset, protocol=protocol)
    assert report.has_errors == is_error
    assert write_clean(dataset, report, folder / "clean.csv", protocol=protocol) == (36 - is_error, int(is_error))


@pytest.mark.integration
@pytest.mark.parametrize("protocol", ["market1501", "no_camera"])
def test_write_clean_of_test_images_of_one_camera(folder, tmp_path, caplog, protocol):
    rows = [line.split(",") for line in (folder / "set.csv").read_text().splitlines()[1:]]
    lines = ["path,pid,camid", *(f"{path},{pid},{'gate' if int(pid) < 7 else 'door'}" for path, pid, *_ in rows)]
    (folder / "set.csv").write_text("\n".join(lines))
    name, clean = f"csv:{folder / 'set.csv'}", folder / "clean.csv"
    drawn = (CsvDataset(folder / "set.csv", seed=seed) for seed in range(50))
    seed = next(n for n, split in enumerate(drawn) if {split.camera(item.camid) for item in split.gallery} == {"gate"})
    options = ["TEST.PROTOCOL", protocol, "DATASETS.FOLDER.SEED", str(seed)]
    assert check_data.cli([name, "--output", str(tmp_path), "--write-clean", str(clean), *options]) == 0
    content = list(csv.DictReader(clean.open()))
    assert len(content) == 36
    if protocol == "no_camera":
        assert [f"{row['path']},{row['pid']},{row['camid']}" for row in content] == lines[1:]
        assert "no column camid" not in caplog.text
    else:
        assert "camid" not in content[0]
        assert "no column camid, because all test images are from the camera gate" in caplog.text
    again = build_dataset(f"csv:{clean}")
    assert not check_dataset(again, protocol=protocol_of(protocol)).has_errors


@pytest.mark.integration
def test_write_clean_keeps_the_cameras_if_each_test_image_has_its_own(folder, tmp_path):
    rows = [line.split(",") for line in (folder / "set.csv").read_text().splitlines()[1:]]
    lines = ["path,pid,camid", *(f"{path},{pid},c{number}" for number, (path, pid, *_) in enumerate(rows))]
    (folder / "set.csv").write_text("\n".join(lines))
    dataset = build_dataset(f"csv:{folder / 'set.csv'}")
    assert not dataset.has_cameras
    write_clean(dataset, check_dataset(dataset), folder / "clean.csv")
    assert [row["camid"] for row in csv.DictReader((folder / "clean.csv").open())] == [f"c{n}" for n in range(36)]
    again = build_dataset(f"csv:{folder / 'clean.csv'}")
    assert not check_dataset(again).findings


def test_check_data_reports_single_findings_in_the_singular(folder, tmp_path, capsys, caplog):
    no_match(folder)
    listed_twice(folder)
    clean = tmp_path / "clean.csv"
    assert check_data.cli([f"csv:{folder / 'set.csv'}", "--output", str(tmp_path), "--write-clean", str(clean)]) == 1
    out = capsys.readouterr().out
    assert "ERROR: 1 query without a gallery image of its identity\n" in out
    assert "note: 1 image of train listed more than once\n" in out
    assert "note: 1 problem that would stop a run\n" in out
    assert "35 images; excluded 2 images and 0 invalid lines" in out
    assert "--write-clean" not in out + caplog.text


def test_image_that_cannot_be_decoded_for_training_is_unreadable(folder):
    Image.fromarray(np.zeros((64, 32), dtype=np.float32)).save(folder / "float.tif")
    edit(folder, "3_1.jpg", "float.tif")
    assert "mode F" in findings_of(folder)[0]["unreadable images"].examples[0]


def test_identity_0_of_a_csv_file_is_an_identity(folder):
    edit(folder, "6_1.jpg,6", "6_1.jpg,0")
    assert findings_of(folder)[0]["identities in both training and test"].examples == ["0"]


def test_all_occurrences_are_written_to_a_file(folder, tmp_path, capsys):
    for number in range(4):
        for pid in (1, 2):
            (folder / f"{pid}_{number}.jpg").write_bytes(b"")
    assert check_data.cli([f"csv:{folder / 'set.csv'}", "--output", str(tmp_path / "out")]) == 1
    out, found = capsys.readouterr().out, (tmp_path / "out/findings.txt").read_text()
    assert out.count("cannot identify the image format") == 5 and "and 3 more" in out
    assert found.count("cannot identify the image format") == 8 and "more" not in found


def test_only_one_training_identity_is_reported_without_a_count():
    assert text(Report([], [Finding("only one training identity", ["0"], 1)])).endswith(
        "ERROR: only one training identity\n    0"
    )


@pytest.mark.integration
def test_write_clean_writes_a_random_split_and_boxes(tmp_path):
    rng = np.random.default_rng(0)
    rows = ["path,pid,x0,y0,x1,y1"]
    for number in range(24):
        Image.fromarray(rng.integers(0, 256, (32, 16, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{number // 4},0,0,16,{20 + number % 4}")
    (tmp_path / "set.csv").write_text("\n".join(rows))
    dataset = build_dataset(f"csv:{tmp_path / 'set.csv'}")
    assert write_clean(dataset, check_dataset(dataset), tmp_path / "clean.csv") == (24, 0)
    again = build_dataset(f"csv:{tmp_path / 'clean.csv'}")
    for split in ("train", "query", "gallery"):
        assert {(item.path, item.box) for item in getattr(again, split)} == {
            (item.path, item.box) for item in getattr(dataset, split)
        }


@pytest.mark.integration
@pytest.mark.parametrize(
    "options, problem",
    [
        (("SOLVER.IMS_PER_BATCH", "64"), "smaller than one batch"),
        (("SOLVER.IMS_PER_BATCH", "16", "DATALOADER.SAMPLER_TRAIN", "NaiveIdentitySampler", "DATALOADER.NUM_INSTANCE",
          "2"), "too few identities"),
        (("SOLVER.IMS_PER_BATCH", "12", "MODEL.BACKBONE.SIE_CAMERAS", "1"), "SIE_CAMERAS"),
        (("SOLVER.IMS_PER_BATCH", "12", "INPUT.SIZE_TRAIN", "(64,)"), "INPUT.SIZE_TRAIN"),
        (("SOLVER.IMS_PER_BATCH", "12", "INPUT.SIZE_TEST", "(64,)"), "INPUT.SIZE_TEST"),
        (("SOLVER.IMS_PER_BATCH", "12"), None),
    ],
)  # fmt: skip
def test_check_data_reports_what_would_stop_a_run(folder, tmp_path, capsys, options, problem):
    for name in ("0_0.jpg", "7_1.jpg"):
        with Image.open(folder / name) as image:
            image.resize((40, 64)).save(folder / name)
    assert check_data.cli([f"csv:{folder / 'set.csv'}", "--output", str(tmp_path / "out"), *options]) == (
        problem is not None
    )
    out = capsys.readouterr().out
    assert ("would stop a run" in out) == (problem is not None) and (problem or "") in out


@pytest.mark.integration
def test_problems_of_a_run_are_errors_for_its_training_set_only(folder, tmp_path, capsys):
    """The test set has too few training images for the sampler, which does not matter."""
    lines = (folder / "set.csv").read_text().splitlines()
    trained = [line for line in lines if ",train" in line]
    (folder / "test.csv").write_text("\n".join([lines[0], trained[0], trained[-1], *(set(lines[1:]) - set(trained))]))
    sets = [f"DATASETS: {{NAMES: ['csv:{folder}/set.csv'], TESTS: ['csv:{folder}/test.csv']}}"]
    for size, code in ((12, 0), (64, 1)):
        (tmp_path / "run.yml").write_text("\n".join([*sets, f"SOLVER: {{IMS_PER_BATCH: {size}}}"]))
        assert check_data.cli([str(tmp_path / "run.yml"), "--output", str(tmp_path / "out")]) == code
        assert ("ERROR: 1 problem that would stop a run" in capsys.readouterr().out) == (code == 1)


@pytest.mark.integration
def test_similar_images_are_not_all_near_duplicates(tmp_path):
    rng = np.random.default_rng(0)
    scene = np.asarray(Image.fromarray(rng.integers(0, 256, (12, 6, 3), dtype=np.uint8)).resize((64, 128)), float)
    rows = ["path,pid,camid,split"]
    for pid in range(20):
        for number in range(4):
            pixels = scene + rng.normal(0, 4, scene.shape)
            top, left = rng.integers(20, 80), rng.integers(10, 40)
            pixels[top : top + 30, left : left + 14] = rng.integers(0, 256, 3)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{pid}_{number}.png")
            split = "train" if pid < 10 else "gallery" if number else "query"
            rows.append(f"{pid}_{number}.png,{pid},{number % 2},{split}")
    (tmp_path / "set.csv").write_text("\n".join(rows))
    dataset = build_dataset(f"csv:{tmp_path / 'set.csv'}")

    def near_duplicates(**options):
        report = check_dataset(dataset, **options)
        return sum(finding.count for finding in report.findings if "near-duplicates" in finding.fault), report

    fixed, _ = near_duplicates(near_duplicate_bits=30)
    found, report = near_duplicates()
    assert fixed > 50 and found <= 4
    assert any("are similar" in note and "gray levels" in note for note in report.notes)
    none, _ = near_duplicates(near_duplicate_bits=0)
    assert none == 0


@pytest.mark.integration
@pytest.mark.parametrize("copy", ["recompressed", "half the size", "brighter"])
def test_copies_are_found_among_similar_images(tmp_path, copy):
    """The background is equal in all images."""
    rng = np.random.default_rng(0)
    scene = np.asarray(Image.fromarray(rng.integers(0, 256, (12, 6, 3), dtype=np.uint8)).resize((64, 128)), float)
    rows = ["path,pid,camid,split"]
    for pid in range(40):
        pixels = scene + rng.normal(0, 4, scene.shape)
        top, left = rng.integers(20, 80), rng.integers(10, 40)
        pixels[top : top + 30, left : left + 14] = rng.integers(0, 256, 3)
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(tmp_path / f"{pid}.png")
        rows.append(f"{pid}.png,{pid},0,{('train', 'gallery', 'query')[pid % 3]}")
        if pid % 6 == 2:
            image = image.resize((32, 64)) if copy == "half the size" else image
            image = image.point(lambda value: value + 8) if copy == "brighter" else image
            image.save(tmp_path / f"copy_{pid}.jpg", quality=30 if copy == "recompressed" else 90)
            rows.append(f"copy_{pid}.jpg,{pid},1,gallery")
    (tmp_path / "set.csv").write_text("\n".join(rows))
    by_fault, _ = findings_of(tmp_path)
    examples = by_fault["near-duplicates between query and gallery"].examples
    pairs = [re.findall(r"(\w+)\.(?:png|jpg)", example) for example in examples]
    assert sorted(pairs) == sorted([str(pid), f"copy_{pid}"] for pid in range(2, 40, 6))
    assert not any(name.endswith(("train and query", "train and gallery")) for name in by_fault if "near" in name)


def test_near_duplicates_are_listed_with_their_distance(folder):
    near_duplicate(folder)
    (example,) = findings_of(folder)[0]["near-duplicates between train and gallery"].examples
    assert re.search(
        r"4_2.jpg \(identity 4, line 20\) ~ .*8_3.jpg \(identity 8, line 37\): \d+ of 256 bits differ", example
    )


@pytest.mark.parametrize("name, is_escaped", [("Анна", False), ("Ελένη", False), ("中文", True)])
def test_contact_sheet_draws_names_in_any_script(folder, tmp_path, monkeypatch, caplog, name, is_escaped):
    edit(folder, "0_0.jpg,0,", f"0_0.jpg,{name},")
    bundled = [path for path in fonts._font_files() if path.name == "DejaVuSans.ttf"]
    monkeypatch.setattr(fonts, "_font_files", lambda: tuple(bundled))
    if not bundled:
        pytest.skip("needs DejaVu Sans (matplotlib)")
    contact_sheet(build_dataset(f"csv:{folder / 'set.csv'}"), tmp_path / "sheet.png", identities=20)
    text, font = fonts.drawable_text(name)
    assert (text == r"\u4e2d\u6587") if is_escaped else (text == name)
    assert font == bundled[0] and ("no font for" in caplog.text) == is_escaped


@pytest.mark.parametrize("text", ["नमस्ते", "ไทย้", "a\u0301\u0943"])
def test_combining_marks_without_a_font_are_escaped(monkeypatch, text):
    bundled = [path for path in fonts._font_files() if path.name == "DejaVuSans.ttf"]
    monkeypatch.setattr(fonts, "_font_files", lambda: tuple(bundled))
    if not bundled:
        pytest.skip("needs DejaVu Sans (matplotlib)")
    drawn, _ = fonts.drawable_text(text)
    known = {"a", "\u0301"}
    assert drawn == "".join(
        character if character in known else character.encode("ascii", "backslashreplace").decode()
        for character in text
    )


def test_text_without_any_font_is_escaped(monkeypatch):
    monkeypatch.setattr(fonts, "_font_files", lambda: ())
    assert fonts.drawable_text("ab ü\n") == (r"ab \xfc\n", None)
    assert fonts.load_font(None, 12).getmask("a").size[0] > 0


# ---- columns, published numbers and protocols


@pytest.mark.integration
def test_columns_of_a_csv_file_are_summarized(folder):
    lines = (folder / "set.csv").read_text().splitlines()
    extra = ["clothes,height,attributes", *(f'{n % 5},{"" if n % 4 else n / 2},"[1, {n % 2}]"' for n in range(36))]
    (folder / "columns.csv").write_text("\n".join(f"{a},{b}" for a, b in zip(lines, extra, strict=True)))
    _, report = findings_of(folder, "columns.csv")
    assert report.columns == [
        ("clothes", "integer", 5, 0, "0, 1, 2, ..."),
        ("height", "float", 9, 27, "0.0, 2.0, 4.0, ..."),
        ("attributes", "list", 2, 0, "[1, 0], [1, 1]"),
    ]
    assert "| clothes    | integer |        5 |         0 |" in text(report)
    assert "clothes" not in text(findings_of(folder)[1])


def ltcc(root, monkeypatch):
    """LTCC with one image per file of the tree."""
    files = dict(TREES["LTCC"][0])
    rng = np.random.default_rng(0)
    for path in files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (64, 32, 3), dtype=np.uint8)).save(root / path)
    monkeypatch.setenv("FASTAMP_DATASETS", str(root))
    return build_dataset("LTCC")


def test_numbers_that_differ_from_the_published_ones_are_reported(tmp_path, monkeypatch):
    dataset = ltcc(tmp_path, monkeypatch)
    (finding,) = (finding for finding in check_dataset(dataset).findings if "published" in finding.fault)
    assert not finding.is_error and finding.count == 6
    assert "train: 2 images, 9576 published" in finding.examples
    assert "query: 1 identity, 75 published" in finding.examples
    monkeypatch.setattr(type(dataset), "published_counts", {"train": (2, 1), "query": (0, 1), "gallery": (1, 0)})
    assert not [finding for finding in check_dataset(dataset).findings if "published" in finding.fault]


@pytest.mark.parametrize(("rule", "found"), [("market1501", False), ("no_camera", True)])
def test_other_protocol_is_a_note(rule, found, tmp_path, monkeypatch):
    report = check_dataset(ltcc(tmp_path, monkeypatch), protocol=protocol_of(rule))
    findings = [finding for finding in report.findings if "protocol" in finding.fault]
    assert bool(findings) is found and not any(finding.is_error for finding in findings)
    assert not found or "cloth_changing" in findings[0].examples[0]


@pytest.mark.parametrize(
    ("protocol", "column"),
    [
        (protocol_of("cloth_changing"), None),
        (Protocol(group_by="species"), "'species'"),
        (Protocol.from_config(get_cfg().with_values({"TEST.PROTOCOL": "animals_open"})), "'species'"),
    ],
)
def test_column_that_the_evaluation_needs_is_reported(protocol, column, tmp_path, monkeypatch):
    report = check_dataset(ltcc(tmp_path, monkeypatch), protocol=protocol)
    examples = [text for finding in report.findings if "stop a run" in finding.fault for text in finding.examples]
    assert len(examples) == (column is not None) and (not examples or column in examples[0])


@pytest.mark.integration
def test_cameras_that_the_protocol_cannot_evaluate_are_reported(folder):
    dataset = build_dataset(f"csv:{folder / 'set.csv'}")
    for rule, found in (("market1501", False), ("sysu_all_single", True)):
        report = check_dataset(dataset, protocol=protocol_of(rule))
        examples = [text for finding in report.findings if "stop a run" in finding.fault for text in finding.examples]
        assert bool(examples) is found and all("infrared cameras 3 and 6" in text for text in examples)


def test_evaluation_under_another_protocol_warns(tmp_path, monkeypatch, caplog):
    ltcc(tmp_path, monkeypatch)
    cfg = get_cfg()
    cfg.merge_from_list(["DATALOADER.NUM_WORKERS", "0", "MODEL.DEVICE", "cpu"])
    for rule, warned in (("market1501", False), ("no_camera", True)):
        cfg.TEST.PROTOCOL = rule
        caplog.clear()
        build_reid_test_loader(cfg, "LTCC")
        assert ("TEST.PROTOCOL to market1501" in caplog.text) is warned


def test_clean_file_of_a_dataset_keeps_its_columns(tmp_path, monkeypatch):
    dataset = ltcc(tmp_path, monkeypatch)
    write_clean(dataset, Report([]), tmp_path / "clean.csv")
    clean = build_dataset(f"csv:{tmp_path / 'clean.csv'}")
    for split in ("train", "query", "gallery"):
        pairs = zip(getattr(clean, split), getattr(dataset, split), strict=True)
        assert all(one.columns == other.columns for one, other in pairs)


def test_identities_without_gallery_images_are_reported(tmp_path, monkeypatch):
    ltcc(tmp_path, monkeypatch)
    (tmp_path / "LTCC_ReID/query/005_1_c2_1.png").rename(tmp_path / "LTCC_ReID/query/006_1_c2_1.png")
    report = check_dataset(build_dataset("LTCC"), protocol=protocol_of("market1501"))
    assert "queries without a gallery image of their identity" in [finding.fault for finding in report.findings]


@pytest.mark.integration
def test_check_data_with_a_recipe_notes_repeats_and_events_beyond_the_end(folder, tmp_path, capsys):
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        "SOLVER: {IMS_PER_BATCH: 12, MAX_EPOCH: 2, WARMUP_ITERS: 500}\n"
        "DATALOADER: {SAMPLER_TRAIN: NaiveIdentitySampler, NUM_INSTANCE: 6}\n"
    )
    command = [f"csv:{folder}/set.csv", "--output", str(tmp_path / "out")]
    assert check_data.cli([*command, "--config-file", str(recipe)]) == 0
    notes = [block for block in capsys.readouterr().out.split("\n\n") if block.startswith("note: ")]
    assert any("DATALOADER.NUM_INSTANCE" in note and "repeats 4.0 images" in note for note in notes)
    assert any("SOLVER.WARMUP_ITERS 500" in note and "fix:" in note for note in notes)
    check_data.cli(command)
    assert "SOLVER.WARMUP_ITERS" not in capsys.readouterr().out
