"""Commands recipes, init, demo, benchmark, completion, help and version."""

import contextlib
import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml

from fastamp.cli import COMMANDS, command_parser, main
from fastamp.config.recipes import find_recipe, list_project_recipes, list_recipes
from fastamp.config.schema import HEADER


@pytest.mark.integration
def test_recipes_lists_names_and_prints_files_that_work_in_any_folder(elsewhere, input_error, capsys):
    assert main(["recipes"]) == 0
    assert capsys.readouterr().out.split() == [*list_recipes(), *list_project_recipes()]
    assert main(["recipes", "veri"]) == 0
    names = capsys.readouterr().out.split()
    assert names and all(name.lower().startswith("veri") for name in names)
    for name in list_recipes():
        assert main(["recipes", name]) == 0
        text = capsys.readouterr().out
        Path("mine.yml").write_text(text)
        assert main(["config", "diff", "mine.yml", name]) == 0
        assert capsys.readouterr().out == "no difference\n", name
        assert text.startswith(HEADER)
        assert [line for line in text.removeprefix(HEADER).splitlines() if line.startswith("#")] == [
            line for line in find_recipe(name).read_text().splitlines() if line.startswith("#")
        ]
    assert "'Market1501/sbs_R50-ibn'" in input_error(main, ["recipes", "Market1501/sbs_R50-ibm"])


def readme_commands(folder):
    blocks = (folder / "README.md").read_text().split("```sh\n")[1:]
    return [shlex.split(line) for block in blocks for line in block.partition("```")[0].splitlines()]


@pytest.mark.integration
def test_init_writes_a_project_whose_readme_commands_run(demo, elsewhere, monkeypatch, input_error, capsys):
    assert main(["init", "my_project"]) == 0
    out = capsys.readouterr().out
    project = elsewhere / "my_project"
    assert {path.name for path in project.iterdir()} == {
        "README.md",
        "config.yml",
        "components.py",
        "fastamp.schema.json",
    }
    assert (project / "config.yml").read_text().startswith(HEADER)
    schema = json.loads((project / "fastamp.schema.json").read_text())
    losses = schema["properties"]["MODEL"]["properties"]["LOSSES"]["properties"]
    assert losses["UNIT_NORM"]["properties"]["SCALE"]["default"] == 0.01
    assert "cd my_project" in out and "PROJECT" not in "".join(
        path.read_text() for path in project.iterdir() if path.suffix != ".json"
    )
    monkeypatch.chdir(project)
    options = dict(zip(*[iter(tiny.tiny_options("logs/my_project", "SOLVER.MAX_EPOCH", "1"))] * 2, strict=True))
    for name in ("MODEL.LOSSES.NAME", "OUTPUT_DIR"):  # from config.yml
        del options[name]
    commands = readme_commands(project)
    assert [words[1] for words in commands] == ["train", "train", "eval", "visualize", "check-data"]
    for program, command, *words in commands[:-1]:
        small = [text for pair in options.items() for text in pair] if command == "train" else ["MODEL.DEVICE=cpu"]
        assert program == "fastamp" and main([command, *words, *small]) == 0, (command, words)
    assert "loss_norm" in (project / "logs/my_project/metrics.json").read_text()
    assert list((project / "logs/my_project/pictures").rglob("*.png"))
    monkeypatch.chdir(elsewhere)
    assert "my_project" in input_error(main, ["init", "my_project"])
    assert main(["init", "other", "--recipe", "Market1501/sbs_R50-ibm"]) == 2
    assert "'Market1501/sbs_R50-ibn'" in capsys.readouterr().err and not Path("other").exists()
    assert main(["init", "other", "--recipe", "VeRi/sbs_R50-ibn.yml"]) == 0
    assert yaml.safe_load(Path("other/config.yml").read_text())["_BASE_"] == "VeRi/sbs_R50-ibn"


@pytest.mark.parametrize("name", ["my project", "a: b #1", "it's", "größe"])
def test_init_quotes_the_name_of_the_folder(name, elsewhere, monkeypatch, capsys):
    assert main(["init", name]) == 0
    next_command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert shlex.split(next_command)[:2] == ["cd", name]
    monkeypatch.chdir(name)
    assert [words[2] for words in readme_commands(Path()) if words[1] == "eval"] == [f"logs/{name}"]
    assert yaml.safe_load(Path("config.yml").read_text(encoding="utf-8"))["OUTPUT_DIR"] == f"logs/{name}"


@pytest.mark.parametrize("base", ["Base-bagtricks", "configs/Base-bagtricks.yml"])
def test_init_rejects_a_base_file(base, elsewhere, capsys):
    assert find_recipe(base) and main(["init", "other", "--recipe", base]) == 2
    assert "unknown recipe" in capsys.readouterr().err and not Path("other").exists()


@pytest.mark.end_to_end
def test_demo_trains_the_quickstart(demo, elsewhere):
    options = tiny.tiny_options("logs/demo", "SOLVER.MAX_EPOCH=1")
    assert main(["demo", *options]) == 0
    assert (elsewhere / "logs/demo/report.html").is_file()
    assert "BASELINES: true" in (elsewhere / "logs/demo/config.yaml").read_text()  # from the recipe


def test_benchmark_lists_and_runs_scripts_in_a_process(elsewhere, input_error, capsys, monkeypatch):
    assert main(["benchmark"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "train_step" in [line.split()[0] for line in lines] and all(len(line.split()) > 3 for line in lines)
    started = []
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kwargs: started.append(args[0]) or subprocess.CompletedProcess((), 3)
    )
    assert main(["benchmark", "train_step", "--runs", "2", "--help"]) == 3
    (command,) = started
    assert command[0] == sys.executable and command[2:] == ["--runs", "2", "--help"] and Path(command[1]).is_file()
    assert "'train_step'" in input_error(main, ["benchmark", "train_stop"])


def complete(script, *words):
    """Return the completions of the last word in bash."""
    line = " ".join(shlex.quote(word) for word in words)
    code = f'{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n_fastamp\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.integration
def test_completion_script_completes_commands_flags_recipes_and_keys(capsys):
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "fastamp", "trai") == ["train"]
    assert complete(script, "fastamp", "help", "extr") == ["extract"]
    assert complete(script, "fastamp", "train", "Market1501/sbs_R50-") == ["Market1501/sbs_R50-ibn"]
    assert complete(script, "fastamp", "train", "x.yml", "SOLVER.AMP.DT") == ["SOLVER.AMP.DTYPE"]
    assert complete(script, "fastamp", "train", "x.yml", "--res") == ["--resume"]
    assert complete(script, "fastamp", "eval", "--res") == []
    assert complete(script, "fastamp", "config", "d") == ["diff"]
    assert "train_step" in complete(script, "fastamp", "benchmark", "train")
    assert complete(script, "fastamp", "train", "logs/") == []  # bash completes file names by default
    for command in set(COMMANDS) - {"help", "version"}:
        flags = {flag for action in command_parser(command)._actions for flag in action.option_strings}
        assert set(complete(script, "fastamp", command, "--")) == {flag for flag in flags if flag.startswith("--")}


def complete_in_zsh(script, folder, *lines):
    """Return each line after a press of Tab in an interactive zsh."""
    (folder / "completion").write_text(script)
    setup = (
        "source ./completion; bindkey '^I' complete-word; bindkey '^T' report; zle -N report\n"
        'report() { print -r -- "$BUFFER" >> lines; BUFFER=""; }\n'
    )
    terminal, slave = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "HOME": str(folder)}
    zsh = subprocess.Popen(["zsh", "-f", "-i"], stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment)
    os.close(slave)
    os.write(terminal, (setup + "".join(f"{line}\t\x14" for line in lines) + "exit\n").encode())
    shown = b""
    with contextlib.suppress(OSError):  # at the end, the terminal is closed
        while read := os.read(terminal, 4096):
            shown += read
    os.close(terminal)
    assert zsh.wait() == 0 and (folder / "lines").exists(), shown.decode()
    return [line.rstrip() for line in (folder / "lines").read_text().splitlines()]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_completion_script_works_in_zsh(capsys, tmp_path):
    assert main(["completion"]) == 0
    completed = {
        "fastamp trai": "fastamp train",
        "fastamp help extr": "fastamp help extract",
        "fastamp train Market1501/sbs_R50-": "fastamp train Market1501/sbs_R50-ibn",
        "fastamp train x.yml SOLVER.AMP.DT": "fastamp train x.yml SOLVER.AMP.DTYPE",
        "fastamp train x.yml --res": "fastamp train x.yml --resume",
        "fastamp config expl": "fastamp config explain",
        "fastamp train ./comp": "fastamp train ./completion",
    }
    assert complete_in_zsh(capsys.readouterr().out, tmp_path, *completed) == list(completed.values())


def test_help_and_version_commands_equal_the_flags(input_error, capsys):
    for words, same in ((["help"], ["--help"]), (["version"], ["--version"])):
        assert main(words) == main(same) == 0
        out = capsys.readouterr().out
        assert out[: len(out) // 2] == out[len(out) // 2 :]
    for words in (["help", "train"], ["train", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0 and "usage: fastamp train" in capsys.readouterr().out
    assert "'train'" in input_error(main, ["help", "trian"])
