"""timm's plain Vision Transformers: grids, tokens, side information, JPM, weights files of the original programs."""

import json

import pytest
import torch

from fastamp.config import get_cfg
from fastamp.modeling import build_backbone, build_model
from fastamp.modeling.heads.jpm_head import JPMHead, shuffle_patches
from fastamp.utils.errors import ConfigError, WeightsError

timm = pytest.importorskip("timm")

# Architecture and arguments of tiny variants.
TINY = {"embed_dim": 32, "depth": 3, "num_heads": 2}
PLAIN = ("vit_base_patch16_224", {})
DINOV2 = ("vit_small_patch14_dinov2", {})
DINOV2_REG = ("vit_small_patch14_reg4_dinov2", {})
DINOV3 = ("vit_small_patch16_dinov3", {})
EVA02 = ("eva02_tiny_patch14_224", {})
SIGLIP = ("vit_base_patch16_siglip_224", {})
FAMILIES = (PLAIN, DINOV2, DINOV2_REG, DINOV3, EVA02, SIGLIP)
IDS = ("plain", "dinov2", "dinov2-registers", "dinov3", "eva02", "siglip")


def tiny(tmp_path, architecture, arguments=None):
    """Write the config of a tiny variant of a timm architecture, and return its name for MODEL.BACKBONE.NAME."""
    folder = tmp_path / architecture
    folder.mkdir(exist_ok=True)
    content = {"architecture": architecture, "num_classes": 0, "model_args": TINY | (arguments or {})}
    content["pretrained_cfg"] = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "input_size": [3, 224, 224]}
    (folder / "config.json").write_text(json.dumps(content))
    return f"timm/local-dir:{folder}"


def config(name, *opts, size=(64, 32)):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.BACKBONE.NAME", name, "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.DROP_PATH_RATIO", "0."])
    cfg.INPUT.SIZE_TRAIN = cfg.INPUT.SIZE_TEST = size
    cfg.merge_from_list(list(opts))
    return cfg


def build(name, *opts, size=(64, 32)):
    return build_backbone(config(name, *opts, size=size))


def randomize(model, seed=0):
    """Draw all parameters, so that features depend on the images and on each block, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def original(architecture, state, size, **arguments):
    """Build timm's own model of an image size with the weights of the backbone."""
    model = timm.create_model(architecture, num_classes=0, img_size=size, **TINY, **arguments).eval()
    model.load_state_dict({key.removeprefix("model."): value for key, value in state.items()}, strict=True)
    return model


@pytest.mark.parametrize("size", [(256, 128), (384, 128)])
@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_grid_of_patches_has_the_aspect_ratio_of_the_images_and_features_equal_timm(family, size, tmp_path):
    architecture, arguments = family
    backbone = randomize(build(tiny(tmp_path, architecture, arguments), size=size)).eval()
    patch = backbone.patch[0]
    grid = tuple(round(side / patch) for side in size)
    exact = tuple(side * patch for side in grid)
    assert backbone.grid == grid == backbone.patch_grid(size)
    x = torch.randn(2, 3, *exact)
    model = original(architecture, backbone.state_dict(), exact, **arguments)
    with torch.no_grad():
        tokens = model.fc_norm(model.forward_features(x))
        expected = model(x) if backbone.feature == "pooled" else tokens[:, 0]
        torch.testing.assert_close(backbone(x)[:, :, 0, 0], expected, rtol=1e-4, atol=1e-5)


BEIT = "beit_base_patch16_224", {}
BEIT_V2 = "beitv2_base_patch16_224", {}


@pytest.mark.parametrize("size", [(256, 128), (384, 128)])
@pytest.mark.parametrize("feature", ["class", "patches"])
@pytest.mark.parametrize("family", [BEIT, BEIT_V2], ids=["beit", "beit2"])
def test_features_of_beit_equal_timm(family, feature, size, tmp_path):
    architecture, arguments = family
    backbone = build(tiny(tmp_path, architecture, arguments), "MODEL.BACKBONE.FEATURE", feature, size=size)
    randomize(backbone).eval()
    model = original(architecture, backbone.state_dict(), size, global_pool="", **arguments)
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        tokens, found = model.forward_features(x), backbone(x)
        if feature == "class":
            torch.testing.assert_close(found[:, :, 0, 0], tokens[:, 0])
        else:
            assert found.shape == (2, 32, size[0] // 16, 8)
            torch.testing.assert_close(found.flatten(2).transpose(1, 2), tokens[:, 1:])


@pytest.mark.parametrize("size", [(256, 128), (384, 128)])
def test_feature_map_of_maxvit_equals_timm(size):
    backbone = randomize(build("timm/test_maxvit", size=size)).eval()
    model = timm.create_model("test_maxvit", num_classes=0, img_size=size).eval()
    model.load_state_dict({key.removeprefix("model."): value for key, value in backbone.state_dict().items()})
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = model.forward_features(x)
        assert expected.shape[2:] == (size[0] // 32, 4)
        torch.testing.assert_close(backbone(x), expected)


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_patches_feature_is_the_map_without_learned_tokens(family, tmp_path):
    architecture, arguments = family
    backbone = randomize(build(tiny(tmp_path, architecture, arguments), "MODEL.BACKBONE.FEATURE", "patches")).eval()
    x = torch.randn(2, 3, *(side * backbone.patch[0] for side in backbone.grid))
    model = original(
        architecture, backbone.state_dict(), x.shape[2:], **({"global_pool": "avg"} if family == SIGLIP else {}),
        **({"fc_norm": False} if family == SIGLIP else {}),
    )  # fmt: skip
    with torch.no_grad():
        tokens = model.fc_norm(model.forward_features(x))[:, model.num_prefix_tokens :]
        assert backbone(x).shape == (2, 32, *backbone.grid)
        torch.testing.assert_close(backbone(x).flatten(2).transpose(1, 2), tokens, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [PLAIN, EVA02, DINOV3], ids=["plain", "eva02", "dinov3"])
def test_pooled_feature_equals_timm(family, tmp_path):
    architecture, arguments = family
    backbone = build(tiny(tmp_path, architecture, arguments), "MODEL.BACKBONE.FEATURE", "pooled", size=(56, 28))
    randomize(backbone).eval()
    x = torch.randn(2, 3, *(side * backbone.patch[0] for side in backbone.grid))
    model = original(architecture, backbone.state_dict(), x.shape[2:], **arguments)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x)[:, :, 0, 0], model(x), rtol=1e-4, atol=1e-5)


def test_images_are_resized_to_the_nearest_grid_of_patches_of_14_pixels(tmp_path, caplog):
    backbone = build(tiny(tmp_path, *DINOV2), size=(256, 128)).eval()
    assert backbone.grid == (18, 9)
    assert "252 x 126" in caplog.text and "18 x 9" in caplog.text
    x = torch.randn(1, 3, 256, 128)
    small = torch.nn.functional.interpolate(x, size=(252, 126), mode="bilinear")
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), backbone(small))


@pytest.mark.integration
def test_overlapping_patches_have_the_grid_of_transreid(tmp_path):
    core = build(
        "build_vit_backbone", "MODEL.BACKBONE.DEPTH", "deit_small", "MODEL.BACKBONE.FEAT_DIM", "384",
        "MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)", size=(256, 128),
    )  # fmt: skip
    name = tiny(tmp_path, "vit_base_patch16_224", {"embed_dim": 384, "depth": 12, "num_heads": 6})
    backbone = build(name, "MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)", size=(256, 128)).eval()
    assert backbone.grid == core.grid == (21, 10)
    backbone.load_state_dict({f"model.{key}": value for key, value in core.state_dict().items()})
    x = torch.randn(1, 3, 256, 128)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), core.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [DINOV3, EVA02, SIGLIP], ids=["dinov3", "eva02", "siglip"])
def test_overlapping_patches_change_the_grid_of_each_family(family, tmp_path):
    stride = {"eva02_tiny_patch14_224": "(10, 10)"}.get(family[0], "(12, 12)")
    backbone = build(tiny(tmp_path, *family), "MODEL.BACKBONE.STRIDE_SIZE", stride, size=(64, 40)).eval()
    assert backbone.grid == ((6, 3) if family == EVA02 else (5, 3))
    with torch.no_grad():
        assert backbone(torch.randn(1, 3, 64, 40)).shape == (1, 32, 1, 1)
        assert backbone(torch.randn(1, 3, 80, 40)).shape == (1, 32, 1, 1)  # another grid


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_side_information_is_added_to_all_tokens(family, tmp_path):
    name = tiny(tmp_path, *family)
    side = ("MODEL.BACKBONE.SIE_CAMERAS", "3", "MODEL.BACKBONE.SIE_VIEWS", "2", "MODEL.BACKBONE.SIE_COE", "2.0")
    backbone, plain = build(name, *side).eval(), build(name).eval()
    state = backbone.state_dict()
    row = state["sie_embed"][2 * 2 + 1]
    randomize(plain)
    plain_state = plain.state_dict()
    backbone.load_state_dict(plain_state | {"sie_embed": backbone.sie_embed})
    plain.model.norm_pre.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 2.0 * row,))
    x = torch.randn(2, 3, 64, 32)
    ids = {"camids": torch.tensor([2, 0]), "viewids": torch.tensor([1, 0])}
    with torch.no_grad():
        features = backbone(x, **ids)
        torch.testing.assert_close(features[:1], plain(x[:1]))
        assert not torch.allclose(features[1:], plain(x[1:]))
    with pytest.raises(ValueError, match="SIE_CAMERAS"):
        backbone(x)


def heads(name, *opts):
    cfg = config(name, "MODEL.HEADS.NAME", "JPMHead", "MODEL.HEADS.JPM.PARTS", "2", "MODEL.HEADS.NUM_CLASSES", "4",
                 "MODEL.HEADS.WITH_BNNECK", "True", "MODEL.LOSSES.NAME", "('CrossEntropyLoss',)", *opts)  # fmt: skip
    return build_model(cfg)


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_jpm_head_computes_the_last_block_of_shuffled_patches(family, tmp_path):
    name = tiny(tmp_path, *family)
    whole = randomize(build(name)).eval()
    torch.save(whole.state_dict(), tmp_path / "whole.pth")
    load = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "whole.pth"))
    model = heads(name, "MODEL.HEADS.EVAL_FEAT", "before", *load).eval()
    assert isinstance(model.heads, JPMHead)
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        tokens = model.backbone(x)
        embedding = model.heads(tokens)
        torch.testing.assert_close(embedding[:, :32], whole(x)[:, :, 0, 0], rtol=1e-4, atol=1e-5)
        # The local features, from timm's own block with the rotation of each shuffled patch.
        prefix, count = whole.prefix, whole.grid[0] * whole.grid[1]
        order = shuffle_patches(torch.arange(count).view(1, -1, 1), shift=5, groups=2).flatten()
        inner, rotation = whole.model, None
        if getattr(inner, "rope", None) is not None:
            rotation = inner.rope.get_embed(shape=whole.grid)
        for part in range(2):
            rows = order[part * (count // 2) : (part + 1) * (count // 2)]
            group = torch.cat((tokens[:, :prefix, :32], tokens[:, prefix:, :32][:, rows]), dim=1)
            options = {} if rotation is None else {"rope": rotation[rows]}
            output = inner.norm(inner.blocks[-1](group, **options))
            output = inner.attn_pool(output) if family == SIGLIP else inner.fc_norm(output)[:, 0]
            torch.testing.assert_close(
                embedding[:, 32 * (part + 1) : 32 * (part + 2)], output / 2, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_jpm_with_side_information_trains_all_parameters(family, tmp_path):
    model = heads(tiny(tmp_path, *family), "MODEL.BACKBONE.SIE_CAMERAS", "3")
    batch = {"images": torch.rand(4, 3, 64, 32) * 255, "targets": torch.tensor([0, 0, 1, 1])}
    sum(model(batch | {"camids": torch.tensor([0, 1, 2, 0])}).values()).backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == []


@pytest.mark.parametrize("head", ["EmbeddingHead", "JPMHead"])
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", [PLAIN, DINOV3, SIGLIP], ids=["plain", "dinov3", "siglip"])
def test_checkpointing_changes_neither_losses_nor_gradients(family, amp, head, tmp_path):
    name, results = tiny(tmp_path, *family), []
    for checkpointing in ("False", "True"):
        torch.manual_seed(0)
        model = heads(name, "MODEL.HEADS.NAME", head, "MODEL.BACKBONE.CHECKPOINTING", checkpointing,
                      "MODEL.BACKBONE.DROP_PATH_RATIO", "0.5")  # fmt: skip
        torch.manual_seed(2)
        batch = {"images": torch.rand(4, 3, 64, 32) * 255, "targets": torch.tensor([0, 0, 1, 1])}
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = sum(model(batch).values())
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_drop_path_and_dropout_of_config_are_those_of_the_model(tmp_path):
    name = tiny(tmp_path, *PLAIN)
    backbone = build(name, "MODEL.BACKBONE.DROP_PATH_RATIO", "0.2", "MODEL.BACKBONE.DROP_RATIO", "0.3",
                     "MODEL.BACKBONE.ATT_DROP_RATE", "0.4")  # fmt: skip
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in backbone.model.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2])
    assert backbone.pos_drop.p == 0.3 and isinstance(backbone.model.pos_drop, torch.nn.Identity)
    assert backbone.model.blocks[0].attn.attn_drop.p == 0.4 and backbone.model.blocks[0].mlp.drop1.p == 0.3


def dinov2_file(model, *, registers):
    """Return the state dict of a model with the names and shapes of DINOv2's program at 56 x 56."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["mask_token"] = torch.zeros(1, 32)
    if registers:
        state["register_tokens"] = state.pop("reg_token")
        row = torch.randn(1, 1, 32)
        state["cls_token"] = state["cls_token"] - row
        state["pos_embed"] = torch.cat((row, state["pos_embed"]), dim=1)
    return state


@pytest.mark.parametrize("wrapped", ["", "teacher.backbone.", "chunked"])
@pytest.mark.parametrize("family", [DINOV2, DINOV2_REG], ids=["dinov2", "registers"])
def test_files_of_dinov2_load_with_resized_positions(family, wrapped, tmp_path, caplog):
    reference = timm.create_model(family[0], num_classes=0, img_size=(56, 56), dynamic_img_size=True, **TINY).eval()
    randomize(reference)
    state = dinov2_file(reference, registers=family == DINOV2_REG)
    if wrapped == "chunked":
        state = {key.replace("blocks.", "blocks.0."): value for key, value in state.items()}
    if wrapped:
        state = {"teacher": {f"backbone.{key}": value for key, value in state.items()}}
    torch.save(state, tmp_path / "dinov2.pth")
    load = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "dinov2.pth"))
    backbone = build(tiny(tmp_path, *family), *load, size=(84, 42)).eval()
    assert "resized from 4 x 4 to 6 x 3" in caplog.text and "bicubic" in caplog.text
    x = torch.randn(2, 3, 84, 42)
    with torch.no_grad():
        expected = reference.forward_features(x)[:, 0]
        torch.testing.assert_close(backbone(x)[:, :, 0, 0], expected, rtol=1e-4, atol=1e-5)


def test_files_of_dinov3_load(tmp_path):
    reference = timm.create_model(DINOV3[0], num_classes=0, img_size=(64, 32), global_pool="token", **TINY).eval()
    randomize(reference)
    state = {}
    for key, value in reference.state_dict().items():
        key = key.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma").replace("reg_token", "storage_tokens")
        state[key] = value
    state |= {"mask_token": torch.zeros(1, 32), "rope_embed.periods": torch.ones(4)}
    for number in range(3):
        state[f"blocks.{number}.attn.qkv.bias"] = torch.zeros(96)
        state[f"blocks.{number}.attn.qkv.bias_mask"] = torch.zeros(96)
    torch.save(state, tmp_path / "dinov3.pth")
    load = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "dinov3.pth"))
    backbone = build(tiny(tmp_path, *DINOV3), *load).eval()
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x)[:, :, 0, 0], reference(x), rtol=1e-4, atol=1e-5)


def test_checkpoint_of_another_image_size_loads_with_resized_positions(tmp_path):
    name = tiny(tmp_path, *PLAIN)
    state = {f"backbone.{key}": value for key, value in build(name, size=(96, 48)).state_dict().items()}
    torch.save({"model": state}, tmp_path / "run.pth")
    load = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "run.pth"))
    backbone = build(name, *load)
    assert torch.equal(backbone.state_dict()["model.cls_token"], state["backbone.model.cls_token"])


def test_weights_in_the_folder_of_a_local_model_are_loaded(tmp_path, caplog):
    safetensors = pytest.importorskip("safetensors.torch")
    name = tiny(tmp_path, *PLAIN)
    reference = build(name)
    state = {key.removeprefix("model."): value.contiguous() for key, value in reference.state_dict().items()}
    safetensors.save_file(state, tmp_path / PLAIN[0] / "model.safetensors")
    backbone = build(name, "MODEL.BACKBONE.PRETRAIN", "True")
    assert "MODEL.PIXEL_MEAN" in caplog.text and "127.5" in caplog.text
    assert all(torch.equal(value, reference.state_dict()[key]) for key, value in backbone.state_dict().items())


def test_hub_names_are_resolved_by_timm(tmp_path, monkeypatch):
    folder = tiny(tmp_path, *PLAIN).removeprefix("timm/local-dir:")
    monkeypatch.setattr("timm.models._hub.download_from_hf", lambda model_id, filename, **_: f"{folder}/{filename}")
    backbone = build("timm/hf-hub:some/one")
    assert backbone.feature_dim == 32 and backbone.grid == (4, 2)


@pytest.mark.parametrize(
    "opts, match",
    [
        (("MODEL.BACKBONE.STRIDE_SIZE", "(20, 20)"), "STRIDE_SIZE"),
        (("INPUT.SIZE_TEST", "(8, 8)"), "INPUT.SIZE_TEST"),
        (("MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)", "INPUT.SIZE_TRAIN", "(15, 64)"), "INPUT.SIZE_TRAIN"),
    ],
)
def test_unsupported_options_raise(opts, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        build(tiny(tmp_path, *PLAIN), *opts)


def test_class_token_of_a_model_without_one_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL\.BACKBONE\.FEATURE"):
        build(tiny(tmp_path, *SIGLIP), "MODEL.BACKBONE.FEATURE", "class")


def test_folder_without_config_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(f"timm/local-dir:{tmp_path}")


@pytest.mark.parametrize("change", ["width", "depth", "patch"])
def test_file_of_another_width_depth_or_patch_size_raises(change, tmp_path):
    architecture = DINOV2[0] if change == "patch" else PLAIN[0]
    arguments = TINY | {"width": {"embed_dim": 64}, "depth": {"depth": 6}, "patch": {}}[change]
    size = (56, 56) if change == "patch" else (64, 64)
    other = timm.create_model(architecture, num_classes=0, img_size=size, **arguments)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    load = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "other.pth"))
    with pytest.raises(WeightsError, match=r"model: width 32, 3 blocks, patches of 16 x 16") as error:
        build(tiny(tmp_path, *PLAIN), *load)
    assert {"width": "width 64,", "depth": "6 blocks,", "patch": "14 x 14"}[change] in str(error.value)


@pytest.mark.integration
def test_swin_has_side_information_and_checkpointing():
    name, x = "timm/swin_tiny_patch4_window7_224", torch.randn(2, 3, 64, 32)
    backbone = build(name, "MODEL.BACKBONE.SIE_CAMERAS", "2", "MODEL.BACKBONE.CHECKPOINTING", "True")
    plain = build(name).eval()
    plain.load_state_dict({key: value for key, value in backbone.state_dict().items() if key != "sie_embed"})
    side = 3.0 * backbone.sie_embed.detach()[1]
    plain.model.patch_embed.register_forward_hook(lambda _, __, output: output + side)
    ids = torch.tensor([1, 1])
    with torch.no_grad():
        torch.testing.assert_close(backbone.eval()(x, camids=ids), plain(x))
    backbone.train()(x, camids=ids).sum().backward()
    assert backbone.sie_embed.grad.abs().sum() > 0 and all(layer.grad_checkpointing for layer in backbone.model.layers)


def test_side_information_of_a_convnet_raises():
    with pytest.raises(ConfigError, match="SIE_CAMERAS"):
        build("timm/test_resnet", "MODEL.BACKBONE.SIE_CAMERAS", "2")


@pytest.mark.integration
@pytest.mark.parametrize("family", [DINOV2_REG, DINOV3, SIGLIP], ids=["dinov2-registers", "dinov3", "siglip"])
def test_traced_model_computes_the_same_features(family, tmp_path):
    model = heads(tiny(tmp_path, *family)).eval()
    randomize(model)
    images = torch.rand(2, 3, 64, 32) * 255
    with torch.no_grad():
        traced = torch.jit.trace(model, images, check_trace=False)
        torch.testing.assert_close(traced(images), model(images), rtol=1e-4, atol=1e-5)
