"""Table of the recipes, from their configs."""

from markdown_text import table

from fastamp.config import CfgNode, read_config
from fastamp.config.recipes import list_recipes

MARKER = "<!-- table of recipes -->"
_HEADER = ("recipe", "model", "losses", "image size", "batch", "epochs", "learning rate", "precision")


def recipes_table() -> str:
    """Return one row per recipe, as Markdown."""
    return table(_HEADER, [(f"`{name}`", *_describe(read_config(name))) for name in list_recipes()])


def _describe(cfg: CfgNode) -> tuple[str, ...]:
    backbone = cfg.MODEL.BACKBONE
    model = f"{backbone.NAME.removeprefix('build_').removesuffix('_backbone')} {backbone.DEPTH}"
    model += "".join(f" {text}" for text, used in (("IBN", backbone.WITH_IBN), ("NL", backbone.WITH_NL)) if used)
    if cfg.MODEL.META_ARCHITECTURE != "Baseline":
        model = f"{cfg.MODEL.META_ARCHITECTURE}, {model}"
    losses = ", ".join(name.removesuffix("Loss") for name in cfg.MODEL.LOSSES.NAME)
    size = " x ".join(map(str, cfg.INPUT.SIZE_TRAIN))
    batch = f"{cfg.SOLVER.IMS_PER_BATCH}, K = {cfg.DATALOADER.NUM_INSTANCE}"
    precision = cfg.SOLVER.AMP.DTYPE if cfg.SOLVER.AMP.ENABLED else "float32"
    return (model, losses, size, batch, str(cfg.SOLVER.MAX_EPOCH), f"{cfg.SOLVER.BASE_LR:g}", precision)
