"""CLIP-ReID: features, losses and rates of the authors' program, the tokenizer, both stages of a run, and bad input."""

import functools
import gzip
import json
import operator
import re
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import torch
from torch import nn

from fastamp import Predictor
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.cli import main
from fastamp.config import read_config
from fastamp.config.projects import import_project
from fastamp.engine import DefaultTrainer
from fastamp.engine.dry_run import dry_run
from fastamp.engine.hooks import HookBase
from fastamp.modeling import build_model
from fastamp.solver import build_lr_schedule, build_optimizer
from fastamp.utils.errors import ConfigError, WeightsError

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests/reference"
MODELS = json.loads(gzip.decompress((REFERENCE / "foundation/clipreid_models.json.gz").read_bytes()))
RECIPES = sorted(path.stem for path in (ROOT / "projects/CLIPReID/configs").glob("[!B]*_*.yml"))
TINY = ("MODEL.DEVICE", "cpu", "SOLVER.AMP", "off", "INPUT.SIZE_TRAIN", "(32, 16)", "INPUT.SIZE_TEST", "(32, 16)",
        "CLIPREID.TEXT_WIDTH", "16", "CLIPREID.TEXT_BLOCKS", "1", "MODEL.BACKBONE.NAME", "build_clip_vit_backbone",
        "MODEL.BACKBONE.FEAT_DIM", "192", "MODEL.BACKBONE.DROP_PATH_RATIO", "0.2")  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def project(unregistered):
    import_project("CLIPReID")


@pytest.fixture
def without_initialization(monkeypatch):
    """Skip the weight initialization, because the test loads other weights."""
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: None)
    monkeypatch.setattr(nn.init, "normal_", lambda tensor, *args, **options: tensor)


def demo(*opts, classes="4"):
    return read_config("CLIPReID/demo", [*TINY, "MODEL.HEADS.NUM_CLASSES", classes, *opts])


def batch_of(images, targets):
    return {"images": images, "targets": torch.tensor(targets)}


@pytest.mark.integration
@pytest.mark.parametrize("case", ["vit_clipreid", "vit_clipreid clip_file"])
def test_model_equals_the_original_program(case, tmp_path, without_initialization):
    from clipreid.losses import image_text_supcon

    expected, arrays = MODELS[case], np.load(REFERENCE / "foundation/clipreid_embeddings.npz")
    cfg = read_config("CLIPReID/Market1501_vit_clipreid", [
        "MODEL.DEVICE", "cpu", "SOLVER.AMP", "off", "MODEL.HEADS.NUM_CLASSES", str(expected["num_classes"]),
        "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.EVAL_FEAT", "before",
    ])  # fmt: skip
    state = reference_weights.state_dict(expected["state_dict"])
    if expected["weights_from"] == "clip_file":
        torch.save(state, tmp_path / "clip.pth")
        pretrained = {"MODEL.BACKBONE.PRETRAIN": True, "MODEL.BACKBONE.PRETRAIN_PATH": str(tmp_path / "clip.pth")}
        model = build_model(cfg.with_values(pretrained))
        weights = reference_weights.state_dict(expected["state_dict_own"])
        load_model_state(model, weights, source="reference", min_match=0)
    else:
        model = build_model(cfg)
        report = load_model_state(model, state, source="reference")
        assert report.dropped == report.other_shape == []
        assert set(report.missing) <= {"text_features", "prompt_learner.identities"}
    model.eval()
    with torch.no_grad():
        images = batch_of(reference_weights.images(expected["input_size"]), [0, 1])
        features = model(images)
        model.heads.eval_feat = "after"
        after = model(images)
    model.update_text_features()
    assert reference_weights.difference(features, arrays[case]) < 1e-4
    assert reference_weights.difference(after, arrays[f"{case} after"]) < 1e-4
    assert reference_weights.difference(model.text_features[expected["text_ids"]], arrays[f"{case} text"]) < 1e-4
    batch = batch_of(reference_weights.images(expected["input_size"], 4), expected["train_targets"])
    with torch.no_grad():
        stage1, targets = model.prompt_image_features(batch), batch["targets"]
        assert reference_weights.difference(model.prompt_image_features(images), arrays[f"{case} stage1_image"]) < 1e-4
    texts = model.text_features[targets]
    losses = expected["stage1_losses"]
    assert image_text_supcon(stage1, texts, targets, targets) == pytest.approx(losses["i2t"], rel=1e-3)
    assert image_text_supcon(texts, stage1, targets, targets) == pytest.approx(losses["t2i"], rel=1e-3)
    for module in model.modules():
        if hasattr(module, "drop_path"):
            assert isinstance(module.drop_path, nn.Identity)
    model.train()
    with torch.no_grad():
        found = model(batch)
    parts = expected["train_losses"]
    assert found["loss_cls"] == pytest.approx(0.25 * (parts["id"] + parts["id_proj"]), rel=1e-3)
    triplets = parts["triplet"] + parts["triplet_last"] + parts["triplet_proj"]
    assert found["loss_triplet"] == pytest.approx(triplets, rel=1e-3)
    assert found["loss_i2t"] == pytest.approx(parts["i2t"], rel=1e-3)
    assert sum(found.values()) == pytest.approx(parts["total"], rel=1e-3)


def naive_supcon(images, texts, image_labels, text_labels):
    total = 0.0
    for image, label in zip(images, image_labels, strict=True):
        scores = torch.stack([image @ text for text in texts]).double()
        log = scores - scores.exp().sum().log()
        positives = [number for number, other in enumerate(text_labels) if other == label]
        total -= sum(log[number] for number in positives) / len(positives)
    return float(total / len(images))


def test_losses_on_tensors():
    from clipreid.losses import image_text_logits, image_text_supcon

    expected = MODELS["losses_on_tensors"]
    count, width, classes, labels = (expected[key] for key in ("n", "d", "classes", "labels"))
    scale = dict(expected["scales"].items())

    def tensor(name, shape, kind):
        return scale[kind] * reference_weights.fill(f"losses.{name}", shape)

    images, texts = (tensor(name, (count, width), name) for name in ("image", "text"))
    targets = torch.tensor(labels)
    found = image_text_supcon(images, texts, targets, targets)
    assert found == pytest.approx(expected["supcon_i2t"], rel=1e-5)
    assert found == pytest.approx(naive_supcon(images, texts, labels, labels), rel=1e-5)
    assert image_text_supcon(texts, images, targets, targets) == pytest.approx(expected["supcon_t2i"], rel=1e-5)
    logits = [tensor(f"logits_{number}", (count, classes), "logits") for number in (0, 1)]
    features = [tensor(f"feat_{number}", (count, width), "feat") for number in (0, 1, 2)]
    text_logits = image_text_logits(images, tensor("text_all", (classes, width), "text_all"))
    for name, recipe in (
        ("person/vit_clipreid", "Market1501_vit_clipreid"),
        ("person/cnn_clipreid", "Market1501_cnn_clipreid"),
        ("VehicleID/cnn_clipreid", "VehicleID_cnn_clipreid"),
    ):
        from fastamp.modeling.losses import build_losses

        cfg, parts = read_config(f"CLIPReID/{recipe}", []), expected[name]
        losses = build_losses(cfg)
        identity, triplet = losses["loss_cls"], losses["loss_triplet"]
        assert [float(identity({"cls_outputs": logit}, targets)) / identity.scale for logit in logits] == pytest.approx(
            parts["id"], rel=1e-5
        )
        assert [float(triplet({"features": feature}, targets)) for feature in features] == pytest.approx(
            parts["triplet"], rel=1e-5
        )
        identity_scale, identity.scale = identity.scale, 1.0
        i2t = float(identity({"cls_outputs": text_logits}, targets))
        assert i2t == pytest.approx(parts["i2t"], rel=1e-5)
        total = identity_scale * sum(parts["id"]) + sum(parts["triplet"]) + cfg.CLIPREID.I2T_SCALE * i2t
        assert total == pytest.approx(parts["total"], rel=1e-5)


@pytest.mark.parametrize("name", ["vit_clipreid", "cnn_clipreid"])
def test_learning_rates_equal_the_original_program(name):
    from fastamp.solver.lr_schedule import EpochCosineSchedule

    expected, cfg = MODELS["lr"][f"person/{name}.yml"], read_config(f"CLIPReID/Market1501_{name}", [])
    stage1, schedule = cfg.CLIPREID.STAGE1, build_lr_schedule(cfg, 100)
    prompts = EpochCosineSchedule(stage1.WARMUP_EPOCHS, stage1.MAX_EPOCH, stage1.WARMUP_LR, stage1.ETA_MIN_LR)
    for number, rate in expected["stage1"].items():
        found = prompts.learning_rate(stage1.BASE_LR, epoch=int(number) - 1, steps_taken=0)
        assert found == pytest.approx(rate, rel=1e-9)
    for number, rates in expected["stage2 [weights, biases]"].items():
        for factor, rate in zip((1, cfg.SOLVER.BIAS_LR_FACTOR), rates, strict=True):
            found = schedule.learning_rate(cfg.SOLVER.BASE_LR * factor, epoch=int(number) - 1, steps_taken=0)
            assert found == pytest.approx(rate, rel=1e-9)


def test_every_bias_has_the_rate_of_biases():
    cfg = demo("SOLVER.BIAS_LR_FACTOR", "2.0")
    model = build_model(cfg)
    rates = {id(p): group["lr"] for group in build_optimizer(cfg, model).param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        frozen = name.startswith(("prompt_learner.", "text_encoder.")) or "heads.bottleneck" in name
        if frozen and not parameter.requires_grad:
            assert id(parameter) not in rates
        else:
            assert rates[id(parameter)] == cfg.SOLVER.BASE_LR * (2 if "bias" in name else 1), name


def test_recipes_load_with_the_published_settings(subtests):
    for recipe in RECIPES:
        with subtests.test(recipe):
            cfg, (dataset, name) = read_config(f"CLIPReID/{recipe}", []), recipe.split("_", 1)
            vit, vehicle = name.startswith("vit"), dataset in ("VeRi", "VehicleID")
            assert cfg.PROJECTS == ("CLIPReID",) and (dataset,) == cfg.DATASETS.NAMES
            assert tuple(cfg.INPUT.SIZE_TRAIN) == ((256, 256) if vehicle else (256, 128))
            assert cfg.MODEL.PIXEL_MEAN[0] == (127.5 if vit else pytest.approx(0.485 * 255))
            assert (120 if vit and not vehicle else 60) == cfg.CLIPREID.STAGE1.MAX_EPOCH
            assert (256 if dataset == "VehicleID" else 64) == cfg.CLIPREID.STAGE1.IMS_PER_BATCH
            assert (0.0 if recipe == "VehicleID_cnn_clipreid" else 0.1) == cfg.MODEL.LOSSES.CE.EPSILON
            assert (0.25 if vit else 1.0) == cfg.MODEL.LOSSES.CE.SCALE
            lr = (5e-5 if dataset == "VehicleID" else 5e-6) if vit else 3.5e-4
            assert (lr, 60 if vit else 120) == (cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_EPOCH)
            assert tuple(cfg.SOLVER.STEPS) == ((30, 50) if vit else (40, 70))
            assert (1e-4 if vit else 5e-4) == cfg.SOLVER.WEIGHT_DECAY
            assert ("vehicle" in cfg.CLIPREID.PROMPT) == vehicle


MERGES = "#version: tiny\np h\nph o\nt o</w>\npho to</w>\no f</w>\nx x\n"


def test_tokenizer_merges_by_rank(tmp_path):
    from clipreid.tokenizer import Tokenizer

    path = tmp_path / "merges.txt.gz"
    path.write_bytes(gzip.compress(MERGES.encode()))
    tokenizer = Tokenizer(str(path))
    merges = 512
    assert (tokenizer.start, tokenizer.end) == (merges + 6, merges + 7)
    byte = {char: number for number, char in enumerate("!\"#$%&'()*+,-./0123456789:;<=>?@")}
    letter = {
        char: 32 + number for number, char in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz")
    }
    assert tokenizer.encode("A  Photo of.")[1:-1] == [letter["a"] + 256, merges + 3, merges + 4, byte["."] + 256]
    assert tokenizer.encode("ph")[1:-1] == [letter["p"], letter["h"] + 256]  # the merge is not at the end of a word
    assert tokenizer.encode("é")[1:-1] == [tokenizer._ids["Ã"], tokenizer._ids["©</w>"]]


def test_prompts_have_the_published_tokens_and_places(tmp_path):
    from clipreid.text import PromptLearner, prompt_tokens
    from clipreid.tokenizer import CONTEXT

    for expected in MODELS["prompts"].values():
        tokens, start = prompt_tokens(expected["text"])
        assert (tokens, start, len(tokens) - 1) == (expected["token_ids"], 5, expected["eot_index"])
        assert expected["length"] == CONTEXT
    (tmp_path / "merges.txt").write_text(MERGES)
    tokens, start = prompt_tokens("photo X X X X of", str(tmp_path / "merges.txt"))
    assert len(tokens) == 8 and start == 2 and tokens[2] == tokens[5]
    learner = PromptLearner(3, 8, start=start, length=len(tokens))
    embedding = torch.randn(600, 8)
    learner.set_words(tokens, embedding)
    found = learner(torch.tensor([2, 0]))
    torch.testing.assert_close(found[0, 2:6], learner.cls_ctx[2])
    torch.testing.assert_close(found[1, 6:], embedding[tokens[6:]])
    torch.testing.assert_close(learner.token_suffix[0, -1], embedding[0])
    with pytest.raises(ConfigError, match="600 rows"):
        learner.set_words([*tokens[:-1], 700], embedding)


def test_text_tower_hides_the_padding():
    from clipreid.text import TextEncoder

    encoder = TextEncoder(width=16, blocks=2, embedding=8).eval()
    prompts = torch.randn(2, 12, 16)
    padded = torch.cat([prompts, torch.randn(2, 65, 16)], dim=1)
    before = encoder.transformer(padded + encoder.positional_embedding)[1][:, 11]
    torch.testing.assert_close(encoder(prompts), encoder.ln_final(before) @ encoder.text_projection)


def test_batches_of_cached_features_cover_an_epoch_and_continue_anywhere():
    from itertools import islice

    from clipreid.trainer import CachedFeatures

    features, targets = torch.arange(10.0)[:, None], torch.arange(10)
    loader = CachedFeatures(10, batch_size=4, seed=3)
    loader.cache(features, targets)
    whole = [batch["targets"].tolist() for batch in islice(loader, 7)]
    assert [len(batch) for batch in whole] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(functools.reduce(operator.iadd, whole[:3], [])) == list(range(10)) and whole[:3] != whole[3:6]
    loader.start_at(4)
    assert [batch["targets"].tolist() for batch in islice(loader, 3)] == whole[4:]
    assert CachedFeatures(10, batch_size=5, seed=0).iters_per_epoch == 2


RUN = ("DATALOADER.NUM_WORKERS", "0", "SOLVER.IMS_PER_BATCH", "16", "SOLVER.MAX_EPOCH", "2", "TEST.REPORT", "False",
       "SOLVER.CHECKPOINT_PERIOD", "1", "TEST.EVAL_PERIOD", "2", "CLIPREID.STAGE1.MAX_EPOCH", "4", "TEST.BASELINES",
       "False", "CLIPREID.STAGE1.IMS_PER_BATCH", "40", "SOLVER.WARMUP_ITERS",
       "0", "SOLVER.DELAY_EPOCHS", "0")  # fmt: skip


def run_config(folder, *opts):
    return demo(*RUN, "OUTPUT_DIR", str(folder), *opts, classes="0")


class StopAt(HookBase):
    """Raise an error in an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def before_epoch(self):
        if self.trainer.epoch == self.epoch:
            raise InterruptedError


@pytest.mark.integration
def test_run_trains_both_stages_and_each_resumes_bit_for_bit(runs):
    torch.manual_seed(0)
    whole = DefaultTrainer(run_config(runs / "whole"))
    initial = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.resume_or_load(resume=False)
    whole.train()
    state = whole.model.state_dict()
    changed = {name for name, value in state.items() if not torch.equal(value, initial[name])}
    assert "prompt_learner.cls_ctx" in changed and "text_features" in changed and "backbone.proj" in changed
    assert not any(name.startswith("text_encoder.") or "token_" in name for name in changed)
    assert "saved" in (runs / "whole/log.txt").read_text()

    # Stage 1 stops in its fourth epoch, after the checkpoint of the third.
    torch.manual_seed(0)
    first = DefaultTrainer(run_config(runs / "part"))
    first.stages.current.trainer.register_hooks([StopAt(3)])
    first.resume_or_load(resume=False)
    with pytest.raises(InterruptedError):
        first.train()
    assert (runs / "part/last_checkpoint").read_text() == "model_0002.pth"
    # Stage 2 stops in its second epoch.
    second = DefaultTrainer(run_config(runs / "part"))
    second.register_hooks([StopAt(1)])
    second.resume_or_load(resume=True)
    with pytest.raises(InterruptedError):
        second.train()
    prompts = second.model.prompt_learner.cls_ctx
    assert torch.equal(prompts, state["prompt_learner.cls_ctx"]), (
        (prompts - state["prompt_learner.cls_ctx"]).abs().max()
    )
    assert second.stages.current.trainer is second.trainer
    third = DefaultTrainer(run_config(runs / "part"))
    third.resume_or_load(resume=True)
    third.train()
    assert [name for name, value in third.model.state_dict().items() if not torch.equal(value, state[name])] == []
    content = read_checkpoint(runs / "part/model_final.pth")
    assert torch.equal(content["model"]["text_features"], state["text_features"])

    predictor = Predictor(runs / "part/model_final.pth", device="cpu")
    assert predictor.features(np.zeros((1, 32, 16, 3), np.uint8)).shape == (1, 192)
    assert predictor.model.text_encoder is None

    # The prompts of this run, and those of other identities.
    weights = ("MODEL.WEIGHTS", str(runs / "part/model_final.pth"), "CLIPREID.STAGE1.MAX_EPOCH", "0")
    again = DefaultTrainer(run_config(runs / "again", *weights))
    again.resume_or_load(resume=False)
    again.train()
    torch.testing.assert_close(again.model.text_features, state["text_features"])
    other = DefaultTrainer(run_config(runs / "other", *weights))
    other.resume_or_load(resume=False)
    other.model.prompt_learner.identities[2] += 1
    with pytest.raises(ConfigError, match="1 of 16"):
        other.train()


@pytest.mark.integration
def test_dry_run_measures_both_stages(runs, capsys):
    stages = DefaultTrainer(run_config(runs / "run")).stages.left()
    dry_run(run_config(runs / "run"), str(runs / "scratch"))
    report = dict(re.findall(r"^\| (\w+) +\| (.*?) +\|$", capsys.readouterr().out, re.MULTILINE))
    assert all("images/s" in report[stage.name] for stage in stages)
    assert f" {sum(stage.trainer.max_iter for stage in stages)} iterations " in report["total"]
    assert ": 5 by SOLVER.CHECKPOINT_PERIOD" in report["checkpoints"] and not (runs / "run").exists()


@pytest.mark.integration
def test_run_in_bfloat16_with_side_information(runs):
    opts = ("SOLVER.AMP", "bf16", "MODEL.BACKBONE.SIE_CAMERAS", "3", "MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)")
    trainer = DefaultTrainer(run_config(runs / "run", *opts))
    trainer.resume_or_load(resume=False)
    before = trainer.model.backbone.sie_embed.clone()
    trainer.train()
    assert not torch.equal(trainer.model.backbone.sie_embed, before)
    assert trainer.model.text_features.isfinite().all() and trainer.model.text_features.dtype == torch.float32


def clip_file(path, **changes):
    """Write a tiny file of CLIP that fits the demo's towers."""
    model = build_model(demo())
    state = {f"visual.{name}": value for name, value in model.backbone.state_dict().items()}
    state |= model.text_encoder.state_dict() | {
        "token_embedding.weight": torch.randn(49408, 16),
        "logit_scale": torch.ones(()),
    }
    torch.save({name: value for name, value in (state | changes).items() if value is not None}, path)
    return ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path))


def test_files_of_clip_set_image_tower_text_tower_and_words(tmp_path):
    opts = clip_file(tmp_path / "clip.pth")
    state, model = torch.load(tmp_path / "clip.pth"), build_model(demo(*opts))
    assert torch.equal(model.backbone.proj, state["visual.proj"])
    assert torch.equal(model.text_encoder.text_projection, state["text_projection"])
    assert torch.equal(model.prompt_learner.token_prefix[0, 1], state["token_embedding.weight"][320])


def test_bad_input(tmp_path):
    with pytest.raises(ConfigError, match="(?s)missing.gz.*bpe_simple_vocab"):
        build_model(demo("CLIPREID.VOCABULARY", str(tmp_path / "missing.gz")))
    (tmp_path / "damaged.gz").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="CLIPREID.VOCABULARY.*damaged.gz"):
        build_model(demo("CLIPREID.VOCABULARY", str(tmp_path / "damaged.gz")))
    (tmp_path / "other.txt").write_text("first\none two three\n")
    with pytest.raises(ConfigError, match="line 2"):
        build_model(demo("CLIPREID.VOCABULARY", str(tmp_path / "other.txt")))
    (tmp_path / "merges.txt").write_text(MERGES)
    with pytest.raises(ConfigError, match="positions"):
        build_model(
            demo("CLIPREID.VOCABULARY", str(tmp_path / "merges.txt"), "CLIPREID.PROMPT", "X X X X" + " of" * 80)
        )
    with pytest.raises(ConfigError, match="CLIPREID.PROMPT.*CLIPREID.VOCABULARY"):
        build_model(demo("CLIPREID.PROMPT", "A photo of a X X X X zebra."))
    with pytest.raises(ConfigError, match="'X X X X'"):
        build_model(demo("CLIPREID.PROMPT", "A photo."))
    with pytest.raises(ConfigError, match="PROJECTION"):
        build_model(demo("MODEL.BACKBONE.PROJECTION", "False", "MODEL.BACKBONE.FEAT_DIM", "128"))
    with pytest.raises(ConfigError, match="CLIPReIDHead"):
        build_model(demo("MODEL.HEADS.NAME", "EmbeddingHead"))
    with pytest.raises(ConfigError, match="MODEL.COMPILE"):
        build_model(demo("MODEL.COMPILE", "on"))
    opts = clip_file(tmp_path / "clip.pth")
    with pytest.raises(ConfigError, match=r"CLIPREID\.TEXT_WIDTH 32(.|\n)*CLIPREID\.TEXT_WIDTH to 16"):
        build_model(demo(*opts, "CLIPREID.TEXT_WIDTH", "32"))
    opts = clip_file(tmp_path / "image.pth", **{"token_embedding.weight": None})
    with pytest.raises(ConfigError, match="image.pth"):
        build_model(demo(*opts))
    opts = clip_file(tmp_path / "wide.pth", **{"visual.proj": torch.zeros(128, 32)})
    with pytest.raises(WeightsError, match="proj: file .128, 32., model .128, 64."):
        build_model(demo(*opts))
    model = build_model(demo(classes="0"))
    with pytest.raises(ConfigError, match="MODEL.HEADS.NUM_CLASSES"):
        model.train()(batch_of(torch.zeros(2, 3, 32, 16), [0, 0]))


def test_trainer_refuses_other_models(runs):
    with pytest.raises(ConfigError, match="MODEL.META_ARCHITECTURE CLIPReID"):
        DefaultTrainer(run_config(runs / "run", "MODEL.META_ARCHITECTURE", "Baseline"))


@pytest.mark.integration
def test_convert_clip_reads_a_torchscript_archive(tmp_path, capsys):
    module = nn.Sequential(nn.Linear(2, 3).half())
    torch.jit.save(torch.jit.trace(module.float(), torch.zeros(1, 2)), tmp_path / "clip.pt")
    assert main(["convert-clip", str(tmp_path / "clip.pt"), str(tmp_path / "clip.pth")]) == 0
    assert "wrote 2 tensors" in capsys.readouterr().out
    assert torch.equal(read_checkpoint(tmp_path / "clip.pth")["0.weight"], module[0].weight)
    assert main(["convert-clip", str(tmp_path / "clip.pth"), str(tmp_path / "again.pth")]) == 2


@pytest.mark.parametrize("tower", ["vit", "resnet"])
def test_checkpoint_of_the_program_loads_with_camera_embeddings(tower):
    opts = ("MODEL.BACKBONE.SIE_CAMERAS", "3")
    if tower == "resnet":
        opts = ("MODEL.BACKBONE.NAME", "build_clip_resnet_backbone", "MODEL.BACKBONE.FEAT_DIM", "576")
    model, other = build_model(demo(*opts)), build_model(demo(*opts))
    names = {"heads.weight": "classifier.weight", "heads.weight_proj": "classifier_proj.weight"}
    state = {"cv_embed": torch.randn(3, 128)}
    for name, value in model.state_dict().items():
        if name not in ("backbone.sie_embed", "text_features", "prompt_learner.identities"):
            state[names.get(name, name.replace("backbone.", "image_encoder.", 1).removeprefix("heads."))] = value
    report = load_model_state(other, state, source="file")
    assert report.dropped == []
    assert set(report.missing) == {"text_features", "prompt_learner.identities"}
    if tower == "vit":
        assert torch.equal(other.backbone.sie_embed[:, 0], state["cv_embed"])
    else:
        assert any("no effect" in note for note in report.notes)
    assert torch.equal(other.heads.weight_proj, model.heads.weight_proj)
