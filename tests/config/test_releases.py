"""Translation of config files from FastReID v0.1.1 and v1.0.0."""

import logging

import old_configs
import pytest
import yaml

from fastamp.config import changed_values, explain_key, get_cfg
from fastamp.config.defaults import KEYS
from fastamp.config.releases import read_recipe
from fastamp.config.releases.tables import RELEASE_DEFAULTS, RENAMED, REPLACED, SPELLINGS, VALUES
from fastamp.solver import build_lr_schedule
from fastamp.utils.errors import ConfigError

BOTH_LOSSES = ["CrossEntropyLoss", "TripletLoss"]
# Differences from the current defaults, written by hand from the releases.
COMMON = {
    "CUDNN_BENCHMARK": True,
    "MODEL.BACKBONE.PRETRAIN": True,
    "MODEL.HEADS.WITH_BNNECK": True,
    "MODEL.HEADS.SCALE": 1,
    "MODEL.HEADS.MARGIN": 0.0,
    "MODEL.LOSSES.NAME": BOTH_LOSSES,
    "MODEL.LOSSES.CE.EPSILON": 0.1,
    "MODEL.LOSSES.TRI.HARD_MINING": True,
    "INPUT.FLIP.ENABLED": True,
    "INPUT.PADDING.ENABLED": True,
    "INPUT.REA.ENABLED": True,
    "DATALOADER.SAMPLER_TRAIN": "NaiveIdentitySampler",
    "SOLVER.BASE_LR": 0.00035,
    "SOLVER.BIAS_LR_FACTOR": 2.0,
    "SOLVER.STEPS": [40, 90],
    "SOLVER.WARMUP_ITERS": 0,
    "SOLVER.WARMUP_EPOCHS": 10,
    "TEST.EVAL_PERIOD": 30,
    "TEST.IMS_PER_BATCH": 128,
}
AGW = {
    "MODEL.BACKBONE.WITH_NL": True,
    "MODEL.LOSSES.TRI.MARGIN": 0.0,
    "MODEL.LOSSES.TRI.HARD_MINING": False,
    "MODEL.LOSSES.TRI.WEIGHTING": "fastreid",
}
SBS = {
    "MODEL.FREEZE_LAYERS": ["backbone"],
    "MODEL.BACKBONE.WITH_NL": True,
    "MODEL.HEADS.NECK_FEAT": "after",
    "MODEL.HEADS.POOL_LAYER": "GeneralizedMeanPoolingP",
    "MODEL.HEADS.CLS_LAYER": "CircleSoftmax",
    "MODEL.HEADS.SCALE": 64,
    "MODEL.HEADS.MARGIN": 0.35,
    "MODEL.LOSSES.TRI.MARGIN": 0.0,
    "INPUT.SIZE_TRAIN": [384, 128],
    "INPUT.SIZE_TEST": [384, 128],
    "INPUT.AUTOAUG.ENABLED": True,
    "DATALOADER.NUM_INSTANCE": 16,
    "SOLVER.MAX_EPOCH": 60,
    "SOLVER.BIAS_LR_FACTOR": 1.0,
    "SOLVER.SCHED": "CosineAnnealingLR",
    "SOLVER.DELAY_EPOCHS": 30,
}
MGN = {
    "MODEL.META_ARCHITECTURE": "MGN",
    "MODEL.FREEZE_LAYERS": ["backbone", "b1", "b2", "b3"],
    "MODEL.BACKBONE.WITH_NL": False,
    "MODEL.HEADS.EMBEDDING_DIM": 256,
    "MODEL.LOSSES.CE.SCALE": 1.0,
    "MODEL.LOSSES.TRI.SCALE": 1.0,
}
VERI = {
    "INPUT.SIZE_TRAIN": [256, 256],
    "INPUT.SIZE_TEST": [256, 256],
    "SOLVER.OPT": "SGD",
    "SOLVER.BASE_LR": 0.01,
    "SOLVER.ETA_MIN_LR": 7.7e-05,
    "SOLVER.CHECKPOINT_PERIOD": 20,
    "TEST.EVAL_PERIOD": 20,
}
FIRST = COMMON | {
    "MODEL.BACKBONE.STEM_POOL": "padded",
    "INPUT.CJ.PROB": 0.8,
    "SOLVER.EPOCH_SCHEDULE": "absolute",
    "SOLVER.LR_UPDATE": "iteration",
    "SOLVER.ETA_MIN_LR": 3e-7,
    "SOLVER.WARMUP_FACTOR": 0.01,
    "SOLVER.CHECKPOINT_PERIOD": 60,
}
LAST = COMMON | {
    "SOLVER.LR_UPDATE": "epoch",
    "SOLVER.NESTEROV": True,
    "SOLVER.AMP.ENABLED": True,
    "SOLVER.CHECKPOINT_PERIOD": 30,
}
FIRST_SBS = FIRST | SBS | {"SOLVER.ETA_MIN_LR": 7.7e-07, "SOLVER.FREEZE_EPOCHS": 10, "SOLVER.CHECKPOINT_PERIOD": 30}
LAST_SBS = LAST | SBS | {
    "INPUT.AUTOAUG.PROB": 0.1,
    "SOLVER.AMP.ENABLED": False,
    "SOLVER.ETA_MIN_LR": 7e-07,
    "SOLVER.FREEZE_ITERS": 1000,
    "SOLVER.CHECKPOINT_PERIOD": 20,
    "TEST.EVAL_PERIOD": 10,
}  # fmt: skip
EXPECTED = {
    "v0.1.1": {
        "bagtricks": FIRST,
        "AGW": FIRST | AGW | {"MODEL.HEADS.POOL_LAYER": "GeneralizedMeanPoolingP"},
        "Strongerbaseline": FIRST_SBS,
        "sbs": FIRST_SBS,
        "MGN": FIRST_SBS | MGN,
        "mgn": FIRST_SBS | MGN,
        "VeRi": FIRST_SBS | VERI,
    },
    "v1.0.0": {
        "bagtricks": LAST,
        "AGW": LAST | AGW | {"MODEL.HEADS.POOL_LAYER": "GeneralizedMeanPooling"},
        "SBS": LAST_SBS,
        "sbs": LAST_SBS,
        "MGN": LAST_SBS | MGN,
        "mgn": LAST_SBS | MGN,
        "VeRi": LAST_SBS | VERI | {"SOLVER.FREEZE_ITERS": 10},
    },
}
BACKBONES = {
    "R50": {},
    "R50-ibn": {"MODEL.BACKBONE.WITH_IBN": True},
    "R101-ibn": {"MODEL.BACKBONE.WITH_IBN": True, "MODEL.BACKBONE.DEPTH": "101x"},
    "S50": {"MODEL.BACKBONE.NAME": "build_resnest_backbone"},
}


def expected(name):
    """Return the expected differences of a translated file from the current defaults, as key -> value.

    Args:
        name: path of the file, e.g. ``"v0.1.1/configs/Market1501/sbs_R50-ibn.yml"``.
    """
    release, _, *folder, file = name.removesuffix(".yml").split("/")
    method, part = file.split("_") if folder else ("Base", file.removeprefix("Base-"))
    if not folder:
        return EXPECTED[release][part]
    values = EXPECTED[release]["VeRi" if folder == ["VeRi"] else method] | BACKBONES[part]
    output = f"logs/{folder[0].lower()}/{method.lower()}_{part}"
    return values | {"DATASETS.NAMES": folder, "DATASETS.TESTS": folder, "OUTPUT_DIR": output}


def flat(cfg):
    return {key.path: list(value) if isinstance(value, tuple) else value for key, value in cfg.keys_below()}


def load(path, release=""):
    cfg = get_cfg()
    cfg.merge_from_file(path, release=release)
    return cfg


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return old_configs.write(tmp_path_factory.mktemp("old"))


@pytest.fixture
def recipe(tmp_path):
    """Function that writes a mapping to a config file and loads the file."""

    def read(mapping, release=""):
        (tmp_path / "old.yml").write_text(yaml.safe_dump(mapping))
        return load(tmp_path / "old.yml", release)

    return read


# ---- the files of the releases


@pytest.mark.integration
def test_fastreid_config_files_translate_to_the_recipe_of_their_release(root, subtests):
    for name in old_configs.FILES:
        with subtests.test(name):
            cfg = load(root / name)
            assert flat(cfg) == flat(get_cfg()) | expected(name)
            assert f"FastReID {name.split('/')[0]}," in cfg.translation_notes()[0]


def test_all_25_config_files_of_each_fastreid_release_are_tested():
    assert [sum(name.startswith(release) for name in old_configs.FILES) for release in EXPECTED] == [25, 25]


@pytest.mark.parametrize(
    "name", ["v0.1.1/configs/Market1501/sbs_R50-ibn.yml", "v1.0.0/configs/DukeMTMC/mgn_R50-ibn.yml"]
)
def test_translating_with_the_wrong_release_changes_the_recipe(root, name):
    """Negative control: the defaults of the two releases differ, so the recipe depends on the release."""
    right, other = load(root / name), {"v0.1.1": "v1.0.0", "v1.0.0": "v0.1.1"}[name.split("/")[0]]
    wrong = load(root / name, release=other)
    differ = {key for key, value in flat(wrong).items() if value != flat(right)[key]}
    assert {"SOLVER.LR_UPDATE", "MODEL.BACKBONE.STEM_POOL", "SOLVER.NESTEROV", "INPUT.CJ.PROB"} <= differ


@pytest.mark.integration
def test_translation_logs_every_renamed_key_in_a_config_file(root, subtests):
    for name in old_configs.FILES:
        with subtests.test(name):
            text = "\n".join(load(root / name).translation_notes())
            for source, mapping in read_layers_of(root / name):
                for key, value in mapping.items():
                    if key not in KEYS or (key in VALUES and value in VALUES[key]):
                        assert f"{key} " in text, (source, key)


def read_layers_of(path):
    """Yield ``(file name, dict of dotted key -> value)`` for each base file and the file, without using fastamp."""
    mapping = yaml.safe_load(path.read_text())
    if base := mapping.pop("_BASE_", None):
        yield from read_layers_of((path.parent / base).resolve())

    def leaves(node, prefix=""):
        for key, value in node.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    yield path.name, dict(leaves(mapping))


def test_converting_an_old_config_logs_translated_keys_and_defaults_of_the_release(root, caplog):
    with caplog.at_level(logging.INFO, "fastamp"):
        load(root / "v0.1.1/configs/Base-AGW.yml")
    assert "Base-bagtricks.yml: INPUT.DO_PAD True -> INPUT.PADDING.ENABLED True" in caplog.messages
    assert "default of v0.1.1: INPUT.DO_FLIP True -> INPUT.FLIP.ENABLED True" in caplog.messages


@pytest.mark.parametrize("name, rates", [
    # 100 iterations per epoch: iteration -> fraction of BASE_LR.
    ("v0.1.1/configs/Base-bagtricks.yml", {0: 0.01, 500: 0.505, 1000: 1, 3999: 1, 4000: 0.1, 8999: 0.1, 9000: 0.01}),
    ("v0.1.1/configs/Base-Strongerbaseline.yml", {0: 0.01, 500: 0.505, 3000: 1, 4500: 0.5011, 5999: 0.0022}),
    ("v1.0.0/configs/Base-bagtricks.yml", {0: 0.1, 99: 0.1, 100: 0.19, 1000: 1, 4999: 1, 5000: 0.1, 10000: 0.01}),
    ("v1.0.0/configs/Base-SBS.yml", {0: 0.1, 1000: 1, 2999: 1, 3000: 0.99727, 4400: 0.501, 4499: 0.501, 5999: 0.002}),
])  # fmt: skip
def test_translated_schedule_matches_learning_rates_of_the_fastreid_release(root, name, rates):
    cfg = load(root / name)
    schedule = build_lr_schedule(cfg, 100)
    found = {
        step: schedule.learning_rate(cfg.SOLVER.BASE_LR, epoch=step // 100, steps_taken=step) / cfg.SOLVER.BASE_LR
        for step in rates
    }
    assert found == pytest.approx(rates, abs=1e-5)


# ---- single keys


def test_keys_missing_from_old_config_file_get_release_defaults(recipe):
    cfg = recipe({"SOLVER": {"MAX_ITER": 7, "DELAY_ITERS": 1}})
    assert (cfg.SOLVER.MAX_EPOCH, cfg.SOLVER.WARMUP_EPOCHS, cfg.SOLVER.WEIGHT_DECAY_BIAS) == (7, 10, 0.0)
    assert (cfg.DATALOADER.SAMPLER_TRAIN, cfg.TEST.EVAL_PERIOD) == ("BalancedIdentitySampler", 50)
    assert pytest.approx((0.596 * 255, 0.558 * 255, 0.497 * 255)) == cfg.INPUT.REA.VALUE
    cfg = recipe({"SOLVER": {"FP16_ENABLED": True}})
    assert (cfg.SOLVER.MAX_EPOCH, cfg.SOLVER.WARMUP_EPOCHS, cfg.SOLVER.WEIGHT_DECAY_BIAS) == (120, 10, 0.0)
    assert (cfg.DATALOADER.SAMPLER_TRAIN, cfg.TEST.EVAL_PERIOD) == ("NaiveIdentitySampler", 20)
    assert cfg.INPUT.REA.VALUE == (123.675, 116.28, 103.53) and cfg.SOLVER.AMP.ENABLED


@pytest.mark.parametrize("release", RELEASE_DEFAULTS)
def test_old_config_file_with_all_release_defaults_equals_empty_file(recipe, release):
    """Old FastReID releases saved the config of a run with every key, not only with the changed keys."""
    whole = {
        key: list(value) if isinstance(value, tuple) else value for key, value in RELEASE_DEFAULTS[release].items()
    }
    cfg = recipe(whole)
    assert f"FastReID {release}," in cfg.translation_notes()[0] and cfg == recipe({}, release)
    assert not any(line.startswith("no counterpart") for line in cfg.translation_notes())


def test_old_pooling_layer_names_are_translated(recipe, subtests):
    cases = [
        ("v0.1.1", "avgpool", "GlobalAvgPool"), ("v0.1.1", "fastavgpool", "FastGlobalAvgPool"),
        ("v0.1.1", "maxpool", "GlobalMaxPool"), ("v0.1.1", "avgmaxpool", "AdaptiveAvgMaxPool"),
        ("v0.1.1", "gempool", "GeneralizedMeanPoolingP"), ("v1.0.0", "gempool", "GeneralizedMeanPooling"),
        ("v1.0.0", "gempoolP", "GeneralizedMeanPoolingP"), ("v1.0.0", "clipavgpool", "ClipGlobalAvgPool"),
        ("v1.0.0", "identity", "Identity"), ("v1.0.0", "flatten", "Flatten"),
    ]  # fmt: skip
    for release, old, new in cases:
        with subtests.test(release=release, old=old):
            assert new == recipe({"MODEL": {"HEADS": {"POOL_LAYER": old}}}, release).MODEL.HEADS.POOL_LAYER


@pytest.mark.parametrize("old, new, scale, margin", [
    ("linear", "Linear", 1, 0.0), ("arcSoftmax", "ArcSoftmax", 30, 0.5), ("circleSoftmax", "CircleSoftmax", 30, 0.5),
    ("amSoftmax", "CosSoftmax", 30, 0.5), ("cosSoftmax", "CosSoftmax", 30, 0.5),
])  # fmt: skip
def test_old_classifier_names_are_translated(recipe, old, new, scale, margin):
    """The old linear classifier ignored SCALE and MARGIN; the current classifier multiplies the logits by SCALE."""
    heads = recipe({"MODEL.HEADS": {"CLS_LAYER": old, "SCALE": 30, "MARGIN": 0.5}}, "v0.1.1").MODEL.HEADS
    assert (new, scale, margin) == (heads.CLS_LAYER, heads.SCALE, heads.MARGIN)


def test_translated_margin_softmax_keeps_scale_and_margin_of_the_release(recipe):
    heads = recipe({"MODEL": {"HEADS": {"CLS_LAYER": "circleSoftmax"}}}, "v1.0.0").MODEL.HEADS
    assert (heads.SCALE, heads.MARGIN) == (128, 0.15)


@pytest.mark.parametrize("heads, architecture, neck, embedding, features", [
    ({"NAME": "BNneckHead"}, "Baseline", True, 0, 2048),
    ({"NAME": "LinearHead", "IN_FEAT": 512}, "Baseline", False, 0, 512),
    ({"NAME": "ReductionHead", "REDUCTION_DIM": 300}, "Baseline", True, 300, 2048),
    ({"NAME": "BNneckHead", "REDUCTION_DIM": 300}, "Baseline", True, 0, 2048),
    ({"IN_FEAT": 256}, "MGN", True, 256, 2048),
])  # fmt: skip
def test_heads_from_v011_are_translated(recipe, heads, architecture, neck, embedding, features):
    cfg = recipe({"MODEL": {"META_ARCHITECTURE": architecture, "HEADS": heads}}, "v0.1.1")
    found = cfg.MODEL.HEADS
    assert ("EmbeddingHead", neck, embedding) == (found.NAME, found.WITH_BNNECK, found.EMBEDDING_DIM)
    assert features == cfg.MODEL.BACKBONE.FEAT_DIM
    missing = any("no counterpart: MODEL.HEADS.NAME ReductionHead" in line for line in cfg.translation_notes())
    assert missing == (heads.get("NAME") == "ReductionHead")


@pytest.mark.parametrize("identities, naive, sampler", [
    (True, True, "NaiveIdentitySampler"), (True, False, "BalancedIdentitySampler"), (False, True, "TrainingSampler"),
    (False, False, "TrainingSampler"),
])  # fmt: skip
@pytest.mark.parametrize("release", ["v0.1.1", "v1.0.0"])
def test_old_sampler_flags_are_translated_to_a_sampler_name(recipe, release, identities, naive, sampler):
    cfg = recipe({"DATALOADER": {"PK_SAMPLER": identities, "NAIVE_WAY": naive}}, release)
    assert sampler == cfg.DATALOADER.SAMPLER_TRAIN


def test_old_augmentations_without_probability_get_the_release_default(recipe):
    mapping = {"INPUT": {"DO_AUTOAUG": True, "DO_AUGMIX": True, "DO_FLIP": False, "CJ": {"ENABLED": True}}}
    first, last = recipe(mapping, "v0.1.1").INPUT, recipe(mapping, "v1.0.0").INPUT
    assert [config.AUTOAUG.PROB for config in (first, last)] == [0.0, 0.0]
    assert [config.AUGMIX.PROB for config in (first, last)] == [1.0, 0.0]
    assert first.AUGMIX.ENABLED and last.AUGMIX.ENABLED and not first.FLIP.ENABLED
    assert (first.CJ.ENABLED, last.CJ.ENABLED) == (False, True)  # it was built and dropped in v0.1.1


def test_translation_renames_old_keys_of_input_test_solver_and_kd(recipe):
    mapping = {"INPUT": {"PADDING": 7, "PADDING_MODE": "edge", "FLIP_PROB": 0.3, "DO_AFFINE": True, "AUGMIX_PROB": 0.2}}
    mapping |= {"TEST": {"ROC_ENABLED": True, "FLIP_ENABLED": True}, "SOLVER": {"FREEZE_FC_ITERS": 50}}
    cfg = recipe(mapping | {"KD": {"MODEL_CONFIG": "teacher.yml"}})
    assert (cfg.INPUT.PADDING.SIZE, cfg.INPUT.PADDING.MODE, cfg.INPUT.FLIP.PROB) == (7, "edge", 0.3)
    assert cfg.INPUT.AFFINE.ENABLED and cfg.TEST.ROC.ENABLED and cfg.TEST.FLIP.ENABLED
    assert (cfg.INPUT.AUGMIX.PROB, cfg.SOLVER.FREEZE_FC_ITERS, cfg.KD.MODEL_CONFIG) == (0.2, 50, ("teacher.yml",))
    assert recipe({"MODEL.LOSSES.CIRCLE.ALPHA": 64}).MODEL.LOSSES.CIRCLE.GAMMA == 64


def test_mgn_loss_scales_from_v011_are_converted(recipe):
    """v0.1.1 summed the losses of all MGN heads; the current model averages them."""
    losses = {"NAME": BOTH_LOSSES, "CE": {"SCALE": 0.25}, "TRI": {"SCALE": 0.2}}
    mapping = {"MODEL": {"META_ARCHITECTURE": "MGN", "LOSSES": losses}}
    cfg = recipe(mapping, "v0.1.1")
    assert sum("no counterpart: MODEL.META_ARCHITECTURE MGN" in line for line in cfg.translation_notes()) == 1
    found = cfg.MODEL.LOSSES
    assert (found.CE.SCALE, found.TRI.SCALE, found.CIRCLE.SCALE) == (2.0, 1.0, 1.0)
    cfg = recipe(mapping, "v1.0.0")
    assert not any("no counterpart" in line for line in cfg.translation_notes())
    found = cfg.MODEL.LOSSES
    assert (found.CE.SCALE, found.TRI.SCALE) == (0.25, 0.2)


@pytest.mark.parametrize("release, euclidean", [("v0.1.1", True), ("v1.0.0", False)])
@pytest.mark.parametrize("normalize", [True, False])
def test_normalized_triplet_loss_from_v011_is_logged_as_without_counterpart(recipe, release, euclidean, normalize):
    cfg = recipe({"MODEL": {"LOSSES": {"TRI": {"NORM_FEAT": normalize}}}}, release)
    named = any("no counterpart: MODEL.LOSSES.TRI.NORM_FEAT" in line for line in cfg.translation_notes())
    assert cfg.MODEL.LOSSES.TRI.NORM_FEAT is normalize and named == (euclidean and normalize)


def test_weight_decay_norm_from_v011_equals_weight_decay(recipe):
    solver = recipe({"SOLVER": {"MAX_ITER": 5, "WEIGHT_DECAY": 0.01}}).SOLVER
    assert (solver.WEIGHT_DECAY, solver.WEIGHT_DECAY_NORM, solver.WEIGHT_DECAY_BIAS) == (0.01, 0.01, 0.0)


def test_swa_epochs_from_v011_are_added_to_max_epoch(recipe):
    swa = {"ENABLED": True, "ITER": 15, "PERIOD": 3, "LR_SCHED": True}
    cfg = recipe({"SOLVER": {"MAX_ITER": 40, "SWA": swa}})
    assert (cfg.SOLVER.MAX_EPOCH, cfg.SOLVER.SWA.ENABLED) == (55, True)
    assert (cfg.SOLVER.SWA.START_EPOCH, cfg.SOLVER.SWA.PERIOD, cfg.SOLVER.SWA.LR_FACTOR) == (40, 3, 0.0)
    assert any("no counterpart" in line and "SWA.LR_SCHED" in line for line in cfg.translation_notes())
    cfg = recipe({"SOLVER": {"MAX_ITER": 40, "SWA": {"ITER": 15, "LR_FACTOR": 5.0}}})
    assert (cfg.SOLVER.MAX_EPOCH, cfg.SOLVER.SWA) == (40, get_cfg().SOLVER.SWA)
    assert any("SOLVER.SWA.ITER 15: no effect" in line for line in cfg.translation_notes())


def test_old_keys_without_counterpart_are_logged(recipe, caplog):
    backbone = {"NORM": "GhostBN", "NORM_SPLIT": 4}
    cfg = recipe({"MODEL": {"BACKBONE": backbone, "HEADS": {"NORM_SPLIT": 2}}, "SOLVER": {"MAX_ITERS": 7}})
    assert cfg.MODEL.BACKBONE.NORM == "GhostBN"
    missing = [line for line in cfg.translation_notes() if line.startswith("no counterpart")]
    assert len(missing) == 2 and "MODEL.BACKBONE.NORM_SPLIT 4" in missing[1]
    assert "SOLVER.MAX_ITERS 7: not a key of any release. Did you mean" in missing[0]
    assert all(line in caplog.messages for line in missing)
    assert any("MODEL.HEADS.NORM_SPLIT 2: no effect" in line for line in cfg.translation_notes())


def test_config_values_valid_only_in_old_releases_are_translated(recipe):
    mapping = {"SOLVER": {"FP16_ENABLED": False, "MOMENTUM": 0.0}, "TEST": {"EVAL_PERIOD": 0}}
    cfg = recipe(mapping | {"MODEL": {"FREEZE_LAYERS": [""]}})
    assert (cfg.TEST.EVAL_PERIOD, cfg.SOLVER.NESTEROV, cfg.MODEL.FREEZE_LAYERS) == (120, False, ())


def test_old_key_with_wrong_type_error_names_file_and_old_key(recipe):
    with pytest.raises(ConfigError, match=r"old.yml: SOLVER.MAX_ITER: .*'many'"):
        recipe({"SOLVER": {"MAX_ITER": "many"}})


# ---- detection of the release


def test_max_iter_and_warmup_iters_in_v100_files_are_read_as_epochs(recipe):
    """The vehicle configs in v1.0.0 still used key names from v0.1.1."""
    solver = {"FP16_ENABLED": True, "MAX_EPOCH": 120, "WARMUP_EPOCHS": 10, "NESTEROV": True}
    cfg = recipe({"SOLVER": solver | {"MAX_ITER": 60, "WARMUP_ITERS": 5, "STEPS": [30, 50]}})
    assert "FastReID v1.0.0," in cfg.translation_notes()[0]
    assert "SOLVER.MAX_ITER, SOLVER.WARMUP_ITERS" in cfg.translation_notes()[1]
    assert (cfg.SOLVER.MAX_EPOCH, cfg.SOLVER.WARMUP_EPOCHS, cfg.SOLVER.WARMUP_ITERS) == (60, 5, 0)


def test_warmup_longer_than_training_in_old_file_is_read_as_iterations(recipe):
    """Releases after v1.0.0 counted WARMUP_ITERS in iterations, but still used some old keys."""
    cfg = recipe({"INPUT": {"DO_PAD": True}, "SOLVER": {"WARMUP_ITERS": 2000, "MAX_EPOCH": 60, "AMP": True}})
    assert (cfg.SOLVER.WARMUP_ITERS, cfg.SOLVER.WARMUP_EPOCHS, cfg.SOLVER.LR_UPDATE) == (2000, 0, "mixed")
    assert any("WARMUP_ITERS 2000" in line for line in cfg.translation_notes())
    assert any("SOLVER.AMP.ENABLED" in line and "current" in line for line in cfg.translation_notes())


def test_old_config_file_valid_for_two_releases_is_read_as_v100(recipe):
    cfg = recipe({"INPUT": {"DO_PAD": False}})
    note = cfg.translation_notes()[0]
    assert "v0.1.1 or v1.0.0" in note and "INPUT.DO_PAD" in note
    assert cfg.SOLVER.LR_UPDATE == "epoch" and not cfg.INPUT.PADDING.ENABLED
    stated = recipe({"INPUT": {"DO_PAD": False}}, "v0.1.1")
    assert stated.SOLVER.LR_UPDATE == "iteration" and "v0.1.1" in stated.translation_notes()[0]
    with pytest.raises(ConfigError, match="'v0.2'"):
        recipe({}, "v0.2")


@pytest.mark.parametrize("mapping", [
    {},
    {"DATASETS": {"NAMES": '("DukeMTMC",)'}, "OUTPUT_DIR": "logs/x"},
    {"SOLVER": {"WARMUP_ITERS": 2000, "MAX_EPOCH": 60, "FREEZE_ITERS": 1000}, "MODEL": {"HEADS": {"EMBEDDING_DIM": 9}}},
    {"MODEL": {"HEADS": {"NAME": "LinearHead"}}},  # a custom head
    {"INPUT": {"PADDING": True}, "SOLVER": {"AMP_ENABLED": True, "SWA": {"ENABLED": True, "PERIOD": 2}}},
])  # fmt: skip
def test_config_file_without_old_keys_is_not_translated(recipe, mapping):
    cfg, same = recipe(mapping), get_cfg()
    same.merge_from_other_cfg(mapping)
    assert cfg == same and cfg.translation_notes() == []


def test_project_key_named_like_an_old_key_is_not_translated(tmp_path):
    (tmp_path / "project.yml").write_text("MODEL: {HEADS: {IN_FEAT: 3}}\n")
    cfg = get_cfg()
    cfg.define("MODEL.HEADS.IN_FEAT", 1, "Width of a project's head.")
    cfg.merge_from_file(tmp_path / "project.yml")
    assert cfg.MODEL.HEADS.IN_FEAT == 3 and cfg.translation_notes() == []


def test_translation_keeps_current_keys_in_an_old_config_file(recipe):
    cfg = recipe(
        {"SOLVER": {"MAX_ITER": 7, "AMP": "bf16"}, "TEST": {"RERANK": True, "REPORT": True}, "INPUT.FLIP": False}
    )
    assert (cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE, cfg.SOLVER.MAX_EPOCH) == (True, "bfloat16", 7)
    assert cfg.TEST.RERANK.ENABLED and cfg.TEST.REPORT and not cfg.INPUT.FLIP.ENABLED


@pytest.mark.parametrize("old, current", [("child", "base"), ("base", "child")])
def test_merging_old_and_current_config_files_raises(tmp_path, old, current):
    files = {old: {"SOLVER": {"MAX_ITER": 60}}, current: {"INPUT": {"FLIP": True}}}
    (tmp_path / "base.yml").write_text(yaml.safe_dump(files["base"]))
    (tmp_path / "child.yml").write_text(yaml.safe_dump({"_BASE_": "base.yml"} | files["child"]))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "child.yml")
    for text in (f"{tmp_path / old}.yml", "(SOLVER.MAX_ITER)", f"{tmp_path / current}.yml", "(INPUT.FLIP", "fix: "):
        assert text in str(caught.value)


def test_missing_v011_base_file_error_suggests_copying_it(tmp_path):
    (tmp_path / "sbs.yml").write_text("_BASE_: Base-Strongerbaseline.yml\n")
    with pytest.raises(ConfigError, match=r"Base-Strongerbaseline\.yml(.|\n)*fix: .*copy"):
        load(tmp_path / "sbs.yml")


# ---- old names elsewhere


@pytest.mark.parametrize("key, value, now", [
    ("INPUT.DO_PAD", "True", "INPUT.PADDING.ENABLED"),
    ("SOLVER.MAX_ITER", "60", "SOLVER.MAX_EPOCH"),
    ("INPUT.PADDING", "10", "INPUT.PADDING.SIZE"),
    ("MODEL.BACKBONE.NORM_SPLIT", "2", "MODEL.BACKBONE.NORM_SPLIT"),
    ("DATALOADER.PK_SAMPLER", "True", "DATALOADER.SAMPLER_TRAIN"),
])  # fmt: skip
def test_old_key_on_command_line_error_suggests_the_current_key(key, value, now):
    with pytest.raises(ConfigError, match=now) as caught:
        get_cfg().merge_from_list([key, value])
    assert "CROP" not in str(caught.value)


def test_explain_key_accepts_old_key_names_and_old_config_files(root):
    text = explain_key("INPUT.DO_PAD", config_file=str(root / "v0.1.1/configs/Base-AGW.yml"))
    assert text.startswith("INPUT.PADDING.ENABLED: False") and "Base-AGW.yml: True" in text


def test_translated_config_is_unchanged_after_saving_and_loading(root, tmp_path):
    cfg = load(root / "v0.1.1/configs/VeRi/sbs_R50-ibn.yml")
    (tmp_path / "new.yml").write_text(yaml.safe_dump(changed_values(cfg)))
    assert load(tmp_path / "new.yml") == cfg and not read_recipe(tmp_path / "new.yml").release
    (tmp_path / "dump.yml").write_text(cfg.dump())
    assert load(tmp_path / "dump.yml") == cfg


def test_release_tables_cover_every_key_of_old_releases():
    old = {key for defaults in RELEASE_DEFAULTS.values() for key in defaults}
    for new in (*RENAMED.values(), *SPELLINGS.values()):
        assert new in KEYS
    assert not set(SPELLINGS) & set(KEYS)
    for key, new in REPLACED.items():
        assert key not in KEYS and (not new or new in KEYS)
    assert {key for key in old if key not in KEYS} <= {*RENAMED, *REPLACED}
