"""MODEL.COMPILE: features and gradients, hooks, diagnostics and errors."""

import json
import logging

import every_backbone
import pytest
import tiny
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from fastamp.amp import PrecisionPolicy
from fastamp.diagnostics.nan_locator import locate_in_training, try_locate
from fastamp.engine import DefaultTrainer
from fastamp.modeling import META_ARCH_REGISTRY, build_model
from fastamp.modeling.backbones.vit import Block, Depth
from fastamp.modeling.meta_arch.baseline import Baseline
from fastamp.utils.compiled import compilation_of, compile_parts, repeated_blocks, uncompiled
from fastamp.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.integration

BATCH = {
    "images": torch.randint(256, (4, 3, 64, 32), dtype=torch.uint8),
    "targets": torch.tensor([0, 0, 1, 1]),
    "img_paths": list("abcd"),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture
def graphs():
    """Function that returns the number of graphs that were compiled since its last call."""
    from torch._dynamo.utils import counters

    def count():
        counted.append(counters["stats"]["unique_graphs"])
        return counted[-1] - counted[-2]

    counted = [counters["stats"]["unique_graphs"]]
    return count


def models(tmp_path, *more):
    opts = ("MODEL.HEADS.NUM_CLASSES", "2", "MODEL.BACKBONE.NAME", "build_plain_backbone")
    torch.manual_seed(0)
    plain = build_model(tiny.tiny_config(tmp_path, *opts))
    compiled = build_model(tiny.tiny_config(tmp_path, *opts, "MODEL.COMPILE", "aot_eager", *more))
    compiled.load_state_dict(plain.state_dict())
    return plain, compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("region", ["backbone", "model"])
def test_compiled_model_has_same_features_and_gradients_as_eager_model(region, dtype, tmp_path, graphs):
    plain, compiled = models(tmp_path, "MODEL.COMPILE_REGION", region)
    policy = PrecisionPolicy("cpu", dtype)
    with torch.no_grad(), policy.autocast():
        torch.testing.assert_close(compiled.eval()(BATCH), plain.eval()(BATCH))
        assert graphs() == 1
        compiled({"images": BATCH["images"][:3]})  # an incomplete batch is not worth a compilation
    for model in (plain, compiled):
        for paths in ("abcd", "efgh"):
            model.zero_grad()
            with policy.autocast():
                losses = model.train()(BATCH | {"img_paths": list(paths)})
            sum(losses.values()).backward()
    assert graphs() == 1
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad, rtol=5e-2 if policy.enabled else 1e-5, atol=2e-3 if policy.enabled else 1e-5
        )


def test_compiled_model_rejects_labels_out_of_range(tmp_path):
    opts = ("MODEL.HEADS.NUM_CLASSES", "2", "MODEL.HEADS.CLS_LAYER", "CircleSoftmax", "MODEL.COMPILE", "aot_eager")
    model = build_model(tiny.tiny_config(tmp_path, *opts, "MODEL.COMPILE_REGION", "model"))
    for _ in range(2):
        model.train()(BATCH)
    with pytest.raises(DataError, match="label 2"):
        model(BATCH | {"targets": torch.tensor([0, 0, 1, 2])})


def test_blocks_of_transformer_share_graphs_and_drop_paths_at_random(graphs):
    depth = Depth(None, width=8, heads=2)
    kinds = {"dropout": 0.0, "attention_dropout": 0.0}
    model = torch.nn.Module()
    model.trunk = torch.nn.ModuleDict(
        {"blocks": torch.nn.ModuleList(Block(depth, drop_path=rate / 4, **kinds) for rate in range(4))}
    )
    names = repeated_blocks(model, ("trunk",))
    assert names == [f"trunk.blocks.{number}" for number in range(4)]
    compile_parts(model, names, "aot_eager")
    x = torch.randn(64, 3, 8)
    eager = model.trunk.blocks[3].eval()(x)
    changed = []
    for block in model.trunk.blocks.train():
        first, second = block(x), block(x)
        changed.append((first != second).any(dim=(1, 2)).float().mean().item())
    assert graphs() == 3  # one of evaluation; the first block drops no path
    assert changed[0] == 0 and 0 < changed[1] < changed[2]
    # In expectation, dropping paths does not change the output.
    outputs = torch.stack([model.trunk.blocks[3](x) for _ in range(300)]).mean(0)
    assert abs(torch.dot((outputs - x).flatten(), (eager - x).flatten()) / (eager - x).square().sum() - 1) < 0.2


def test_failed_compilation_warns_once_and_continues_eagerly(caplog):
    def fails_forward(graph, inputs):
        raise RuntimeError("no kernel")

    def fails_backward(graph, inputs):
        def fail(*_):
            raise RuntimeError("no kernel")

        return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=fail)(
            graph, inputs
        )

    for backend in (fails_forward, fails_backward):
        torch.compiler.reset()
        caplog.clear()
        model = torch.nn.ModuleDict({"one": Trunk(), "other": Trunk()})
        compile_parts(model, ("one", "other"), backend)
        for _ in range(2):
            inputs = torch.ones(2, 4)
            results = model.one(inputs) + model.other(inputs)
            results.sum().backward()
            torch.testing.assert_close(results, model.one.linear(inputs).relu() + model.other.linear(inputs).relu())
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "MODEL.COMPILE" in record.getMessage() and "no kernel" in record.getMessage()
        assert record.exc_info is None and "Traceback" not in caplog.text
        assert compilation_of(model) is None


def test_error_of_the_model_is_not_reported_as_one_of_the_compiler(caplog):
    class Wrong(Trunk):
        def forward(self, x):
            return super().forward(x) @ torch.ones(5, 5)  # PyTorch finds it while it traces

    model = torch.nn.Sequential(Wrong())
    with pytest.raises(RuntimeError) as expected:
        model(torch.ones(2, 4))
    compile_parts(model, ("0",), "aot_eager")
    with pytest.raises(RuntimeError) as found:
        model(torch.ones(2, 4))
    assert (found.type, str(found.value), found.value.__context__) == (expected.type, str(expected.value), None)
    assert "MODEL.COMPILE" not in caplog.text
    assert compilation_of(model)  # the next batch may be valid


@pytest.mark.parametrize("backbone", ["swin tiny", "vmamba nano", "clip_vit tiny", "effnet b0", "osnet x0_25"])
def test_repeated_blocks_are_called(backbone):
    model, called = build_model(every_backbone.config(backbone)).eval(), set()
    names = repeated_blocks(model, model.trunks)
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    with torch.no_grad():
        model(BATCH)
    assert called == set(names) and len(names) > 1


def test_log_names_graph_breaks_and_recompilations(caplog):
    class Broken(Trunk):
        def forward(self, x):
            if x.sum() > 0:  # depends on the values
                x = x + 1
            return self.linear(x).relu()

    model, caplog.handler.level = torch.nn.Sequential(Broken()), 0
    compile_parts(model, ("0",), "aot_eager")
    with caplog.at_level(logging.INFO):
        for size in (2, 3):
            model(torch.ones(size, 4))
    first, second = (record.getMessage() for record in caplog.records if record.name.startswith("fastamp"))
    assert f"{__file__}:" in first and "1 graph break" in first and "0 recompilations" in first
    assert "size mismatch" in second and " recompilation of forward" in second
    assert compilation_of(model).seconds > 0


@META_ARCH_REGISTRY.register()
class Untrunked(Baseline):
    trunks = ()


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


INVALID = {
    "MODEL.COMPILE.*trunks": ("MODEL.META_ARCHITECTURE", "Untrunked", "MODEL.COMPILE", "aot_eager"),
    "blocks.*COMPILE_REGION to backbone": ("MODEL.COMPILE", "aot_eager", "MODEL.COMPILE_REGION", "blocks"),
    "MoCo.*one_graph": (
        "MODEL.META_ARCHITECTURE", "MoCo", "MODEL.COMPILE", "aot_eager", "MODEL.COMPILE_REGION", "model",
    ),
    "COMPILE_MODE.*aot_eager": ("MODEL.COMPILE", "aot_eager", "MODEL.COMPILE_MODE", "max-autotune"),
    "reduce-overhead.*cpu": ("MODEL.COMPILE", "on", "MODEL.COMPILE_MODE", "reduce-overhead"),
    "cudagraphs.*cpu": ("MODEL.COMPILE", "cudagraphs"),
    "COMPILE_MODE.*'fast'": ("MODEL.COMPILE_MODE", "fast"),
}  # fmt: skip


@pytest.mark.parametrize("message", INVALID)
def test_invalid_settings_are_errors(message, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build_model(tiny.tiny_config(tmp_path, *INVALID[message], "MODEL.HEADS.NUM_CLASSES", "2"))


def test_missing_compiler_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"MODEL\.COMPILE.*inductor"):
        build_model(tiny.tiny_config(tmp_path, "MODEL.COMPILE", "on", "MODEL.HEADS.NUM_CLASSES", "2"))


@pytest.mark.parametrize("text, backend", [("True", "inductor"), ("on", "inductor"), ("False", "off")])
def test_compile_config_key_accepts_booleans_and_on(tmp_path, text, backend):
    assert backend == tiny.tiny_config(tmp_path, "MODEL.COMPILE", text).MODEL.COMPILE
