"""Failure propagation: a failed process ends all processes on all machines, and its error is printed first."""

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

from fastamp.engine.failure_monitor import is_consequence, is_timeout, select_causes
from fastamp.engine.launch import _READY, _worker
from fastamp.engine.torchrun import count_store_connections
from fastamp.utils.command_line import Outcome

SCRIPT = str(Path(__file__).parents[1] / "helpers/failing_launch.py")
DIED = "the process of rank 1 exited without"
KILLED = "the process of rank 1 was terminated by SIGKILL"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(*commands):
    """Run the commands concurrently; return their exit codes and stderr outputs."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=env) for command in commands
    ]
    stderr = [run.communicate(timeout=300)[1] for run in runs]
    return [run.returncode for run in runs], stderr


@pytest.mark.integration
def test_killed_process_ends_processes_on_another_machine():
    """Children of the killed process, e.g. data loader workers, do not keep its connections open."""
    url = f"tcp://127.0.0.1:{free_port()}"
    runs = [preloaded.start(SCRIPT, "killed", "1", "1", "2", machine, url) for machine in "01"]
    done = [run.finish() for run in runs]
    codes, stderr = [process.returncode for process in done], [process.stderr for process in done]
    assert codes == [1, 128 + signal.SIGKILL], stderr
    assert stderr[0].startswith(DIED) and stderr[1].startswith(KILLED)
    assert not any("Traceback" in text or "peer" in text for text in stderr), stderr


@pytest.mark.integration
def test_exception_under_torchrun_ends_blocked_rank_on_another_machine():
    """The rendezvous store is available until the other agent, which polls its ranks every two seconds, has exited."""
    endpoint = f"127.0.0.1:{free_port()}"
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    options = (["--rdzv-conf", "is_host=1"], ["--rdzv-conf", "is_host=0", "--monitor-interval", "2"])
    codes, stderr = run_all(*([*torchrun, *option, SCRIPT, "stuck", "1", "1"] for option in options))
    assert codes == [1, 1]
    for text in stderr:
        ours = text[text.index("rank 1: ") : text.index("torch/distributed/elastic")]
        assert ours.startswith("rank 1: Traceback") and ours.count("AssertionError: a bug") == 1, text
        assert "Connection" not in text and "exitcode  : 1" in text


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_store_connection_count_excludes_own_agent_and_ranks(monkeypatch):
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("127.0.0.1", 0)) as ranks:
        port = store.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(ranks.getsockname()[1]))
        assert count_store_connections(os.getpid()) == 0
        with socket.create_connection(("127.0.0.1", port)), store.accept()[0]:
            assert count_store_connections(os.getpid()) == 0  # excluding the connection of the agent itself
            with (
                subprocess.Popen([sys.executable, "-c", code, str(port)]) as other,
                subprocess.Popen([sys.executable, "-c", code, str(ranks.getsockname()[1])]) as rank,
                store.accept()[0],
                ranks.accept()[0],
            ):
                assert count_store_connections(os.getpid()) == 1
                assert count_store_connections(other.pid) == 0  # hosts no store
                other.kill()
                other.wait()
                deadline = time.monotonic() + 20
                while count_store_connections(os.getpid()) and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert count_store_connections(os.getpid()) == 0
                rank.kill()


@pytest.mark.integration
def test_ranks_exit_after_their_agent_is_killed(tmp_path):
    """The ranks on the other machine exit as well."""
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
        for agent in agents:
            agent.kill()
            agent.wait()


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _start_worker_and_sleep(meeting, started):
    group = {"init_method": f"file://{meeting}", "world_size": 1, "rank": 0}
    wait = (_send_pid_and_sleep, 0, 1, group, sys.argv, (started,), started)
    multiprocessing.get_context("fork").Process(target=_worker, args=wait).start()
    time.sleep(60)


def _send_pid_and_sleep(started):
    started.send(os.getpid())
    time.sleep(60)


@pytest.mark.integration
def test_launched_rank_exits_after_its_parent_is_killed(tmp_path):
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    starter = fork.Process(target=_start_worker_and_sleep, args=(tmp_path / "meeting", sender))
    starter.start()
    sender.close()
    assert receiver.recv() == _READY
    receiver.recv()
    starter.kill()
    assert receiver.poll(20)
    with pytest.raises(EOFError):  # the write end was held by the worker
        receiver.recv()


def test_reported_failures_exclude_duplicates_and_consequences():
    bug, again = Outcome(1, "bug", rank=2), Outcome(1, "bug", rank=0)
    peer = Outcome(1, "Connection closed by peer", rank=3, kind="consequence")
    wrong, silent = Outcome(2, "error: x", rank=1), Outcome(3, rank=4)
    assert select_causes([peer, silent, bug, Outcome(0), again, wrong]) == [bug, wrong, silent]
    late = Outcome(1, "timed out", rank=5, kind="timeout")
    assert select_causes([late, bug]) == [bug] and select_causes([late, peer]) == [late, peer]
    assert select_causes([peer]) == [peer] and select_causes([]) == []


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:36152"), True),
        (dist.DistNetworkError("the store is gone"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (BrokenPipeError("Broken pipe"), False),  # closed stdout
    ],
)
def test_only_lost_connection_errors_are_consequences(error, expected):
    assert is_consequence(error) == expected
    wrapped = ValueError("the model fails")
    wrapped.__cause__ = error
    assert is_consequence(wrapped) == expected


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation"), True),
        (dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), True),
        (dist.DistStoreError("wait timeout after 3000ms, keys: /barrier"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:36152"), False),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (TimeoutError("timed out waiting"), False),
    ],
)
def test_only_timeouts_of_collective_operations_are_timeouts(error, expected):
    assert is_timeout(error) == expected
    wrapped = ValueError("the model fails")
    wrapped.__cause__ = error
    assert is_timeout(wrapped) == expected
