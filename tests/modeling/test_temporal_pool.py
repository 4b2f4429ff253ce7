"""Temporal pooling: weights of frames, tracklets of several lengths, and the model in training and evaluation."""

import pytest
import torch
from tiny import tiny_config
from torch.nn import functional as F

from fastamp.modeling import build_model
from fastamp.modeling.heads import EmbeddingHead
from fastamp.modeling.heads.temporal_pool import TemporalAttention, TemporalAvgPool, pad_tracklets
from fastamp.utils.errors import ConfigError

TRACKLETS = torch.tensor([0, 0, 1, 2, 1, 0, 2, 2, 2, 3])  # frames of a tracklet need not be consecutive


def features(rows=10, dtype=torch.float32):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def model(tmp_path, *opts, pool="attention", classes="3"):
    options = ("MODEL.HEADS.TEMPORAL_POOL", pool, "MODEL.HEADS.NUM_CLASSES", classes, "DATALOADER.TRACKLET.FRAMES", "2")
    return build_model(tiny_config(tmp_path, *options, *opts))


def batch(tracklets, targets=None):
    images = torch.randint(256, (len(tracklets), 3, 64, 32), generator=torch.Generator().manual_seed(2))
    result = {"images": images.to(torch.uint8), "tracklet": torch.tensor(tracklets), "img_paths": list("abcdefgh")}
    result["img_paths"] = result["img_paths"][: len(tracklets)]
    return result if targets is None else result | {"targets": torch.tensor(targets)}


def test_frames_are_padded_to_the_longest_tracklet():
    frames, mask = pad_tracklets(features(), TRACKLETS)
    assert mask.tolist() == [[True] * n + [False] * (4 - n) for n in (3, 2, 4, 1)]
    for number in range(4):
        tracklet_frames = features()[number == TRACKLETS]
        assert (
            torch.equal(frames[number, : len(tracklet_frames)], tracklet_frames)
            and not frames[number, len(tracklet_frames) :].any()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_average_equals_the_mean_of_each_tracklet(dtype):
    x = features(dtype=dtype)
    expected = torch.stack([x[number == TRACKLETS].mean(0) for number in range(4)])
    torch.testing.assert_close(TemporalAvgPool(8, frames=2)(x, TRACKLETS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_equals_a_loop_over_tracklets(dtype):
    pool, x = TemporalAttention(8, frames=2, hidden=5).to(dtype), features(dtype=dtype)
    torch.nn.init.normal_(pool.score.weight)
    expected = []
    for number in range(4):
        tracklet_frames = x[number == TRACKLETS]
        hidden = F.relu(tracklet_frames @ pool.reduce.weight.T + pool.reduce.bias)
        padded = F.pad(hidden, (0, 0, 1, 1))
        kernel = pool.score.weight[0].T  # (3, hidden)
        scores = (
            torch.stack([(padded[t : t + 3] * kernel).sum() for t in range(len(tracklet_frames))]) + pool.score.bias
        )
        expected.append((scores.softmax(0)[:, None] * tracklet_frames).sum(0))
    torch.testing.assert_close(pool(x, TRACKLETS), torch.stack(expected))


def test_attention_starts_near_the_average():
    frames, mask = pad_tracklets(2 * torch.rand(10, 2048, generator=torch.Generator().manual_seed(0)), TRACKLETS)
    weights = TemporalAttention(2048, frames=2).weights(frames, mask)
    torch.testing.assert_close(weights, mask / mask.sum(1, keepdim=True), atol=0.1, rtol=0)


def test_attention_passes_gradients_and_weights_differ():
    pool, x = TemporalAttention(8, frames=2), features().requires_grad_()
    torch.nn.init.normal_(pool.score.weight)
    pool(x, TRACKLETS).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in pool.reduce.parameters())
    assert pool.score.weight.grad.abs().sum() > 0 and x.grad.abs().sum(1).min() > 0
    weights = pool.weights(*pad_tracklets(features(), TRACKLETS))
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    assert weights[2].std() > 1e-4


@pytest.mark.parametrize("pool", ["avg", "attention"])
def test_tracklet_of_one_frame_keeps_its_feature(pool):
    head = EmbeddingHead(feat_dim=8, num_classes=3, temporal_pool=pool, frames=2).eval()
    maps = features(4)[:, :, None, None]
    torch.testing.assert_close(head(maps, tracklets=torch.arange(4)), head(maps))


@pytest.mark.parametrize("pool", ["avg", "attention"])
def test_training_outputs_have_one_row_for_each_tracklet(pool):
    head = EmbeddingHead(feat_dim=8, num_classes=3, temporal_pool=pool, frames=2)
    maps, tracklets = features(6)[:, :, None, None], torch.tensor([0, 0, 1, 1, 2, 2])
    outputs = head(maps, torch.tensor([2, 0, 1]), tracklets)
    assert {name: len(value) for name, value in outputs.items()} == {
        "cls_outputs": 3, "pred_class_logits": 3, "features": 3
    }  # fmt: skip
    torch.testing.assert_close(outputs["features"], head.temporal_pool(features(6), tracklets))
    assert len(head.logits(maps, tracklets)) == 3


def test_head_without_temporal_pooling_has_the_same_state():
    assert EmbeddingHead(feat_dim=8, num_classes=3, temporal_pool="avg").state_dict().keys() == (
        EmbeddingHead(feat_dim=8, num_classes=3).state_dict().keys()
    )


@pytest.mark.parametrize("pool", ["avg", "attention"])
def test_model_trains_on_tracklets(tmp_path, pool):
    net = model(tmp_path, pool=pool, classes="3")
    losses = net(batch([4, 4, 9, 9, 4, 4], [1, 1, 2, 2, 1, 1]))
    assert set(losses) == {"loss_cls", "loss_triplet"} and all(torch.isfinite(loss) for loss in losses.values())
    sum(losses.values()).backward()
    head = net.heads(torch.randn(6, 16, 8, 4), torch.tensor([1, 2, 1]), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert len(head["features"]) == 3


@pytest.mark.parametrize("pool", ["avg", "attention"])
def test_evaluation_repeats_the_feature_of_a_tracklet(tmp_path, pool):
    net = model(tmp_path, pool=pool).eval()
    with torch.no_grad():
        found = net(batch([5, 8, 5, -1, 8, -1]))
        images = net(batch([5, 8, 5, -1, 8, -1])["images"])
    assert found.shape == (6, 16)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[4])
    torch.testing.assert_close(found[[3, 5]], images[[3, 5]])  # without a tracklet: single images
    assert not torch.allclose(found[0], images[0])
    if pool == "avg":  # the neck is affine in evaluation mode
        torch.testing.assert_close(found[0], (images[0] + images[2]) / 2)


def test_columns_of_losses_have_one_value_for_each_tracklet(tmp_path):
    class ClothesLoss(torch.nn.Module):
        columns = ("clothes",)

        def forward(self, outputs, targets):
            assert outputs["clothes"].tolist() == [7, 8] and targets.tolist() == [1, 2]
            return outputs["features"].sum()

    net = model(tmp_path)
    net.losses["loss_clothes"] = ClothesLoss()
    net(batch([4, 4, 9, 9], [1, 1, 2, 2]) | {"clothes": torch.tensor([7, 7, 8, 8])})


def test_training_without_tracklets_is_an_error(tmp_path):
    images = {name: value for name, value in batch([0, 0, 1, 1], [0] * 4).items() if name != "tracklet"}
    with pytest.raises(ConfigError, match="TrackletSampler"):
        model(tmp_path)(images)


@pytest.mark.parametrize("tracklets", [[0, 1, 1, 2], [0, 0, 1]])
def test_batches_of_other_samplers_are_an_error(tmp_path, tracklets):
    with pytest.raises(ConfigError, match=r"TRACKLET.FRAMES.*\(2\)[^\n]*\n.*TrackletSampler"):
        model(tmp_path)(batch(tracklets, [0] * len(tracklets)))


@pytest.mark.parametrize(
    "opts",
    [
        ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "64"),
        ("MODEL.META_ARCHITECTURE", "Distiller", "KD.EMA.ENABLED", "True"),
    ],
)
def test_other_models_reject_temporal_pooling(tmp_path, opts):
    with pytest.raises(ConfigError, match=f"TEMPORAL_POOL=avg.*{opts[1]}"):
        model(tmp_path, *opts, pool="avg")
