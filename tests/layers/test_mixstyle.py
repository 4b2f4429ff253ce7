"""MixStyle: statistics against a naive loop, probability, evaluation mode, random state, and its use in a ResNet."""

import numpy as np
import pytest
import torch
from tiny import tiny_config

from fastamp.layers import MixStyle
from fastamp.layers.mixstyle import mix_styles
from fastamp.modeling import build_backbone

RESNET = ("MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM",
          "512", "MODEL.BACKBONE.NORM", "BN")  # fmt: skip


def test_styles_equal_a_naive_loop():
    maps, others, weights = torch.randn(4, 3, 5, 2) * 3 + 1, torch.tensor([2, 0, 3, 3]), torch.tensor([0.1, 0.7, 1, 0])
    found = mix_styles(maps, others, weights).numpy()
    for image in range(4):
        for channel in range(3):
            content, other = (maps[row, channel].double().numpy() for row in (image, others[image]))
            deviations = [np.sqrt(pixels.var(ddof=1) + 1e-6) for pixels in (content, other)]
            weight = float(weights[image])
            mean = weight * content.mean() + (1 - weight) * other.mean()
            deviation = weight * deviations[0] + (1 - weight) * deviations[1]
            expected = (content - content.mean()) / deviations[0] * deviation + mean
            np.testing.assert_allclose(found[image, channel], expected, rtol=1e-5, atol=1e-5)


def test_statistics_are_constants_for_the_gradient():
    maps = torch.randn(2, 1, 2, 2, requires_grad=True)
    mix_styles(maps, torch.tensor([1, 0]), torch.tensor([0.0, 0.0])).sum().backward()
    deviation = (maps.detach().var(dim=(2, 3), keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(maps.grad, (deviation.flip(0) / deviation).expand(2, 1, 2, 2))


def test_batches_are_mixed_with_the_given_probability_and_only_in_training():
    maps, mix = torch.randn(8, 4, 3, 3), MixStyle(probability=0.5)
    changed = [not torch.allclose(mix(maps), maps, atol=1e-4) for _ in range(200)]
    assert 70 < sum(changed) < 130  # 100 expected, standard deviation 7
    assert mix.eval()(maps) is maps
    torch.testing.assert_close(MixStyle(probability=0.0)(maps), maps)


def test_weights_are_those_of_the_beta_distribution():
    """Images with the styles 0 and 1 (means): the mixed mean is the weight, or 1 minus it."""
    maps = torch.cat([torch.zeros(2000, 1, 1, 2), torch.ones(2000, 1, 1, 2)])
    means = MixStyle(probability=1.0, alpha=0.1)(maps).mean((1, 2, 3))[:2000]
    mixed = means[means > 0]  # half of the images have a partner of the other style
    near = ((mixed < 0.1) | (mixed > 0.9)).float().mean()
    expected = torch.distributions.Beta(0.1, 0.1).sample((20000,))
    assert abs(near - ((expected < 0.1) | (expected > 0.9)).float().mean()) < 0.06 and abs(mixed.mean() - 0.5) < 0.06


def test_same_random_state_gives_the_same_styles():
    maps, mix = torch.randn(8, 4, 3, 3), MixStyle(probability=1.0)
    state = torch.get_rng_state()
    first = mix(maps)
    assert not torch.equal(mix(maps), first)
    torch.set_rng_state(state)
    assert torch.equal(mix(maps), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resnet_mixes_after_two_stages_with_the_same_weights(tmp_path, dtype):
    plain = build_backbone(tiny_config(tmp_path, *RESNET))
    mixed = build_backbone(tiny_config(tmp_path, *RESNET, "MODEL.BACKBONE.MIXSTYLE", "True"))
    assert list(mixed.state_dict()) == list(plain.state_dict())
    mixed.load_state_dict(plain.state_dict())
    shapes = []
    mixed.mixstyle.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[1:])))
    images = torch.randn(4, 3, 64, 32)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert torch.equal(mixed.eval()(images), plain.eval()(images))
        mixed.train()(images)
    assert shapes[-2:] == [(64, 16, 8), (128, 8, 4)]


def test_other_backbones_warn(tmp_path, caplog):
    opts = ("MODEL.BACKBONE.NAME", "build_osnet_backbone", "MODEL.BACKBONE.DEPTH", "x0_25",
            "MODEL.BACKBONE.FEAT_DIM", "128")  # fmt: skip
    build_backbone(tiny_config(tmp_path, "MODEL.BACKBONE.MIXSTYLE", "True", *opts))
    assert "MODEL.BACKBONE.MIXSTYLE is ignored" in caplog.text
