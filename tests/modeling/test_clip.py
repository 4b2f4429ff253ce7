"""CLIP's image towers: features of CLIP-ReID's program, weights files, and bad input."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.torchscript_file import read_torchscript
from fastamp.config import get_cfg
from fastamp.modeling import build_model
from fastamp.modeling.backbones import build_backbone
from fastamp.modeling.backbones.clip_resnet import AttentionPool
from fastamp.modeling.infer_config import infer_config
from fastamp.utils.errors import ConfigError, WeightsError

REFERENCE = Path(__file__).parents[1] / "reference"
CASES = ("vit_clipreid", "vit_clipreid clip_file")


@pytest.fixture(scope="module", autouse=True)
def without_initialization():
    """Skip the weight initialization of linear layers, because the large models load other weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "reset_parameters", lambda self: nn.init.normal_(self.bias, std=0.1))
        yield


def config(*opts, name="vit", depth="tiny", size=(64, 32)):
    cfg = get_cfg()
    cfg.merge_from_list([
        "MODEL.BACKBONE.NAME", f"build_clip_{name}_backbone", "MODEL.BACKBONE.DEPTH", depth, "MODEL.DEVICE", "cpu",
        "MODEL.BACKBONE.DROP_PATH_RATIO", "0", "INPUT.SIZE_TRAIN", size, "INPUT.SIZE_TEST", size,
        "MODEL.HEADS.NUM_CLASSES", "4", "MODEL.BACKBONE.PROJECTION", "True", *opts,
    ])  # fmt: skip
    width = {"vit": {"tiny": (128, 64), "base": (768, 512)}, "resnet": {"tiny": (512, 64), "50x": (2048, 1024)}}
    map_width, projected = width[name][depth]
    cfg.MODEL.BACKBONE.FEAT_DIM = map_width + cfg.MODEL.BACKBONE.PROJECTION * projected
    return cfg


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_features_equal_the_original_program(case):
    expected = json.loads(gzip.decompress((REFERENCE / "foundation/clipreid_models.json.gz").read_bytes()))[case]
    arrays = np.load(REFERENCE / "foundation/clipreid_embeddings.npz")
    backbone = build_backbone(config(depth="base", size=tuple(expected["input_size"]))).eval()
    towers = ("visual.", "image_encoder.", "text_projection")
    state = reference_weights.state_dict(
        {name: shape for name, shape in expected["state_dict"].items() if name.startswith(towers)}
    )
    report = load_model_state(backbone, state, source="reference", backbone_prefix="")
    assert report.missing == [] and all(name.startswith("other.") for name in report.dropped)
    images = (reference_weights.images(expected["input_size"]) / 255 - 0.5) / 0.5
    with torch.no_grad():
        last, _, projected = backbone.features(images)
        features = backbone(images).flatten(1)
    assert reference_weights.difference(features, arrays[case]) < 1e-4
    assert reference_weights.difference(last, arrays[f"{case} last"]) < 1e-4
    assert reference_weights.difference(projected, arrays[f"{case} stage1_image"]) < 1e-4
    if f"{case} pos_embed" in arrays:
        assert any("resized from 14 x 14 to 16 x 8" in note for note in report.notes)
        assert reference_weights.difference(backbone.positional_embedding.data[:40], arrays[f"{case} pos_embed"]) < 1e-5


def test_attention_pooling_equals_multi_head_attention():
    pool = AttentionPool((4, 2), 128, 32)
    maps = torch.randn(3, 128, 4, 2)
    tokens = maps.flatten(2).permute(2, 0, 1)
    tokens = torch.cat([tokens.mean(0, keepdim=True), tokens]) + pool.positional_embedding[:, None]
    expected, _ = F.multi_head_attention_forward(
        query=tokens[:1], key=tokens, value=tokens, embed_dim_to_check=128, num_heads=2, in_proj_weight=None,
        in_proj_bias=torch.cat([pool.q_proj.bias, pool.k_proj.bias, pool.v_proj.bias]), bias_k=None, bias_v=None,
        add_zero_attn=False, dropout_p=0.0, out_proj_weight=pool.c_proj.weight, out_proj_bias=pool.c_proj.bias,
        use_separate_proj_weight=True, q_proj_weight=pool.q_proj.weight, k_proj_weight=pool.k_proj.weight,
        v_proj_weight=pool.v_proj.weight, need_weights=False,
    )  # fmt: skip
    torch.testing.assert_close(pool(maps), expected[0])


def test_resnet_features_are_means_of_stages_and_the_attention_pooling():
    backbone = build_backbone(config(name="resnet")).eval()
    images = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        third, last, pooled = backbone.features(images)
        features = backbone(images)
        maps = backbone._maps(images)[1]
    assert maps.shape == (2, 512, 4, 2) and third.shape == (2, 256)
    torch.testing.assert_close(features.flatten(1), torch.cat([maps.mean((2, 3)), pooled], 1))
    torch.testing.assert_close(last, maps.mean((2, 3)))


@pytest.mark.integration
def test_resnet_equals_timm_under_the_same_weights():
    timm = pytest.importorskip("timm")
    other = timm.create_model("resnet50_clip", pretrained=False, num_classes=0).eval()
    options = ("MODEL.BACKBONE.PROJECTION", "False", "MODEL.BACKBONE.LAST_STRIDE", "2")
    backbone = build_backbone(config(*options, name="resnet", depth="50x")).eval()
    names = {"shortcut.conv.conv": "downsample.0", "shortcut.conv.bn": "downsample.1", "stem.": ""}
    parts = [(n, f"conv{n}{kind}", part) for kind in ("_1x1", "_kxk", "") for n in (1, 2, 3) for part in ("conv", "bn")]
    names |= {f"{module}.{part}": f"{part}{n}" for n, module, part in parts}
    names |= {f"stages.{n}.": f"layer{n + 1}." for n in range(4)}
    state = {}
    for key, value in other.state_dict().items():
        for theirs, ours in names.items():
            key = key.replace(theirs, ours)
        state[key] = reference_weights.fill(key, tuple(value.shape))
    weights = {key: value for key, value in state.items() if not key.startswith("head.")}
    backbone.load_state_dict(weights)
    other.load_state_dict(dict(zip(other.state_dict(), state.values(), strict=True)))
    images = reference_weights.images((64, 32)) / 255
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), other.forward_features(images), rtol=1e-4, atol=1e-4)


def test_side_embedding_is_added_to_the_class_token_only():
    backbone = build_backbone(config("MODEL.BACKBONE.SIE_CAMERAS", "3", "MODEL.BACKBONE.SIE_VIEWS", "2")).eval()
    assert backbone.sie_embed.shape == (6, 1, 128)
    images, cameras, views = torch.randn(2, 3, 64, 32), torch.tensor([0, 2]), torch.tensor([1, 0])
    found = backbone.add_side_information(torch.zeros(2, 1, 128), cameras, views)
    torch.testing.assert_close(found[:, 0], 3.0 * backbone.sie_embed[[1, 4], 0])
    seen = []
    backbone.ln_pre.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    backbone(images, cameras, views)
    backbone.sie_embed.data.add_(1)
    backbone(images, cameras, views)
    change = (seen[1] - seen[0]).abs().amax(2)
    assert (change[:, 0] > 2.9).all() and (change[:, 1:] == 0).all()
    with pytest.raises(ValueError, match="camids"):
        backbone(images)


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_overlap_other_sizes_and_training(name):
    opts = ("MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)", "MODEL.BACKBONE.CHECKPOINTING", "True") if name == "vit" else ()
    model = build_model(config(*opts, name=name))
    if name == "vit":
        assert model.backbone.grid == (5, 2)
    losses = model({"images": torch.rand(4, 3, 64, 32) * 255, "targets": torch.tensor([0, 0, 1, 1])})
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in model.backbone.parameters())
    assert model.eval()(torch.rand(2, 3, 96, 48)).shape == (2, model.backbone.feature_dim)


def clip_state(name="vit", grid=(2, 2)):
    """State dict of a tiny CLIP file in half precision: the image tower and some text tensors."""
    size = (16 * grid[0], 16 * grid[1])
    tower = build_backbone(config(name=name, size=size)).state_dict()
    state = {f"visual.{key}": value.half() if value.is_floating_point() else value for key, value in tower.items()}
    text = {"transformer.resblocks.0.ln_1.weight": torch.ones(128), "token_embedding.weight": torch.zeros(5, 128)}
    return state | text | {"logit_scale": torch.tensor(4.6)}


@pytest.mark.parametrize("name", ["vit", "resnet"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_files_of_clip_load_as_pretrained_backbone(tmp_path, name, suffix, caplog):
    state, path = clip_state(name), tmp_path / f"clip{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    backbone = build_backbone(
        config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path), name=name)
    )
    assert "resized from 2 x 2 to 4 x 2" in caplog.text
    torch.testing.assert_close(backbone.conv1.weight.data, state["visual.conv1.weight"].float())
    assert backbone.conv1.weight.dtype == torch.float32


def transformers_state(tower):
    """Name the state dict of an image tower as Hugging Face's transformers does."""
    names = {
        "class_embedding": "embeddings.class_embedding", "conv1.weight": "embeddings.patch_embedding.weight",
        "positional_embedding": "embeddings.position_embedding.weight", "ln_pre": "pre_layrnorm",
        "ln_post": "post_layernorm", "transformer.resblocks": "encoder.layers", "attn.out_proj": "self_attn.out_proj",
        "ln_1": "layer_norm1", "ln_2": "layer_norm2", "c_fc": "fc1", "c_proj": "fc2",
    }  # fmt: skip
    state = {"vision_model.embeddings.position_ids": torch.arange(len(tower["positional_embedding"]))[None]}
    for key, value in tower.items():
        block, packed, kind = key.partition("attn.in_proj_")
        parts = {
            f"{block}self_attn.{part}_proj.{kind}": weight for part, weight in zip("qkv", value.chunk(3), strict=True)
        }
        for name, weight in parts.items() if packed else [(key, value)]:
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            state[f"vision_model.{name}"] = weight.clone()
    if "proj" in tower:
        state["visual_projection.weight"] = state.pop("vision_model.proj").t().contiguous()
    return state


@pytest.mark.parametrize("projection", [True, False])
@pytest.mark.parametrize("model", ["CLIPModel", "CLIPVisionModelWithProjection", "CLIPVisionModel"])
def test_files_of_transformers_load_to_equal_outputs(tmp_path, projection, model):
    options = ("MODEL.BACKBONE.PROJECTION", str(projection))
    source = build_backbone(config(*options)).eval()
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.1)
    state = transformers_state(source.state_dict())
    if model == "CLIPVisionModel":  # of transformers 5
        state = {key.removeprefix("vision_model."): value for key, value in state.items()}
    elif model == "CLIPModel":
        names = ("text_model.encoder.layers.0.self_attn.q_proj.weight", "text_model.final_layer_norm.weight")
        state |= {name: torch.ones(3, 3) for name in (*names, "text_projection.weight", "logit_scale")}
    save_file(state, tmp_path / "model.safetensors")
    pretrained = (
        "MODEL.BACKBONE.PRETRAIN",
        "True",
        "MODEL.BACKBONE.PRETRAIN_PATH",
        str(tmp_path / "model.safetensors"),
    )
    loaded = build_backbone(config(*options, *pretrained)).eval()
    images = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), source(images), rtol=0, atol=0)
    keys = infer_config(state, "model.safetensors")
    found = [keys.get(f"MODEL.BACKBONE.{name}", "False") for name in ("NAME", "DEPTH", "PROJECTION")]
    assert found == ["build_clip_vit_backbone", "tiny", str(projection)]


def test_incomplete_attention_of_a_transformers_file_is_missing():
    source = build_backbone(config())
    state = transformers_state(source.state_dict())
    del state["vision_model.encoder.layers.3.self_attn.k_proj.bias"]
    report = load_model_state(source, state, source="file", backbone_prefix="")
    assert report.missing == ["transformer.resblocks.3.attn.in_proj_bias"]


def test_torchscript_archive_is_read_without_its_code(tmp_path):
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.visual = nn.Sequential(nn.Conv2d(3, 4, 3).half(), nn.BatchNorm2d(4))
            self.logit_scale = nn.Parameter(torch.tensor(2.5))

        def forward(self, x):
            return x * self.logit_scale

    tower = Tower().eval()
    torch.jit.save(torch.jit.script(tower), tmp_path / "clip.pt")
    found, expected = read_torchscript(tmp_path / "clip.pt"), tower.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in expected.items())
    torch.save(expected, tmp_path / "plain.pth")
    (tmp_path / "damaged.pt").write_bytes((tmp_path / "clip.pt").read_bytes()[:500])
    for name in ("plain.pth", "damaged.pt", "missing.pt"):
        with pytest.raises(WeightsError, match="TorchScript"):
            read_torchscript(tmp_path / name)


def test_bad_input(tmp_path):
    torch.save(clip_state(), tmp_path / "clip.pth")
    weights = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "clip.pth"))
    with pytest.raises(WeightsError, match=r"clip\.pth(.|\n)*class_embedding"):
        build_backbone(config(*weights, depth="base"))
    with pytest.raises(WeightsError, match=r"clip\.pth(.|\n)*conv1\.weight"):
        build_backbone(config(*weights, name="resnet"))
    with pytest.raises(ConfigError, match=r"INPUT\.SIZE_TRAIN.*\(64, 8\).* 16 x 16"):
        build_backbone(config(size=(64, 8)))
    with pytest.raises(ConfigError, match="JPMHead"):
        build_model(config("MODEL.HEADS.NAME", "JPMHead"))
