"""CLIP-ReID equals plain formulas under the state dict of its program: both towers, strides, cameras and views."""

import pytest
import torch
import torch.nn.functional as F

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.config.projects import import_project
from fastamp.modeling import build_model

CLASSES, CAMERAS, VIEWS, WEIGHT, PATCH = 6, 3, 2, 2.5, 16
TARGETS = [0, 4, 0, 4]


@pytest.fixture(autouse=True, scope="module")
def project(unregistered):
    import_project("CLIPReID")


def layer_norm(x, state, name):
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return centered / (variance + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]


def block(x, state, name, heads, causal=False):
    """One residual block; tokens x (N, D) of one image."""
    normal = layer_norm(x, state, f"{name}.ln_1")
    packed = normal @ state[f"{name}.attn.in_proj_weight"].T + state[f"{name}.attn.in_proj_bias"]
    queries, keys, values = packed.chunk(3, dim=1)
    width, mixed = x.shape[1] // heads, []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = queries[:, part] @ keys[:, part].T / width**0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        mixed.append(scores.softmax(1) @ values[:, part])
    x = x + torch.cat(mixed, 1) @ state[f"{name}.attn.out_proj.weight"].T + state[f"{name}.attn.out_proj.bias"]
    hidden = layer_norm(x, state, f"{name}.ln_2") @ state[f"{name}.mlp.c_fc.weight"].T + state[f"{name}.mlp.c_fc.bias"]
    hidden = hidden / (1 + (-1.702 * hidden).exp())
    return x + hidden @ state[f"{name}.mlp.c_proj.weight"].T + state[f"{name}.mlp.c_proj.bias"]


def vit(image, state, stride, row):
    """Features last, img and proj of one image (3, H, W); ``row`` of cv_embed, or None."""
    rows, columns = ((length - PATCH) // stride + 1 for length in image.shape[1:])
    kernel, tokens = state["image_encoder.conv1.weight"].flatten(1), [state["image_encoder.class_embedding"]]
    if row is not None:
        tokens[0] = tokens[0] + WEIGHT * state["cv_embed"][row]
    for y in range(rows):
        for x in range(columns):
            patch = image[:, y * stride : y * stride + PATCH, x * stride : x * stride + PATCH]
            tokens.append(kernel @ patch.flatten())
    x = torch.stack(tokens) + state["image_encoder.positional_embedding"]
    x = layer_norm(x, state, "image_encoder.ln_pre")
    for number in range(4):
        last, x = x, block(x, state, f"image_encoder.transformer.resblocks.{number}", heads=2)
    image_feature = layer_norm(x[0], state, "image_encoder.ln_post")
    return last[0], image_feature, image_feature @ state["image_encoder.proj"]


def conv(x, state, name, norm, stride=1):
    weight = state[f"image_encoder.{name}.weight"]
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2)
    mean, variance = (state[f"image_encoder.{norm}.running_{kind}"][:, None, None] for kind in ("mean", "var"))
    scale, shift = (state[f"image_encoder.{norm}.{kind}"][:, None, None] for kind in ("weight", "bias"))
    return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


def bottleneck(x, state, name, stride):
    out = conv(x, state, f"{name}.conv1", f"{name}.bn1").relu()
    out = F.avg_pool2d(conv(out, state, f"{name}.conv2", f"{name}.bn2").relu(), stride)
    out = conv(out, state, f"{name}.conv3", f"{name}.bn3")
    if f"image_encoder.{name}.downsample.0.weight" in state:
        x = conv(F.avg_pool2d(x, stride), state, f"{name}.downsample.0", f"{name}.downsample.1")
    return (out + x).relu()


def resnet(image, state, stride, row):
    """Features last, img and proj of one image in evaluation mode; ``stride`` and ``row`` have no effect."""
    x = image[None]
    for number in (1, 2, 3):
        x = conv(x, state, f"conv{number}", f"bn{number}", stride=2 if number == 1 else 1).relu()
    x, maps = F.avg_pool2d(x, 2), []
    for stage, step in enumerate((1, 2, 2, 1), start=1):
        number = 0
        while f"image_encoder.layer{stage}.{number}.conv1.weight" in state:
            x = bottleneck(x, state, f"layer{stage}.{number}", step if number == 0 else 1)
            number += 1
        maps.append(x)
    pool = {name.removeprefix("image_encoder.attnpool."): value for name, value in state.items() if "attnpool" in name}
    tokens = x[0].flatten(1).T
    tokens = torch.cat([tokens.mean(0, keepdim=True), tokens]) + pool["positional_embedding"]
    query, keys, values = (
        rows @ pool[f"{name}_proj.weight"].T + pool[f"{name}_proj.bias"]
        for name, rows in (("q", tokens[:1]), ("k", tokens), ("v", tokens))
    )
    mixed = [
        (query[:, part : part + 64] @ keys[:, part : part + 64].T / 8).softmax(1) @ values[:, part : part + 64]
        for part in range(0, tokens.shape[1], 64)
    ]
    projection = torch.cat(mixed, 1) @ pool["c_proj.weight"].T + pool["c_proj.bias"]
    return maps[2].mean((2, 3))[0], maps[3].mean((2, 3))[0], projection[0]


def text_features(state):
    features = []
    for vectors in state["prompt_learner.cls_ctx"]:
        prefix, suffix = (state[f"prompt_learner.token_{name}"][0] for name in ("prefix", "suffix"))
        x = torch.cat([prefix, vectors, suffix]) + state["text_encoder.positional_embedding"]
        x = block(x, state, "text_encoder.transformer.resblocks.0", heads=1, causal=True)
        features.append(layer_norm(x[11], state, "text_encoder.ln_final") @ state["text_encoder.text_projection"])
    return torch.stack(features)


def smoothed_cross_entropy(logits, targets):
    target = F.one_hot(targets, CLASSES).double() * 0.9 + 0.1 / CLASSES
    return -(target * logits.log_softmax(1)).sum(1).mean()


def batch_hard_triplet(features, targets):
    distance = torch.stack([(features - feature).square().sum(1).sqrt() for feature in features])
    same = targets[:, None] == targets[None]
    hardest = distance.masked_fill(~same, -1).amax(1), distance.masked_fill(same, float("inf")).amin(1)
    return (hardest[0] - hardest[1] + 0.3).clamp_min(0).mean()


def batch_norm(features, state, name, *, training):
    """The feature's batch statistics in training mode, the running ones otherwise."""
    mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    if training:
        mean, variance = features.mean(0), features.var(0, unbiased=False)
    return (features - mean) / (variance + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]


def program_state(model):
    """State dict of the model under the names of CLIP-ReID's program, with random values, float32."""
    generator = torch.Generator().manual_seed(0)
    names = {"heads.weight": "classifier.weight", "heads.weight_proj": "classifier_proj.weight"}
    names |= {"backbone.sie_embed": "cv_embed"}
    state = {}
    for name, value in model.state_dict().items():
        if name in ("text_features", "prompt_learner.identities"):
            continue
        if value.is_floating_point():
            # Small enough for rounding errors in float32, large enough that exchanged parameters change the result.
            noise = (0.3 if value.dim() < 2 else value[0].numel() ** -0.5) * torch.randn(
                value.shape, generator=generator
            )
            value = 0.5 + noise.abs() if name.endswith("running_var") else value + noise
        name = names.get(name, name).replace("backbone.", "image_encoder.", 1)
        state[name.removeprefix("heads.")] = value[:, 0] if name == "cv_embed" else value
    return state


CASES = [
    ("vit", 16, 0, 0), ("vit", 12, 0, 0), ("vit", 12, CAMERAS, 0), ("vit", 16, 0, VIEWS), ("vit", 12, CAMERAS, VIEWS),
    ("resnet", 16, 0, 0), ("resnet", 16, CAMERAS, 0),
]  # fmt: skip


@pytest.mark.parametrize(("tower", "stride", "cameras", "views"), CASES)
@pytest.mark.parametrize("size", [(64, 32), (48, 96)])
def test_model_equals_plain_formulas(tower, stride, cameras, views, size):
    width = {"vit": 192, "resnet": 576}[tower]
    cfg = read_config("CLIPReID/demo", [
        "MODEL.DEVICE", "cpu", "SOLVER.AMP", "off", "INPUT.SIZE_TRAIN", str(size), "INPUT.SIZE_TEST", str(size),
        "CLIPREID.TEXT_BLOCKS", "1", "MODEL.BACKBONE.NAME", f"build_clip_{tower}_backbone", "MODEL.LOSSES.CE.SCALE",
        "0.25", "MODEL.BACKBONE.FEAT_DIM", str(width), "MODEL.BACKBONE.STRIDE_SIZE", str((stride, stride)),
        "MODEL.BACKBONE.SIE_CAMERAS", str(cameras), "MODEL.BACKBONE.SIE_VIEWS", str(views), "MODEL.BACKBONE.SIE_COE",
        str(WEIGHT), "MODEL.HEADS.NUM_CLASSES", str(CLASSES), "MODEL.BACKBONE.DROP_PATH_RATIO", "0",
        "MODEL.HEADS.EVAL_FEAT", "before",
    ])  # fmt: skip
    model = build_model(cfg)
    state = program_state(model)
    if cameras and tower == "resnet":
        state["cv_embed"] = torch.randn(cameras, 512)
    report = load_model_state(model, state, source="file")
    assert report.dropped == report.other_shape == []
    assert set(report.missing) == {"text_features", "prompt_learner.identities"}
    state = {name: value.double() for name, value in state.items()}

    images, camids, viewids = torch.rand(4, 3, *size) * 255, torch.tensor([0, 2, 1, 0]), torch.tensor([1, 0, 1, 1])
    batch = {"images": images, "targets": torch.tensor(TARGETS), "camids": camids, "viewids": viewids}
    rows = camids * max(views, 1) + viewids if cameras and views else camids if cameras else viewids
    with_side = (cameras or views) and tower == "vit"
    normal, encode = (images.double() - 127.5) / 127.5, {"vit": vit, "resnet": resnet}[tower]

    def features(side):
        found = [
            encode(image, state, stride, int(row) if side else None) for image, row in zip(normal, rows, strict=True)
        ]
        return [torch.stack(outputs) for outputs in zip(*found, strict=True)]

    last, image, projection = features(with_side)

    def close(found, expected):
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()

    model.eval()
    with torch.no_grad():
        close(model(batch), torch.cat([image, projection], 1))
        model.heads.eval_feat = "after"
        necks = [("bottleneck", image), ("bottleneck_proj", projection)]
        after = [batch_norm(features, state, name, training=False) for name, features in necks]
        close(model(batch), torch.cat(after, 1))
        close(model.prompt_image_features(batch), features(False)[2])
        model.update_text_features()
    texts = text_features(state)
    close(model.text_features, texts)
    if with_side:  # negative control: the embedding matters, and not for the features of stage 1
        assert (features(False)[2] - projection).abs().max() > 1e-2 * projection.abs().max()

    model.backbone.eval()  # the plain ResNet has running statistics only
    model.heads.train()
    model.training = True
    with torch.no_grad():
        losses = model(batch)
    targets = batch["targets"]
    necks = [("classifier", *necks[0]), ("classifier_proj", *necks[1])]
    logits = [batch_norm(x, state, neck, training=True) @ state[f"{name}.weight"].T for name, neck, x in necks]
    expected = {
        "loss_cls": 0.25 * sum(smoothed_cross_entropy(logit, targets) for logit in logits),
        "loss_triplet": sum(batch_hard_triplet(features, targets) for features in (last, image, projection)),
        "loss_i2t": smoothed_cross_entropy(projection @ texts.T, targets),
    }
    assert {name: float(value) for name, value in losses.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-3
    )
