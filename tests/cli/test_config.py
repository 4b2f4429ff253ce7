"""fastamp config: list, explain, diff and convert."""

import old_configs
import pytest
import tiny
import yaml

from fastamp.cli import main
from fastamp.config import get_cfg


@pytest.fixture
def recipe(tmp_path):
    """A config file with a base of its own."""
    (tmp_path / "base.yml").write_text("SOLVER: {AMP: bf16, BASE_LR: 0.1, OPT_ARGS: {eps: 1.0e-6}}\n")
    (tmp_path / "top.yml").write_text("_BASE_: base.yml\nSOLVER.BASE_LR: 2e-1\nMODEL: {DEVICE: cpu}\n")
    return tmp_path / "top.yml"


@pytest.fixture
def config(capsys):
    """Run `fastamp config` and return its exit code, and the lines on stdout, or on stderr after an error."""

    def run(*words):
        code = main(["config", *map(str, words)])
        out, err = capsys.readouterr()
        return code, (err if code else out).splitlines()

    return run


def test_list(config, recipe):
    code, lines = config("list", "SOLVER.AMP", "--config-file", recipe)
    assert code == 0 and lines[0] == "[SOLVER.AMP]" and "SOLVER.AMP.DTYPE: auto   (here: bfloat16)" in lines
    assert config("list", "SOLVR") == (2, ["error: there is no config key or section 'SOLVR'. Did you mean 'SOLVER'?"])


def test_explain_says_where_a_key_is_set(config, recipe):
    code, lines = config("explain", "solver.base_lr", "--config-file", recipe)
    base = recipe.with_name("base.yml")
    assert code == 0 and lines[0] == "SOLVER.BASE_LR: 0.0003"
    assert "    takes a number, at least 0" in lines
    joined = " ".join(line.strip() for line in lines)
    assert joined.index(f"{base}: 0.1") < joined.index(f"{recipe}: 0.2")
    joined = " ".join(config("explain", "SOLVER.OPT_ARGS", "--config-file", recipe)[1])
    assert f"{base}: eps 1e-06" in joined
    assert f"{recipe}: not set" in " ".join(config("explain", "SEED", "--config-file", recipe)[1])


def test_explain_says_every_spelling(config, recipe):
    """FastReID's, the aliases of values, and the short one of a section, also where a file uses it."""
    code, lines = config("explain", "SOLVER.AMP_ENABLED", "--config-file", recipe)
    assert code == 0 and lines[0] == "SOLVER.AMP.ENABLED: False"
    assert "    FastReID's spelling: SOLVER.AMP_ENABLED" in lines
    assert f"{recipe.with_name('base.yml')}: True" in " ".join(lines)
    text = " ".join(config("explain", "SOLVER.AMP.DTYPE", "--config-file", recipe)[1])
    for part in ("choices: auto, bfloat16, float16", "bf16 (bfloat16)", "`SOLVER.AMP VALUE`", "base.yml: bfloat16"):
        assert part in text


def test_explain_a_section_and_an_unknown_key(config, tmp_path):
    assert config("explain", "SOLVER.EMA")[1][0] == "[SOLVER.EMA]"
    code, lines = config("explain", "SOLVER.BASE_RL")
    assert code == 2 and "Did you mean 'SOLVER.BASE_LR'?" in lines[0]
    (tmp_path / "wrong.yml").write_text("SOLVER: {BASE_RL: 1}\n")
    code, lines = config("explain", "SEED", "--config-file", tmp_path / "wrong.yml")
    assert code == 2 and "wrong.yml" in lines[0]


def test_diff_of_files_runs_and_checkpoints(config, recipe, run_folder, checkpoint, tmp_path):
    base = recipe.with_name("base.yml")
    assert config("diff", recipe, recipe) == (0, ["no difference"])
    # In the order of declaration, and resolved: the device and the rate are all that the base does not say.
    assert config("diff", base, recipe) == (0, ["MODEL.DEVICE: cuda -> cpu", "SOLVER.BASE_LR: 0.1 -> 0.2"])
    assert config("diff", run_folder, checkpoint) == (0, ["no difference"])
    code, lines = config("diff", recipe, checkpoint)
    assert (
        code == 0
        and "SOLVER.BASE_LR: 0.2 -> 0.001" in lines
        and f"MODEL.BACKBONE.FEAT_DIM: 2048 -> {tiny.WIDTH}" in lines
    )


def test_diff_of_what_is_no_config(config, recipe, tmp_path):
    code, lines = config("diff", recipe, tmp_path / "none.yml")
    assert code == 2 and "none.yml" in lines[0]
    (tmp_path / "empty").mkdir()
    assert config("diff", tmp_path / "empty", recipe)[1][0].endswith(
        "is a folder without a config.yaml, and so no run's"
    )
    (tmp_path / "x.pth").write_bytes(b"nothing")
    assert config("diff", recipe, tmp_path / "x.pth")[0] == 2


def test_keys_of_a_projects_own(config, tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("def add_config(cfg):\n    cfg.define('MODEL.MINE', 1, 'A number of mine.')\n")
    (tmp_path / "mine.yml").write_text("MODEL: {MINE: 2}\n")
    command = ("explain", "MODEL.MINE", "--plugin", plugin, "--config-file", tmp_path / "mine.yml")
    assert config(*command)[1][:2] == ["MODEL.MINE: 1", "    A number of mine."]
    (tmp_path / "default.yml").write_text("")
    files = (tmp_path / "default.yml", tmp_path / "mine.yml")
    assert config("diff", *files, "--plugin", plugin) == (0, ["MODEL.MINE: 1 -> 2"])
    assert config("diff", *files)[0] == 2


def test_convert_a_config_of_an_old_release(tmp_path, capsys):
    root = old_configs.write(tmp_path / "old")
    old, new = root / "v0.1.1/configs/Market1501/AGW_R50.yml", tmp_path / "new.yml"
    assert main(["config", "convert", str(old), "-o", str(new)]) == 0
    out, err = capsys.readouterr()
    assert out == f"wrote {new}\n" and f"{old}: recognized as a config of FastReID v0.1.1 by " in err
    assert "Base-bagtricks.yml: INPUT.DO_PAD True -> INPUT.PADDING.ENABLED True\n" in err
    converted, loaded = get_cfg(), get_cfg()
    converted.merge_from_file(new)
    loaded.merge_from_file(old)
    assert converted == loaded and converted.MODEL.BACKBONE.STEM_POOL == "padded"

    assert main(["config", "convert", str(new)]) == 0  # its own keys are the present ones
    out, err = capsys.readouterr()
    assert "nothing to translate" in err and yaml.safe_load(out) == yaml.safe_load(new.read_text())
    assert main(["config", "convert", str(tmp_path / "missing.yml")]) == 2
    for existing in (old, new):
        before = existing.read_bytes()
        assert main(["config", "convert", str(old), "-o", str(existing)]) == 2
        assert existing.read_bytes() == before and "exists already" in capsys.readouterr().err


def test_convert_names_what_has_no_counterpart_and_takes_a_release(tmp_path, capsys):
    old = tmp_path / "old.yml"
    old.write_text("MODEL: {HEADS: {NAME: ReductionHead, IN_FEAT: 512}}\n")
    assert main(["config", "convert", str(old)]) == 0
    out, err = capsys.readouterr()
    assert "no counterpart: MODEL.HEADS.NAME ReductionHead" not in out.split("# Other")[1]
    assert out.count("# no counterpart: MODEL.HEADS.NAME ReductionHead") == 1 and err.count("ReductionHead: its") == 1
    old.write_text("INPUT: {DO_PAD: True}\nMODEL: {HEADS: {POOL_LAYER: gempool}}\n")
    pools = []
    for words in ([], ["--release", "v0.1.1"]):
        assert main(["config", "convert", str(old), *words]) == 0
        pools.append(yaml.safe_load(capsys.readouterr().out)["MODEL"]["HEADS"]["POOL_LAYER"])
    assert pools == ["GeneralizedMeanPooling", "GeneralizedMeanPoolingP"]
