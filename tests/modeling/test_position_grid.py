"""Grid of the position embedding in a weights file: stored config, key, and inference for files of other programs."""

import itertools

import pytest
import timm
import torch

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.config import read_config
from fastamp.modeling.backbones import clip, clip_resnet
from fastamp.modeling.backbones.position_grid import infer_grids
from fastamp.modeling.backbones.timm_vit import TimmVisionTransformer
from fastamp.modeling.backbones.vit import Depth, VisionTransformer
from fastamp.utils.errors import WeightsError

WIDTH = 32


def vit(size, stride=16, **options):
    depth = Depth(pretrained=None, width=WIDTH, blocks=1, heads=2)
    return VisionTransformer(depth=depth, image_size=size, stride=(stride, stride), **options)


def clip_vit(size, stride=16, **options):
    depth = clip.ClipDepth(width=WIDTH, blocks=1, heads=2, embedding=8)
    return clip.ClipVisionTransformer(depth=depth, image_size=size, stride=(stride, stride), **options)


def clip_rn(size, stride=16, **options):
    depth = clip_resnet.ClipResNetDepth(width=8, blocks=(1, 1, 1, 1), embedding=8)
    return clip_resnet.ClipResNet(depth=depth, image_size=size, projection=True, **options)


def timm_vit(size, stride=16, **options):
    grid = [(side - 16) // stride + 1 for side in size]
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=[16 * side for side in grid],
        embed_dim=WIDTH,
        depth=1,
        num_heads=2,
        num_classes=0,
        dynamic_img_size=True,
    )
    return TimmVisionTransformer(model, stride=(stride, stride), **options)


POSITIONS = {
    vit: "pos_embed",
    clip_vit: "positional_embedding",
    clip_rn: "attnpool.positional_embedding",
    timm_vit: "model.pos_embed",
}
families = pytest.mark.parametrize("family", POSITIONS)


def coordinates(state, family, grid):
    """Set the first two channels of the position embedding in ``state`` to row and column, each from 0 to 1."""
    positions = state[POSITIONS[family]]
    rows, columns = ((torch.arange(side) + 0.5) / side for side in grid)
    patches = positions.view(-1, positions.shape[-1])[1:]
    patches[:, 0], patches[:, 1] = rows.repeat_interleave(grid[1]), columns.repeat(grid[0])
    return state


def check_coordinates(backbone, family):
    """Assert that the position embedding has rows and columns in place; bilinear borders are clamped."""
    expected = coordinates({key: value.clone() for key, value in backbone.state_dict().items()}, family, backbone.grid)
    found = backbone.state_dict()[POSITIONS[family]]
    torch.testing.assert_close(found, expected[POSITIONS[family]], atol=0.05, rtol=0)


class Model(torch.nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone


def config_text(size, stride):
    cfg = read_config("", ["INPUT.SIZE_TRAIN", size, "MODEL.BACKBONE.STRIDE_SIZE", (stride, stride)])
    return cfg.dump()


SIZES = [((288, 128), 16), ((256, 128), 12), ((384, 128), 16), ((128, 256), 16), ((512, 128), 16)]


@pytest.mark.integration
@families
def test_a_checkpoint_of_fastamp_is_resized_from_the_grid_of_its_config(family, tmp_path, subtests):
    for (size, stride), target in itertools.product(SIZES, [(256, 128), (192, 192), (256, 192)]):
        with subtests.test(size=size, stride=stride, target=target):
            source = family(size, stride)
            state = coordinates(source.state_dict(), family, source.grid)
            content = {
                "model": {f"backbone.{key}": value for key, value in state.items()},
                "config": config_text(size, stride),
            }
            torch.save(content, tmp_path / "own.pth")
            model = Model(family(target))
            Checkpointer(model).load(tmp_path / "own.pth")
            check_coordinates(model.backbone, family)
            pretrained = family(target)
            load_pretrained_backbone(pretrained, path=str(tmp_path / "own.pth"), online=None)
            check_coordinates(pretrained, family)


@families
def test_the_key_states_the_grid_of_a_file_without_a_config(family):
    source = family((128, 256))
    state = coordinates(source.state_dict(), family, (8, 16))
    backbone = family((256, 128), weights_grid=(8, 16))
    load_model_state(backbone, state, source="x", backbone_prefix="")
    check_coordinates(backbone, family)
    backbone = family((256, 128), weights_grid=(8, 15))
    with pytest.raises(WeightsError, match="WEIGHTS_GRID"):
        load_model_state(backbone, state, source="x", backbone_prefix="")


@families
def test_a_reid_file_is_resized_from_a_common_grid_whatever_the_grid_of_the_model(family, subtests):
    for (size, stride), target in itertools.product(SIZES[:3], [(256, 128), (224, 224), (96, 256)]):
        with subtests.test(size=size, stride=stride, target=target):
            source = family(size, stride)
            state = coordinates(source.state_dict(), family, source.grid)
            state = {f"backbone.{key}": value for key, value in state.items()} | {"bottleneck.weight": torch.ones(1)}
            model = Model(family(target))
            load_model_state(model, state, source="x")
            check_coordinates(model.backbone, family)


@families
def test_a_pretrained_file_has_a_square_grid(family, subtests):
    for target in [(256, 128), (512, 128), (64, 256)]:
        with subtests.test(target=target):
            source = family((256, 256))
            state = coordinates(source.state_dict(), family, source.grid)
            backbone = family(target)
            load_model_state(backbone, state, source="x", backbone_prefix="")
            check_coordinates(backbone, family)


def test_grids_that_fit_are_listed_in_the_notes():
    state = {f"backbone.{key}": value for key, value in vit((384, 128)).state_dict().items()}
    report = load_model_state(Model(vit((256, 128))), state | {"heads.weight": torch.ones(2, 2)}, source="x")
    assert any("24 x 8" in note and "16 x 12" in note and "WEIGHTS_GRID" in note for note in report.notes)


COMMON = [(16, 8), (24, 8), (18, 8), (14, 14), (12, 12)]


@pytest.mark.parametrize(
    "patches, own, is_reid, grids",
    [
        (144, (16, 8), True, [(18, 8), (12, 12)]),
        (144, (16, 8), False, [(12, 12), (18, 8)]),
        (144, (12, 12), True, [(12, 12), (18, 8)]),
        (128, (21, 10), True, [(16, 8)]),
        (128, (8, 16), True, [(8, 16), (16, 8)]),
        (128, (8, 16), False, [(8, 16), (16, 8)]),
        (210, (16, 16), False, [(21, 10)]),
        (200, (4, 4), False, [(20, 10)]),
    ],
)
def test_infer_grids_prefers_the_family_of_the_file(patches, own, is_reid, grids):
    assert infer_grids(patches, stride_grid=own, common=COMMON, is_reid=is_reid) == grids
