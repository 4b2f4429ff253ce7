"""Command `fastamp config`: list, explain, diff and convert."""

import old_configs
import pytest
import tiny
import yaml

from fastamp.cli import main
from fastamp.config import get_cfg


@pytest.fixture
def recipe(tmp_path):
    """Config file that inherits from a base file."""
    (tmp_path / "base.yml").write_text("SOLVER: {AMP: bf16, BASE_LR: 0.1, OPT_ARGS: {eps: 1.0e-6}}\n")
    (tmp_path / "top.yml").write_text("_BASE_: base.yml\nSOLVER.BASE_LR: 2e-1\nMODEL: {DEVICE: cpu}\n")
    return tmp_path / "top.yml"


@pytest.fixture
def config(capsys):
    """Function that runs `fastamp config` and returns the exit code and the lines of stdout, or of stderr on error."""

    def run(*words):
        code = main(["config", *map(str, words)])
        out, err = capsys.readouterr()
        return code, (err if code else out).splitlines()

    return run


def test_config_list_shows_values_set_in_a_config_file(config, recipe):
    code, lines = config("list", "SOLVER.AMP", "--config-file", recipe)
    assert code == 0 and lines[0] == "[SOLVER.AMP]" and "SOLVER.AMP.DTYPE: auto   (set to: bfloat16)" in lines
    code, lines = config("list", "SOLVR")
    assert code == 2 and "'SOLVR'" in lines[0] and "'SOLVER'" in lines[0]


def test_config_explain_lists_the_files_that_set_a_key(config, recipe):
    code, lines = config("explain", "solver.base_lr", "--config-file", recipe)
    base = recipe.with_name("base.yml")
    assert code == 0 and lines[0] == "SOLVER.BASE_LR: 0.0003   (set to: 0.2)"
    assert "    accepts a number, at least 0" in lines
    joined = " ".join(line.strip() for line in lines)
    assert joined.index(f"{base}: 0.1") < joined.index(f"{recipe}: 0.2")
    joined = " ".join(line.strip() for line in config("explain", "SOLVER.OPT_ARGS", "--config-file", recipe)[1])
    assert f"{base}: eps 1e-06" in joined
    assert f"{recipe}: not set" in " ".join(
        line.strip() for line in config("explain", "SEED", "--config-file", recipe)[1]
    )


def test_config_list_and_explain_accept_recipes_files_checkpoints_and_run_folders(
    config, recipe, run_folder, checkpoint
):
    for source in (run_folder, checkpoint):
        assert "SOLVER.BASE_LR: 0.0003   (set to: 0.001)" in config("list", source, "SOLVER")[1]
        assert "SOLVER.BASE_LR: 0.0003   (set to: 0.001)" in config("list", source)[1]
        assert config("explain", source, "BASE_LR")[1][0] == "SOLVER.BASE_LR: 0.0003   (set to: 0.001)"
        assert config("explain", source, "SOLVER.MOMENTUM")[1][0] == "SOLVER.MOMENTUM: 0.9"
    for source in (recipe, "Market1501/bagtricks_R50"):
        for command in (("list", "SOLVER.BASE_LR"), ("explain", "SOLVER.BASE_LR"), ("list", "solver")):
            action, key = command
            assert config(action, source, key) == config(action, key, "--config-file", source)
        assert config("list", source) == config("list", "--config-file", source)
    assert "(set to: 0.2)" in " ".join(config("explain", recipe, "SOLVER")[1])
    assert config("list", "solver.ema")[1][0] == "[SOLVER.EMA]"


def test_config_list_and_explain_reject_missing_sources_and_keys(config, recipe, tmp_path):
    missing = tmp_path / "none"
    for words in (("list", missing), ("list", missing.with_suffix(".yml"), "SOLVER"), ("explain", "none/x", "SEED")):
        code, lines = config(*words)
        assert code == 2 and str(words[1]) in lines[0]
    for words in (("explain", recipe), ("explain", "Market1501/bagtricks_R50")):
        code, lines = config(*words)
        assert code == 2 and "key" in lines[0] and str(words[1]) in lines[0]
    code, lines = config("list", recipe, "SOLVER", "--config-file", recipe)
    assert code == 2 and "two configs" in lines[0]


def test_config_accepts_flags_anywhere(config, recipe, tmp_path):
    (tmp_path / "plugin.py").write_text("")
    plugin = ("--plugin", tmp_path / "plugin.py")
    words = (recipe, "SEED", "3", "SOLVER.BIAS_LR_FACTOR=2.0")
    shown = config("show", *words, *plugin)
    assert shown[0] == 0 and "SEED: 3" in shown[1] and any("plugin.py" in line for line in shown[1])
    for place in range(len(words)):
        if place != 2:  # between KEY and VALUE
            assert config("show", *words[:place], *plugin, *words[place:]) == shown
    assert config("list", recipe, *plugin, "SEED") == config("list", recipe, "SEED")


def test_config_explain_accepts_aliases_and_lists_shorthands(config, recipe):
    code, lines = config("explain", "SOLVER.AMP_ENABLED", "--config-file", recipe)
    assert code == 0 and lines[0] == "SOLVER.AMP.ENABLED: False   (set to: True)"
    assert "    name in FastReID: SOLVER.AMP_ENABLED" in lines
    assert f"{recipe.with_name('base.yml')}: True" in " ".join(line.strip() for line in lines)
    text = " ".join(line.strip() for line in config("explain", "SOLVER.AMP.DTYPE", "--config-file", recipe)[1])
    for part in ("choices: auto, bfloat16, float16", "bf16 (bfloat16)", "`SOLVER.AMP VALUE`", "base.yml: bfloat16"):
        assert part in text


def test_config_explain_searches_the_descriptions_if_no_key_has_the_name(config):
    for words, key in (("learning_rate", "SOLVER.BASE_LR"), ("batch size", "SOLVER.IMS_PER_BATCH"), ("erasing", "REA")):
        code, lines = config("explain", words)
        assert code == 0 and words in lines[0] and any(key in line for line in lines[1:]), words
    for words in ("bogus", "__", "learning_bogus"):
        assert config("explain", words)[0] == 2


def test_config_explain_describes_sections_and_rejects_unknown_keys(config, tmp_path):
    assert config("explain", "SOLVER.EMA")[1][0] == "[SOLVER.EMA]"
    code, lines = config("explain", "SOLVER.BASE_RL")
    assert code == 2 and "'SOLVER.BASE_LR'" in lines[0]
    (tmp_path / "wrong.yml").write_text("SOLVER: {BASE_RL: 1}\n")
    code, lines = config("explain", "SEED", "--config-file", tmp_path / "wrong.yml")
    assert code == 2 and "wrong.yml" in lines[0]


def test_config_diff_compares_files_run_folders_and_checkpoints(config, recipe, run_folder, checkpoint, tmp_path):
    base = recipe.with_name("base.yml")
    assert config("diff", recipe, recipe) == (0, ["no difference"])
    # In the order of declaration, after merging the bases.
    assert config("diff", base, recipe) == (0, ["MODEL.DEVICE: cuda -> cpu", "SOLVER.BASE_LR: 0.1 -> 0.2"])
    assert config("diff", run_folder, checkpoint) == (0, ["no difference"])
    code, lines = config("diff", recipe, checkpoint)
    assert (
        code == 0
        and "SOLVER.BASE_LR: 0.2 -> 0.001" in lines
        and f"MODEL.BACKBONE.FEAT_DIM: 2048 -> {tiny.WIDTH}" in lines
    )


def test_config_diff_exits_with_2_if_a_source_is_unreadable(config, recipe, tmp_path):
    code, lines = config("diff", recipe, tmp_path / "none.yml")
    assert code == 2 and "none.yml" in lines[0]
    (tmp_path / "empty").mkdir()
    code, lines = config("diff", tmp_path / "empty", recipe)
    assert code == 2 and str(tmp_path / "empty") in lines[0] and "config.yaml" in lines[0]
    (tmp_path / "x.pth").write_bytes(b"nothing")
    assert config("diff", recipe, tmp_path / "x.pth")[0] == 2


def test_config_explain_and_diff_accept_keys_of_a_plugin(config, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("def add_config(cfg):\n    cfg.define('MODEL.MINE', 1, 'A number of mine.')\n")
    (tmp_path / "mine.yml").write_text("MODEL: {MINE: 2}\n")
    command = ("explain", "MODEL.MINE", "--plugin", plugin, "--config-file", tmp_path / "mine.yml")
    assert config(*command)[1][:2] == ["MODEL.MINE: 1   (set to: 2)", "    A number of mine."]
    (tmp_path / "default.yml").write_text("")
    files = (tmp_path / "default.yml", tmp_path / "mine.yml")
    assert config("diff", *files, "--plugin", plugin) == (0, ["MODEL.MINE: 1 -> 2"])
    assert config("diff", *files)[0] == 2


def test_config_convert_writes_current_keys_and_overwrites_no_file(tmp_path, capsys):
    root = old_configs.write(tmp_path / "old")
    old, new = root / "v0.1.1/configs/Market1501/AGW_R50.yml", tmp_path / "new.yml"
    assert main(["config", "convert", str(old), "-o", str(new)]) == 0
    out, err = capsys.readouterr()
    assert out == f"wrote {new}\n" and f"{old}: " in err and "FastReID v0.1.1" in err
    assert "Base-bagtricks.yml: INPUT.DO_PAD True -> INPUT.PADDING.ENABLED True\n" in err
    converted, loaded = get_cfg(), get_cfg()
    converted.merge_from_file(new)
    loaded.merge_from_file(old)
    assert converted == loaded and converted.MODEL.BACKBONE.STEM_POOL == "padded"

    assert main(["config", "convert", str(new)]) == 0  # it has current keys only
    out, err = capsys.readouterr()
    assert str(new) in err and yaml.safe_load(out) == yaml.safe_load(new.read_text())
    assert main(["config", "convert", str(tmp_path / "missing.yml")]) == 2
    for existing in (old, new):
        before = existing.read_bytes()
        assert main(["config", "convert", str(old), "-o", str(existing)]) == 2
        assert existing.read_bytes() == before and str(existing) in capsys.readouterr().err


def test_config_convert_lists_keys_without_counterpart_and_accepts_a_release(tmp_path, capsys):
    old = tmp_path / "old.yml"
    old.write_text("MODEL: {HEADS: {NAME: ReductionHead, IN_FEAT: 512}}\n")
    assert main(["config", "convert", str(old)]) == 0
    out, err = capsys.readouterr()
    assert "no counterpart: MODEL.HEADS.NAME ReductionHead" not in out.split("# Other")[1]
    assert (
        out.count("# no counterpart: MODEL.HEADS.NAME ReductionHead") == 1
        and err.count("no counterpart: MODEL.HEADS.NAME ReductionHead") == 1
    )
    old.write_text("INPUT: {DO_PAD: True}\nMODEL: {HEADS: {POOL_LAYER: gempool}}\n")
    pools = []
    for words in ([], ["--release", "v0.1.1"]):
        assert main(["config", "convert", str(old), *words]) == 0
        pools.append(yaml.safe_load(capsys.readouterr().out)["MODEL"]["HEADS"]["POOL_LAYER"])
    assert pools == ["GeneralizedMeanPooling", "GeneralizedMeanPoolingP"]


@pytest.mark.parametrize(
    "key, choices",
    [
        ("MODEL.META_ARCHITECTURE", "Baseline LightMBN MGN MoCo Distiller"),
        ("MODEL.BACKBONE.NAME", "build_resnet_backbone build_vit_backbone timm/NAME"),
        ("MODEL.BACKBONE.NORM", "BN syncBN GN"),
        ("MODEL.HEADS.NORM", "BN syncBN"),
        ("MODEL.HEADS.NAME", "EmbeddingHead"),
        ("MODEL.HEADS.POOL_LAYER", "GeneralizedMeanPooling Identity"),
        ("MODEL.HEADS.CLS_LAYER", "Linear ArcSoftmax"),
        ("MODEL.LOSSES.NAME", "TripletLoss SupConLoss pml/"),
        ("DATALOADER.SAMPLER_TRAIN", "NaiveIdentitySampler"),
        ("DATASETS.NAMES", "Market1501 csv:FILE folder:FOLDER"),
        ("DATASETS.TESTS", "MSMT17 csv:FILE"),
        ("TEST.PRECISE_BN.DATASET", "MSMT17"),
        ("SOLVER.OPT", "Adam SGD LAMB"),
        ("SOLVER.SCHED", "MultiStepLR OneCycleLR"),
        ("SOLVER.TRAINER", "auto AMPTrainer"),
        ("TEST.PROTOCOL", "market1501 vehicleid"),
    ],
)
def test_config_explain_lists_the_choices_of_component_keys(config, key, choices):
    code, lines = config("explain", key)
    text = " ".join(line.strip() for line in lines).partition("choices: ")[2]
    assert code == 0 and all(name in text for name in choices.split()), text


def test_config_explain_finds_keys_by_their_last_part(config):
    code, lines = config("explain", "LR")
    assert code == 0 and lines[0].startswith("SOLVER.BASE_LR: ")
    assert "SOLVER.ETA_MIN_LR" in " ".join(lines) and "MODEL.LOSSES.CENTER.LR" in " ".join(lines)
    assert config("explain", "max_epoch")[1][0].startswith("SOLVER.MAX_EPOCH: ")
    assert config("explain", "amp.dtype")[1][0].startswith("SOLVER.AMP.DTYPE: ")
    assert "MODEL.BACKBONE.NAME" in " ".join(config("explain", "name")[1])
    code, lines = config("explain", "enabled")
    assert code == 0 and "keys match enabled" in lines[0] and "SOLVER.EMA.ENABLED: False" in lines
    assert config("explain", "no_such_name")[0] == 2
    assert config("explain", "SOLVER")[1][0] == "[SOLVER]"
