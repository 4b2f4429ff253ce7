"""Accumulation, freezing, weight averages and precise batch norm, compared with naive implementations."""

import copy
import itertools
import json
import logging

import pytest
import tiny
import torch

from fastamp.amp import PrecisionPolicy
from fastamp.engine import TRAINER_REGISTRY, DefaultTrainer, HookBase
from fastamp.evaluation import update_bn_statistics
from fastamp.modeling import build_model
from fastamp.solver import build_optimizer
from fastamp.utils.errors import ConfigError, TrainingError

FLOAT32 = PrecisionPolicy("cpu", torch.float32, "test")


class Batches(list):
    """Loader that repeats fixed batches; an epoch contains each batch once."""

    @property
    def iters_per_epoch(self):
        return len(self)

    def __iter__(self):
        return itertools.cycle(list.__iter__(self))


def batches(count, size):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, size, 3, 64, 32), dtype=torch.uint8, generator=generator)
    targets = torch.randint(4, (count, size), generator=generator)
    return Batches({"images": i, "targets": t} for i, t in zip(images, targets, strict=True))


def make(tmp_path, loader, *opts):
    cfg = tiny.tiny_config(tmp_path, *tiny.PLAIN, "MODEL.HEADS.NUM_CLASSES", "4", "SOLVER.BASE_LR", "0.1", *opts)
    torch.manual_seed(0)
    model = build_model(cfg)
    name = "AMPTrainer" if cfg.SOLVER.AMP.ENABLED else "SimpleTrainer"
    return TRAINER_REGISTRY.build(name, cfg, model=model, data_loader=loader, optimizers=[build_optimizer(cfg, model)])


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("clip", ["value", "norm", "global_norm", None])
def test_accumulating_four_micro_batches_equals_one_full_batch(tmp_path, clip):
    options = () if clip is None else ("SOLVER.CLIP_GRADIENTS", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", clip)
    options += ("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "0.001")
    quarters = batches(4, 4)
    full_batch = Batches([{key: torch.cat([batch[key] for batch in quarters[:]]) for key in quarters[0]}])
    full = make(tmp_path, full_batch, *options)
    accumulated = make(tmp_path, quarters, "SOLVER.ACCUM_STEPS", "4", *options)
    assert accumulated.batches_before(1) == 4 and full.batches_before(1) == 1
    for trainer in (full, accumulated):
        trainer.train(0, 5, 1)
    first, second = parameters(full.model), parameters(accumulated.model)
    start = parameters(make(tmp_path, full_batch).model)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(first[name], start[name])
    means = [trainer.metrics.flush() for trainer in (full, accumulated)]
    assert means[1]["total_loss"] == pytest.approx(means[0]["total_loss"], rel=1e-5)
    assert means[1]["grad_norm"] == pytest.approx(means[0]["grad_norm"], rel=1e-5)


def test_last_step_of_an_epoch_averages_the_remaining_batches(tmp_path):
    loader = batches(5, 4)
    trainer = make(tmp_path, loader, "SOLVER.ACCUM_STEPS", "2", "SOLVER.MOMENTUM", "0")
    assert [trainer.batches_before(i) for i in range(7)] == [0, 2, 4, 5, 7, 9, 10]
    model = copy.deepcopy(trainer.model).train()
    trainer.train(0, 2, 3)
    for first, end in [(0, 2), (2, 4), (4, 5)] * 2:
        model.zero_grad()
        sum(model(batch)["loss_cls"] / (end - first) for batch in loader[first:end]).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (p.grad + 0.0005 * p)
    for name, p in parameters(model).items():
        torch.testing.assert_close(trainer.model.get_parameter(name).detach(), p, rtol=1e-4, atol=1e-6)


def test_overflow_in_any_accumulated_batch_skips_the_step(tmp_path):
    loader = batches(4, 4)
    loader[2]["images"] = torch.full((4, 3, 64, 32), float("inf"))
    trainer = make(tmp_path, loader, "SOLVER.ACCUM_STEPS", "2")
    trainer.train(0, 1, 2)
    metrics = trainer.metrics.flush()
    assert trainer.steps_taken == 1 and metrics["skipped_total"] == 1
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert metrics["total_loss"] < 10


def run(cfg, *hooks):
    torch.manual_seed(0)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer.register_hooks(hooks)
    return trainer, trainer.train()


class Record(HookBase):
    """Record the state dict of the model after each iteration."""

    def __init__(self):
        self.states, self.gradients = [], []

    def before_train(self):
        self.start = {name: t.clone() for name, t in self.trainer.model.state_dict().items()}

    def after_step(self):
        self.states.append({name: t.clone() for name, t in self.trainer.model.state_dict().items()})


@pytest.mark.integration
@pytest.mark.parametrize("layers", [["backbone"], ["backbone.0", "backbone.1"]])
def test_only_frozen_layers_stay_unchanged(demo, tmp_path, layers):
    options = ("MODEL.FREEZE_LAYERS", str(layers), "SOLVER.FREEZE_ITERS", "8", "TEST.EVAL_PERIOD", "1")
    record = Record()
    run(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "2", *options), record)
    prefixes = tuple(f"{layer}." for layer in layers)
    frozen = {name for name in record.start if name.startswith(prefixes)}
    always_frozen = {"heads.bottleneck.0.bias"}  # the bias of a BNNeck is never trained
    for iteration in (0, 5, 7):  # 6 iterations per epoch; iteration 7 follows an evaluation
        unmoved = {name for name, value in record.states[iteration].items() if torch.equal(value, record.start[name])}
        assert unmoved == frozen | always_frozen, iteration
    moved = {name for name, value in record.states[8].items() if not torch.equal(value, record.states[7][name])}
    assert moved == set(record.start) - always_frozen


@pytest.mark.integration
def test_freeze_epochs_overrides_freeze_iters(demo, tmp_path, caplog):
    options = ("MODEL.FREEZE_LAYERS", "backbone", "SOLVER.FREEZE_EPOCHS", "1", "SOLVER.FREEZE_ITERS", "2")
    record = Record()
    run(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "2", *options), record)
    name = "backbone.0.weight"
    moved = [not torch.equal(state[name], record.start[name]) for state in record.states]
    assert moved == [False] * 6 + [True] * 6  # 6 iterations per epoch
    assert "SOLVER.FREEZE_ITERS=2" in caplog.text and "SOLVER.FREEZE_EPOCHS=1" in caplog.text


@pytest.mark.integration
def test_classifier_is_frozen_in_the_last_iterations(demo, tmp_path):
    record = Record()
    run(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "2", "SOLVER.FREEZE_FC_ITERS", "4"), record)
    pairs = list(zip([record.start, *record.states], record.states, strict=False))
    assert [not torch.equal(*(state["heads.weight"] for state in pair)) for pair in pairs] == [True] * 8 + [False] * 4
    assert not torch.equal(*(state["backbone.0.weight"] for state in pairs[-1]))


def test_freezing_an_unknown_module_raises(demo, tmp_path):
    cfg = tiny.tiny_config(tmp_path, "MODEL.FREEZE_LAYERS", "backbon", "SOLVER.FREEZE_ITERS", "8")
    with pytest.raises(ConfigError, match="MODEL.FREEZE_LAYERS: .*'backbon'.*'backbone'"):
        DefaultTrainer(cfg)


@pytest.mark.integration
def test_freezing_all_parameters_raises(demo, tmp_path):
    options = ("MODEL.FREEZE_LAYERS", "['backbone', 'heads']", "SOLVER.FREEZE_ITERS", "8")
    with pytest.raises(TrainingError, match=r"MODEL.FREEZE_LAYERS .*backbone, heads"):
        run(tiny.tiny_config(tmp_path, *options))


@pytest.mark.integration
def test_frozen_layers_have_no_gradient_and_no_optimizer_state(demo, tmp_path):
    options = ("MODEL.FREEZE_LAYERS", "backbone", "SOLVER.FREEZE_ITERS", "100", "SOLVER.MAX_EPOCH", "1")
    trainer, _ = run(tiny.tiny_config(tmp_path, *options))
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    assert {names[id(p)].split(".")[0] for p in trainer.optimizer.state} == {"heads"}
    assert not any(p.requires_grad for p in trainer.model.backbone.parameters())


@pytest.mark.integration
def test_ema_is_evaluated_and_saved_as_the_best_model(demo, tmp_path):
    record = Record()
    cfg = tiny.tiny_config(tmp_path, "SOLVER.EMA.ENABLED", "True", "SOLVER.EMA.DECAY", "0.8", "SOLVER.MAX_EPOCH", "2")
    _, results = run(cfg, record)
    name = "backbone.0.weight"
    expected = record.start[name].double()
    for number, state in enumerate(record.states):
        decay = min(0.8, 1 - (1 + number) ** (-2 / 3))
        expected = decay * expected + (1 - decay) * state[name].double()
    best, final = (torch.load(tmp_path / f"model_{which}.pth", weights_only=True) for which in ("best", "final"))
    torch.testing.assert_close(final["average"]["model"][name].double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(best["model"][name], final["average"]["model"][name])
    assert torch.equal(final["model"][name], record.states[-1][name])
    assert not torch.equal(final["model"][name], best["model"][name])

    def evaluate(which, *opts):
        other = tiny.tiny_config(tmp_path / "eval", "MODEL.WEIGHTS", str(tmp_path / f"model_{which}.pth"), *opts)
        return DefaultTrainer.test_weights(other)

    ema = ("SOLVER.EMA.ENABLED", "True")
    assert evaluate("best") == evaluate("best", *ema) == evaluate("final", *ema) == results
    weights = evaluate("final", *ema, "SOLVER.EMA.EVALUATE", "False")
    assert weights == evaluate("final")


@pytest.mark.integration
def test_ema_starts_from_loaded_weights(demo, tmp_path):
    run(tiny.tiny_config(tmp_path / "first", "SOLVER.MAX_EPOCH", "1"))
    path = tmp_path / "first/model_final.pth"
    options = ("MODEL.WEIGHTS", str(path), "SOLVER.EMA.ENABLED", "True", "SOLVER.MAX_EPOCH", "1", "SOLVER.BASE_LR", "0")
    trainer, _ = run(tiny.tiny_config(tmp_path / "second", *options))
    weights = tiny.weights(path)
    for name, _ in trainer.model.named_parameters():
        assert torch.equal(trainer.average.tensors()[name], weights[name]), name


@pytest.mark.integration
def test_ema_weights_are_not_evaluated_if_ema_evaluate_is_false(demo, tmp_path):
    options = ("SOLVER.MAX_EPOCH", "1", "SOLVER.BASE_LR", "0.01")
    plain = run(tiny.tiny_config(tmp_path / "plain", *options))[1]
    options += ("SOLVER.EMA.ENABLED", "True", "SOLVER.EMA.EVALUATE", "False")
    assert run(tiny.tiny_config(tmp_path / "ema", *options))[1] == plain
    assert torch.load(tmp_path / "ema/model_final.pth", weights_only=True)["average"]["updates"] == 6


@pytest.mark.integration
def test_ema_excludes_skipped_steps(demo, tmp_path):
    class OneOverflow(HookBase):
        def before_step(self):
            if self.trainer.iter == 1:
                self.handle = self.trainer.model.heads.weight.register_hook(lambda grad: grad * float("inf"))

        def after_step(self):
            if self.trainer.iter == 1:
                self.handle.remove()

    cfg = tiny.tiny_config(tmp_path, "SOLVER.EMA.ENABLED", "True", "SOLVER.MAX_EPOCH", "1")
    trainer, _ = run(cfg, OneOverflow())
    assert trainer.trainer.steps_taken == 5 and trainer.average.updates == 5


@pytest.mark.integration
def test_swa_averages_last_epochs_and_reestimates_bn_statistics(demo, tmp_path):
    record = Record()
    options = ("SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.START_EPOCH", "1", "SOLVER.MAX_EPOCH", "4")
    trainer, results = run(tiny.tiny_config(tmp_path, *options), record)
    final = torch.load(tmp_path / "model_final.pth", weights_only=True)
    ends = [record.states[6 * epoch - 1] for epoch in (2, 3, 4)]
    for name in ("backbone.0.weight", "heads.weight"):
        torch.testing.assert_close(final["average"]["model"][name], torch.stack([s[name] for s in ends]).mean(0))
    assert final["average"]["updates"] == 3

    model = build_model(trainer.cfg)
    model.load_state_dict(final["average"]["model"])
    update_bn_statistics(model, DefaultTrainer.build_train_loader(trainer.cfg), 6, policy=FLOAT32)
    for name, value in model.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(final["average"]["model"][name], value)
            assert not torch.allclose(value, torch.stack([s[name] for s in ends]).mean(0), rtol=1e-3)
    options += ("MODEL.WEIGHTS", str(tmp_path / "model_final.pth"))
    assert DefaultTrainer.test_weights(tiny.tiny_config(tmp_path / "eval", *options)) == results


@pytest.mark.integration
@pytest.mark.parametrize("period", [1, 2])
def test_swa_contains_the_initial_weights_with_their_fraction(demo, tmp_path, period):
    tiny.train(tmp_path / "source", "SOLVER.MAX_EPOCH", "1")
    source = str(tmp_path / "source/model_final.pth")
    swa = ("SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.START_EPOCH", "1", "SOLVER.SWA.PERIOD", str(period))
    options = (*swa, "SOLVER.SWA.INITIAL_WEIGHT", "0.4", "SOLVER.MAX_EPOCH", "4", "MODEL.WEIGHTS", source)
    record = Record()
    run(tiny.tiny_config(tmp_path, *options), record)
    final = torch.load(tmp_path / "model_final.pth", weights_only=True)
    ends = [record.states[6 * epoch - 1] for epoch in ((2, 3, 4) if period == 1 else (3, 4))]
    initial = torch.load(source, weights_only=True)["model"]
    assert final["average"]["updates"] == len(ends)
    for name in ("backbone.0.weight", "heads.weight"):
        mean = torch.stack([s[name] for s in ends]).mean(0)
        torch.testing.assert_close(final["average"]["model"][name], 0.4 * initial[name] + 0.6 * mean)


def test_swa_with_random_initial_weights_exits_with_2(demo, tmp_path, input_error):
    import train_net

    options = ("SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.INITIAL_WEIGHT", "0.5", "MODEL.BACKBONE.PRETRAIN", "False")
    assert "starts from random weights" in input_error(train_net.cli, tiny.tiny_options(tmp_path, *options))


def test_enabling_ema_and_swa_exits_with_2(demo, tmp_path, capfd):
    import train_net

    options = tiny.tiny_options(tmp_path, "SOLVER.EMA.ENABLED", "True", "SOLVER.SWA.ENABLED", "True")
    assert train_net.cli(options) == 2
    assert "SOLVER.EMA and SOLVER.SWA are both enabled" in capfd.readouterr().err


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_precise_bn_matches_statistics_of_all_inputs(offset):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.frozen = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, batch):
            return self.drop(self.frozen(self.bn(batch["images"])))

    inputs = [offset + 3 * torch.randn(size, 3, 4, 2) for size in (4, 7, 1)]
    model = Model()
    model.frozen.eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert update_bn_statistics(model, itertools.cycle({"images": x} for x in inputs), 3, policy=FLOAT32) == 1
    values = torch.cat(inputs).transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(model.bn.running_mean.double(), values.mean(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.bn.running_var.double(), values.var(1), rtol=1e-4, atol=1e-6)
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"bn.running_mean", "bn.running_var"}
    assert model.training and model.bn.training and not model.frozen.training and model.drop.training
    assert torch.equal(random_state, torch.get_rng_state())


@pytest.mark.integration
def test_precise_bn_runs_before_each_evaluation(demo, tmp_path, caplog):
    logging.getLogger("fastamp").setLevel(logging.INFO)
    options = ("TEST.PRECISE_BN.ENABLED", "True", "TEST.PRECISE_BN.DATASET", "Demo", "TEST.PRECISE_BN.NUM_ITER", "4")
    trainer, results = run(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "2", "TEST.EVAL_PERIOD", "1", *options))
    assert caplog.text.count("statistics of 3 layers from 4 batches") == 2
    model = build_model(trainer.cfg)
    model.load_state_dict(tiny.weights(tmp_path / "model_final.pth"))
    update_bn_statistics(model, DefaultTrainer.build_train_loader(trainer.cfg), 4, policy=FLOAT32)
    for name, value in tiny.weights(tmp_path / "model_final.pth").items():
        if "running" in name:
            torch.testing.assert_close(model.state_dict()[name], value)
    weights = ("MODEL.WEIGHTS", str(tmp_path / "model_final.pth"))
    assert DefaultTrainer.test_weights(tiny.tiny_config(tmp_path / "eval", *weights)) == results


@pytest.mark.integration
def test_precise_bn_applies_when_evaluating_a_weights_file(demo, tmp_path):
    run(tiny.tiny_config(tmp_path / "run", "SOLVER.MAX_EPOCH", "1"))
    weights = ("MODEL.WEIGHTS", str(tmp_path / "run/model_final.pth"), "SOLVER.MAX_EPOCH", "1", "SOLVER.BASE_LR", "0")
    precise = ("TEST.PRECISE_BN.ENABLED", "True", "TEST.PRECISE_BN.DATASET", "Demo", "TEST.PRECISE_BN.NUM_ITER", "2")
    evaluated = DefaultTrainer.test_weights(tiny.tiny_config(tmp_path / "eval", *weights, *precise))
    assert evaluated == run(tiny.tiny_config(tmp_path / "frozen", *weights, *precise))[1]
    assert evaluated != DefaultTrainer.test_weights(tiny.tiny_config(tmp_path / "eval", *weights))


@pytest.mark.parametrize("option", [("MODEL.FREEZE_LAYERS", "backbone"), ("SOLVER.FREEZE_ITERS", "3")])
def test_incomplete_freeze_options_warn(demo, tmp_path, caplog, option):
    DefaultTrainer(tiny.tiny_config(tmp_path, *option))
    assert "MODEL.FREEZE_LAYERS" in caplog.text and "SOLVER.FREEZE_ITERS" in caplog.text


@pytest.mark.integration
def test_throughput_counts_images_of_all_accumulated_batches(demo, tmp_path):
    cfg = tiny.tiny_config(tmp_path, "SOLVER.ACCUM_STEPS", "4", "SOLVER.MAX_EPOCH", "1", "LOG_PERIOD", "1")
    trainer, _ = run(cfg)
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    training = [row for row in rows if "total_loss" in row]
    assert len(training) == 2 and trainer.trainer.iters_per_epoch == 2  # six batches: four, then two
    assert training[0]["images_per_second"] * training[0]["time"] == pytest.approx(16 * 6 / 2)
