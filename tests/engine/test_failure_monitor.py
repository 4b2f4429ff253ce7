"""A process that fails ends all of them, on every machine, with its error first."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest
import torch.distributed as dist

from fastamp.engine.failure_monitor import Outcome, is_consequence, select_causes
from fastamp.engine.launch import _READY, _worker
from fastamp.engine.torchrun import count_store_connections

SCRIPT = str(Path(__file__).parents[1] / "helpers/failing_launch.py")
DIED = "the process of rank 1 exited without"
KILLED = "the process of rank 1 was terminated by SIGKILL"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(*commands):
    """Run the commands at the same time; return their exit codes and what they said on stderr."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    runs = [subprocess.Popen([sys.executable, *each], stderr=subprocess.PIPE, text=True, env=env) for each in commands]
    said = [run.communicate(timeout=300)[1] for run in runs]
    return [run.returncode for run in runs], said


def test_a_killed_process_ends_those_of_another_machine():
    """Although its children, like workers that load data, keep open what it had open."""
    url = f"tcp://127.0.0.1:{free_port()}"
    runs = [preloaded.start(SCRIPT, "killed", "1", "1", "2", machine, url) for machine in "01"]
    done = [run.finish() for run in runs]
    codes, said = [each.returncode for each in done], [each.stderr for each in done]
    assert codes == [1, 128 + signal.SIGKILL], said
    assert said[0].startswith(DIED) and said[1].startswith(KILLED)
    assert not any("Traceback" in each or "peer" in each for each in said), said


def test_a_bug_under_torchrun_ends_the_other_machine_that_waits_for_something_else():
    """The agent that looks after its rank once in two seconds still finds the other agent's store at its end."""
    endpoint = f"127.0.0.1:{free_port()}"
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    options = (["--rdzv-conf", "is_host=1"], ["--rdzv-conf", "is_host=0", "--monitor-interval", "2"])
    codes, said = run_all(*([*torchrun, *each, SCRIPT, "stuck", "1", "1"] for each in options))
    assert codes == [1, 1]
    for each in said:
        ours = each[each.index("rank 1: ") : each.index("torch/distributed/elastic")]
        assert ours.startswith("rank 1: Traceback") and ours.count("AssertionError: a bug") == 1, each
        assert "Connection" not in each and "exitcode  : 1" in each


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_agents_that_use_a_store_are_counted(monkeypatch):
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("127.0.0.1", 0)) as ranks:
        port = store.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(ranks.getsockname()[1]))
        assert count_store_connections(os.getpid()) == 0
        with socket.create_connection(("127.0.0.1", port)), store.accept()[0]:
            assert count_store_connections(os.getpid()) == 0  # the agent's own
            with (
                subprocess.Popen([sys.executable, "-c", code, str(port)]) as other,
                subprocess.Popen([sys.executable, "-c", code, str(ranks.getsockname()[1])]) as rank,
                store.accept()[0],
                ranks.accept()[0],
            ):
                assert count_store_connections(os.getpid()) == 1
                assert count_store_connections(other.pid) == 0  # which hosts none
                other.kill()
                other.wait()
                deadline = time.monotonic() + 20
                while count_store_connections(os.getpid()) and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert count_store_connections(os.getpid()) == 0
                rank.kill()


def test_the_ranks_of_a_killed_agent_end(tmp_path):
    """Those of one machine, and with them those of the other."""
    endpoint = f"127.0.0.1:{free_port()}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, SCRIPT, str(tmp_path / "pid"), "1", "1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(torchrun, stderr=subprocess.DEVNULL, env=env) for _ in range(2)]
    try:
        deadline = time.monotonic() + 120
        while len(ranks := [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        agents[0].kill()
        while any(_is_running(pid) for pid in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert agents[1].wait(60) == 1
    finally:
        for each in agents:
            each.kill()
            each.wait()


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _start_and_be_killed(meeting, started):
    group = {"init_method": f"file://{meeting}", "world_size": 1, "rank": 0}
    wait = (_say_and_wait, 0, 1, group, sys.argv, (started,), started)
    multiprocessing.get_context("fork").Process(target=_worker, args=wait).start()
    time.sleep(60)


def _say_and_wait(started):
    started.send(os.getpid())
    time.sleep(60)


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    starter = fork.Process(target=_start_and_be_killed, args=(tmp_path / "meeting", sender))
    starter.start()
    sender.close()
    assert receiver.recv() == _READY
    receiver.recv()
    starter.kill()
    assert receiver.poll(20)
    with pytest.raises(EOFError):  # of a pipe that the process had open
        receiver.recv()


def test_what_is_said():
    bug, again = Outcome(1, "bug", rank=2), Outcome(1, "bug", rank=0)
    peer = Outcome(1, "Connection closed by peer", rank=3, kind="consequence")
    wrong, silent = Outcome(2, "error: x", rank=1), Outcome(3, rank=4)
    assert select_causes([peer, silent, bug, Outcome(0), again, wrong]) == [bug, wrong, silent]
    assert select_causes([peer]) == [peer] and select_causes([]) == []


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:36152"), True),
        (dist.DistNetworkError("the store is gone"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (BrokenPipeError("Broken pipe"), False),  # of an output that nobody reads
    ],
)
def test_consequences(error, expected):
    assert is_consequence(error) == expected
    wrapped = ValueError("the model fails")
    wrapped.__cause__ = error
    assert is_consequence(wrapped) == expected
