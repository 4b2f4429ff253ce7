"""Messages of fastamp/modeling, fastamp/layers and fastamp/solver: models, losses, teachers and optimizers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from messages import Recorder
from tiny import tiny_config
from torch import nn

from fastamp.config import get_cfg
from fastamp.layers import CLS_LAYER_REGISTRY, PartialFC
from fastamp.layers.distance import check_metric
from fastamp.layers.norm import group_norm
from fastamp.modeling import META_ARCH_REGISTRY, build_backbone, build_model, out_of_memory
from fastamp.modeling.backbones import BACKBONE_REGISTRY
from fastamp.modeling.heads import ClasHead, EmbeddingHead
from fastamp.modeling.infer_config import infer_config
from fastamp.modeling.load import load_model
from fastamp.modeling.losses import ClothesAdversarialLoss
from fastamp.modeling.losses.compute import with_columns
from fastamp.solver import build_lr_schedule, build_optimizer
from fastamp.solver.state import OptimizerState
from fastamp.solver.weight_average import WeightAverage
from fastamp.utils import comm

SITES = ["fastamp/modeling", "fastamp/layers", "fastamp/solver"]
RESNET = ("MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM",
          "512", "MODEL.BACKBONE.NORM", "BN")  # fmt: skip
VIT = (
    "MODEL.BACKBONE.NAME",
    "build_vit_backbone",
    "MODEL.BACKBONE.DEPTH",
    "deit_small",
    "MODEL.BACKBONE.FEAT_DIM",
    "384",
)
CLIP = ("MODEL.BACKBONE.NAME", "build_clip_vit_backbone", "MODEL.BACKBONE.DEPTH", "tiny")
PML = ("MODEL.LOSSES.NAME", "pml/TripletMarginLoss")


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    models(record)
    batches(record)
    losses(record)
    teachers(record)
    memory(record)
    stored_weights(record, request.getfixturevalue("run_folder"))
    layers(record)
    partial_fc(record)
    optimizers(record)


def build(record, *opts, **classes):
    """Build the tiny model with the given options."""
    return build_model(tiny_config(record.root / "run", "MODEL.HEADS.NUM_CLASSES", classes.get("classes", "4"), *opts))


def timm_folder(record, **arguments):
    """Write the config of a timm model with the given arguments, and return its folder."""
    folder = record.root / "timm-model"
    folder.mkdir(exist_ok=True)
    content = {"architecture": "test_vit", "num_classes": 0, "model_args": arguments}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def models(record):
    """Build models with incompatible backbone, head and meta-architecture options."""
    with record("EmbeddingHead(neck_feat='behind')"):
        EmbeddingHead(feat_dim=4, num_classes=2, neck_feat="behind")
    with record("a ViT with camera embeddings without cameras"):
        vit = build_backbone(tiny_config(record.root / "run", *VIT, "MODEL.BACKBONE.SIE_CAMERAS", "3"))
        vit(torch.zeros(1, 3, 64, 32))
    for opts in (
        (*RESNET, "MODEL.BACKBONE.DEPTH", "19x"),
        (*RESNET, "MODEL.BACKBONE.FEAT_DIM", "2048"),
        (*RESNET, "MODEL.BACKBONE.WITH_NL", "True"),
        (*RESNET, "MODEL.BACKBONE.NORM", "GN", "MODEL.HEADS.NORM", "GN", "MODEL.HEADS.EMBEDDING_DIM", "10"),
        (*RESNET, "MODEL.HEADS.POOL_LAYER", "Flatten", "INPUT.SIZE_TEST", "(128, 64)"),
        (*RESNET, "MODEL.HEADS.POOL_LAYER", "Flatten"),
        (*RESNET, "MODEL.HEADS.POOL_LAYER", "Identity"),
        (*RESNET, "MODEL.META_ARCHITECTURE", "MGN", "MODEL.HEADS.POOL_LAYER", "Flatten"),
        (*RESNET, "MODEL.META_ARCHITECTURE", "MGN", "MODEL.BACKBONE.WITH_NL", "True"),
        (*RESNET, "MODEL.META_ARCHITECTURE", "MGN", "MODEL.BACKBONE.MIXSTYLE", "True"),
        ("MODEL.META_ARCHITECTURE", "MGN"),
        ("MODEL.META_ARCHITECTURE", "LightMBN"),
        ("MODEL.META_ARCHITECTURE", "LightMBN", "MODEL.HEADS.EMBEDDING_DIM", "8"),
        ("MODEL.META_ARCHITECTURE", "LightMBN", "MODEL.HEADS.EMBEDDING_DIM", "8", "MODEL.HEADS.NAME", "FCHead"),
        ("MODEL.META_ARCHITECTURE", "LightMBN", "MODEL.HEADS.EMBEDDING_DIM", "8", "MODEL.BACKBONE.NAME",
         "build_osnet_backbone", "MODEL.BACKBONE.DEPTH", "x0_25", "MODEL.BACKBONE.FEAT_DIM", "128",
         "MODEL.HEADS.POOL_LAYER", "GeneralizedMeanPooling"),
        (*RESNET, "MODEL.HEADS.NAME", "JPMHead"),
        (*VIT, "MODEL.HEADS.NAME", "JPMHead", "MODEL.HEADS.JPM.PARTS", "64"),
        (*VIT, "INPUT.SIZE_TRAIN", "(8, 8)"),
        (*CLIP, "MODEL.BACKBONE.FEAT_DIM", "128", "INPUT.SIZE_TRAIN", "(8, 8)"),
        (*CLIP, "MODEL.BACKBONE.FEAT_DIM", "192", "MODEL.BACKBONE.PROJECTION", "True", "MODEL.HEADS.NAME", "JPMHead"),
        (*VIT, "MODEL.BACKBONE.DEPTH", "tiny"),
        (*RESNET, "MODEL.LORA.RANK", "8"),
        (*CLIP, "MODEL.BACKBONE.FEAT_DIM", "128", "MODEL.LORA.RANK", "8", "MODEL.LORA.TARGETS", "('attn',)"),
        (*CLIP, "MODEL.BACKBONE.FEAT_DIM", "128", "MODEL.LORA.RANK", "200"),
        (*CLIP, "MODEL.BACKBONE.FEAT_DIM", "128", "MODEL.LORA.RANK", "8"),
        ("MODEL.BACKBONE.NAME", "build_plain_backbone", "MODEL.HEADS.POOL_LAYER", "Flatten", "MODEL.BACKBONE.FEAT_DIM",
         "17"),
        ("MODEL.LOSSES.NAME", "('pml/TripletMarginLoss', 'pml/TripletMarginLoss')"),
        ("MODEL.HEADS.NECK_FEAT", "behind"),
        ("MODEL.HEADS.NAME", "FCHead"),
        ("MODEL.HEADS.NAME", "FCHead", "MODEL.HEADS.EMBEDDING_DIM", "8"),
        ("MODEL.HEADS.NAME", "EmbeddingHeads"),
        ("MODEL.HEADS.POOL_LAYER", "AvgPool"),
        ("MODEL.BACKBONE.NAME", "build_repvgg_backbone", "MODEL.BACKBONE.DEPTH", "A0", "MODEL.BACKBONE.FEAT_DIM",
         "1280", "MODEL.BACKBONE.DEPLOY", "True"),
        ("MODEL.BACKBONE.NAME", "build_repvgg_backbone", "MODEL.BACKBONE.DEPTH", "A0", "MODEL.BACKBONE.FEAT_DIM",
         "1280", "MODEL.BACKBONE.DEPLOY", "True", "MODEL.BACKBONE.NORM", "GN"),
        ("MODEL.BACKBONE.NAME", "build_osnet_backbone", "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.BACKBONE.WITH_SE",
         "True", "MODEL.BACKBONE.DEPTH", "x0_25"),
        ("MODEL.BACKBONE.NAME", "timm/resnet19"),
        ("MODEL.BACKBONE.NAME", "timm/convnext_atto", "MODEL.BACKBONE.FEAT_DIM", "320", "MODEL.BACKBONE.NORM", "IN",
         "MODEL.BACKBONE.LAST_STRIDE", "1"),
        ("MODEL.BACKBONE.NAME", "timm/test_vit", "MODEL.BACKBONE.FEAT_DIM", "64", "INPUT.SIZE_TRAIN", "(65, 33)"),
        ("MODEL.BACKBONE.NAME", "timm/test_vit", "MODEL.BACKBONE.FEAT_DIM", "64", "INPUT.CHANNELS", "1",
         "INPUT.SIZE_TRAIN", "(8, 4)"),
        ("MODEL.BACKBONE.NAME", "timm/nest_tiny"),
        ("MODEL.BACKBONE.NAME", "timm/mixer_s32_224", "INPUT.SIZE_TEST", "(128, 64)"),
        ("MODEL.BACKBONE.NAME", "timm/test_maxvit", "MODEL.BACKBONE.DROP_RATIO", "0.1"),
        ("MODEL.BACKBONE.NAME", "timm/test_resnet", "MODEL.BACKBONE.SIE_CAMERAS", "2"),
        ("MODEL.BACKBONE.NAME", "timm/vgg11", "MODEL.BACKBONE.CHECKPOINTING", "True"),
        ("MODEL.BACKBONE.NAME", "timm/efficientvim_m1"),
        ("MODEL.BACKBONE.NAME", "timm/pit_ti_224", "MODEL.BACKBONE.FEATURE", "patches"),
        ("MODEL.BACKBONE.NAME", "timm/test_vit", "MODEL.BACKBONE.STRIDE_SIZE", "(20, 20)"),
        ("MODEL.BACKBONE.NAME", "timm/test_resnet", "MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)"),
        ("MODEL.BACKBONE.NAME", "timm/test_vit2", "MODEL.BACKBONE.FEATURE", "class"),
        ("MODEL.BACKBONE.NAME", "timm/vit_tiny_r_s16_p8_224", "MODEL.BACKBONE.STRIDE_SIZE", "(8, 8)"),
        ("MODEL.BACKBONE.NAME", "timm/vit_small_patch16_rope_mixed_224", "MODEL.HEADS.NAME", "JPMHead",
         "MODEL.BACKBONE.FEAT_DIM", "384"),
        ("MODEL.BACKBONE.NAME", "timm/hf-hub:some/one"),
        ("MODEL.BACKBONE.NAME", f"timm/local-dir:{record.root}"),
        ("MODEL.BACKBONE.NAME", f"timm/local-dir:{timm_folder(record, num_heads=5)}"),
        (*RESNET, "MODEL.BACKBONE.CHECKPOINTING", "True"),
        ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "4"),
        ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "64", "MODEL.HEADS.TEMPORAL_POOL", "avg"),
        ("KD.EMA.ENABLED", "True"),
        ("MODEL.PIXEL_STD", "(1, 2)"),
        ("MODEL.COMPILE", "inductor"),
    ):  # fmt: skip
        with record(f"build_model {' '.join(opts)}"), pytest.MonkeyPatch.context() as patch:
            patch.setattr("timm.models._hub.download_from_hf", fail)
            model = build(record, *opts)
            if {"MGN", "JPMHead", "MoCo", "Identity"} & set(opts):
                size = (16, 8) if "MGN" in opts else (64, 32)
                model({"images": torch.zeros(8, 3, *size), "targets": torch.arange(8) % 4})
    with record("training with MODEL.HEADS.NUM_CLASSES 0"):
        model = build(record, classes="0")
        model({"images": torch.zeros(2, 3, 64, 32), "targets": torch.arange(2)})
    with record("temporal pooling of a batch without tracklets"):
        model = build(record, "MODEL.HEADS.TEMPORAL_POOL", "avg")
        model({"images": torch.zeros(6, 3, 64, 32), "targets": torch.arange(6) % 4})
    two_stems = (*RESNET, "MODEL.BACKBONE.NAME", "build_two_stem_resnet_backbone")
    with record("a two-stem ResNet without DATASETS.CATEGORIES"):
        build(record, *two_stems)
    model = build(record, *two_stems, "DATASETS.CATEGORIES", "{'modality': ['visible', 'infrared']}").eval()
    for title, batch in (
        ("without the column", {"side": torch.zeros(2, dtype=torch.int64)}),
        ("with an image without a modality", {"modality": torch.tensor([0, -1])}),
    ):
        with record(f"a two-stem ResNet and a batch {title}"):
            model({"images": torch.zeros(2, 3, 64, 32), **batch})
    with record("a two-stem ResNet with SyncBN in two processes"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.utils.comm.get_world_size", lambda: 2)
        categories = ("DATASETS.CATEGORIES", "{'modality': ['visible', 'infrared']}")
        build(record, *two_stems, *categories, "MODEL.BACKBONE.NORM", "SyncBN")
    with record("weights file and a backbone that cannot be built"), pytest.MonkeyPatch.context() as patch:
        builder = BACKBONE_REGISTRY.get("build_two_stem_resnet_backbone")
        patch.setattr(builder, "variants", replace(builder.variants, keys_of=lambda state: {}))
        infer_config(build(record, *RESNET).state_dict(), "weights.pth")
    with record("timm is not installed"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "timm", None)
        build(record, "MODEL.BACKBONE.NAME", "timm/resnet18")
    with record("no compiler"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.which", lambda *_, **__: None)
        build(record, "MODEL.COMPILE", "inductor")


def batches(record):
    """Call models with invalid batches."""
    model = build(record)
    images = torch.zeros(2, 3, 64, 32)
    for title, training, batch in (
        ("a tensor in training mode", True, images),
        ("a list", False, [1]),
        ("a dict without images", False, {"image": images}),
        ("a single image", False, images[0]),
        ("channels last", False, images.permute(0, 2, 3, 1)),
        ("boolean images", False, images.bool()),
        ("targets in a list", True, {"images": images, "targets": [0, 1]}),
        ("no targets", True, {"images": images}),
        (
            "a label out of range",
            True,
            {"images": images, "targets": torch.tensor([3, 4]), "img_paths": ["a.jpg", "b.jpg"]},
        ),
    ):
        with record(f"model of {title}"):
            model.train(training)(batch)
    with record("model with camera embeddings, a batch without camids"):
        build(record, *VIT, "MODEL.BACKBONE.SIE_CAMERAS", "2").eval()(images)


def losses(record):
    """Trigger the messages about MODEL.LOSSES."""
    for opts in (
        ("MODEL.LOSSES.NAME", "CrossEntropy"),
        ("MODEL.LOSSES.NAME", "('TripletLoss', 'TripletLoss')"),
        ("MODEL.LOSSES.NAME", "TripletLoss", "MODEL.LOSSES.PML.ARGS", "{'TripletMarginLoss.margin': 0.1}"),
        ("MODEL.LOSSES.NAME", "pml/TripletMarginLos"),
        (*PML, "MODEL.LOSSES.PML.ARGS", "{'TripletLoss.margin': 0.1}"),
        (*PML, "MODEL.LOSSES.PML.ARGS", "{'TripletMarginLoss': 0.1}"),
        (*PML, "MODEL.LOSSES.PML.ARGS", "{'TripletMarginLoss.margn': 0.1}"),
        (*PML, "MODEL.LOSSES.PML.ARGS", "{'TripletMarginLoss.margin': 'x'}"),
        ("MODEL.LOSSES.NAME", "pml/ArcFaceLoss", "MODEL.LOSSES.PML.ARGS", "{'ArcFaceLoss.scale': 'x'}"),
        (*RESNET, "MODEL.META_ARCHITECTURE", "MGN", "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'CenterLoss')"),
    ):
        with record(f"build_model {' '.join(opts)}"):
            build(record, *opts)
    with record("pytorch-metric-learning is not installed"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "pytorch_metric_learning", None)
        build(record, *PML)

    clothes_loss = nn.Module()
    clothes_loss.columns = ("clothes",)
    with record("ClothesAdversarialLoss without a column of clothes"):
        build(record, "MODEL.LOSSES.NAME", "ClothesAdversarialLoss", "MODEL.HEADS.NUM_CLASSES", "3")
    for clothes in ([0, -1, 1], [0, 0, 1]):
        with record(f"ClothesAdversarialLoss with the clothes {clothes} of the identities 0, 1 and 1"):
            loss = ClothesAdversarialLoss(num_clothes=2, feature_dim=4)
            loss.set_training_columns(np.array([0, 1, 1]), {"clothes": np.array(clothes)})
    with record("a loss that needs a column which the batch does not have"):
        with_columns({"features": torch.ones(1, 2)}, {"cloths": torch.zeros(1)}, {"loss": clothes_loss})


def teachers(record):
    """Build teachers from invalid KD.MODEL_CONFIG and KD.MODEL_WEIGHTS."""
    cfg = tiny_config(record.root / "run", "MODEL.HEADS.NUM_CLASSES", "4")
    config = record.file("teacher.yml", cfg.dump())
    state = build_model(cfg).state_dict()
    weights = record.root / "teacher.pth"
    torch.save(state, weights)
    torch.save({name: value for name, value in state.items() if name != "heads.weight"}, record.root / "headless.pth")
    files = ("KD.MODEL_CONFIG", config, "KD.MODEL_WEIGHTS", weights)

    class Mute(nn.Linear):
        pass

    META_ARCH_REGISTRY.register("MessagesMute")(lambda cfg: Mute(1, 1))

    def other(*opts):
        return record.file("other.yml", tiny_config(record.root / "run", *opts).dump())

    for title, opts in (
        ("none", ()),
        ("no weights", files[:2]),
        ("a missing config", ("KD.MODEL_CONFIG", record.root / "nowhere.yml", *files[2:])),
        ("missing weights", (*files[:2], "KD.MODEL_WEIGHTS", record.root / "nowhere.pth")),
        ("weights without a classifier", (*files[:2], "KD.MODEL_WEIGHTS", record.root / "headless.pth")),
        ("other classes", ("MODEL.HEADS.NUM_CLASSES", "9")),
        ("other channels", ("INPUT.CHANNELS", "1")),
        ("an unknown backbone", ("MODEL.BACKBONE.NAME", "build_tinny_backbone")),
        ("no logits", ("MODEL.META_ARCHITECTURE", "MessagesMute")),
    ):
        if opts and not opts[0].startswith("KD."):
            opts = ("KD.MODEL_CONFIG", other(*opts), *files[2:])
        with record(f"Distiller with teacher: {title}"):
            build(record, "MODEL.META_ARCHITECTURE", "Distiller", *map(str, opts))


def memory(record):
    """Build models that do not fit into memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out_of_memory, "available_memory", lambda: 10**9)
        for opts in (
            ("MODEL.HEADS.NUM_CLASSES", "1000000000"),
            ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "1000000000"),
            ("MODEL.HEADS.EMBEDDING_DIM", "400000000"),
        ):
            with record(f"build_model {' '.join(opts)}"):
                build(record, *opts)
        patch.setattr(out_of_memory, "available_memory", lambda: None)
        with record("build_model beyond the address space"):
            build(record, "MODEL.HEADS.EMBEDDING_DIM", str(10**13))


def stored_weights(record, run):
    """Load models from checkpoints, and import weights."""
    with record("load_model of 5"):
        load_model(5)
    with record("load_model without MODEL.WEIGHTS"):
        load_model(get_cfg())
    cfg = tiny_config(record.root / "run", "MODEL.WEIGHTS", str(run / "model_best.pth"))
    with record("load_model"):
        load_model(cfg)
    content = torch.load(run / "model_best.pth", weights_only=True)
    torch.save(content | {"policy": {"dtype": 3}}, record.root / "policy.pth")
    with record("load_model with a damaged policy"):
        load_model(tiny_config(record.root / "run", "MODEL.WEIGHTS", str(record.root / "policy.pth")))
    import import_checkpoint

    for title, state in {
        "an unknown backbone": {"conv.weight": torch.ones(3, 3, 1, 1)},
        "too many tensors": {f"backbone.{number}.weight": torch.ones(1) for number in range(9000)},
    }.items():
        path = record.root / f"{title.replace(' ', '_')}.pth"
        torch.save(state, path)
        record.command(import_checkpoint.cli, "tools/import_checkpoint.py", path, record.root / "imported.pth")
    with record("load_model of a RepVGG in deploy form"):
        from fastamp.checkpoint.load_state import load_model_state

        repvgg = ("MODEL.BACKBONE.NAME", "build_repvgg_backbone", "MODEL.BACKBONE.DEPTH", "A0",
                  "MODEL.BACKBONE.FEAT_DIM", "1280")  # fmt: skip
        deployed = build(record, *repvgg, "MODEL.BACKBONE.DEPLOY", "True").state_dict()
        load_model_state(build(record, *repvgg), deployed, source="x.pth")
    with record("timm weights offline"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("timm.models._builder.load_state_dict_from_hf", fail)
        build(record, "MODEL.BACKBONE.NAME", "timm/test_vit.r160_in1k", "MODEL.BACKBONE.FEAT_DIM", "64",
              "MODEL.BACKBONE.PRETRAIN", "True")  # fmt: skip
    reduction = {"heads.bnneck.weight": torch.ones(4), "heads.bottleneck.1.weight": torch.ones(4)}
    with record("weights of ReductionHead"):
        model = build(record)
        load_model_state(model, model.state_dict() | {"heads.reduction.0.weight": torch.ones(4)} | reduction,
                         source="x.pth")  # fmt: skip


def partial_fc(record):
    """Build and call models with Partial FC that cannot work."""
    pfc = ("MODEL.HEADS.PFC.ENABLED", "True")
    with record("Partial FC with label smoothing and the focal loss"):
        build(record, *pfc, "MODEL.LOSSES.CE.EPSILON", "0.1", "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'FocalLoss')")
    with record("Partial FC of MoCo"):
        build(record, *pfc, "MODEL.META_ARCHITECTURE", "MoCo")
    with record("PartialFC(sample_rate=0)"):
        PartialFC(num_classes=4, sample_rate=0)
    with record("build_optimizer with Partial FC and Adafactor"):
        model = build(record, *pfc)
        build_optimizer(tiny_config(record.root / "run", *pfc, "SOLVER.OPT", "Adafactor"), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "get_world_size", lambda: 2)
        with record("Partial FC with fewer classes than processes"):
            PartialFC(num_classes=1)
        with record("class logits of a head with a part of the centers"):
            EmbeddingHead(feat_dim=4, num_classes=3, sample_rate=1.0).logits(torch.ones(2, 4, 1, 1))
        with record("ClasHead with a part of the centers"):
            ClasHead(feat_dim=4, num_classes=3, sample_rate=1.0)


def fail(*_, **__):
    raise OSError("no network")


def layers(record):
    """Compute distances and build norms with invalid arguments."""
    with record("check_metric('manhattan')"):
        check_metric("manhattan")
    with record("group_norm(10)"):
        group_norm(10)
    with record("SubCenterArcSoftmax with a margin below MODEL.HEADS.SUBCENTERS.MIN_MARGIN"):
        CLS_LAYER_REGISTRY.get("SubCenterArcSoftmax")(scale=30.0, margin=0.1)


def optimizers(record):
    """Trigger the messages about SOLVER."""
    model = build(record)
    for opts in (
        ("SOLVER.OPT", "Adm"),
        ("SOLVER.OPT", "LBFGS"),
        ("SOLVER.OPT_ARGS", "{'lr': 1}"),
        ("SOLVER.OPT_ARGS", "{'betaa': 1}"),
        ("SOLVER.OPT_ARGS", "{'betas': 1}"),
        ("SOLVER.OPT_ARGS", "{'betas': (2.0, 3.0)}"),
        ("SOLVER.LR_FACTORS", "{'backbone.*': -1}"),
        ("SOLVER.LR_FACTORS", "{'bakbone.*': 1}"),
        ("SOLVER.LAYER_DECAY", "0.75"),
        ("SOLVER.LAYER_DECAY", "1.5"),
        ("SOLVER.SCHED", "Cosine"),
        ("SOLVER.WARMUP_ITERS", "2000"),
        ("SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.START_EPOCH", "9"),
        ("SOLVER.LR_SCALING", "linear"),
    ):
        with record(f"build_optimizer {' '.join(opts)}"):
            cfg = tiny_config(record.root / "run", *opts)
            build_optimizer(cfg, model)
            build_lr_schedule(cfg, 10)
            if cfg.SOLVER.SWA.ENABLED:
                from fastamp.solver.lr_schedule import swa_start

                swa_start(cfg)
    with record("Nesterov momentum without momentum"):
        opts = ("SOLVER.OPT", "SGD", "SOLVER.OPT_ARGS", "{'nesterov': True}", "SOLVER.MOMENTUM", "0")
        build_optimizer(tiny_config(record.root / "run", *opts), model)
    with record("build_optimizer of a frozen model"):
        frozen = build(record)
        frozen.requires_grad_(False)
        build_optimizer(tiny_config(record.root / "run"), frozen)
    with record("SOLVER.OPT Lamb without timm"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "timm", None)
        patch.setitem(__import__("sys").modules, "timm.optim", None)
        build_optimizer(tiny_config(record.root / "run", "SOLVER.OPT", "LAMB"), model)

    def state_of(*opts, model=model):
        cfg = tiny_config(record.root / "run", *opts)
        return OptimizerState(build_optimizer(cfg, model), model)

    own = state_of("SOLVER.BASE_LR", "1e-3")
    for title, opts in {
        "another optimizer": ("SOLVER.OPT", "SGD"),
        "another learning rate": ("SOLVER.BASE_LR", "1e-2"),
        "another option": ("SOLVER.OPT_ARGS", "{'amsgrad': True}"),
    }.items():
        with record(f"the optimizer's state with {title}"):
            own.load_state_dict(state_of(*opts).state_dict())
    with record("the optimizer's state of another model"):
        other = build(record, "MODEL.BACKBONE.NAME", "build_plain_backbone")
        own.load_state_dict(state_of(model=other).state_dict())
    state = own.state_dict()
    with record("the optimizer's state without names, of other groups"):
        groups = [{key: value for key, value in group.items() if key != "param_names"} for group in
                  state["param_groups"]]  # fmt: skip
        own.load_state_dict(state | {"param_groups": groups[:1]})
    with record("the optimizer's state without moments"):
        own.load_state_dict(state | {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(9)}}})
    ema, swa = (WeightAverage(model, kind) for kind in ("ema", "swa"))
    with record("the state of another average"):
        ema.load_state_dict(swa.state_dict())
    with record("the average of another model"):
        ema.load_state_dict(WeightAverage(nn.Linear(1, 1), "ema").state_dict())
