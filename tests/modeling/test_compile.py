"""MODEL.COMPILE: features and gradients, hooks, diagnostics and errors."""

import json

import pytest
import tiny
import torch

from fastamp.amp import PrecisionPolicy
from fastamp.diagnostics.nan_locator import locate_in_training, try_locate
from fastamp.engine import DefaultTrainer
from fastamp.modeling import build_model
from fastamp.utils.compiled import compile_parts, uncompiled
from fastamp.utils.errors import ConfigError

pytestmark = pytest.mark.integration

BATCH = {"images": torch.randint(256, (4, 3, 64, 32), dtype=torch.uint8), "targets": torch.tensor([0, 0, 1, 1])}


def models(tmp_path):
    opts = ("MODEL.HEADS.NUM_CLASSES", "2", "MODEL.BACKBONE.NAME", "build_plain_backbone")
    torch.manual_seed(0)
    plain = build_model(tiny.tiny_config(tmp_path, *opts))
    compiled = build_model(tiny.tiny_config(tmp_path, *opts, "MODEL.COMPILE", "aot_eager"))
    compiled.load_state_dict(plain.state_dict())
    return plain, compiled


def test_compiled_model_has_same_features_and_gradients_as_eager_model(tmp_path):
    plain, compiled = models(tmp_path)
    assert compiled.backbone._compiled_call_impl is not None
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(BATCH), plain.eval()(BATCH))
    for model in (plain, compiled):
        sum(model.train()(BATCH).values()).backward()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Trunk(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Model(torch.nn.Module):
    trunks = ("trunk",)

    def __init__(self):
        super().__init__()
        self.trunk = Trunk()

    def forward(self, x):
        return self.trunk(x)


def test_model_is_compiled_after_the_first_forward_pass_was_checked(caplog):
    model, policy, graphs = Model(), PrecisionPolicy("cpu", torch.bfloat16), []
    compile_parts(model, model.trunks, lambda graph, inputs: graphs.append(graph) or graph.forward)
    with policy.checked_autocast(model):
        model(torch.ones(2, 4))
    assert "trunk: bfloat16" in caplog.text and graphs == []
    with policy.autocast():
        model(torch.ones(2, 4))
    assert len(graphs) == 1


def test_forward_hooks_of_compiled_model_run_in_uncompiled_context(tmp_path):
    _, compiled = models(tmp_path)
    compiled.eval()(BATCH)
    seen = []
    compiled.backbone[0].register_forward_hook(lambda *_: seen.append(1))
    with uncompiled(compiled):
        compiled(BATCH)
    assert seen == [1]


def test_nan_locator_finds_overflow_in_compiled_model(tmp_path):
    _, compiled = models(tmp_path)
    compiled.train()(BATCH)
    with torch.no_grad():
        compiled.backbone[2].weight.fill_(float("inf"))
    policy = PrecisionPolicy.float32(tiny.tiny_config(tmp_path), torch.device("cpu"))
    location, _ = try_locate(compiled, BATCH, lambda passes: locate_in_training(passes, policy))
    assert location.module == "backbone.2"


def test_training_of_compiled_model_logs_activation_statistics(demo, tmp_path):
    trainer = DefaultTrainer(
        tiny.tiny_config(
            tmp_path, "MODEL.COMPILE", "aot_eager", "SOLVER.MAX_EPOCH", "1", "LOG_ACTIVATION_STATS", "True"
        )
    )
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    layers = {row["largest_activation_layer"] for row in rows if "largest_activation_layer" in row}
    assert layers
    names = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    assert "backbone.0.weight" in names


def test_compile_raises_for_model_without_trunks_or_machine_without_compiler(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="Linear"):
        compile_parts(torch.nn.Linear(2, 2), (), "aot_eager")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"MODEL\.COMPILE.*inductor"):
        build_model(tiny.tiny_config(tmp_path, "MODEL.COMPILE", "on", "MODEL.HEADS.NUM_CLASSES", "2"))


@pytest.mark.parametrize("text, backend", [("True", "inductor"), ("on", "inductor"), ("False", "off")])
def test_compile_config_key_accepts_booleans_and_on(tmp_path, text, backend):
    assert backend == tiny.tiny_config(tmp_path, "MODEL.COMPILE", text).MODEL.COMPILE
