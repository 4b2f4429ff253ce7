"""``launch`` initializes the process group with the timeout and the device of the config."""

import argparse
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import preloaded
import pytest
import tiny
import torch
import torch.distributed as dist

from fastamp.engine import default_setup, launch, setup
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

HELPERS = Path(__file__).parents[1] / "helpers"


def command_line(*opts, **more):
    return argparse.Namespace(config_file="", opts=list(opts), **more)


@pytest.fixture
def initialize(monkeypatch):
    """Function that calls ``launch`` as the second of two torchrun processes, on a machine with ``gpus`` GPUs.

    It returns the arguments of ``init_process_group``, and the selected CUDA device.
    """
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    def call(*args, gpus=2, main=print, **options):
        found = {}

        def initialize_group(backend, **group):
            found.update(group, backend=backend)
            raise RuntimeError("no rendezvous in this test")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.update(selected=device))
        monkeypatch.setattr(dist, "init_process_group", initialize_group)
        with pytest.raises(ConfigError, match="no rendezvous"):
            launch(main, args=args, **options)
        return found

    return call


NCCL = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", 1), "selected": 1, "init_method": "env://"}
GLOO = {"backend": "gloo", "init_method": "env://"}


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_process_group_on_cuda_has_the_device_of_the_process(device, initialize):
    assert initialize(command_line("MODEL.DEVICE", device)) == NCCL
    assert initialize(command_line("MODEL.DEVICE", device), gpus=1) == GLOO
    assert initialize(command_line("MODEL.DEVICE", device), gpus=0) == GLOO


def test_process_group_without_config_uses_available_gpus(initialize):
    assert initialize() == initialize("a word") == NCCL


def test_process_group_on_a_cpu_does_not_use_cuda(initialize, monkeypatch):
    assert initialize(command_line("MODEL.DEVICE", "cpu")) == GLOO
    assert initialize("folder", command_line("MODEL.DEVICE", "cpu")) == GLOO
    assert initialize(device="cpu") == GLOO


def test_timeout_is_the_one_of_the_config(initialize):
    five = {"timeout": timedelta(minutes=5)}
    assert initialize(command_line("DIST_TIMEOUT_MINUTES", "5", "MODEL.DEVICE", "cpu")) == GLOO | five
    assert initialize(command_line("DIST_TIMEOUT_MINUTES", "5", "MODEL.DEVICE", "cuda")) == NCCL | five
    assert initialize(command_line("DIST_TIMEOUT_MINUTES", "0", "MODEL.DEVICE", "cpu")) == GLOO


def test_arguments_of_launch_precede_the_config(initialize):
    args = command_line("DIST_TIMEOUT_MINUTES", "5", "MODEL.DEVICE", "cuda")
    assert initialize(args, timeout=timedelta(minutes=7), device="cpu") == GLOO | {"timeout": timedelta(minutes=7)}
    assert initialize(args, device="cpu") == GLOO | {"timeout": timedelta(minutes=5)}


def test_invalid_config_is_left_to_the_main_function(initialize):
    """The main function of a project may define further keys."""
    assert initialize(command_line("MY_OWN.KEY", "5")) == NCCL


@pytest.mark.parametrize("value", ["-1", "inf", "nan", "1e9", "soon"])
def test_invalid_timeout_is_a_config_error(value, tmp_path):
    with pytest.raises(ConfigError, match="DIST_TIMEOUT_MINUTES"):
        tiny.tiny_config(tmp_path, "DIST_TIMEOUT_MINUTES", value)


@pytest.mark.integration
def test_process_that_others_wait_for_in_vain_is_named_after_the_timeout():
    """The default timeout, 30 minutes, exceeds that of the subprocesses."""
    cases = [("stopped", 1, 2), ("stopped", 0, 2), ("sleeping", 1, 3)]
    opts = ("MODEL.DEVICE", "cpu", "DIST_TIMEOUT_MINUTES", "0.1")
    runs = [preloaded.start(HELPERS / "timeout_ranks.py", *case, *opts) for case in cases]
    for (fault, rank, _), run in zip(cases, runs, strict=True):
        done = run.finish()
        assert done.returncode == 1 and done.stderr.startswith(f"error: rank {rank} did not"), done.stderr
        assert ("is stopped" if fault == "stopped" else "main (timeout_ranks.py") in done.stderr
        assert "imed out waiting 6000ms" in done.stderr and "DIST_TIMEOUT_MINUTES" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.integration
def test_error_in_a_plugin_is_reported_once(tmp_path):
    plugin, file = tmp_path / "plugin.py", tmp_path / "tiny.yml"
    plugin.write_text("raise ValueError('an error in the plugin')\n")
    file.write_text("MODEL:\n  DEVICE: cpu\n")
    words = [
        "--plugin",
        str(plugin),
        "--config-file",
        str(file),
        "--num-gpus",
        "2",
        "OUTPUT_DIR",
        str(tmp_path / "run"),
    ]
    command = [sys.executable, "-m", "fastamp", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: an error in the plugin") == 1, done.stderr


def test_timeout_that_was_not_applied_causes_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comm, "is_distributed", lambda: True)
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for minutes, applied, warns in ((5, None, True), (5, timedelta(minutes=5), False), (0, None, False)):
        monkeypatch.setattr(setup, "group_timeout", lambda applied=applied: applied)
        default_setup(tiny.tiny_config(tmp_path, "DIST_TIMEOUT_MINUTES", str(minutes)))
        assert ("DIST_TIMEOUT_MINUTES 5 has no effect" in capsys.readouterr().out) == warns
