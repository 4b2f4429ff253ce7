"""JPM head: patch shuffle, features, losses and loss weights."""

import pytest
import torch
from torch import nn

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import get_cfg, read_config
from fastamp.modeling import build_backbone, build_heads, build_losses, build_model
from fastamp.modeling.backbones.vit import DEPTHS, Depth
from fastamp.modeling.heads import EmbeddingHead, JPMHead
from fastamp.modeling.heads.jpm_head import shuffle_patches
from fastamp.modeling.losses.compute import compute_losses
from fastamp.utils.errors import ConfigError

TARGETS = torch.tensor([0, 0, 1, 1])


@pytest.fixture
def config(monkeypatch):
    """Function that creates a config with JPMHead; DEPTH base is patched to a small network."""
    monkeypatch.setitem(DEPTHS, "base", Depth(None, width=16, blocks=3, heads=2))

    def build(*opts):
        return read_config("", [
            "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.NAME", "build_vit_backbone", "MODEL.BACKBONE.DEPTH", "base",
            "MODEL.BACKBONE.FEAT_DIM", "16", "MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)",
            "MODEL.HEADS.NAME", "JPMHead", "MODEL.HEADS.NUM_CLASSES", "3", "MODEL.HEADS.WITH_BNNECK", "True",
            "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'TripletLoss')", "MODEL.LOSSES.TRI.HARD_MINING", "True",
            "INPUT.SIZE_TRAIN", "(64, 40)", "INPUT.SIZE_TEST", "(64, 40)", *opts,
        ])  # fmt: skip

    return build


def naive_shuffle(patches, shift, groups):
    """Shuffle a list of patches with a loop."""
    moved = patches[shift - 1 :] + patches[: shift - 1]
    if len(moved) % groups:
        moved.append(moved[-2])
    run = len(moved) // groups
    return [moved[group * run + index] for index in range(run) for group in range(groups)]


@pytest.mark.parametrize(
    "count, shift, groups", [(8, 5, 2), (210, 5, 2), (15, 8, 2), (12, 1, 3), (7, 3, 1), (11, 2, 3)]
)
def test_shuffle_patches_equals_naive_loop(count, shift, groups):
    patches = torch.arange(count).float()[None, :, None].expand(2, -1, 3)
    found = shuffle_patches(patches, shift=shift, groups=groups)
    assert torch.equal(found[0], found[1]) and torch.equal(found[..., 0], found[..., 2])
    assert found[0, :, 0].tolist() == naive_shuffle(list(range(count)), shift, groups)


def make(parts=4, **options):
    return JPMHead(
        last_block=nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
        branches=[EmbeddingHead(feat_dim=6, num_classes=3, pool_layer="Identity") for _ in range(1 + parts)],
        **options,
    )


def test_jpm_head_processes_each_patch_group_with_class_token():
    """The last block is replaced by a mean over tokens: each feature is the mean of a group and the class token."""

    class Mean(nn.Module):
        def forward(self, tokens):
            return tokens.mean(1, keepdim=True).expand_as(tokens)

    head = JPMHead(
        last_block=Mean(),
        branches=[EmbeddingHead(feat_dim=1, num_classes=3, pool_layer="Identity", with_bnneck=False) for _ in range(4)],
        rearrange=False,
    ).eval()
    tokens = torch.tensor([[100.0, 1, 2, 3, 4, 5, 6, 7]])[:, :, None]  # the seventh patch is dropped
    expected = torch.tensor([[128 / 8, 103 / 3 / 3, 107 / 3 / 3, 111 / 3 / 3]])
    torch.testing.assert_close(head(tokens), expected)


@pytest.mark.parametrize("eval_feat", ["before", "after"])
def test_jpm_head_evaluation_feature_concatenates_global_and_local_features(config, eval_feat):
    model = build_model(config("MODEL.HEADS.EVAL_FEAT", eval_feat)).eval()
    head = model.heads
    for branch in head.branches:
        branch.bottleneck[0].running_mean.normal_()
    tokens = torch.randn(2, 16, 16)
    with torch.no_grad():
        features = head(tokens)
        assert features.shape == (2, 80) and head.feature_dim == 80 and features.dtype == torch.float32
        order = naive_shuffle(list(range(1, 16)), 5, 2)
        raw = [head.b1(tokens)[:, 0]]
        raw += [head.b2(tokens[:, [0, *order[start : start + 3]]])[:, 0] for start in (0, 3, 6, 9)]
        if eval_feat == "after":
            raw = [
                branch.bottleneck(x[:, :, None, None]).flatten(1) for branch, x in zip(head.branches, raw, strict=True)
            ]
        expected = torch.cat([raw[0], *(part / 4 for part in raw[1:])], dim=1)
    torch.testing.assert_close(features, expected)


def test_jpm_head_blocks_are_copies_of_last_backbone_block(config):
    cfg = config()
    backbone = build_backbone(cfg)
    last = {name: value.clone() for name, value in backbone.blocks[2].state_dict().items()}
    nn.init.normal_(backbone.norm.weight)
    norm = backbone.norm.weight.clone()
    head = build_heads(cfg, backbone)
    assert len(backbone.blocks) == 2 and backbone(torch.zeros(1, 3, 64, 40)).shape == (1, 16, 16)
    for copied in (head.b1, head.b2):
        assert all(torch.equal(copied[0].state_dict()[name], value) for name, value in last.items())
        assert torch.equal(copied[1].weight, norm)
    assert head.b1[0].attn.qkv.weight is not head.b2[0].attn.qkv.weight


def test_jpm_head_global_and_local_losses_each_have_weight_one_half(config):
    cfg = config()
    model = build_model(cfg)
    images = torch.randint(256, (4, 3, 64, 40), dtype=torch.uint8)
    model.backbone.blocks[1].drop_path.eval()
    for block in (model.heads.b1[0], model.heads.b2[0]):
        block.drop_path.eval()
    found = model({"images": images, "targets": TARGETS})
    outputs = model.heads(model.feature_maps({"images": images}), TARGETS)
    weights, for_losses = zip(*outputs, strict=True)
    assert weights == (0.5, 0.125, 0.125, 0.125, 0.125)
    assert set(found) == {"loss_cls", "loss_triplet"}
    for name, loss in build_losses(cfg).items():
        values = [loss(output, TARGETS) for output in for_losses]
        assert found[name].item() == pytest.approx((0.5 * values[0] + 0.5 * sum(values[1:]) / 4).item(), rel=1e-5)


def test_loss_of_single_output_with_weight_1_equals_unweighted_loss():
    losses = build_losses(get_cfg())
    outputs = {"cls_outputs": torch.randn(4, 3), "features": torch.randn(4, 5)}
    plain = compute_losses(losses, outputs, TARGETS, gather=False)
    assert compute_losses(losses, [(1.0, outputs)], TARGETS, gather=False) == plain


@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_jpm_parameters_have_gradients_independent_of_checkpointing(config, checkpointing):
    model = build_model(config("MODEL.BACKBONE.CHECKPOINTING", str(checkpointing)))
    images = torch.randint(256, (4, 3, 64, 40), dtype=torch.uint8)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        sum(model({"images": images, "targets": TARGETS}).values()).backward()
    frozen = [f"heads.branches.{number}.bottleneck.0.bias" for number in range(5)]
    assert [name for name, p in model.named_parameters() if p.grad is None] == frozen
    if checkpointing:
        kept = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        model.backbone.checkpointing = model.heads.checkpointing = False
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            sum(model({"images": images, "targets": TARGETS}).values()).backward()
        assert all(p.grad is None or torch.equal(p.grad, kept[name]) for name, p in model.named_parameters())


def test_jpm_head_loads_checkpoint_with_another_number_of_classes(config):
    model, other = build_model(config()), build_model(config("MODEL.HEADS.NUM_CLASSES", "7"))
    report = load_model_state(other, model.state_dict(), source="own")
    assert report.other_shape == [f"heads.branches.{number}.weight" for number in range(5)]
    assert report.missing == report.dropped == report.renamed == []


def test_loading_jpm_weights_into_embedding_head_suggests_jpm_head(config):
    """As in TransReID's files, the state dict also contains the backbone's last block, which is not trained."""
    state = build_model(config()).state_dict()
    state |= {
        f"backbone.blocks.2.{name.removeprefix('heads.b1.0.')}": value
        for name, value in state.items()
        if "b1.0" in name
    }
    state |= {f"backbone.norm.{name}": state[f"heads.b1.1.{name}"] for name in ("weight", "bias")}
    model = build_model(config("MODEL.HEADS.NAME", "EmbeddingHead", "MODEL.HEADS.POOL_LAYER", "Identity"))
    report = load_model_state(model, state, source="x")
    assert any("JPMHead" in note for note in report.notes)


def test_jpm_head_raises_for_unsupported_backbone_patch_count_or_loss(config):
    with pytest.raises(ConfigError, match="MODEL.HEADS.NAME=JPMHead.*build_resnet_backbone"):
        build_model(config("MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.DEPTH", "18x",
                           "MODEL.BACKBONE.FEAT_DIM", "512"))  # fmt: skip
    with pytest.raises(ConfigError, match=r"MODEL\.HEADS\.JPM\.PARTS.* 4.* 3 "):
        make().eval()(torch.randn(1, 4, 6))
    for arch in ("Baseline", "MoCo"):
        with pytest.raises(ConfigError, match="CenterLoss.*JPMHead"):
            build_model(config("MODEL.META_ARCHITECTURE", arch, "MODEL.LOSSES.NAME", "CenterLoss"))


@pytest.mark.parametrize("other", [("MODEL.HEADS.NUM_CLASSES", "5"), ("MODEL.HEADS.NAME", "EmbeddingHead")])
def test_moco_discards_memory_bank_of_other_identities_or_another_head(config, other):
    moco = ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "8", "MODEL.WEIGHTS_MIN_MATCH", "0.5")
    state = build_model(config(*moco, *other)).state_dict()
    state["memory.queue_label"].fill_(2)
    model = build_model(config(*moco))
    report = load_model_state(model, state, source="test", min_match=0.5)
    assert "other identities" in "".join(report.notes) and (model.memory.queue_label == -1).all()
    state = build_model(config(*moco)).state_dict()
    state["memory.queue_label"].fill_(2)
    load_model_state(model, state, source="test")
    assert (model.memory.queue_label == 2).all()


@pytest.mark.parametrize(
    "arch, term, opts",
    [("MoCo", "loss_mb", ("MODEL.QUEUE_SIZE", "8")), ("Distiller", "loss_jsdiv", ("KD.EMA.ENABLED", "True"))],
)
def test_moco_and_distiller_use_global_feature_of_jpm_head(config, arch, term, opts):
    model = build_model(config("MODEL.META_ARCHITECTURE", arch, "MODEL.BACKBONE.DROP_PATH_RATIO", "0", *opts))
    captured = []
    model.heads.register_forward_hook(lambda head, args, outputs: captured.append((args[0], outputs[0][1])))
    losses = model({"images": torch.randint(256, (4, 3, 64, 40)), "targets": TARGETS})
    assert list(losses) == ["loss_cls", "loss_triplet", term] and losses[term].requires_grad
    tokens, main = captured[0]
    if arch == "MoCo":
        assert model.memory.queue.shape == (16, 8) and (model.memory.queue_label >= 0).sum() == 4
    torch.testing.assert_close(model.heads.logits(tokens), main["pred_class_logits"])
