"""Messages of fastamp/compat: code written for FastReID."""

import warnings

import numpy as np
import pytest
import torch
from messages import Recorder

from fastamp.compat.config import configurable
from fastamp.compat.datasets import ImageDataset
from fastamp.compat.evaluation import build_dist, evaluate_rank, re_ranking
from fastamp.compat.events import EventStorage, get_event_storage
from fastamp.compat.files import PathManager
from fastamp.compat.hooks import CallbackHook
from fastamp.compat.solver import ContiguousParams, build_lr_scheduler
from fastamp.compat.tools import Timer
from fastamp.compat.trainer import as_train_loader
from fastamp.compat.visualizer import Visualizer
from fastamp.config import get_cfg
from fastamp.engine import DefaultTrainer

SITES = ["fastamp/compat"]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    functions(record)
    classes(record)


def functions(record):
    """Call functions with arguments that fastamp does not support."""
    pids = np.array([0, 1])
    with record("build_train_loader returns a list"):
        as_train_loader([{}], get_cfg())
    with record("evaluate_rank(use_metric_cuhk03=True)"):
        evaluate_rank(np.zeros((2, 2)), pids, pids, pids, 1 - pids, use_metric_cuhk03=True)
    with record("evaluate_rank without matches"):
        evaluate_rank(np.zeros((2, 2)), pids, pids, pids, pids)
    with record("re_ranking of distance matrices"):
        re_ranking(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros((2, 2)))
    with record("CallbackHook(before_all=print)"):
        CallbackHook(before_all=print)
    with record("Timer.resume without a pause"):
        Timer().resume()
    timer = Timer()
    timer.pause()
    with record("Timer.pause twice"):
        timer.pause()
    with record("build_dist(metric='manhattan')"):
        build_dist(torch.zeros(2, 2), torch.zeros(2, 2), "manhattan")
    with record("PathManager.open('https://...')"):
        PathManager.open("https://host/model.pth")
    with record("build_lr_scheduler with OneCycleLR"):
        cfg = get_cfg()
        cfg.merge_from_list(["SOLVER.SCHED", "OneCycleLR"])
        build_lr_scheduler(cfg, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), 10)
    with record("get_event_storage() outside a training"):
        get_event_storage()
    with record("EventStorage().history('x')"):
        EventStorage().history("x")
    with record("ContiguousParams"):
        ContiguousParams([])


def classes(record):
    """Define classes that fastamp does not support."""
    with record("a trainer with run_step"), warnings.catch_warnings():
        warnings.simplefilter("always")
        type("Trainer", (DefaultTrainer,), {"run_step": lambda self: None})
    with record("ImageDataset(mode='test')"):
        ImageDataset([], [], [], mode="test")
    with record("@configurable on a method other than __init__"):
        configurable(lambda self: None)
    with record("@configurable without from_config"):
        type("Head", (), {"__init__": configurable(_init)})(get_cfg())
    with record("Visualizer.get_model_output with too many values"):
        pids = np.array([0, 1])
        Visualizer([]).get_model_output(np.ones(3), np.zeros((2, 2)), pids, pids, pids, 1 - pids)


def __init__(self):
    pass


_init = __init__
