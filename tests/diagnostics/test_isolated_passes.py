"""Tests of isolated passes: the model and the random generators are restored bit for bit."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.diagnostics.isolated_passes import IsolatedPasses

FLOAT32, BFLOAT16 = (PrecisionPolicy("cpu", dtype, "test") for dtype in (torch.float32, torch.bfloat16))


class Stateful(nn.Module):
    """Module that draws from all random generators, counts calls, fills a memory bank and replaces a buffer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.frozen_norm = nn.BatchNorm2d(2)
        self.frozen_norm.eval()
        self.register_buffer("bank", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.history, self.table, self.seen = [], {"last": torch.zeros(2)}, torch.zeros(1)
        self.generators = [torch.Generator().manual_seed(4)]

    def forward(self, batch):
        self.calls += 1
        self.bank += 1
        self.hidden = self.hidden + 1
        self.history.append(self.calls)
        self.table["last"] += 1
        self.table["new"] = 1
        self.seen += 1
        self.made_in_a_pass = True
        self.register_buffer("late", torch.ones(1))
        torch.rand(1, generator=self.generators[0])
        noise = torch.rand(1, generator=self.generator) + random.random() + float(np.random.rand())
        x = self.drop(self.norm(self.conv(self.frozen_norm(batch["images"])))).mean((2, 3))
        batch["seen"] += 1  # models may write into their batch
        return {"loss": (x.float().square().mean() + noise).sum()} if self.training else x


def state(model):
    return {
        "tensors": {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "objects": [id(t) for t in model.buffers()],
        "calls": model.calls,
        "history": list(model.history),
        "table": {key: copy.deepcopy(value) for key, value in model.table.items()},
        "seen": model.seen.clone(),
        "names": sorted(vars(model)),
        "generator in a list": model.generators[0].get_state().clone(),
        "modes": [module.training for module in model.modules()],
        "generators": (
            torch.get_rng_state().clone(), model.generator.get_state().clone(),
            random.getstate(), copy.deepcopy(np.random.get_state()),
        ),
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
    }  # fmt: skip


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_isolated_passes_restore_model_and_random_state_on_exit(gradients, fails):
    model = Stateful()
    batch = {"images": torch.randn(4, 2, 6, 6), "seen": torch.zeros(2)}
    if gradients:
        model(dict(batch, seen=torch.zeros(2)))["loss"].backward()
    before = state(model)
    try:
        with IsolatedPasses(model, batch) as passes:
            passes.train(FLOAT32)
            assert model.calls != before["calls"]  # the negative control: a pass changes the state
            passes.evaluate(BFLOAT16)
            if fails:
                raise RuntimeError
    except RuntimeError:
        pass
    assert_same(state(model), before)
    assert not batch["seen"].any()


def test_isolated_passes_restore_buffers_created_in_inference_mode():
    model = Stateful().eval()
    with torch.inference_mode():
        model({"images": torch.randn(4, 2, 6, 6), "seen": torch.zeros(2)})
    assert model.hidden.is_inference()
    before = model.hidden.clone()
    with IsolatedPasses(model, {"images": torch.randn(4, 2, 6, 6), "seen": torch.zeros(2)}) as passes:
        passes.evaluate(FLOAT32)
    assert torch.equal(model.hidden, before)


def test_each_isolated_pass_starts_from_the_same_state():
    model = Stateful()
    with IsolatedPasses(model, {"images": torch.randn(4, 2, 6, 6), "seen": torch.zeros(2)}) as passes:
        first, second = passes.train(FLOAT32), passes.train(FLOAT32)
        assert first.losses == second.losses
        assert_same(first.gradients, second.gradients)
        assert torch.equal(passes.evaluate(FLOAT32), passes.evaluate(FLOAT32))


def test_isolated_passes_start_from_the_given_random_state():
    from fastamp.utils.env import random_state

    model = Stateful()
    batch = {"images": torch.randn(4, 2, 6, 6), "seen": torch.zeros(2)}
    saved = random_state()
    with IsolatedPasses(model, batch) as passes:
        first = passes.train(FLOAT32).losses
    torch.rand(5)
    random.random()
    with IsolatedPasses(model, batch) as passes:
        assert passes.train(FLOAT32).losses != first
    with IsolatedPasses(model, batch, random=saved) as passes:
        assert passes.train(FLOAT32).losses == first


def test_isolated_evaluation_of_untrained_batch_norm_uses_batch_statistics():
    """With initial statistics, activations of an untrained deep network grow without bound."""

    def deep():
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)) for _ in range(30)]
        for block in blocks:
            nn.init.normal_(block[0].weight, std=1.0)
        return nn.Sequential(*blocks)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = deep()

        def forward(self, batch):
            x = self.body(batch["images"]).mean((2, 3))
            return {"loss": x.float().square().mean()} if self.training else x

    model, batch = Model(), {"images": torch.randn(4, 4, 6, 6)}
    plain = copy.deepcopy(model).eval()(batch)
    assert plain.abs().max() > 65504
    with IsolatedPasses(model, batch) as passes:
        assert passes.evaluate(FLOAT32).abs().max() < 10
    assert model.body[1][1].num_batches_tracked == 0
