"""One grammar for all commands: SOURCE, flags anywhere, KEY VALUE and KEY=VALUE."""

import argparse
import json
import shutil

import pytest
import tiny
import torch

from fastamp.cli import command_parser, main
from fastamp.cli.options import add_source_arguments, parse_arguments, split_key_values
from fastamp.cli.source import config_of, evaluation_config, resolve_source, training_config
from fastamp.config.recipes import find_recipe, list_recipes
from fastamp.utils.errors import ConfigError, WeightsError

RECIPE = "Market1501/sbs_R50-ibn"


def parse(*words):
    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    parser.add_argument("--resume", action="store_true")
    return parse_arguments(parser, words)


def test_values_of_a_flag_end_at_a_word_that_is_not_one(capsys):
    for words in (["--seeds", "0", "1", "my.yml", "SEED=1"], ["SEED=1", "--seeds", "0", "-1", "LOG_PERIOD", "my.yml"]):
        args = parse_arguments(command_parser("train"), words)
        assert args.seeds[0] == 0 and len(args.seeds) == 2 and "my.yml" in (args.config_source, *args.opts)
    args = parse_arguments(command_parser("visualize"), ["--kind", "cmc", "roc", "logs/run", "SEED", "1"])
    assert (args.kind, args.checkpoint, args.key_values) == (["cmc", "roc"], "logs/run", ["SEED", "1"])
    for words, part in ((["--seeds", "my.yml"], "invalid int value: 'my.yml'"), (["--seeds"], "at least one")):
        with pytest.raises(SystemExit):
            parse_arguments(command_parser("train"), words)
        assert part in capsys.readouterr().err


def test_key_value_pairs_are_accepted_with_and_without_equals_sign():
    words = ["SEED", "1", "SOLVER.AMP=bf16", "MODEL.WEIGHTS", "a=b.pth", "SOLVER.STEPS=(1, 2)", "OUTPUT_DIR="]
    expected = ["SEED", "1", "SOLVER.AMP", "bf16", "MODEL.WEIGHTS", "a=b.pth", "SOLVER.STEPS", "(1, 2)"]
    assert split_key_values(words) == [*expected, "OUTPUT_DIR", ""]
    assert split_key_values(["seed=1"]) == ["seed", "1"]  # reading the config reports the unknown key
    assert split_key_values(["SEED"]) == ["SEED"]  # reading the config reports the missing value


def test_flags_stand_anywhere_and_the_first_key_is_not_a_source():
    for words in ([RECIPE, "SEED", "1", "--resume", "LOG_PERIOD=2"], ["--resume", RECIPE, "SEED=1", "LOG_PERIOD", "2"]):
        args = parse(*words)
        assert (args.config_source, args.resume) == (RECIPE, True) and args.opts == ["SEED", "1", "LOG_PERIOD", "2"]
    for words in (["SEED", "1"], ["SEED=1"], ["--config-file", "", "SEED", "1"]):
        args = parse(*words)
        assert args.config_source == "" and args.opts == ["SEED", "1"]
    assert parse("x.yml", "SOLVER.BIAS_LR_FACTOR", "-1e-3", "--resume").opts == ["SOLVER.BIAS_LR_FACTOR", "-1e-3"]


def test_a_source_after_a_key_or_another_source_is_an_error(capsys):
    for words, part in (
        (["SEED=1", RECIPE], f"write {RECIPE} before"),
        (["SEED", "1", RECIPE, "LOG_PERIOD=2"], f"write {RECIPE} before"),
        ([RECIPE, "my.yml"], f"{RECIPE} and my.yml"),
    ):
        with pytest.raises(SystemExit) as end:
            parse(*words)
        assert end.value.code == 2 and part in capsys.readouterr().err
    assert parse(RECIPE, "MODEL.WEIGHTS", "my.pth", "KD.MODEL_CONFIG", "my.yml").opts[1::2] == ["my.pth", "my.yml"]


def test_recipes_are_found_by_name_from_any_folder(elsewhere):
    path = find_recipe(RECIPE)
    for name in (RECIPE, f"{RECIPE}.yml", f"configs/{RECIPE}.yml"):
        source = resolve_source(name)
        assert (source.kind, source.path) == ("config", path)
        assert training_config(parse(name, "SEED=3")).OUTPUT_DIR == "logs/market1501/sbs_R50-ibn"
        assert training_config(parse("--config-file", name, "SEED", "3")).SEED == 3
    assert RECIPE in list_recipes() and "Base-SBS" not in list_recipes()
    for name in ("", "/etc/passwd", "../configs/Market1501/sbs_R50-ibn", "Market1501"):
        assert find_recipe(name) is None
    (elsewhere / "mine.yml").write_text(f"_BASE_: {RECIPE}\nSEED: 7\n")
    mine = config_of("mine.yml")
    assert mine.SEED == 7 and mine.MODEL.BACKBONE.WITH_IBN
    (elsewhere / "Market1501").mkdir()
    (elsewhere / f"{RECIPE}.yml").write_text("SEED: 8\n")  # a file of the user has precedence
    assert config_of(f"{RECIPE}.yml").SEED == 8


def test_unknown_source_is_named_as_typed_with_the_nearest_recipe(elsewhere, input_error):
    err = input_error(main, ["train", "Market1501/sbs_R50-ibm"])
    assert "'Market1501/sbs_R50-ibm'" in err and f"'{RECIPE}'" in err and "--config-file" not in err
    assert f"'{RECIPE}'" in input_error(main, ["train", f"{RECIPE}s.yml"])
    assert RECIPE in input_error(main, ["train", RECIPE, "--config-file", "x.yml"])
    assert "missing.pth" in input_error(main, ["eval", "missing.pth"])
    assert "MODEL.WEIGHTS" in input_error(main, ["eval", RECIPE])


def test_training_config_of_a_run_folder_and_a_checkpoint(run_folder, checkpoint):
    trained = config_of(run_folder)
    again = training_config(parse(str(run_folder), "SEED=5"))
    assert str(run_folder) == again.OUTPUT_DIR and again.SEED == 5 and again.MODEL.WEIGHTS == ""
    assert again.MODEL.BACKBONE == trained.MODEL.BACKBONE and not again.is_set("MODEL.DEVICE")
    tuned = training_config(parse(str(checkpoint)))
    assert str(checkpoint) == tuned.MODEL.WEIGHTS and tuned.OUTPUT_DIR == "logs/"
    assert tuned.MODEL.BACKBONE == trained.MODEL.BACKBONE
    weights = training_config(parse(str(run_folder)), with_weights=True).MODEL.WEIGHTS
    assert weights == str(checkpoint)
    empty = checkpoint.parent / "empty"
    empty.mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        training_config(parse(str(empty)))
    with pytest.raises(WeightsError, match=r"model_best\.pth"):
        evaluation_config("", [], source=str(empty))


@pytest.mark.integration
def test_run_folder_continues_with_resume_and_a_checkpoint_does_not(demo, run_folder, tmp_path, input_error):
    run = shutil.copytree(run_folder, tmp_path / "moved")
    assert main(["train", str(run), "SOLVER.MAX_EPOCH=2", "--resume"]) == 0
    state = torch.load(run / "model_final.pth", weights_only=True)
    assert state["trainer"]["iteration"] == 12
    err = input_error(main, ["train", str(run / "model_best.pth"), "--resume"])
    assert str(run / "model_best.pth") in err and f"fastamp train {run} --resume" in err


@pytest.mark.integration
def test_checkpoint_starts_a_new_run_with_its_config_and_weights(demo, checkpoint, tmp_path):
    output = tmp_path / "fine_tuned"
    assert main(["train", str(checkpoint), f"OUTPUT_DIR={output}", "SOLVER.MAX_EPOCH=1", "SOLVER.BASE_LR=0"]) == 0
    found, expected = tiny.weights(output / "model_final.pth"), tiny.weights(checkpoint)
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name.endswith("0.weight"))


@pytest.mark.integration
@pytest.mark.parametrize("source", ["model_best.pth", ""])
def test_training_on_another_dataset_has_its_number_of_classes(demo, run_folder, source, tmp_path, input_error):
    rows = [f"{path},{path.name[:4]}" for path in sorted(demo.glob("*/bounding_box_train/*.jpg"))]
    (tmp_path / "mine.csv").write_text("\n".join(["path,pid", *rows]))  # half of the identities are for testing
    output = tmp_path / "fine_tuned"
    options = ("DATASETS.NAMES", f"csv:{tmp_path}/mine.csv", "OUTPUT_DIR", str(output), "SOLVER.MAX_EPOCH=1")
    assert main(["train", str(run_folder / source), *options, "DATALOADER.NUM_INSTANCE=2"]) == 0
    classes = config_of(output).MODEL.HEADS.NUM_CLASSES
    assert 0 < classes < config_of(run_folder).MODEL.HEADS.NUM_CLASSES
    assert len(tiny.weights(output / "model_final.pth")["heads.weight"]) == classes
    resumed = ["train", str(run_folder), "--resume", *options, f"OUTPUT_DIR={tmp_path}/resumed"]
    assert "MODEL.HEADS.NUM_CLASSES" in input_error(main, resumed)


@pytest.mark.parametrize("source", ["model_best.pth", ""])
def test_eval_takes_a_checkpoint_or_run_folder(demo, run_folder, source, tmp_path):
    words = ("TEST.FLIP=on", "MODEL.DEVICE", "cpu", f"OUTPUT_DIR={tmp_path}")
    for command in (["eval"], ["train", "--eval-only"]):
        assert main([*command, str(run_folder / source), *words]) == 0
        content = json.loads((tmp_path / "metrics_eval.json").read_text())
        assert content["weights"] == str(run_folder / "model_best.pth") and content["datasets"] == ["Demo"]
        (tmp_path / "metrics_eval.json").unlink()


def test_model_commands_take_a_run_folder_or_a_config_with_weights(
    demo, run_folder, checkpoint, tmp_path, capsys, monkeypatch
):
    images = [str(path) for path in sorted(demo.glob("*/query/*.jpg"))[:2]]
    (tmp_path / "mine.yml").write_text((run_folder / "config.yaml").read_text())
    scores = []
    for words in (
        [checkpoint, *images],
        [run_folder, *images, "TEST.FLIP=off"],
        [tmp_path / "mine.yml", *images, f"MODEL.WEIGHTS={checkpoint}"],
        [checkpoint, *images, "--opts", "TEST.FLIP", "off"],
    ):
        assert main(["compare", *map(str, words), "--json", "--device", "cpu"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["score"])
    assert len(set(scores)) == 1
    assert (
        main(["extract", str(run_folder), "Demo", "TEST.FLIP=on", "-o", str(tmp_path / "a.npz"), "--device", "cpu"])
        == 0
    )
    gallery = str(tmp_path / "a.npz")
    assert main(["search", str(run_folder), images[0], "TEST.FLIP=on", "--gallery", gallery, "--device", "cpu"]) == 0
    assert images[0] in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    for name in ("TEST.jpg", "INPUT.png"):  # names as those of config sections
        shutil.copy(images[0], name)
        words = [name, "TEST.FLIP=on", "--gallery", gallery, "--device", "cpu"]
        assert main(["search", str(run_folder), *words]) == 0 and name in capsys.readouterr().out
    assert main(["search", str(run_folder), "SEED", "1", "--gallery", gallery, "--device", "cpu"]) == 2
    assert main(["strip", str(run_folder), str(tmp_path / "small.pth")]) == 0
    assert (tmp_path / "small.pth").stat().st_size < checkpoint.stat().st_size


def test_errors_name_the_argument_that_the_user_typed(demo, checkpoint, tmp_path, input_error, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, part in (
        (["compare", checkpoint, "a.jpg", "b.jpg", "--device", "cuda"], "--device is 'cuda'"),
        (["export", checkpoint, tmp_path / "x.onnx", "--data", "Demoo"], "--data: unknown name 'Demoo'"),
        (["check-data", "Demoo"], "dataset: unknown name 'Demoo'"),
    ):
        err = input_error(main, [str(word) for word in words])
        assert part in err and "DATASETS.NAMES" not in err and "MODEL.DEVICE" not in err
    for words, part in ((["visualize", "x", "--num", "0"], "--num"), (["train", "--resumee"], "'--resume'")):
        with pytest.raises(SystemExit):
            main(words)
        assert part in capsys.readouterr().err


@pytest.mark.integration
def test_check_data_checks_the_datasets_of_a_run(demo, run_folder, tmp_path, capsys):
    assert main(["check-data", str(run_folder), "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Demo\n") and (tmp_path / "contact_sheet.png").exists()


def test_config_show_prints_the_complete_config(capsys):
    assert main(["config", "show", RECIPE, "SEED=9"]) == 0
    out = capsys.readouterr().out
    assert "\nSEED: 9\n" in out and "WITH_IBN: true" in out
