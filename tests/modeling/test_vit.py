"""Vision Transformer: comparison with timm, embeddings, pretrained files and checkpointing."""

import math

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer as TimmTransformer

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.modeling import build_backbone, build_heads
from fastamp.modeling.backbones.vit import DEPTHS, Depth, VisionTransformer, resize_positions
from fastamp.utils.errors import ConfigError, DataError, WeightsError

TINY = Depth(pretrained=None, width=32, blocks=3, heads=4)
URLS = {
    "small": "vit_small_p16_224",
    "base": "jx_vit_base_p16_224",
    "deit_small": "deit_small_distilled",
    "deit_base": "deit_base_distilled",
}


def tiny(**options):
    return VisionTransformer(**({"depth": TINY, "image_size": (64, 32)} | options))


def config(*opts):
    return read_config("", [
        "MODEL.BACKBONE.NAME", "build_vit_backbone", "MODEL.BACKBONE.FEAT_DIM", "768", "MODEL.BACKBONE.DEPTH", "base",
        *opts,
    ])  # fmt: skip


@pytest.fixture
def tiny_base(monkeypatch):
    """Function that creates a config; DEPTH base is patched to a small network."""
    monkeypatch.setitem(DEPTHS, "base", Depth(DEPTHS["base"].pretrained, width=32, blocks=3, heads=4))
    return lambda *opts: config("MODEL.BACKBONE.FEAT_DIM", "32", "INPUT.SIZE_TRAIN", "(64, 32)", *opts)


@pytest.mark.parametrize("depth", DEPTHS)
def test_vit_parameter_names_and_shapes_equal_timm(depth):
    with torch.device("meta"):
        cfg = config("MODEL.BACKBONE.DEPTH", depth, "MODEL.BACKBONE.FEAT_DIM", str(DEPTHS[depth].width))
        backbone = build_backbone(cfg)
        if depth == "small":
            options = {"depth": 8, "num_heads": 8, "mlp_ratio": 3.0, "qkv_bias": False}
            reference = TimmTransformer(img_size=(256, 128), num_classes=0, **options)
        else:
            name = {"base": "vit_base_patch16_224", "deit_base": "deit_base_patch16_224"}
            reference = timm.create_model(
                name.get(depth, "deit_small_patch16_224"), img_size=(256, 128), num_classes=0, pretrained=False
            )
    shapes = {name: tuple(value.shape) for name, value in backbone.state_dict().items()}
    assert shapes == {name: tuple(value.shape) for name, value in reference.state_dict().items()}
    assert [block.attn.heads for block in backbone.blocks] == [block.attn.num_heads for block in reference.blocks]
    assert backbone.blocks[0].attn.scale == (768**-0.5 if depth == "small" else None)
    assert URLS[depth] in DEPTHS[depth].pretrained.url


def timm_vit(**options):
    torch.manual_seed(3)
    options = {"img_size": (64, 32), "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5} | options
    model = TimmTransformer(**options).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_vit_features_equal_timm():
    reference = timm_vit()
    backbone = tiny().eval()
    report = load_model_state(backbone, reference.state_dict(), source="timm", backbone_prefix="")
    assert report.dropped == ["head.weight", "head.bias"] and report.missing == []
    images = torch.randn(2, 3, 64, 32)
    torch.testing.assert_close(
        backbone(images)[:, :, 0, 0], reference.forward_features(images)[:, 0], rtol=1e-4, atol=1e-5
    )


def test_vit_attention_scale_multiplies_dot_products():
    scaled = tiny(depth=Depth(None, width=32, blocks=1, heads=4, scale=32**-0.5))
    plain = tiny(depth=Depth(None, width=32, blocks=1, heads=4))
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        plain.blocks[0].attn.qkv.weight[:32] *= 0.5  # 32 ** -0.5 is half of 8 ** -0.5
        images = torch.randn(2, 3, 64, 32)
        torch.testing.assert_close(scaled(images), plain(images))


@pytest.mark.parametrize(
    "size, stride, grid",
    [((256, 128), (16, 16), (16, 8)), ((256, 128), (12, 12), (21, 10)), ((40, 33), (8, 11), (4, 2))],
)
def test_vit_stride_sets_patch_grid(size, stride, grid):
    backbone = tiny(image_size=size, stride=stride)
    assert backbone.grid == grid and backbone.pos_embed.shape == (1, 1 + math.prod(grid), 32)
    assert backbone(torch.randn(1, 3, *size)).shape == (1, 32, 1, 1)


def test_vit_resizes_position_embedding_for_images_of_another_size():
    backbone = tiny().eval()
    other = tiny(image_size=(96, 48)).eval()
    other.load_state_dict(
        backbone.state_dict() | {"pos_embed": resize_positions(backbone.pos_embed.detach(), (4, 2), (6, 3))}
    )
    images = torch.randn(2, 3, 96, 48)
    torch.testing.assert_close(backbone(images), other(images))


def test_resize_positions_interpolates_bilinearly():
    positions = torch.randn(1, 1 + 14 * 14, 5)
    resized = resize_positions(positions, (14, 14), (21, 10))
    assert torch.equal(resized[:, 0], positions[:, 0])
    rows, columns = (((torch.arange(n) + 0.5) * 14 / n - 0.5).clamp(0, 13) for n in (21, 10))
    old, patch = positions[0, 1:].reshape(14, 14, 5), (13, 6)
    y, x = rows[patch[0]].item(), columns[patch[1]].item()
    top, left = math.floor(y), math.floor(x)
    expected = sum(
        (1 - abs(y - i)) * (1 - abs(x - j)) * old[min(i, 13), min(j, 13)]
        for i in (top, top + 1)
        for j in (left, left + 1)
    )
    torch.testing.assert_close(resized[0, 1 + patch[0] * 10 + patch[1]], expected)


def test_vit_stochastic_depth_probability_grows_linearly_with_depth():
    backbone = tiny(depth=Depth(None, width=32, blocks=5, heads=4), drop_path=0.4)
    rates = [1 - getattr(block.drop_path, "keep", torch.tensor(1.0)).item() for block in backbone.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    block, x = backbone.blocks[-1], torch.randn(64, 3, 32)
    block.train()
    with torch.no_grad():
        block.norm1.weight.zero_()  # attention has the same output for all images
        skipped = (block(x) == x).flatten(1).all(1)
    assert 0 < skipped.sum() < 40  # probability 0.16 to skip both branches
    assert not (block.eval()(x) == x).flatten(1).all(1).any()


@pytest.mark.parametrize("option", ["dropout", "attention_dropout"])
def test_vit_dropout_is_active_only_in_training_mode(option):
    backbone, images = tiny(**{option: 0.5}), torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        assert not torch.equal(backbone(images), backbone(images))
        backbone.eval()
        assert torch.equal(backbone(images), backbone(images))


@pytest.mark.parametrize(
    "cameras, views, row", [(6, 0, [1, 4]), (0, 8, [0, 7]), (6, 8, [1 * 8 + 0, 4 * 8 + 7]), (1, 0, [0, 0])]
)
def test_vit_adds_camera_and_view_embeddings_to_tokens(cameras, views, row):
    backbone = tiny(cameras=cameras, views=views, side_weight=2.0).eval()
    assert backbone.takes_cameras and len(backbone.sie_embed) == max(cameras, 1) * max(views, 1)
    plain = tiny().eval()
    state = backbone.state_dict()
    sie = state.pop("sie_embed")
    images, side_information = torch.randn(2, 3, 64, 32), {"camids": torch.tensor([1, 4]) % max(cameras, 1)}
    features = backbone(images, **side_information, viewids=torch.tensor([0, 7]))
    for number in range(2):
        plain.load_state_dict(state | {"pos_embed": state["pos_embed"] + 2.0 * sie[row[number]]})
        torch.testing.assert_close(features[number], plain(images)[number])


def test_vit_raises_without_required_camera_or_view_ids():
    images, zeros = torch.randn(2, 3, 64, 32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"SIE_CAMERAS=6.*camids"):
        tiny(cameras=6, views=2)(images, viewids=zeros)
    with pytest.raises(ValueError, match=r"SIE_VIEWS=2.*viewids"):
        tiny(cameras=6, views=2)(images, camids=zeros)
    assert tiny(views=2)(images, viewids=zeros).shape == (2, 32, 1, 1)
    assert not tiny().takes_cameras


@pytest.mark.parametrize("name", ["camids", "viewids"])
@pytest.mark.parametrize("number", [-1, 3])
def test_camera_and_view_without_an_embedding_is_an_error(name, number):
    ids = {"camids": torch.tensor([0, 1]), "viewids": torch.tensor([0, 1])} | {name: torch.tensor([0, number])}
    with pytest.raises(DataError, match=rf"{name} in .*{number}.*0\.\.2"):
        tiny(cameras=3, views=3)(torch.randn(2, 3, 64, 32), **ids)


@pytest.mark.parametrize("bf16", [False, True])
def test_vit_checkpointing_saves_memory_and_gives_equal_gradients(bf16):
    torch.manual_seed(1)
    backbone = tiny(drop_path=0.5, dropout=0.1, attention_dropout=0.1)
    images = torch.randn(8, 3, 64, 32)

    def gradients(checkpointing):
        backbone.checkpointing = checkpointing
        backbone.zero_grad()
        torch.manual_seed(7)
        saved = 0

        def pack(tensor):
            nonlocal saved
            saved += tensor.numel()
            return tensor

        count = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16), count:
            out = backbone(images)
        out.float().square().sum().backward()
        return saved, {name: parameter.grad.clone() for name, parameter in backbone.named_parameters()}

    kept, expected = gradients(checkpointing=False)
    few, found = gradients(checkpointing=True)
    assert few < kept / 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(value.abs().sum() > 0 for value in expected.values())


def test_vit_initial_weights_have_expected_standard_deviations():
    backbone = tiny(depth=Depth(None, width=256, blocks=1, heads=4), cameras=40)
    for name in ("pos_embed", "sie_embed", "cls_token", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc2.weight"):
        assert backbone.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.1), name
    assert not backbone.blocks[0].attn.qkv.bias.any()
    assert backbone.patch_embed.proj.weight.std().item() == pytest.approx((2 / 256 / 256) ** 0.5, rel=0.02)


def pretrained(tiny_base, tmp_path, state, *opts):
    path = tmp_path / "vit.pth"
    torch.save(state, path)
    return build_backbone(
        tiny_base("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path), *opts)
    )


@pytest.mark.parametrize("kind", ["timm", "deit", "oldest"])
def test_vit_loads_pretrained_weights_of_timm_and_deit(tiny_base, tmp_path, caplog, kind):
    state = timm_vit(img_size=224).state_dict()
    content = dict(state)
    if kind == "deit":
        two = torch.cat((state["pos_embed"][:, :1], torch.full((1, 1, 32), 9.0), state["pos_embed"][:, 1:]), dim=1)
        content |= {"pos_embed": two, "dist_token": torch.ones(1, 1, 32), "head_dist.weight": torch.ones(5, 32)}
        content = {"model": content}
    elif kind == "oldest":
        content["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
    options = ("MODEL.BACKBONE.SIE_CAMERAS", "3")
    backbone = pretrained(tiny_base, tmp_path, content, *options)
    loaded = backbone.state_dict()
    for name in loaded.keys() - {"pos_embed", "sie_embed"}:
        assert torch.equal(loaded[name], state[name]), name
    assert torch.equal(loaded["pos_embed"], resize_positions(state["pos_embed"], (14, 14), (4, 2)))
    assert "14 x 14" in caplog.text and "4 x 2" in caplog.text
    assert "100% of the backbone's" in caplog.text  # camera embeddings are excluded


def test_vit_sums_rgb_weights_for_gray_images(tiny_base, tmp_path):
    state = timm_vit().state_dict()
    backbone = pretrained(tiny_base, tmp_path, state, "INPUT.CHANNELS", "1")
    assert torch.equal(backbone.patch_embed.proj.weight, state["patch_embed.proj.weight"].sum(1, keepdim=True))


def test_vit_logs_unused_camera_embeddings_and_raises_for_another_camera_count(caplog):
    load_model_state(tiny(), tiny(cameras=6).state_dict(), source="x", backbone_prefix="")
    assert "6 camera or view embeddings" in caplog.text
    with pytest.raises(WeightsError, match="sie_embed"):
        load_model_state(tiny(cameras=5), tiny(cameras=6).state_dict(), source="x", backbone_prefix="")


def test_pretrain_downloads_vit_weights_of_configured_depth(tiny_base, monkeypatch, tmp_path):
    calls = []

    def download(url, path, sha256):
        calls.append(url)
        torch.save(timm_vit().state_dict(), path)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("fastamp.checkpoint.pretrained.download", download)
    build_backbone(tiny_base("MODEL.BACKBONE.PRETRAIN", "True"))
    assert calls == [DEPTHS["base"].pretrained.url]


def test_vit_raises_for_invalid_image_size_feat_dim_or_stride(caplog):
    with pytest.raises(ConfigError, match=r"INPUT\.SIZE_TEST.*\(8, 128\)"):
        build_backbone(config("INPUT.SIZE_TEST", "(8, 128)"))
    with torch.device("meta"), pytest.raises(ConfigError, match=r"FEAT_DIM is 384"):
        build_backbone(config("MODEL.BACKBONE.FEAT_DIM", "384", "MODEL.BACKBONE.WITH_SE", "True"))
    assert "MODEL.BACKBONE.WITH_SE" in caplog.text
    with pytest.raises(ConfigError, match=r"STRIDE_SIZE"):
        config("MODEL.BACKBONE.STRIDE_SIZE", "(0, 12)")


def test_vit_position_embedding_matches_size_of_cropped_training_images(tiny_base):
    cropped = ("INPUT.CROP", "True", "INPUT.CROP.SIZE", "(48,)")
    backbone = build_backbone(tiny_base(*cropped)).eval()
    assert backbone.grid == (3, 3)
    assert build_backbone(tiny_base(*cropped, "INPUT.SIZE_TRAIN", "(0,)")).grid == (3, 3)
    with pytest.raises(ConfigError, match=r"INPUT\.CROP\.SIZE.*\(8, 8\)"):
        build_backbone(tiny_base("INPUT.CROP", "True", "INPUT.CROP.SIZE", "(8,)"))
    with pytest.raises(ConfigError, match=r"build_vit_backbone.*INPUT\.SIZE_TRAIN.*\(64,\)"):
        build_backbone(tiny_base("INPUT.SIZE_TRAIN", "(64,)"))
    backbone = build_backbone(tiny_base("INPUT.SIZE_TEST", "(32,)")).eval()
    with torch.no_grad():
        assert all(backbone(torch.randn(1, 3, *size)).shape == (1, 32, 1, 1) for size in ((32, 70), (50, 32)))


def test_hand_over_last_block_splits_vit_without_changing_features():
    backbone = tiny().eval()
    images = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        expected = backbone(images)
        last = backbone.hand_over_last_block()
        tokens = backbone(images)
        assert tokens.shape == (2, 9, 32) and len(backbone.blocks) == 2
        assert not any(name.startswith(("norm", "blocks.2")) for name in backbone.state_dict())
        assert torch.equal(last(tokens)[:, 0], expected[:, :, 0, 0])


def test_head_with_identity_pooling_returns_vit_class_token(tiny_base):
    cfg = tiny_base("MODEL.HEADS.POOL_LAYER", "Identity")
    head = build_heads(cfg).eval()
    feature = torch.randn(2, 32, 1, 1)
    assert torch.equal(head(feature), feature.flatten(1))


@pytest.mark.parametrize(
    "name, shape",
    [
        ("pos_embed", (1, 0, 384)),
        ("pos_embed", (1, 1, 384)),
        ("pos_embed", (2, 197, 384)),
        ("patch_embed.proj.weight", (384, 5)),
    ],
)
def test_loading_vit_tensors_of_wrong_shape_raises(name, shape):
    cfg = read_config("", [
        "MODEL.BACKBONE.NAME", "build_vit_backbone", "MODEL.BACKBONE.DEPTH", "deit_small", "MODEL.BACKBONE.FEAT_DIM",
        "384",
    ])  # fmt: skip
    backbone = build_backbone(cfg)
    with pytest.raises(WeightsError, match=f"{name}: file"):
        load_model_state(backbone, backbone.state_dict() | {name: torch.ones(shape)}, source="x", backbone_prefix="")
