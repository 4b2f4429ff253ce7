"""Training with a backbone that MODEL.FREEZE_LAYERS freezes for all epochs."""

import pytest
import tiny
import torch

from fastamp.config import read_config
from fastamp.engine import DefaultTrainer, HookBase

PROBE = (
    "MODEL.BACKBONE.NAME", "build_clip_vit_backbone", "MODEL.BACKBONE.DEPTH", "tiny", "MODEL.BACKBONE.FEAT_DIM", "128",
    "MODEL.HEADS.POOL_LAYER", "Identity", "MODEL.BACKBONE.DROP_PATH_RATIO", "0.5", "MODEL.BACKBONE.DROP_RATIO", "0.5",
    "MODEL.HEADS.EMBEDDING_DIM", "16", "MODEL.FREEZE_LAYERS", "('backbone',)", "SOLVER.FREEZE_EPOCHS", "-1",
    "SOLVER.MAX_EPOCH", "3", "TEST.EVAL_PERIOD", "1", "SOLVER.OPT", "AdamW", "SOLVER.WEIGHT_DECAY", "0.1",
    "SOLVER.EMA.ENABLED", "True", "SOLVER.AMP", "bf16", "MODEL.BACKBONE.CHECKPOINTING", "True",
)  # fmt: skip


class Watch(HookBase):
    """Record, at each step, whether the output of the backbone has a graph, and which modules are in training mode."""

    def __init__(self, model):
        self.graphs, self.training, self.gradients = [], set(), set()
        self.model = model
        model.backbone.register_forward_hook(self.after_forward)

    def after_forward(self, module, args, output):
        if torch.is_grad_enabled():
            self.graphs.append(output.requires_grad)
            trained = {"", "transformer"}
            names = {name for name, part in module.named_modules() if part.training and name not in trained}
            self.training |= {name for name in names if list(module.get_submodule(name).children()) == []}

    def after_backward(self):
        self.gradients |= {name for name, p in self.model.named_parameters() if p.grad is not None}


def run(folder, *opts, resume=False):
    trainer = DefaultTrainer(tiny.tiny_config(folder, *PROBE, *opts))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    watch = Watch(trainer.model)
    trainer.register_hooks([watch])
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return before, watch


@pytest.fixture(scope="module")
def probe(demo_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        return (folder, *run(folder))


@pytest.mark.integration
def test_frozen_backbone_has_no_graph_no_gradients_and_is_in_evaluation_mode(probe):
    folder, before, watch = probe
    assert watch.graphs and not any(watch.graphs)
    assert watch.gradients and all(name.startswith("heads.") for name in watch.gradients)
    assert watch.training == set()  # dropout, drop path and norms, in all epochs, also after the evaluations
    after = tiny.weights(folder / "model_final.pth")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed and not any(name.startswith("backbone.") for name in changed)


@pytest.mark.integration
def test_resumed_probe_is_equal_bit_for_bit(probe, demo, tmp_path):
    folder, _, _ = probe
    (tmp_path / "model_0001.pth").write_bytes((folder / "model_0001.pth").read_bytes())
    (tmp_path / "last_checkpoint").write_text("model_0001.pth")
    run(tmp_path, resume=True)
    one, other = (torch.load(source / "model_final.pth", weights_only=True) for source in (folder, tmp_path))
    assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())
    averages = (content["average"]["model"] for content in (one, other))
    first, second = averages
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("recipe", ["finetune/linear_probe.yml", "Demo/linear_probe.yml"])
def test_recipes_freeze_the_backbone_for_the_whole_training(recipe, pytestconfig):
    cfg = read_config(pytestconfig.rootpath / "configs" / recipe)
    assert cfg.MODEL.FREEZE_LAYERS == ("backbone",) and cfg.SOLVER.FREEZE_EPOCHS == -1
    assert cfg.MODEL.LORA.RANK == 0
