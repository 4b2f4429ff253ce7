"""Console script: commands, help, versions and unknown commands."""

import os
import subprocess
import sys
import types
from pathlib import Path

import preloaded
import pytest
import tiny

from fastamp.cli import COMMANDS, command_module, main
from fastamp.utils.command_line import resume_command

ROOT = Path(__file__).parents[2]
WITH_MODULE = [command for command in COMMANDS if command not in ("help", "version")]


@pytest.mark.integration
def test_help_and_unknown_commands_do_not_import_torch():
    code = (
        "import sys; from fastamp.cli import main\n"
        "codes = [main(['--help']), main([]), main(['trian'])]\n"
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[0, 2, 2] False"
    assert all(f"  {command} " in done.stdout for command in COMMANDS)
    assert "'trian'" in done.stderr and "'train'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.integration
def test_command_help_and_invalid_arguments_do_not_import_torch():
    code = (
        "import runpy, sys; from fastamp.cli import main\n"
        f"words = [[command, '--help'] for command in {sorted(WITH_MODULE)}]\n"
        "for argv in [*words, ['search', 'a'], ['train', '--num-gpus', 'x']]:\n"
        "    try: main(argv)\n"
        "    except SystemExit as end: print(argv, end.code)\n"
        "    print(argv, 'torch' in sys.modules, file=sys.stderr)\n"
        "sys.argv = ['train_net.py', '--help']\n"
        "try: runpy.run_path('tools/train_net.py', run_name='__main__')\n"
        "except SystemExit as end: print('train_net', end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "train_net 0 False"
    assert "['search', 'a'] 2" in done.stdout and "['train', '--num-gpus', 'x'] 2" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == len(WITH_MODULE) + 2 and all(line.endswith(" False") for line in lines), lines


def test_export_formats_match_the_inference_api():
    from fastamp.cli import export
    from fastamp.inference import export as exporting

    assert {*export.FORMATS.values()} == {*exporting.FORMATS}


def run_with_closed_stdout(*command):
    """Run a program with a closed stdout pipe; return its exit code and stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = preloaded.Run([str(word) for word in command], {}, stdout=writing).finish()
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    "argv, code",
    [
        (["-m", "fastamp", "-h"], 0),
        (["-m", "fastamp", "--version"], 0),
        (["-m", "fastamp", "train", "-h"], 0),
        (["-m", "fastamp", "config", "list"], 0),
        (["-m", "fastamp", "check-data", "Domo"], 2),
        (["-m", "fastamp"], 2),
        *(([f"tools/{name}.py", "-h"], 0) for name in ("train_net", "import_checkpoint", "plain_train_net")),
    ],
)
def test_closed_stdout_keeps_the_exit_code(argv, code):
    """A closed pipe, as with ``| head``, must not cause a traceback or a warning at exit."""
    argv = [str(ROOT / word) if word.startswith("tools/") else word for word in argv]
    found, stderr = run_with_closed_stdout(*argv)
    assert found == code, stderr
    assert "Traceback" not in stderr and "BrokenPipe" not in stderr and "Exception ignored" not in stderr, stderr


@pytest.mark.integration
@pytest.mark.parametrize("read", [True, False])
def test_broken_pipe_error_is_ignored_only_for_stdout(read, tmp_path):
    script = tmp_path / "command.py"
    script.write_text(
        "import os, sys; from fastamp.engine import run_command_line\n"
        "def command():\n"
        "    reading, writing = os.pipe()\n"
        "    os.close(reading)\n"
        "    os.write(writing if int(sys.argv[1]) else 1, b'x')\n"
        "sys.exit(run_command_line(command))"
    )
    if read:
        done = preloaded.run(script, "1")
        assert done.returncode == 1 and "Traceback" in done.stderr and "BrokenPipeError" in done.stderr
    else:
        assert run_with_closed_stdout(script, "0") == (0, "")


@pytest.mark.integration
def test_logging_continues_after_stdout_is_closed(tmp_path):
    """If the console is closed during training, logging must neither raise nor print an error."""
    script = tmp_path / "log.py"
    script.write_text(
        "import logging, sys; from fastamp.utils.logger import setup_logger; setup_logger()\n"
        "for _ in range(3): logging.getLogger('fastamp.x').info('line')\n"
        "print('end', file=sys.stderr)"
    )
    found, stderr = run_with_closed_stdout(script)
    assert (found, stderr) == (0, "end\n")


def test_plugin_flag_declares_config_keys(tmp_path, capsys):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("from fastamp.config import Key\nKEYS = (Key('MODEL.MINE', 1, 'A number.'),)\n")
    assert main(["config", "explain", "MODEL.MINE", "--plugin", str(plugin)]) == 0
    assert "MODEL.MINE: 1" in capsys.readouterr().out


def test_version_option_lists_dependencies_and_gpu(capsys):
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{out}" for name in ("fastamp", "Python", "torch", "torchvision")) and "GPU" in out


def test_command_help_shows_usage_and_summary(capsys, subtests):
    for command in WITH_MODULE:
        with subtests.test(command):
            module = command_module(command)
            with pytest.raises(SystemExit) as end:
                main([command, "--help"])
            out = capsys.readouterr().out
            assert end.value.code == 0 and f"usage: fastamp {command}" in out
            assert module.__doc__.splitlines()[0] in out
            assert f"fastamp {command}" in out[out.index("\nexamples:") :]


def test_fastamp_exits_with_0_on_success_and_2_for_invalid_input(demo, tmp_path, input_error):
    assert main(["check-data", "Demo", "--output", str(tmp_path)]) == 0
    assert "error: " in input_error(main, ["check-data", "Domo"])
    with pytest.raises(SystemExit) as end:
        main(["train", "--no-such-option"])
    assert end.value.code == 2


@pytest.mark.integration
def test_exit_code_is_0_for_train_and_eval_and_2_if_weights_are_missing(demo, tmp_path):
    options = tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1")
    assert main(["train", *options]) == 0
    assert main(["eval", *options, "MODEL.WEIGHTS", str(tmp_path / "model_final.pth")]) == 0
    assert main(["eval", *options]) == 2
    assert main(["train", "--eval-only", *options]) == 2


@pytest.mark.parametrize("torchrun", [False, True])
@pytest.mark.parametrize(
    "argv, expected",
    [
        (["/usr/bin/fastamp", "train", "--config-file", "a b.yml"], "fastamp train --resume --config-file 'a b.yml'"),
        (["/lib/fastamp/__main__.py", "train", "X", "1"], "python -m fastamp train --resume X 1"),
        (["tools/train_net.py", "X", "1"], "python tools/train_net.py --resume X 1"),
        (["/usr/bin/fastamp", "train", "--resume", "X", "1"], "fastamp train --resume X 1"),
    ],
)
def test_resume_command_repeats_the_launch_command_with_resume(monkeypatch, argv, expected, torchrun):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # pytest may run by -m
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        module = "-m fastamp " if expected.startswith("fastamp ") else ""
        expected = f"torchrun --nproc-per-node 2 {module}{expected.removeprefix('python ').removeprefix('fastamp ')}"
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert resume_command() == expected


def test_flags_in_the_spelling_of_keys_and_unknown_flags(capsys):
    for word, part in (("--SOLVER.MAX_EPOCH", "without dashes: SOLVER.MAX_EPOCH"), ("--resumee", "'--resume'")):
        with pytest.raises(SystemExit) as end:
            main(["train", word])
        assert end.value.code == 2 and part in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--epochs"])
    assert "Did you mean" not in capsys.readouterr().err  # all flags begin with dashes, which are not a similarity


def test_an_interrupt_during_the_imports_of_a_command_has_no_traceback(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("fastamp.cli.command_module", interrupt)
    assert main(["train"]) == 130 and capsys.readouterr().err == "interrupted\n"
