"""The smallest variant of each backbone, with its config."""

from fastamp.config import CfgNode, get_cfg

# Name and options -> feature dimension (0: read from timm).
BACKBONES = {
    "resnet 18x": 512,
    "resnet 18x WITH_IBN": 512,
    "resnet 50x WITH_NL": 2048,
    "resnet 18x WITH_SE": 512,
    "two_stem_resnet 18x": 512,
    "resnext 50x": 2048,
    "resnext 50x WITH_IBN": 2048,
    "resnest 50x": 2048,
    "osnet x0_25": 128,
    "osnet x0_25 WITH_IBN": 128,
    "osnet_ain x0_25": 128,
    "repvgg A0": 1280,
    "repvgg A0 DEPLOY": 1280,
    "mobilenetv2 0.25x": 1280,
    "mobilenetv3 Small": 1024,
    "torchreid_mobilenetv2 x1_0": 1280,
    "shufflenet g3": 960,
    "shufflenetv2 0.5x": 1024,
    "effnet b0": 1280,
    "regnet 200x": 368,
    "regnet 200y": 368,
    "vit deit_small": 384,
    "swin tiny": 768,
    "solider tiny": 768,
    "vmamba nano": 256,
    "clip_vit tiny": 128,
    "clip_vit tiny PROJECTION": 192,
    "clip_resnet tiny": 512,
    "clip_resnet tiny PROJECTION": 576,
    "timm/mobilenetv3_small_050": 0,
    "timm/vit_tiny_patch16_224": 0,
}
SIZE = (64, 32)


def config(backbone: str, *opts: str) -> CfgNode:
    """Build the config of one of ``BACKBONES``; ``opts`` are applied last."""
    cfg = get_cfg()
    name, *rest = backbone.split(" ")
    if not name.startswith("timm/"):
        name = f"build_{name}_backbone"
        opts = ("MODEL.BACKBONE.DEPTH", rest[0], "MODEL.BACKBONE.FEAT_DIM", str(BACKBONES[backbone]), *opts)
        opts += tuple(text for option in rest[1:] for text in (f"MODEL.BACKBONE.{option}", "True"))
    if "two_stem" in name:
        two_stems = ("DATASETS.CATEGORIES", "{'modality': ('visible', 'infrared')}")
        opts = (*two_stems, "MODEL.BACKBONE.MODALITY", "infrared", *opts)
    cfg.merge_from_list([
        "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.NAME", name, "INPUT.SIZE_TRAIN", SIZE, "INPUT.SIZE_TEST", SIZE,
        "MODEL.HEADS.WITH_BNNECK", "True", "MODEL.HEADS.NUM_CLASSES", "4", "SOLVER.AMP", "bf16", *opts,
    ])  # fmt: skip
    return cfg
