"""Heads, models and evaluators in the style of FastReID's projects."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.fastreid.config import configurable, get_cfg
from fastamp.fastreid.data import build_reid_test_loader, build_reid_train_loader
from fastamp.fastreid.engine import DefaultTrainer
from fastamp.fastreid.evaluation import DatasetEvaluator, ReidEvaluator, inference_on_dataset
from fastamp.fastreid.modeling import build_model
from fastamp.fastreid.modeling.heads import EmbeddingHead, build_heads
from fastamp.fastreid.modeling.heads.build import REID_HEADS_REGISTRY
from fastamp.fastreid.modeling.losses import log_accuracy
from fastamp.fastreid.modeling.meta_arch import META_ARCH_REGISTRY, MGN, Baseline, Distiller, MoCo
from fastamp.fastreid.solver import build_optimizer
from fastamp.fastreid.utils.events import EventStorage
from fastamp.utils.errors import ConfigError

META_ARCHITECTURES = {"Baseline": Baseline, "MGN": MGN, "MoCo": MoCo}
LAYERS = ["Linear", "CosSoftmax", "ArcSoftmax", "CircleSoftmax"]


class OwnForward(EmbeddingHead):
    """Head that computes the same as ``EmbeddingHead``, with calls as in FastReID."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.width = cfg.MODEL.BACKBONE.FEAT_DIM

    def forward(self, features, targets=None):
        pooled = self.pool_layer(features)
        neck = self.bottleneck(pooled)[..., 0, 0]
        if not self.training:
            return neck
        if type(self.cls_layer).__name__ == "Linear":
            logits = F.linear(neck, self.weight)
        else:
            logits = F.linear(F.normalize(neck), F.normalize(self.weight))
        return {
            "cls_outputs": self.cls_layer(logits.clone(), targets),
            "pred_class_logits": logits.mul(self.cls_layer.s),
            "features": pooled[..., 0, 0],
        }


class InheritedForward(EmbeddingHead):
    """Head with FastReID's constructor only."""

    def __init__(self, cfg):
        super().__init__(cfg)


class Attributes(EmbeddingHead):
    """Head for several binary labels per image."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.norm = nn.BatchNorm1d(cfg.MODEL.HEADS.NUM_CLASSES)

    def forward(self, features, targets=None):
        outputs = self.norm(F.linear(self.bottleneck(self.pool_layer(features)).flatten(1), self.weight))
        return {"cls_outputs": outputs} if self.training else torch.sigmoid(outputs)


class AttributeModel(Baseline):
    """Model with a custom loss on labels (B, A)."""

    def losses(self, outputs, gt_labels):
        return {"loss_bce": F.binary_cross_entropy_with_logits(outputs["cls_outputs"], gt_labels)}


class OwnLossArguments(Baseline):
    """Model whose ``from_config`` extends the dict of ``Baseline``, and whose loss is not registered."""

    @classmethod
    def from_config(cls, cfg):
        arguments = Baseline.from_config(cfg)
        arguments["loss_kwargs"].update({"own": {"scale": 2.0}})
        return arguments

    def losses(self, outputs, gt_labels):
        assert self.loss_kwargs["loss_names"] == ("OwnLoss", "TripletLoss")
        found = Baseline.losses(self, outputs, gt_labels)
        return found | {"loss_own": self.loss_kwargs["own"]["scale"] * outputs["features"].square().mean()}


class ExplicitArguments(Baseline):
    """Model with FastReID's constructor arguments and one more."""

    @configurable
    def __init__(self, *, backbone, heads, pixel_mean, pixel_std, loss_kwargs=None, bonus=0.0):
        super().__init__(
            backbone=backbone, heads=heads, pixel_mean=pixel_mean, pixel_std=pixel_std, loss_kwargs=loss_kwargs
        )
        self.bonus = bonus

    @classmethod
    def from_config(cls, cfg):
        arguments = super().from_config(cfg)
        arguments["bonus"] = 0.5
        return arguments


class FromConfig(Baseline):
    """Model with FastReID's old constructor."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.bonus = cfg.MODEL.LOSSES.TRI.MARGIN


class DropHead(OwnForward):
    """Head with keyword arguments from its own ``from_config``."""

    @configurable
    def __init__(self, *, drop, **arguments):
        EmbeddingHead.__init__(self, **arguments)
        self.drop = nn.Dropout(drop)

    @classmethod
    def from_config(cls, cfg):
        arguments = super().from_config(cfg)
        arguments["drop"] = 0.0
        return arguments


@pytest.fixture
def cfg(demo, tmp_path):
    components = {
        REID_HEADS_REGISTRY: (OwnForward, InheritedForward, DropHead, Attributes),
        META_ARCH_REGISTRY: (AttributeModel, OwnLossArguments, ExplicitArguments, FromConfig),
    }
    for registry, classes in components.items():
        for each in classes:
            registry.register()(each)
    config = get_cfg()
    config.merge_from_list(tiny.tiny_options(tmp_path / "run", "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1"))
    yield config
    for registry, classes in components.items():
        for each in classes:
            registry._components.pop(each.__name__)


@pytest.mark.parametrize("name", ["OwnForward", "InheritedForward", "DropHead"])
@pytest.mark.parametrize("layer", LAYERS)
def test_head_with_config_constructor_equals_the_usual_head(cfg, name, layer):
    values = {"MODEL.HEADS.NUM_CLASSES": 5, "MODEL.HEADS.CLS_LAYER": layer, "MODEL.HEADS.SCALE": 16.0}
    cfg = cfg.with_values(values | {"MODEL.HEADS.MARGIN": 0.2})
    usual = build_heads(cfg)
    assert not isinstance(usual, EmbeddingHead)
    head = REID_HEADS_REGISTRY.build(name, cfg)
    head.load_state_dict(usual.state_dict())
    nn.init.normal_(usual.weight)
    head.load_state_dict(usual.state_dict())
    features, targets = torch.randn(6, tiny.WIDTH, 4, 2), torch.tensor([0, 1, 2, 3, 4, 0])
    expected, found = usual(features, targets), head(features, targets)
    for key in ("cls_outputs", "features") + ("pred_class_logits",) * (name == "InheritedForward" or layer != "Linear"):
        assert torch.allclose(found[key], expected[key], atol=1e-4), key
    assert torch.allclose(head.logits(features), usual.logits(features), atol=1e-4)
    assert torch.equal(head.eval()(features), usual.eval()(features))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["OwnForward", "InheritedForward"])
def test_model_with_such_a_head_is_trained(cfg, name):
    values = {"MODEL.HEADS.NAME": name, "MODEL.HEADS.CLS_LAYER": "CosSoftmax", "MODEL.HEADS.SCALE": 16.0}
    assert DefaultTrainer(cfg.with_values(values)).train()["mAP"] > 0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "losses"),
    [
        ("OwnLossArguments", ("OwnLoss", "TripletLoss")),
        ("ExplicitArguments", ("CrossEntropyLoss", "TripletLoss")),
        ("FromConfig", ("CrossEntropyLoss", "TripletLoss")),
    ],
)
def test_model_with_fastreids_constructor_computes_the_configured_losses(cfg, name, losses):
    values = {"MODEL.META_ARCHITECTURE": name, "MODEL.LOSSES.NAME": losses, "MODEL.HEADS.NUM_CLASSES": 4}
    cfg = cfg.with_values(values | {"MODEL.LOSSES.TRI.MARGIN": 0.5})
    torch.manual_seed(0)
    model = build_model(cfg)
    found = model({"images": torch.rand(8, 3, 64, 32) * 255, "targets": torch.arange(8) // 2})
    assert set(found) == {"loss_triplet", "loss_own" if name == "OwnLossArguments" else "loss_cls"}
    assert model.loss_kwargs["tri"]["margin"] == 0.5 and getattr(model, "bonus", 0.5) == 0.5
    assert DefaultTrainer(cfg.with_values({"MODEL.HEADS.NUM_CLASSES": 0})).train()["mAP"] > 0


def test_unknown_loss_is_an_error_if_the_model_has_no_method_losses(cfg):
    with pytest.raises(ConfigError, match="OwnLoss"):
        build_model(cfg.with_values({"MODEL.META_ARCHITECTURE": "FromConfig", "MODEL.LOSSES.NAME": ("OwnLoss",)}))


class Colors(torch.utils.data.Dataset):
    """Images with two binary attributes: red, and green."""

    num_classes = 2

    def __len__(self):
        return 64

    def __getitem__(self, index):
        labels = torch.tensor([index & 1, index >> 1 & 1], dtype=torch.float32)
        image = torch.zeros(3, 64, 32)
        image[:2] = 200 * labels[:, None, None] + 20 * torch.rand(2, 1, 1)
        return {"images": image, "targets": labels, "img_paths": f"{index}.jpg"}


class Accuracy(DatasetEvaluator):
    def reset(self):
        self.correct = []

    def process(self, inputs, outputs):
        self.correct.append((outputs.cpu() > 0.5) == (inputs["targets"] > 0.5))

    def evaluate(self):
        accuracy = 100 * torch.cat(self.correct).float().mean().item()
        return {"accuracy": accuracy, "metric": accuracy}


class AttributeTrainer(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        return build_reid_train_loader(cfg, train_set=Colors())

    @classmethod
    def build_test_loader(cls, cfg, dataset_name):
        return build_reid_test_loader(cfg, test_set=Colors())[0]

    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_dir=None):
        return cls.build_test_loader(cfg, dataset_name), Accuracy()


@pytest.mark.integration
def test_model_with_an_own_loss_is_trained_on_several_labels_per_image(cfg):
    values = {"MODEL.META_ARCHITECTURE": "AttributeModel", "MODEL.HEADS.NAME": "Attributes"}
    values |= {"DATALOADER.SAMPLER_TRAIN": "TrainingSampler", "SOLVER.MAX_EPOCH": 12, "SOLVER.BASE_LR": 1e-2}
    values |= {"TEST.EVAL_PERIOD": 12, "SOLVER.STEPS": (11,), "MODEL.LOSSES.NAME": ("CrossEntropyLoss",)}
    assert AttributeTrainer(cfg.with_values(values)).train()["accuracy"] > 90


def test_labels_of_the_usual_losses_are_still_checked(cfg):
    model = build_model(cfg.with_values({"MODEL.HEADS.NUM_CLASSES": 2})).train()
    with pytest.raises(ValueError, match="targets"):
        model({"images": torch.zeros(2, 3, 64, 32), "targets": torch.zeros(2, 2)})


class WithOwnLosses:
    """Model with FastReID's constructor and an additional loss."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.share = nn.Parameter(torch.tensor(0.5))

    def losses(self, *outputs_and_labels):
        losses = super().losses(*outputs_and_labels)
        return losses | {"loss_own": self.share * outputs_and_labels[0]["features"].square().mean()}


@META_ARCH_REGISTRY.register()
class OwnMGN(WithOwnLosses, MGN):
    pass


@META_ARCH_REGISTRY.register()
class OwnMoCo(WithOwnLosses, MoCo):
    pass


def branched(cfg, name):
    values = {"MODEL.META_ARCHITECTURE": name, "MODEL.HEADS.NUM_CLASSES": 4, "MODEL.QUEUE_SIZE": 16}
    values |= {"MODEL.BACKBONE.NAME": "build_resnet_backbone", "MODEL.BACKBONE.DEPTH": "18x"}
    return cfg.with_values(values | {"MODEL.BACKBONE.FEAT_DIM": 512, "MODEL.BACKBONE.PRETRAIN": False})


@pytest.mark.parametrize("name", ["MGN", "MoCo"])
def test_mgn_and_moco_with_own_losses_add_them_to_the_usual_ones(cfg, name):
    batch = {"images": torch.rand(8, 3, 96, 32) * 255, "targets": torch.arange(8) // 2}
    found = {}
    for model in (name, f"Own{name}"):
        torch.manual_seed(0)
        found[model] = build_model(branched(cfg, model)).train()(batch)
    assert {"loss_mb", "loss_cls"} <= found["OwnMoCo"].keys() if name == "MoCo" else "loss_cls_b33" in found["OwnMGN"]
    assert found[f"Own{name}"].keys() == found[name].keys() | {"loss_own"}
    for loss, value in found[name].items():
        torch.testing.assert_close(found[f"Own{name}"][loss], value)


@pytest.mark.parametrize("name", ["Baseline", "MGN", "MoCo"])
def test_built_model_is_of_the_class_with_loss_kwargs(cfg, name):
    model = build_model(branched(cfg, name))
    assert type(model) is META_ARCHITECTURES[name] and model.loss_kwargs["tri"]["margin"] == cfg.MODEL.LOSSES.TRI.MARGIN


@META_ARCH_REGISTRY.register()
class NormalizesInPlace(nn.Module):
    """Model that derives from no class of fastamp."""

    def __init__(self, cfg):
        super().__init__()
        self.register_buffer("pixel_mean", torch.tensor(cfg.MODEL.PIXEL_MEAN).view(1, -1, 1, 1))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batched_inputs):
        return self.scale * batched_inputs["images"].sub_(self.pixel_mean).mean((2, 3))


def test_own_model_can_normalize_the_images_of_a_batch_in_place(cfg):
    model = build_model(cfg.with_values({"MODEL.META_ARCHITECTURE": "NormalizesInPlace"})).eval()
    batch = {"images": torch.full((2, 3, 4, 4), 200, dtype=torch.uint8)}
    torch.testing.assert_close(model(batch)[0], 200 - torch.tensor(cfg.MODEL.PIXEL_MEAN))
    assert batch["images"].unique().tolist() == [200]


def test_loss_kwargs_are_those_of_the_config(cfg):
    cfg = cfg.with_values(
        {"MODEL.LOSSES.CE.EPSILON": 0.1, "MODEL.LOSSES.TRI.MARGIN": 0.4, "MODEL.LOSSES.TRI.SCALE": 2.0}
    )
    kwargs = Baseline(cfg.with_values({"MODEL.HEADS.NUM_CLASSES": 4})).loss_kwargs
    assert kwargs["loss_names"] == ("CrossEntropyLoss", "TripletLoss") and set(kwargs) == {"loss_names", "ce", "tri"}
    assert kwargs["ce"] == {"eps": 0.1, "alpha": cfg.MODEL.LOSSES.CE.ALPHA, "scale": 1.0}
    assert kwargs["tri"] == {"margin": 0.4, "norm_feat": False, "hard_mining": True, "scale": 2.0}


class Collecting(ReidEvaluator):
    """Evaluator that collects as in FastReID, and compares with what ``ReidEvaluator`` has collected."""

    def process(self, inputs, outputs):
        super().process(inputs, outputs)
        self.features.append(outputs.cpu())
        self.pids.extend(inputs["targets"])
        self.camids.extend(inputs["camids"])

    def evaluate(self):
        assert self._num_query == self.num_query and self._output_dir == "x" and self.cfg.TEST.METRIC == "cosine"
        predictions = self._predictions
        assert torch.equal(torch.cat([prediction["feats"] for prediction in predictions]), torch.cat(self.features))
        assert torch.cat([each["pids"] for each in predictions]).tolist() == [int(pid) for pid in self.pids]
        assert torch.cat([each["camids"] for each in predictions]).tolist() == [int(camid) for camid in self.camids]
        return {"images": len(self.pids)}


def test_reid_evaluator_has_the_attributes_of_fastreid(cfg):
    loader, num_query = build_reid_test_loader(cfg, "Demo")
    evaluator = Collecting(cfg, num_query, "x")
    model = build_model(cfg).eval()
    for _ in range(2):  # reset discards the lists
        assert inference_on_dataset(model, loader, evaluator) == {"images": len(loader.dataset)}


class Several(nn.Module):
    """Model with two outputs per image."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch):
        features = batch["images"].float().mean((2, 3))
        return features * self.weight, [features[:, :1]]


class Shapes(DatasetEvaluator):
    def process(self, inputs, outputs):
        self.shapes = [tuple(outputs[0].shape), tuple(outputs[1][0].shape)]

    def evaluate(self):
        return {"shapes": self.shapes}


def test_outputs_of_several_tensors_are_passed_to_the_evaluator():
    batch = {"images": torch.zeros(2, 3, 4, 4)}
    assert inference_on_dataset(Several(), [batch], Shapes()) == {"shapes": [(2, 3), (2, 1)]}


def test_head_takes_the_arguments_of_fastreid(cfg):
    class Wide(EmbeddingHead):
        @classmethod
        def from_config(cls, cfg):
            arguments = super().from_config(cfg)
            assert arguments["norm_type"] == "BN"
            return arguments | {"pool_type": "GlobalMaxPool", "cls_type": "CosSoftmax", "embedding_dim": 3}

        def reset_parameters(self):
            super().reset_parameters()
            nn.init.ones_(self.weight)

    head = Wide(cfg.with_values({"MODEL.HEADS.NUM_CLASSES": 2}))
    assert type(head.pool_layer).__name__ == "GlobalMaxPool" and type(head.cls_layer).__name__ == "CosSoftmax"
    assert torch.equal(head.weight, torch.ones(2, 3))


def outputs_and_labels():
    torch.manual_seed(0)
    logits = torch.randn(4, 2)
    outputs = {"cls_outputs": logits, "pred_class_logits": logits, "features": torch.randn(4, 3)}
    return outputs, torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize("own_dict", [False, True])
def test_losses_use_the_values_in_loss_kwargs(cfg, own_dict):
    arguments = Baseline.from_config(cfg.with_values({"MODEL.HEADS.NUM_CLASSES": 2}))
    arguments["loss_kwargs"]["ce"]["scale"] = 0.25
    if own_dict:
        arguments["loss_kwargs"] = dict(arguments["loss_kwargs"])
    outputs, labels = outputs_and_labels()
    found = Baseline(**arguments).losses(outputs, labels)
    assert set(found) == {"loss_cls", "loss_triplet"}
    assert found["loss_cls"].item() == pytest.approx(F.cross_entropy(outputs["cls_outputs"], labels).item() / 4)


class OwnDistiller(Distiller):
    """Distiller that calls its teachers itself."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.connector = nn.Conv2d(cfg.MODEL.BACKBONE.FEAT_DIM, cfg.MODEL.BACKBONE.FEAT_DIM, 1)

    def forward(self, batched_inputs):
        if not self.training:
            return super().forward(batched_inputs)
        maps = self.backbone(self.preprocess_image(batched_inputs))
        targets = batched_inputs["targets"].to(self.device)
        t_maps, t_outputs = [], []
        with torch.no_grad():
            if self.ema_enabled:
                self._momentum_update_key_encoder(self.ema_momentum)
            for teacher in self.model_ts:
                t_maps.append(teacher.backbone(self.preprocess_image(batched_inputs)))
                t_outputs.append(teacher.heads(t_maps[-1], targets))
        return self.losses(self.heads(maps, targets), maps, t_outputs, t_maps, targets)

    def losses(self, s_outputs, maps, t_outputs, t_maps, gt_labels):
        losses = super().losses(s_outputs, t_outputs, gt_labels)
        return losses | {"loss_maps": sum((self.connector(maps) - each).square().mean() for each in t_maps)}


@pytest.mark.parametrize("kind", [Distiller, OwnDistiller])
def test_distiller_with_fastreids_attributes_is_trained(cfg, kind):
    cfg = cfg.with_values({"MODEL.HEADS.NUM_CLASSES": 4, "KD.EMA.ENABLED": True, "KD.EMA.MOMENTUM": 0.5})
    torch.manual_seed(0)
    model = kind(cfg).train()
    batch = {"images": torch.rand(8, 3, 64, 32) * 255, "targets": torch.arange(8) // 2}
    nn.init.constant_(model.heads.weight, 0.5)
    losses = model(batch)
    assert {"loss_cls", "loss_triplet", "loss_jsdiv"} <= set(losses) and losses["loss_jsdiv"].requires_grad
    assert ("loss_maps" in losses) == (kind is OwnDistiller)
    average = model.ema.heads.weight  # halfway between N(0, 0.01) and 0.5
    assert model.ema_momentum == 0.5 and average.mean().item() == pytest.approx(0.25, abs=0.01)
    assert model.eval()(batch).shape == (8, tiny.WIDTH)
    assert torch.equal(model.jsdiv_loss(torch.ones(2, 3), torch.ones(2, 3)), torch.tensor(0.0))


@pytest.mark.parametrize("build", [build_optimizer, DefaultTrainer.build_optimizer])
def test_optimizer_is_also_the_pair_of_later_releases(cfg, build):
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(cfg, model, contiguous=False)
    unpacked, params = build(cfg, model)
    assert type(unpacked).__name__ == type(optimizer).__name__ and params is None
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.clone()
    unpacked.step()
    assert isinstance(optimizer, torch.optim.Optimizer) and not torch.equal(model.weight, before)


def test_accuracy_of_the_batch_is_logged():
    with EventStorage(0) as storage:
        log_accuracy(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 0]))
    assert storage.latest()["cls_accuracy"][0] == 0.5
