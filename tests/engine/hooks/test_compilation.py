import logging

import loops
import pytest
import torch

from fastamp.engine.hooks import CompilationMonitor, HookBase, Priority
from fastamp.engine.hooks.compilation import COMPARED
from fastamp.utils.compiled import compile_parts, uncompiled


class Seconds(HookBase):
    """Replace the measured times of each step by ``eager``, or by ``compiled`` after a compiled one."""

    priority = Priority.VERY_HIGH

    def __init__(self, eager, compiled, graph_runs):
        self.eager, self.compiled, self.graph_runs = eager, compiled, graph_runs

    def before_step(self):
        self.graph_runs.clear()

    def after_step(self):
        self.trainer.step_seconds = self.compiled if self.graph_runs else self.eager
        self.trainer.data_seconds = 0.0


def train(eager, compiled, *, start=0, steps=COMPARED + 10, fail=False):
    """Train with given times of steps; return the kinds of the steps."""
    graph_runs, kinds = [], []

    def backend(graph, inputs):
        if fail:
            raise RuntimeError

        def run(*args):
            graph_runs.append(1)
            return graph(*args)

        return run

    class Kinds(HookBase):
        def after_step(self):
            kinds.append("compiled" if graph_runs else "eager")

    torch.compiler.reset()
    model = loops.make_net()
    compile_parts(model, ("body",), backend)
    trainer = loops.make_trainer(model, [loops.sgd(model)], [loops.make_batch()] * steps, torch.float32)
    trainer.register_hooks([Seconds(eager, compiled, graph_runs), Kinds(), CompilationMonitor(model)])
    trainer.train(start, 1, steps)
    return kinds


def messages(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == level and r.name.endswith("hooks.compilation")]


@pytest.mark.integration
def test_slower_compiled_run_warns_after_the_compared_iterations(caplog):
    kinds = train(0.1, 0.15)
    assert kinds == ["eager", "compiled"] * (COMPARED // 2) + ["compiled"] * 10
    (message,) = messages(caplog, logging.WARNING)
    assert "1.50" in message and "150 and 100 ms" in message and "fix: set MODEL.COMPILE to off" in message


@pytest.mark.integration
def test_faster_compiled_run_warns_only_if_the_warm_up_costs_more(caplog):
    caplog.set_level(logging.INFO)
    train(1e6, 1e5)
    assert messages(caplog, logging.WARNING) == []
    (message,) = messages(caplog, logging.INFO)
    assert "0.10" in message
    caplog.clear()
    train(2e-6, 1e-6)
    (message,) = messages(caplog, logging.WARNING)
    assert "10 iterations left" in message and "fix: set MODEL.COMPILE to off" in message


@pytest.mark.integration
def test_resumed_run_continues_the_order_of_eager_steps_and_few_pairs_are_not_compared(caplog):
    kinds = train(0.1, 0.15, start=31)
    assert kinds == ["eager", *["eager", "compiled"] * 9, *["compiled"] * 10]  # the first pass is always eager
    assert messages(caplog, logging.WARNING) == []


@pytest.mark.integration
def test_run_whose_compilation_failed_is_not_compared(caplog):
    assert train(0.1, 0.15, fail=True) == ["eager"] * (COMPARED + 10)
    assert messages(caplog, logging.WARNING) == []


@pytest.mark.integration
def test_overlapping_uncompiled_contexts():
    runs = []
    model = loops.make_net()
    torch.compiler.reset()
    compile_parts(model, ("body",), lambda graph, inputs: lambda *args: runs.append(1) or graph(*args))
    images = loops.make_batch()["images"]
    first, second = uncompiled(model), uncompiled(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    model.body(images)
    assert runs == []
    second.__exit__(None, None, None)
    model.body(images)
    assert runs == [1]
