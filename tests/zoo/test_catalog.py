"""Tests of the catalog: names, configs from facts, and files that a user put into the folder."""

import errno
import json
import os
import sys
from dataclasses import replace

import pytest
import torch

import fastamp
from fastamp import zoo
from fastamp.checkpoint import record
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.cli import main
from fastamp.cli.models import size_of
from fastamp.config import read_config
from fastamp.engine.builders import Builders
from fastamp.modeling import build_model, load_model
from fastamp.utils.errors import ConfigError, HubError, WeightsError, WriteError, writing
from fastamp.utils.files import file_sha256
from fastamp.zoo import files
from fastamp.zoo.catalog import differences

NAME = "torchreid_osnet_x0_25_msmt17"  # a web page gives the file, and its SHA-256 is known
OPEN = "torchreid_osnet_x0_25_market1501"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Empty folder of the catalog, without downloads."""
    monkeypatch.setenv("FASTAMP_ZOO", str(tmp_path / "zoo"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "zoo").mkdir()
    return tmp_path / "zoo"


@pytest.fixture
def saved(folder):
    """State dict without a config, as other programs write it, in the folder; and its path."""
    config = zoo.find(OPEN).config().with_values({"MODEL.DEVICE": "cpu", "MODEL.LOSSES.NAME": ()})
    torch.manual_seed(0)
    path = folder / f"{OPEN}.pth"
    torch.save({"state_dict": build_model(config).state_dict(), "epoch": 150}, path)
    return path


def test_exact_name_and_unique_parts_are_found():
    found = zoo.find("torchreid_osnet_x1_0_msmt17")  # also a part of the name of the combineall file
    assert found.classes == 1041 and zoo.find("zoo:torchreid_osnet_x1_0_msmt17_combineall").classes == 4101
    assert zoo.find("osnet_x1_0_msmt17") is found and zoo.find("OSNet-x1_0-MSMT17") is found
    assert zoo.find("megadescriptor_l_384").name == "megadescriptor_l_384"


def test_ambiguous_name_lists_candidates_and_unknown_name_the_nearest():
    with pytest.raises(ConfigError) as caught:
        zoo.find("bot_r50")
    assert "fastreid_bot_r50_market1501" in str(caught.value) and "fastreid_bot_r50_msmt17" in str(caught.value)
    assert "bot_s50" not in str(caught.value)
    with pytest.raises(ConfigError, match="'fastreid_agw_r50_market1501'"):
        zoo.find("fastreid_agw_r50_market151")
    with pytest.raises(ConfigError):
        zoo.find("osnet_x1")  # parts end at underscores


def test_names_are_unique_and_the_first_25_have_a_recipe_and_a_direct_address():
    entries = zoo.list_entries()
    assert len({entry.name for entry in entries}) == len(entries) > 200
    first = [entry for entry in entries if entry.rank]
    assert sorted(entry.rank for entry in first) == list(range(1, 26))
    assert [entry.name for entry in first if not entry.recipe or entry.page or entry.withdrawn] == []


def test_placed_file_loads_everywhere_with_the_config_of_its_entry(saved, folder):
    predictor = fastamp.from_pretrained(OPEN, device="cpu")
    assert predictor.cfg.MODEL.HEADS.NAME == "FCHead" and predictor.cfg.INPUT.INTERPOLATION == "bilinear"
    expected = torch.load(saved)["state_dict"]["backbone.conv1.conv.weight"]
    assert torch.equal(predictor.model.state_dict()["backbone.conv1.conv.weight"], expected)
    record = json.loads((folder / f"{OPEN}.pth.json").read_text())
    assert record["size"] == saved.stat().st_size and len(record["sha256"]) == 64
    cfg = zoo.find(OPEN).config().with_values({"MODEL.DEVICE": "cpu", "MODEL.WEIGHTS": f"zoo:{OPEN}"})
    for loaded in (load_model(cfg).model, Builders.load_model(cfg)[0]):
        assert torch.equal(loaded.state_dict()["backbone.conv1.conv.weight"], expected)


def test_changed_file_and_file_with_another_published_hash_are_refused(saved, folder):
    fastamp.from_pretrained(OPEN, device="cpu")
    torch.save({"state_dict": {"x": torch.zeros(3)}}, saved)
    with pytest.raises(WeightsError, match=r"(?s)sha|SHA.*fix: "):
        fastamp.from_pretrained(OPEN, device="cpu")
    torch.save({"state_dict": {"x": torch.zeros(3)}}, folder / f"{NAME}.pth")
    with pytest.raises(WeightsError, match="6f57607fed9f502b"):
        fastamp.from_pretrained(NAME, device="cpu")


def test_web_page_empty_file_and_folder_are_refused_without_a_record(folder):
    path, entry = folder / f"{OPEN}.pth", zoo.find(OPEN)
    torch.save(torch.zeros(9), folder / "whole")
    truncated = (folder / "whole").read_bytes()[:-30]
    (folder / "whole").unlink()
    pages = (b"\n<!DOCTYPE html><title>Sign in</title>", b"\xef\xbb\xbf<!-- quota --><html></html>", b"<script>")
    for content in (*pages, b"", truncated):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=OPEN):
            zoo.local_file(entry)
    path.unlink()
    path.mkdir()
    with pytest.raises(WeightsError, match=OPEN):
        zoo.local_file(entry)
    assert list(folder.iterdir()) == [path]
    path.rmdir()
    path.write_bytes(b"the file, which no record of a refused one excludes")
    assert zoo.local_file(entry) == path


def test_file_behind_a_web_page_names_the_address_and_the_path(folder):
    entry = replace(zoo.find(OPEN), mirrors=())
    with pytest.raises(WeightsError) as caught:
        zoo.local_file(entry)
    assert entry.url in str(caught.value) and str(folder / f"{OPEN}.pth") in str(caught.value)


def test_options_of_the_hub_are_not_ignored_for_names_of_the_catalog(saved, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(HubError, match="local_files_only"):
        fastamp.from_pretrained(NAME, local_files_only=True)
    assert fastamp.from_pretrained(OPEN, device="cpu", local_files_only=True)
    for option in ("revision", "cache_dir"):
        with pytest.raises(HubError, match="FASTAMP_ZOO"):
            fastamp.from_pretrained(OPEN, **{option: "main"})


def test_withdrawn_images_must_be_accepted(folder, capsys):
    name = "fastreid_bot_r50_dukemtmc"
    with pytest.raises(ConfigError, match="MODEL.WEIGHTS_ACCEPT_WITHDRAWN"):
        fastamp.from_pretrained(name)
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE"):  # accepted, and not downloaded
        fastamp.from_pretrained(name, accept_withdrawn=True)
    values = ["MODEL.WEIGHTS", f"zoo:{name}", "MODEL.WEIGHTS_ACCEPT_WITHDRAWN"]
    assert zoo.find(name).config().MODEL.WEIGHTS_ACCEPT_WITHDRAWN is False
    for accept, error in ((False, ConfigError), (True, WeightsError)):
        with pytest.raises(error):
            zoo.with_local_files(read_config("", [*values, accept]))
    assert main(["config", "show", name]) == 2
    assert "--accept-withdrawn" in capsys.readouterr().err
    assert main(["config", "show", name, "--accept-withdrawn"]) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err


def test_commands_take_names(saved, capsys):
    assert main(["config", "show", "osnet_x0_25_market1501"]) == 0
    assert "DEPTH: x0_25" in capsys.readouterr().out


def test_existing_path_has_precedence(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / OPEN).mkdir()
    assert main(["config", "show", OPEN]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_entry_without_a_recipe_is_refused_by_name(folder):
    with pytest.raises(ConfigError, match="torchreid_hacnn_market1501"):
        fastamp.from_pretrained("hacnn_market1501")


def test_models_lists_filtered_entries_and_describes_one(capsys):
    assert main(["models", "veri"]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        entry.name for entry in zoo.list_entries() if "veri" in f"{entry.name} {entry.training_data}".lower()
    ]
    assert main(["models", "veri_sbs"]) == 2 and main(["models", "sbs_r50_ibn_veri"]) == 0
    shown = capsys.readouterr().out
    entry = zoo.find("sbs_r50_ibn_veri")
    assert main(["models", "zoo:sbs_r50_ibn_veri"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["models", "sbs-r50"]) == 0  # spelled as in a name
    assert entry.name in capsys.readouterr().out
    assert all(
        text in shown for text in (entry.url, entry.sha256, "81.9", "97.0", "MODEL_ZOO.md", "not stated", *entry.traps)
    )


def test_license_states_commercial_use_only_if_it_is_stated():
    expected = {
        "torchreid_osnet_x1_0_msmt17_combineall": "yes",  # MIT on the author's hub
        "megadescriptor_l_384": "no",
        "luperson_moco_r50": "no",
        "fastreid_bot_r50_market1501": "not stated",  # only the code has a license
    }
    assert {name: zoo.find(name).commercial_use for name in expected} == expected


@pytest.mark.integration
def test_config_of_each_entry_has_the_facts_of_the_entry():
    """Against the facts themselves: statistics in 0..255, sizes, classes, neck, pooling, stem, cameras."""
    backbones = {
        "ResNet-50 IBN-a": {"NAME": "build_resnet_backbone", "DEPTH": "50x", "WITH_IBN": True},
        "ResNet-101 IBN-a": {"NAME": "build_resnet_backbone", "DEPTH": "101x", "WITH_IBN": True},
        "ResNet-50": {"NAME": "build_resnet_backbone", "DEPTH": "50x", "WITH_IBN": False},
        "ResNeSt-50": {"NAME": "build_resnest_backbone", "DEPTH": "50x"},
        "CLIP ViT-B/16": {"NAME": "build_clip_vit_backbone", "DEPTH": "base"},
        "CLIP ResNet-50": {"NAME": "build_clip_resnet_backbone"},
        "ViT-B/16": {"NAME": "build_vit_backbone", "DEPTH": "base"},
        "osnet_x1_0": {"NAME": "build_osnet_backbone", "DEPTH": "x1_0", "WITH_IBN": False},
        "osnet_x0_75": {"NAME": "build_osnet_backbone", "DEPTH": "x0_75", "WITH_IBN": False},
        "osnet_x0_5": {"NAME": "build_osnet_backbone", "DEPTH": "x0_5"},
        "osnet_x0_25": {"NAME": "build_osnet_backbone", "DEPTH": "x0_25"},
        "osnet_ibn_x1_0": {"NAME": "build_osnet_backbone", "DEPTH": "x1_0", "WITH_IBN": True},
        "osnet_ain_x1_0": {"NAME": "build_osnet_ain_backbone", "DEPTH": "x1_0"},
    }
    wrong, checked = [], {"backbone": 0, "mean": 0, "before": 0, "pooling": 0, "cameras": 0, "padded": 0}
    for entry in zoo.list_entries():
        if not entry.recipe:
            continue
        cfg = entry.config()
        backbone, heads = cfg.MODEL.BACKBONE, cfg.MODEL.HEADS
        found: dict = {key: backbone[key] for key in backbones.get(entry.backbone, {})}
        expected: dict = dict(backbones.get(entry.backbone, {}))
        checked["backbone"] += bool(expected)
        if entry.mean:
            checked["mean"] += 1
            found |= {"mean": cfg.MODEL.PIXEL_MEAN, "std": cfg.MODEL.PIXEL_STD}
            expected |= {
                "mean": pytest.approx([255 * value for value in entry.mean]),
                "std": pytest.approx([255 * value for value in entry.std]),
            }
        if entry.interpolation:
            used = cfg.INPUT.INTERPOLATION_TEST
            found["test"] = cfg.INPUT.INTERPOLATION if used == "same" else used
            expected["test"] = entry.interpolation[1]
        if entry.input_size:
            found["size"], expected["size"] = tuple(cfg.INPUT.SIZE_TEST), tuple(entry.input_size)
        if entry.classes:
            found["classes"], expected["classes"] = heads.NUM_CLASSES, entry.classes
        if entry.neck.startswith("BNNeck, feature"):
            checked["before"] += "before" in entry.neck
            found["feature"], expected["feature"] = heads.EVAL_FEAT, entry.neck.split()[2]
            found["neck"], expected["neck"] = heads.WITH_BNNECK, True
        if entry.neck.startswith("linear 512, batch norm, ReLU"):
            found["head"], expected["head"] = (heads.NAME, heads.EMBEDDING_DIM), ("FCHead", 512)
        if entry.pooling:
            checked["pooling"] += 1
            learned = "learned" in entry.pooling
            found["pool"] = heads.POOL_LAYER == "GeneralizedMeanPoolingP" if learned else heads.POOL_LAYER
            expected["pool"] = True if learned else (
                heads.POOL_LAYER if entry.pooling == "GeM" and heads.POOL_LAYER.startswith("GeneralizedMean")
                else "GlobalAvgPool"
            )  # fmt: skip
        if entry.sie:
            checked["cameras"] += 1
            found["cameras"] = (backbone.SIE_CAMERAS, backbone.SIE_VIEWS, backbone.SIE_COE)
            expected["cameras"] = tuple(entry.sie.get(key, 0) for key in ("cameras", "views", "coefficient"))
        if entry.program == "FastReID" and "ResNet" in entry.backbone:
            old = "2020-01" < entry.published <= "2020-08-10"
            checked["padded"] += old
            found["stem"] = backbone.STEM_POOL
            expected["stem"] = "padded" if old else backbone.STEM_POOL
        if entry.last_stride:
            found["stride"], expected["stride"] = backbone.LAST_STRIDE, entry.last_stride
        found["pretrain"], expected["pretrain"] = backbone.PRETRAIN, False
        wrong += [
            f"{entry.name}: {key} {found[key]}, expected {expected[key]}"
            for key in found
            if found[key] != expected[key]
        ]
    assert wrong == [] and all(count > 4 for count in checked.values()), checked


def test_file_on_the_hub_is_downloaded_without_huggingface_hub(folder, monkeypatch):
    entry = zoo.find("torchreid_osnet_x1_0_msmt17_combineall")
    assert entry.hub_file
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    addresses = []

    def download(url, path, **expected):
        addresses.append((url, expected))
        path.write_bytes(b"content")

    monkeypatch.setattr("fastamp.zoo.files.download", download)
    with pytest.raises(WeightsError, match="SHA-256"):
        zoo.local_file(replace(entry, sha256="0" * 64))
    assert addresses == [(entry.url, {"sha256": "0" * 64, "size": entry.size})]
    assert not zoo.path_of(entry).exists()


def test_config_of_each_entry_agrees_with_it():
    entries = [entry for entry in zoo.list_entries() if entry.recipe]
    assert len(entries) > 100
    for entry in entries[::30]:
        assert differences(entry, entry.config(), evaluated=True) == {}, entry.name


DIFFERENCES = {
    "MODEL.PIXEL_MEAN": [1.0, 2.0, 3.0],
    "MODEL.PIXEL_STD": [1.0, 1.0, 1.0],
    "MODEL.BACKBONE.STEM_RELU": False,
    "MODEL.BACKBONE.STEM_POOL": "ceil",
    "MODEL.BACKBONE.LAST_STRIDE": 2,
    "MODEL.BACKBONE.STRIDE_SIZE": [12, 12],
    "MODEL.BACKBONE.SIE_COE": 1.5,
    "MODEL.HEADS.POOL_LAYER": "GlobalMaxPool",
    "MODEL.HEADS.WITH_BNNECK": False,
    "MODEL.HEADS.EVAL_FEAT": "before",
}


def test_differences_are_those_that_change_the_meaning_of_the_weights():
    entry = zoo.find("fastreid_bot_r50_market1501")
    cfg = entry.config()
    allowed = {"MODEL.HEADS.NUM_CLASSES": 5, "INPUT.SIZE_TRAIN": [64, 32], "SOLVER.BASE_LR": 0.1}
    for key, value in DIFFERENCES.items():
        found = differences(entry, cfg.with_values({key: value} | allowed))
        assert list(found) == [key] and found[key][1] != found[key][0], key
    for key, value in {"INPUT.SIZE_TEST": [64, 32], "INPUT.INTERPOLATION_TEST": "nearest"}.items():
        resized = cfg.with_values({key: value})
        assert differences(entry, resized) == {} and list(differences(entry, resized, evaluated=True)) == [key]
    same = {"INPUT.INTERPOLATION": "bilinear", "INPUT.INTERPOLATION_TEST": cfg.INPUT.INTERPOLATION}
    assert differences(entry, cfg.with_values(same), evaluated=True) == {}
    other = cfg.with_values(DIFFERENCES | {"MODEL.BACKBONE.NAME": "build_osnet_backbone"})
    assert list(differences(entry, other)) == ["MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"]
    backbone = replace(entry, task="backbone")
    assert list(differences(backbone, cfg.with_values(DIFFERENCES), evaluated=True)) == list(DIFFERENCES)[:4]
    without_recipe = replace(entry, recipe="", keys={})
    assert "MODEL.PIXEL_MEAN" in differences(without_recipe, cfg.with_values(DIFFERENCES))


STD = ["MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]"]
CONTRADICTORY = {
    "config with a name": lambda: load_model(
        zoo.find(OPEN).config().with_values({"MODEL.WEIGHTS": f"zoo:{OPEN}"}), opts=STD, device="cpu"
    ),
    "name in Python": lambda: fastamp.from_pretrained(OPEN, opts=STD, device="cpu"),
    "name of a command": lambda: main(["extract", OPEN, str(zoo.zoo_folder()), "-o", "x.npz", *STD]),  # no images
}


@pytest.mark.parametrize("given", CONTRADICTORY)
def test_keys_that_contradict_the_entry_are_named_once(saved, caplog, given):
    caplog.set_level("WARNING")
    CONTRADICTORY[given]()
    (warning,) = (text for text in caplog.messages if "contradict" in text)
    assert "MODEL.PIXEL_STD" in warning and "MODEL.PIXEL_MEAN" not in warning and "fix: " in warning


def test_config_of_the_entry_is_not_contradictory(saved, caplog):
    fastamp.from_pretrained(OPEN, device="cpu", opts=["TEST.FLIP", "True", "MODEL.HEADS.NUM_CLASSES", "3"])
    zoo.warn_of_differences(read_config("", ["MODEL.WEIGHTS", str(saved.with_name("mine.pth")), *STD]))
    assert not [text for text in caplog.messages if "contradict" in text]


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_file_in_a_read_only_folder_is_used(saved, monkeypatch, tmp_path, caplog, error):
    """The record is in the cache of the user, where the next process finds it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write = record.write_atomically

    def refuse(path, content):
        with writing(path):
            if path.parent == saved.parent:
                raise OSError(error, os.strerror(error))
        write(path, content)

    monkeypatch.setattr(record, "write_atomically", refuse)
    assert zoo.checkpoint(OPEN) == zoo.checkpoint(OPEN) == saved
    assert [line for line in caplog.messages if str(saved.parent) in line and "read-only" in line] == [
        line for line in caplog.messages if "read-only" in line
    ][:1]
    assert "OSNet" in read_checkpoint(saved)["config"] or "osnet" in read_checkpoint(saved)["config"]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    saved.write_bytes(saved.read_bytes() + b"changed")
    with pytest.raises(WeightsError, match=str(tmp_path / "cache")):
        zoo.local_file(zoo.find(OPEN))


def test_full_disk_is_not_a_read_only_folder(saved, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(path, content):
        with writing(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record, "write_atomically", refuse)
    with pytest.raises(WriteError, match=saved.name):
        zoo.local_file(zoo.find(OPEN))


def test_file_is_hashed_again_only_if_it_was_changed(saved, monkeypatch):
    hashed = []
    monkeypatch.setattr(files, "file_sha256", lambda path: hashed.append(path) or file_sha256(path))
    entry = zoo.find(OPEN)
    for _ in range(3):
        zoo.local_file(entry)
    assert len(hashed) == 1
    os.utime(saved, (1, 1))
    zoo.local_file(entry)
    zoo.local_file(entry)
    assert len(hashed) == 2
    with pytest.raises(WeightsError, match="0" * 64):  # published since then
        zoo.local_file(replace(entry, sha256="0" * 64))
    content = saved.read_bytes()
    saved.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the same size
    with pytest.raises(WeightsError, match=file_sha256(saved)):
        zoo.local_file(entry)


def test_missing_file_with_a_mirror_is_named_by_the_mirror(folder):
    entry = zoo.find("torchreid_osnet_x1_0_ms_d_m")
    assert entry.page and entry.mirrors
    with pytest.raises(WeightsError) as caught:
        zoo.local_file(entry, accept_withdrawn=True)
    fix = str(caught.value).partition("fix:")[2]
    assert 0 < fix.index(entry.mirrors[0]) < fix.index(entry.url)


def test_sizes_are_in_one_unit():
    shown = {size_of(entry) for entry in zoo.list_entries()}
    assert len(shown) > 3 and all(size == "not stated" or size.endswith(" MiB") for size in shown)
    stated = replace(zoo.find(OPEN), size=None, size_note="1.94 GB (hub file list)")
    assert size_of(stated) == "about 1850 MiB" and size_of(replace(stated, size=3 * 2**20)) == "3.0 MiB"
