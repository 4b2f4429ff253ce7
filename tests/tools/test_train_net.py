"""tools/train_net.py: output files, metrics, resume, and errors for invalid input."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import train_net
import yaml
from PIL import Image

ROOT = Path(__file__).parents[2]
KEPT = {"config.yaml": "a config", "metrics.json": '{"iteration": 3}\n', "model_best.pth": "weights"}


def run(capfd, *argv):
    """Run train_net.py in this process; return the exit code and stderr."""
    code = train_net.cli([str(arg) for arg in argv])
    return code, capfd.readouterr().err


@pytest.fixture
def assert_input_error(demo, tmp_path, capfd):
    """Function that checks that invalid input causes exit code 2 and one error message, and changes no output file."""

    def check(*opts, argv=(), message):
        output = tmp_path / "output"
        output.mkdir(exist_ok=True)
        for name, content in KEPT.items():
            (output / name).write_text(content)
        code, stderr = run(capfd, *argv, *tiny.tiny_options(output, *map(str, opts)))
        assert code == 2, stderr
        assert stderr.count("error:") == 1 and "Traceback" not in stderr
        for part in [message] if isinstance(message, str) else message:
            assert part in stderr
        assert {name: (output / name).read_text() for name in KEPT} == KEPT
        assert {p.name for p in output.iterdir()} <= {*KEPT, "log.txt"}

    return check


@pytest.mark.end_to_end
def test_training_writes_files_and_eval_only_reproduces_metrics(demo, tmp_path, capfd):
    output = tmp_path / "run"
    config = tmp_path / "base.yml"
    config.write_text("SOLVER: {AMP: bf16}\n")
    options = tiny.tiny_options(output)
    assert run(capfd, "--config-file", config, *options)[0] == 0
    names = {p.name for p in output.iterdir()}
    assert {"config.yaml", "log.txt", "metrics.json", "last_checkpoint", "model_best.pth", "model_final.pth"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    rows = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    training = [row for row in rows if "total_loss" in row]
    assert {"loss_cls", "loss_triplet", "grad_norm", "loss_scale", "skipped_total", "lr", "images_per_second"} <= set(
        training[0]
    )
    assert "peak_memory_mb" in training[0] and "eta_seconds" in training[0]
    evaluated = [row for row in rows if "Demo/mAP" in row]
    assert len(evaluated) == 2
    assert evaluated[-1]["Demo/mAP low"] <= evaluated[-1]["Demo/mAP"] <= evaluated[-1]["Demo/mAP high"]
    assert not (output / "evaluation").exists()
    content = torch.load(output / "model_final.pth", weights_only=True)
    notes = {"pairs", "evaluation", "versions", "fastamp_format"}
    assert {"model", "optimizer", "trainer", "random", "policy", "config"} | notes == set(content)
    assert content["policy"]["dtype"] == "bfloat16"
    assert yaml.safe_load(content["config"])["SOLVER"]["MAX_EPOCH"] == 4
    saved = yaml.safe_load((output / "config.yaml").read_text())
    assert saved["MODEL"]["HEADS"]["NUM_CLASSES"] == 16

    # the saved config and weights give the same numbers again
    results = train_net.main(
        train_net.default_argument_parser().parse_args(
            [
                "--eval-only",
                "--config-file",
                str(output / "config.yaml"),
                "MODEL.WEIGHTS",
                str(output / "model_final.pth"),
            ]
        )
    )
    assert results["mAP"] == evaluated[-1]["Demo/mAP"]
    assert {"Rank-1", "Rank-5", "Rank-10", "mAP", "mINP", "metric"} <= set(results)

    # and under another precision they are said to be used so
    capfd.readouterr()
    arguments = ["--eval-only", *options, "MODEL.WEIGHTS", output / "model_final.pth", "SOLVER.AMP", "off"]
    assert run(capfd, *arguments)[0] == 0
    assert "trained in bfloat16, but this process computes in float32" in (output / "log.txt").read_text()

    # and whatever the evaluation can do, it does from here too
    extras = ["TEST.RERANK", "on", "TEST.AQE", "on", "TEST.ROC", "on", "TEST.PER_QUERY", "True", "TEST.FLIP", "on"]
    assert run(capfd, *arguments, *extras)[0] == 0
    log = (output / "log.txt").read_text().split("evaluating on Demo")[-1]
    for text in (
        "expansion of queries and gallery",
        "re-ranking (zhong",
        "; flip test; features fp32 on cpu",
        "TAR@FAR=0.01",
    ):
        assert text in log
    files = {path.name for path in (output / "evaluation/Demo").iterdir()}
    assert files == {"per_query.npz", "queries.csv", "roc.npz", "roc.png"}


def first_convolution(path):
    return tiny.weights(path)["backbone.0.weight"]


def last_map(output):
    rows = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    return [row["Demo/mAP"] for row in rows if "Demo/mAP" in row][-1]


@pytest.mark.integration
def test_grayscale_training_needs_no_key_except_input_channels(demo, tmp_path, capfd):
    output = tmp_path / "run"
    jitter = ("INPUT.CJ.ENABLED", "True", "INPUT.CJ.PROB", "1.0", "TEST.BASELINES", "True", "SOLVER.AMP", "bf16")
    gray = tiny.tiny_options(output, "INPUT.CHANNELS", "1", "SOLVER.MAX_EPOCH", "1", *jitter)
    assert run(capfd, *gray)[0] == 0
    start = first_convolution(output / "model_final.pth")
    assert start.shape[1] == 1
    assert "baseline: color histogram" in (output / "log.txt").read_text()

    assert run(capfd, "--resume", *gray, "SOLVER.MAX_EPOCH", "2")[0] == 0
    assert not torch.equal(first_convolution(output / "model_final.pth"), start)

    weights = ("MODEL.WEIGHTS", str(output / "model_final.pth"))
    arguments = ["--eval-only", "--config-file", str(output / "config.yaml"), *weights]
    results = train_net.main(train_net.default_argument_parser().parse_args(arguments))
    assert results["mAP"] == last_map(output)
    code, stderr = run(capfd, *arguments, "INPUT.CHANNELS", "3")
    assert code == 2 and "do not match the model" in stderr and "INPUT.CHANNELS" in stderr


@pytest.mark.integration
def test_model_uses_fourth_image_channel(demo_root, tmp_path, monkeypatch, capfd):
    """The fourth channel of RGBA images encodes the identity; without it the mAP drops."""
    root = tmp_path / "datasets"
    shutil.copytree(demo_root, root)
    for path in root.rglob("*.jpg"):
        with Image.open(path) as image:
            image = image.convert("RGBA")
        image.putalpha(int(path.name.split("_")[0]) * 37 % 256)
        image.save(path, format="png")
    monkeypatch.setenv("FASTAMP_DATASETS", str(root))
    output = tmp_path / "run"
    options = ("MODEL.PIXEL_MEAN", "(120, 120, 120, 120)", "MODEL.PIXEL_STD", "(60, 60, 60, 60)")
    options += ("INPUT.CHANNELS", "4", "INPUT.REA.VALUE", "(120, 120, 120, 120)", "INPUT.CJ.ENABLED", "True")
    options += ("INPUT.AFFINE.ENABLED", "True", "TEST.BASELINES", "True")
    assert run(capfd, *tiny.tiny_options(output, *options))[0] == 0
    assert first_convolution(output / "model_final.pth").shape[1] == 4

    monkeypatch.setenv("FASTAMP_DATASETS", str(demo_root))
    weights = ("MODEL.WEIGHTS", str(output / "model_final.pth"))
    arguments = ["--eval-only", "--config-file", str(output / "config.yaml"), *weights]
    results = train_net.main(train_net.default_argument_parser().parse_args(arguments))
    assert results["mAP"] < last_map(output) - 20


@pytest.mark.integration
def test_evaluation_log_mentions_flip_test_and_baselines(demo, tmp_path, capfd):
    options = tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1", "TEST.FLIP", "True", "TEST.BASELINES", "True")
    assert run(capfd, *options)[0] == 0
    log = (tmp_path / "log.txt").read_text()
    assert "flip test" in log and "baseline: raw pixels" in log and "baseline: color histogram" in log


def test_train_net_exits_with_2_if_dataset_is_missing_or_empty(assert_input_error, tmp_path, datasets_root):
    market = ("DATASETS.NAMES", "Market1501", "DATASETS.TESTS", "Market1501")
    assert_input_error(*market, message=["Market-1501-v15.09.15", "bounding_box_train", "FASTAMP_DATASETS"])
    for name in ("bounding_box_train", "query", "bounding_box_test"):
        (tmp_path / "Market-1501-v15.09.15" / name).mkdir(parents=True)
    assert_input_error(*market, message="Market-1501-v15.09.15")


@pytest.mark.integration
@pytest.mark.parametrize("workers", ["0", "1"])
def test_train_net_error_names_corrupt_image(demo_root, tmp_path, monkeypatch, capfd, workers):
    root = tmp_path / "datasets"
    shutil.copytree(demo_root, root)
    image = sorted(root.rglob("bounding_box_train/*.jpg"))[5]
    image.write_bytes(image.read_bytes()[:100])
    monkeypatch.setenv("FASTAMP_DATASETS", str(root))
    code, stderr = run(capfd, *tiny.tiny_options(tmp_path / "output", "DATALOADER.NUM_WORKERS", workers))
    assert code == 2
    assert str(image) in stderr and "Traceback" not in stderr


def test_train_net_exits_with_2_if_weights_are_missing_or_invalid(assert_input_error, tmp_path):
    evaluate = {"argv": ["--eval-only"]}
    assert_input_error(**evaluate, message=["--eval-only", "MODEL.WEIGHTS"])
    assert_input_error("MODEL.WEIGHTS", tmp_path / "nowhere.pth", **evaluate, message="nowhere.pth")
    good = tmp_path / "good.pth"
    torch.save({"model": {"backbone.0.weight": torch.ones(3)}}, good)
    assert_input_error(
        "MODEL.WEIGHTS", good, **evaluate, message=["good.pth do not match the model", "backbone.0.weight"]
    )
    truncated = tmp_path / "truncated.pth"
    truncated.write_bytes(good.read_bytes()[:200])
    assert_input_error("MODEL.WEIGHTS", truncated, **evaluate, message=["cannot load", "truncated.pth ("])
    assert_input_error("MODEL.WEIGHTS", truncated, message=["cannot load", "truncated.pth ("])
    resnet = ["MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.DEPTH", "18x"]
    pretrained = ["MODEL.BACKBONE.PRETRAIN", True, "MODEL.BACKBONE.PRETRAIN_PATH", truncated]
    assert_input_error(*resnet, *pretrained, "MODEL.BACKBONE.FEAT_DIM", 512, message="truncated.pth")


@pytest.mark.parametrize(
    "key, value, parts",
    [
        ("SOLVER.BASE_RL", "0.1", ["SOLVER.BASE_RL", "SOLVER.BASE_LR"]),
        ("MODEL.BACKBONE.NAME", "build_resnet", ["MODEL.BACKBONE.NAME", "build_resnet_backbone"]),
        ("MODEL.HEADS.NAME", "EmbedingHead", ["MODEL.HEADS.NAME", "'EmbeddingHead'"]),
        ("MODEL.HEADS.POOL_LAYER", "GlobalAveragePool", ["MODEL.HEADS.POOL_LAYER", "'GlobalAvgPool'"]),
        ("MODEL.HEADS.CLS_LAYER", "Lineal", ["MODEL.HEADS.CLS_LAYER", "'Linear'"]),
        ("MODEL.LOSSES.NAME", "TripleLoss", ["MODEL.LOSSES.NAME", "'TripletLoss'"]),
        ("MODEL.META_ARCHITECTURE", "Basline", ["MODEL.META_ARCHITECTURE", "'Baseline'"]),
        ("DATALOADER.SAMPLER_TRAIN", "NaiveSampler", ["DATALOADER.SAMPLER_TRAIN", "'NaiveIdentitySampler'"]),
        ("DATASETS.NAMES", "Market1502", ["DATASETS.NAMES", "'Market1501'"]),
        ("SOLVER.OPT", "Adamm", ["SOLVER.OPT", "'Adam'"]),
        ("SOLVER.SCHED", "MultiStep", ["SOLVER.SCHED", "'MultiStepLR'"]),
        ("SOLVER.TRAINER", "AmpTrainer", ["SOLVER.TRAINER", "'AMPTrainer'"]),
        ("TEST.METRIC", "euclid", ["TEST.METRIC", "euclidean"]),
        ("TEST.PROTOCOL", "market", ["TEST.PROTOCOL", "'market1501'"]),
        ("TEST.RERANK.LAMBDA", "1.5", ["TEST.RERANK.LAMBDA", "got 1.5"]),
        ("TEST.ROC.FAR", "[0.1, 0]", ["TEST.ROC.FAR", "got (0.1, 0.0)"]),
        ("MODEL.HEADS.NUM_CLASSES", "5", ["MODEL.HEADS.NUM_CLASSES", "5", "16"]),
        ("MODEL.BACKBONE.FEAT_DIM", "2048", ["MODEL.BACKBONE.FEAT_DIM", "2048", "16"]),
        ("TEST.EVAL_PERIOD", "0", ["TEST.EVAL_PERIOD", "got 0"]),
        ("SOLVER.IMS_PER_BATCH", "1000", ["SOLVER.IMS_PER_BATCH", "1000", "96 images"]),
        ("DATALOADER.NUM_INSTANCE", "3", ["DATALOADER.NUM_INSTANCE 3", "16"]),
        ("DATALOADER.NUM_INSTANCE", "-1", ["DATALOADER.NUM_INSTANCE", "got -1"]),
        ("MODEL.META_ARCHITECTURE", "Distiller", ["KD.MODEL_CONFIG"]),
        ("KD.EMA.MOMENTUM", "1.5", ["KD.EMA.MOMENTUM", "got 1.5"]),
        ("MODEL.HEADS.NORM", "IN", ["MODEL.HEADS.NORM", "choices: BN, FrozenBN, GN"]),
        ("SOLVER.LR_FACTORS", "{'backbon.*': 0.1}", ["SOLVER.LR_FACTORS", "'backbon.*'"]),
        ("SOLVER.ACCUM_STEPS", "0", ["SOLVER.ACCUM_STEPS", "got 0"]),
        ("SOLVER.EMA.DECAY", "1", ["SOLVER.EMA.DECAY", "got 1.0"]),
        ("SOLVER.LR_FACTORS", "{'backbone.*': .inf}", ["SOLVER.LR_FACTORS", "inf"]),
        ("MODEL.HEADS.NORM", "GN", ["GN", "32", "16"]),
        ("MODEL.HEADS.SCALE", "0", ["MODEL.HEADS.SCALE", "got 0"]),
        ("MODEL.LOSSES.FL.GAMMA", "-3", ["MODEL.LOSSES.FL.GAMMA", "got -3"]),
        ("MODEL.FREEZE_LAYERS", "backbon", ["MODEL.FREEZE_LAYERS", "'backbone'"]),
        ("SOLVER.OPT_ARGS", "{betas: [0.9]}", ["SOLVER.OPT_ARGS", "betas", "(0.9, 0.999)"]),
        ("SOLVER.OPT_ARGS", "{amsgrad: hello}", ["SOLVER.OPT_ARGS", "amsgrad", "'hello'"]),
        ("SOLVER.OPT_ARGS", "{eps: tiny}", ["SOLVER.OPT_ARGS", "eps", "'tiny'"]),
        ("SOLVER.OPT_ARGS", "{fused: True, foreach: True}", ["Adam", "SOLVER.OPT_ARGS"]),
        ("SOLVER.OPT_ARGS", "{weight_decay: 10.0}", ["SOLVER.OPT_ARGS", "weight_decay", "WEIGHT_DECAY"]),
        ("SOLVER.AMP.FORCE_FP32", "head", ["SOLVER.AMP.FORCE_FP32", "'heads'"]),
        ("SOLVER.AMP", "fp17", ["SOLVER.AMP", "fp17"]),
        ("SOLVER.BASE_LR", "-1", ["SOLVER.BASE_LR", "got -1.0"]),
        ("SOLVER.AMP.BACKOFF_FACTOR", "2", ["SOLVER.AMP.BACKOFF_FACTOR", "got 2.0"]),
        ("INPUT.SIZE_TRAIN", "(64, 32, 3)", ["INPUT.SIZE_TRAIN", "(height, width)", "got (64, 32, 3)"]),
        ("INPUT.REA.PROB", "1.5", ["INPUT.REA.PROB", "got 1.5"]),
        ("MODEL.PIXEL_STD", "(0, 0, 0)", ["MODEL.PIXEL_STD", "got (0.0, 0.0, 0.0)"]),
        ("MODEL.PIXEL_MEAN", "(1.0, 2.0)", ["MODEL.PIXEL_MEAN", "INPUT.CHANNELS 3", "got 2", "fix: "]),
        ("INPUT.CHANNELS", "2", ["INPUT.CHANNELS", "choices: 1, 3, 4"]),
        ("INPUT.CHANNELS", "4", ["MODEL.PIXEL_MEAN", "INPUT.CHANNELS 4", "got 3", "fix: "]),
        ("INPUT.REA.VALUE", "(1, 2)", ["INPUT.REA.VALUE", "got 2", "fix: "]),
        ("MODEL.BACKBONE.LAST_STRIDE", "0", ["MODEL.BACKBONE.LAST_STRIDE", "got 0"]),
        ("MODEL.LOSSES.NAME", "('TripletLoss', 'TripletLoss')", ["MODEL.LOSSES.NAME", "TripletLoss, TripletLoss"]),
        ("MODEL.LOSSES.NAME", "()", ["MODEL.LOSSES.NAME"]),
        ("SOLVER.OPT", "SparseAdam", ["SOLVER.OPT", "SparseAdam"]),
        ("OUTPUT_DIR", "/dev/null/x", ["OUTPUT_DIR", "/dev/null/x"]),
    ],
)
def test_train_net_exits_with_2_for_invalid_config_values(assert_input_error, key, value, parts):
    assert_input_error(key, value, message=parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_train_net_exits_with_2_if_configured_cuda_is_unavailable(assert_input_error):
    assert_input_error("MODEL.DEVICE", "cuda", message=["MODEL.DEVICE is 'cuda'", "MODEL.DEVICE to auto"])


def test_train_net_exits_with_2_for_batch_of_one_image(assert_input_error):
    options = ("DATALOADER.SAMPLER_TRAIN", "TrainingSampler")
    assert_input_error("SOLVER.IMS_PER_BATCH", "1", *options, message=["SOLVER.IMS_PER_BATCH is 1", "WITH_BNNECK"])


def test_train_net_exits_with_2_if_precise_bn_dataset_is_missing(assert_input_error):
    options = ("TEST.PRECISE_BN.ENABLED", "True", "TEST.PRECISE_BN.DATASET")
    assert_input_error(*options, "Nope", message=["TEST.PRECISE_BN.DATASET 'Nope'", "unknown name"])
    assert_input_error(*options, "Market1501", message="TEST.PRECISE_BN.DATASET 'Market1501'")


def test_train_net_exits_with_2_for_invalid_config_files(assert_input_error, tmp_path):
    python = tmp_path / "config.py"
    python.write_text("raise SystemExit(99)")
    assert_input_error(argv=["--config-file", python], message="config.py")
    assert_input_error(argv=["--config-file", tmp_path / "nowhere.yml"], message="nowhere.yml")
    typo = tmp_path / "typo.yml"
    typo.write_text("SOLVER: {MAX_EPOCHS: 3}")
    assert_input_error(argv=["--config-file", typo], message=["typo.yml", "SOLVER.MAX_EPOCHS", "SOLVER.MAX_EPOCH"])


@pytest.mark.parametrize("flags", [("--num-gpus", "0"), ("--num-machines", "2", "--machine-rank", "2")])
def test_train_net_exits_with_2_for_invalid_process_counts(assert_input_error, flags):
    assert_input_error(argv=flags, message=["--num-gpus", "--machine-rank"])


def test_train_net_exits_with_2_for_several_machines_without_dist_url(assert_input_error):
    assert_input_error(argv=["--num-machines", "2"], message="--dist-url")


@pytest.mark.integration
def test_resume_with_another_model_exits_with_2_and_keeps_checkpoint(demo, tmp_path, capfd):
    assert run(capfd, *tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1"))[0] == 0
    before = (tmp_path / "model_final.pth").read_bytes()
    code, stderr = run(capfd, "--resume", *tiny.tiny_options(tmp_path, "MODEL.HEADS.EMBEDDING_DIM", "8"))
    assert code == 2 and "does not match the model" in stderr
    assert (tmp_path / "model_final.pth").read_bytes() == before


def test_train_net_accepts_a_flag_after_key_value_pairs(demo, tmp_path, capfd):
    options = tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1")
    assert run(capfd, *options, "--eval-only")[0] == 2  # MODEL.WEIGHTS is not set
    assert run(capfd, *options, "--dry-run")[0] == 0
    assert not (tmp_path / "model_final.pth").exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    "options, message",
    [
        (("SOLVER.OPT", "SGD"), "SOLVER.OPT is SGD"),
        (("SOLVER.IMS_PER_BATCH", "32"), "from 6 to 3: SOLVER.IMS_PER_BATCH"),
        (("SOLVER.OPT_ARGS.amsgrad", "True"), "amsgrad False -> True"),
    ],
)
def test_resume_with_another_optimizer_or_batch_size_exits_with_2(demo, tmp_path, capfd, options, message):
    assert run(capfd, *tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1"))[0] == 0
    config = (tmp_path / "config.yaml").read_text()
    code, stderr = run(capfd, "--resume", *tiny.tiny_options(tmp_path, *options))
    assert code == 2 and message in stderr, stderr
    assert (tmp_path / "config.yaml").read_text() == config


@pytest.mark.integration
def test_resume_with_another_weight_average_exits_with_2(demo, tmp_path, capfd):
    ema = ("SOLVER.EMA.ENABLED", "True")
    assert run(capfd, *tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1"))[0] == 0
    code, stderr = run(capfd, "--resume", *tiny.tiny_options(tmp_path, *ema))
    assert code == 2 and "average" in stderr
    assert run(capfd, *tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1", *ema))[0] == 0
    swa = ("SOLVER.SWA.ENABLED", "True")
    code, stderr = run(capfd, "--resume", *tiny.tiny_options(tmp_path, *swa))
    assert code == 2 and "average" in stderr
    assert run(capfd, "--resume", *tiny.tiny_options(tmp_path))[0] == 0
    assert "weight average (ema)" in (tmp_path / "log.txt").read_text()


@pytest.mark.integration
def test_resume_applies_and_logs_changed_learning_rate(demo, tmp_path, capfd):
    assert run(capfd, *tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1"))[0] == 0
    changed = ("SOLVER.MAX_EPOCH", "2", "SOLVER.BASE_LR", "1e-5", "SOLVER.WEIGHT_DECAY", "0.25")
    changed += ("SOLVER.WEIGHT_DECAY_NORM", "0.25", "SOLVER.WEIGHT_DECAY_BIAS", "0.25")
    assert run(capfd, "--resume", *tiny.tiny_options(tmp_path, *changed))[0] == 0
    assert "weight_decay 0.0005 -> 0.25" in (tmp_path / "log.txt").read_text()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [row["lr"] for row in rows if "lr" in row][-1] == pytest.approx(1e-5)
    groups = torch.load(tmp_path / "model_final.pth", weights_only=True)["optimizer"]["param_groups"]
    assert groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("content", [b"", b"model_0009.pth", b"\xff\x00\xfe"])
def test_resume_exits_with_2_if_last_checkpoint_file_is_invalid(demo, tmp_path, capfd, content):
    (tmp_path / "last_checkpoint").write_bytes(content)
    code, stderr = run(capfd, "--resume", *tiny.tiny_options(tmp_path))
    assert code == 2 and "last_checkpoint names" in stderr


@pytest.mark.integration
def test_resume_repeats_evaluation_that_failed_after_last_epoch(demo_root, tmp_path, monkeypatch, capfd):
    root = tmp_path / "datasets"
    shutil.copytree(demo_root, root)
    monkeypatch.setenv("FASTAMP_DATASETS", str(root))
    image = sorted(root.rglob("bounding_box_test/*.jpg"))[-1]
    good = image.read_bytes()
    image.write_bytes(good[:100])
    options = tiny.tiny_options(tmp_path / "run", "SOLVER.CHECKPOINT_PERIOD", "4", "SOLVER.MAX_EPOCH", "2")
    code, stderr = run(capfd, *options)
    assert code == 2 and str(image) in stderr
    image.write_bytes(good)
    assert run(capfd, "--resume", *options)[0] == 0
    assert "only evaluating" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.integration
def test_list_config_flag_with_closed_stdout_prints_no_traceback():
    process = subprocess.run(
        f"{sys.executable} tools/train_net.py --list-config | head -1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout == "[run]\n" and process.stderr == ""


def test_list_config_flag_prints_config_keys_with_descriptions(input_error, capsys):
    assert train_net.cli(["--list-config", "SOLVER.AMP"]) == 0
    out = capsys.readouterr().out
    assert "SOLVER.AMP.DTYPE" in out and "SOLVER.BASE_LR" not in out
    assert "SOLVER" in input_error(train_net.cli, ["--list-config", "SOLVR"])


@pytest.mark.integration
def test_train_net_exits_with_2_without_traceback_if_config_file_is_missing():
    process = subprocess.run(
        [sys.executable, "tools/train_net.py", "--config-file", "nowhere.yml"], capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 2
    assert process.stderr.startswith("error:") and "nowhere.yml" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.integration
def test_train_net_exits_with_2_for_invalid_checkpoint_entries(demo, tmp_path, capfd):
    """Entries other than the weights are also validated; in an untrusted file they may have any type."""
    options = tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1", "SOLVER.EMA.ENABLED", "True")
    assert run(capfd, *options)[0] == 0
    good = torch.load(tmp_path / "model_final.pth", weights_only=True)
    odd = tmp_path / "odd.pth"
    evaluate = ("--eval-only", *options, "MODEL.WEIGHTS", str(odd))
    for entry in ({"policy": torch.ones(2, 2)}, {"policy": [1]}, {"average": [1]}, {"average": {"kind": "ema"}}):
        torch.save(good | entry, odd)
        assert run(capfd, *evaluate)[0] == 0
    torch.save(good | {"average": good["average"] | {"model": [1]}}, odd)
    code, stderr = run(capfd, *evaluate)
    assert code == 2 and "the ema in" in stderr and "no state dict" in stderr

    (tmp_path / "last_checkpoint").write_text("odd.pth")
    for entry in (
        {"model": [1]},
        {"model": good["model"] | {"backbone.0.weight": "x"}},
        {"trainer": good["trainer"] | {"iteration": -5}},
        {"trainer": good["trainer"] | {"steps_taken": None}},
        {"trainer": good["trainer"] | {"hooks": 7}},
        {"trainer": good["trainer"] | {"hooks": {"EvalHook": {"best": {"a": 1}}}}},
        {"optimizer": good["optimizer"] | {"state": {0: {"step": "x"}}}},
        {"random": good["random"] | {"torch": torch.zeros(3)}},
        {"random": good["random"] | {"python": (3, (1,), None)}},
        {"average": good["average"] | {"updates": 0.5}},
    ):
        torch.save(good | entry, odd)
        code, stderr = run(capfd, "--resume", *options, "SOLVER.MAX_EPOCH", "2")
        assert code == 2 and "odd.pth" in stderr and next(iter(entry)) in stderr, stderr
