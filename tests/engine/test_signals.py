"""Stop signals in one and several processes, duplicate signals and the resume command."""

import json
import os
import signal
import sys
import types
from pathlib import Path

import preloaded
import pytest
import torch

from fastamp.engine import torchrun
from fastamp.engine.hooks import StopOnSignal
from fastamp.utils.command_line import resume_command


@pytest.mark.parametrize("number", StopOnSignal.SIGNALS)
@pytest.mark.parametrize("torchrun", [False, True])
def test_second_signal_stops_immediately_but_forwarded_duplicate_does_not(monkeypatch, number, torchrun):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    hook = StopOnSignal(None)
    with hook.watching():
        signal.raise_signal(number)
        assert hook.received == number
        # Without torchrun, the default handler ends the process at the second signal.
        assert (signal.getsignal(number) == signal.SIG_DFL) != torchrun
        if torchrun:
            ended = []
            monkeypatch.setattr(os, "kill", lambda pid, number: ended.append((pid, number)))
            signal.raise_signal(number)
            assert not ended
            hook._received_at -= hook.SAME_WITHIN
            signal.raise_signal(number)
            assert ended == [(os.getpid(), number)] and signal.getsignal(number) == signal.SIG_DFL


def run_ranks(folder, processes, case):
    """Run ``signal_ranks.py`` and return the results of all ranks."""
    process = preloaded.run(Path(__file__).parents[1] / "helpers/signal_ranks.py", folder, processes, case)
    assert process.returncode == 0, process.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.integration
@pytest.mark.parametrize(
    "processes, case, iteration, saved",
    [
        (2, "step", 1, []),
        (4, "step", 1, []),
        (2, "no verdict", 1, []),
        (2, "evaluation", 4, ["model_iter_0000004"]),
    ],
)
def test_signal_to_one_rank_stops_all_ranks_in_the_same_iteration(tmp_path, processes, case, iteration, saved):
    for rank in run_ranks(tmp_path, processes, case):
        assert rank["stopped"] == [iteration, signal.SIGTERM] and rank["saved"] == [*saved, "model_interrupted"]
    checkpoint = torch.load(tmp_path / "model_interrupted.pth", weights_only=True)
    assert checkpoint["trainer"]["iteration"] == iteration + 1


@pytest.mark.integration
@pytest.mark.parametrize("processes", [2, 4])
def test_stop_signal_and_checkpoint_minutes_need_no_collective_per_step(tmp_path, processes):
    """The all-reduce of the verdict is the only collective in a step, except for those of DDP."""
    for rank in run_ranks(tmp_path, processes, "never"):
        assert rank["stopped"] is None
        assert rank["saved"] == ["model_iter_0000004", "model_iter_0000007", "model_final"]
        epochs = rank["collectives"][:6], rank["collectives"][6:]
        for *steps, last, _ in epochs:
            assert steps == [["all_reduce"]] * 4 and last[0] == "all_reduce"  # then, the checks of the epoch
        assert epochs[0][-1] == ["all_reduce", "all_reduce"]  # after the evaluation: minutes and signal


@pytest.mark.integration
def test_custom_step_without_verdict_all_reduces_the_stop_signal(tmp_path):
    for rank in run_ranks(tmp_path, 2, "no verdict"):
        assert rank["collectives"][0] == ["all_reduce", "all_reduce"]  # signal and minutes


@pytest.mark.parametrize("before", [None, signal.SIGUSR1])
def test_training_is_signaled_once_to_stop_after_its_agent_exits(monkeypatch, before):
    """If the run has already received a stop signal, no further signal is sent."""
    ended, signals, slept = [], [], []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(torchrun.time, "sleep", slept.append)
    hook = StopOnSignal(None)
    with hook.watching():
        hook.received = before
        torchrun._exit_after_agent(agent=-1)
    assert signals == ([] if before else [(os.getpid(), signal.SIGTERM)])
    assert slept == [torchrun._STOP_SECONDS] and ended == [1]


def test_process_without_training_exits_immediately_after_its_agent(monkeypatch):
    ended, signals = [], []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    monkeypatch.setattr(os, "_exit", ended.append)
    torchrun._exit_after_agent(agent=-1)
    assert ended == [1] and not signals


def resume(monkeypatch, argv, module=None, origin=None, **environment):
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    main = types.ModuleType("__main__")
    main.__spec__ = module and types.SimpleNamespace(name=module, origin=origin or os.path.abspath(argv[0]))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", argv)
    return resume_command()


def test_resume_command_adds_resume_flag_to_original_command(monkeypatch, tmp_path):
    train, of_two = ["tools/train_net.py", "--num-gpus", "2", "OUTPUT_DIR", "a b"], "--num-gpus 2 OUTPUT_DIR 'a b'"
    assert resume(monkeypatch, train) == f"python tools/train_net.py --resume {of_two}"
    assert resume(monkeypatch, ["t.py", "--resume", "X", "1"]) == "python t.py --resume X 1"
    assert resume(monkeypatch, ["/x/mine/__main__.py", "X", "1"], "mine.__main__") == "python -m mine --resume X 1"
    script = resume(monkeypatch, ["a.py", "X", "1"], "mine.script", origin="/x/mine/script.py")
    assert script == "python -m mine.script a.py --resume X 1"
    console = tmp_path / "train"
    console.touch(mode=0o755)
    assert resume(monkeypatch, [str(console), "X", "1"]) == f"{console} --resume X 1"
    elastic = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "node0"}
    assert resume(monkeypatch, ["t.py"], **elastic) == "torchrun --nproc-per-node 8 t.py --resume"
    assert (
        resume(monkeypatch, ["t.py", "X", "1"], **elastic | {"GROUP_WORLD_SIZE": "2"})
        == "torchrun --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 t.py --resume X 1"
    )
