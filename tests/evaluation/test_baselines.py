"""Tests of the baselines: equality with naive loops, and invariances."""

import colorsys

import pytest
import torch
import torch.nn.functional as F

from fastamp.evaluation.baselines import color_histogram, raw_pixels


def noise(count=3, height=24, width=12, seed=0):
    return torch.randint(0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(seed)).byte()


def flat(red, green, blue, height=24, width=12):
    return torch.tensor([red, green, blue], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, height, width).clone()


@pytest.mark.parametrize(("baseline", "size"), [(raw_pixels, 1536), (color_histogram, 864)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_baseline_features_are_independent_of_other_images_in_the_batch(baseline, size, dtype):
    images = noise().to(dtype)
    before = images.clone()
    features = baseline(images)
    assert features.shape == (3, size)
    assert features.dtype == torch.float32
    assert torch.equal(images, before)
    torch.testing.assert_close(features[1:2], baseline(images[1:2]))
    assert baseline(images[:0]).shape == (0, size)


@pytest.mark.parametrize("baseline", [raw_pixels, color_histogram])
@pytest.mark.parametrize("shape", [(3, 24, 12), (2, 2, 24, 12), (2, 5, 24, 12)])
def test_baselines_raise_if_image_shape_is_wrong(baseline, shape):
    with pytest.raises(ValueError):
        baseline(torch.zeros(shape))


@pytest.mark.parametrize("baseline", [raw_pixels, color_histogram])
def test_baseline_features_ignore_a_fourth_image_channel(baseline):
    images = noise()
    assert torch.equal(baseline(torch.cat((images, noise(seed=1)[:, :1]), dim=1)), baseline(images))


def test_baseline_features_of_gray_image_equal_those_of_gray_rgb_image():
    images = noise()[:, :1]
    assert torch.equal(color_histogram(images), color_histogram(images.expand(-1, 3, -1, -1)))
    features = raw_pixels(images)
    assert features.shape == (3, 512)
    torch.testing.assert_close(features.repeat(1, 3), raw_pixels(images.expand(-1, 3, -1, -1)))


def test_raw_pixels_of_32x16_image_are_its_standardized_pixels():
    images = noise(height=32, width=16)
    pixels = images.double().flatten(2)
    expected = (pixels - pixels.mean(2, keepdim=True)) / pixels.std(2, keepdim=True, unbiased=False)
    torch.testing.assert_close(raw_pixels(images), expected.flatten(1).float(), rtol=1e-4, atol=1e-4)


def test_raw_pixels_are_invariant_to_gain_and_offset():
    images = noise().float()
    gain = torch.tensor([0.5, 0.7, 0.9]).view(1, 3, 1, 1)
    torch.testing.assert_close(raw_pixels(images * gain + 20), raw_pixels(images), rtol=1e-3, atol=1e-3)


def test_raw_pixels_of_constant_image_are_zero():
    assert torch.equal(raw_pixels(flat(9, 200, 31)), torch.zeros(1, 1536))


def test_color_histogram_equals_naive_loop():
    image = noise(count=1, height=13, width=5)
    expected = torch.zeros(6, 12, 3, 4, dtype=torch.float64)
    for row in range(13):
        for column in range(5):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[0, :, row, column].double() / 255).tolist())
            weight = torch.exp(torch.tensor(-0.5 * (((column + 0.5) / 5 - 0.5) / 0.22) ** 2, dtype=torch.float64))
            index = (min(int(hue * 12), 11), min(int(saturation * 3), 2), min(int(value * 4), 3))
            expected[(row * 6 // 13, *index)] += weight
    expected = (expected / expected.sum((1, 2, 3), keepdim=True) / 6).sqrt().flatten()[None]
    torch.testing.assert_close(color_histogram(image), expected.float(), rtol=1e-4, atol=1e-5)


def test_color_histograms_have_unit_norm_and_similarities_in_0_to_1():
    features = color_histogram(noise(count=8))
    torch.testing.assert_close(features.norm(dim=1), torch.ones(8))
    similarity = features @ features.t()
    assert similarity.min() >= 0 and similarity.max() <= 1 + 1e-5


def test_color_histogram_is_invariant_to_mirroring_but_not_to_swapped_stripes():
    images = noise(count=1)
    mirrored = color_histogram(images.flip(3))
    torch.testing.assert_close(mirrored, color_histogram(images))
    enlarged = F.interpolate(images.float(), scale_factor=3, mode="nearest")
    assert (color_histogram(enlarged) * color_histogram(images)).sum() > 0.99

    upright = torch.cat((flat(200, 20, 20, 12), flat(20, 20, 200, 12)), dim=2)
    similarity = color_histogram(upright) @ color_histogram(torch.cat((upright, upright.flip(2)))).t()
    torch.testing.assert_close(similarity, torch.tensor([[1.0, 0.0]]))


def test_color_histograms_of_black_gray_and_white_images_are_orthogonal():
    features = color_histogram(torch.cat((flat(0, 0, 0), flat(128, 128, 128), flat(255, 255, 255))))
    assert torch.isfinite(features).all()
    torch.testing.assert_close(features @ features.t(), torch.eye(3))


def test_color_histogram_raises_if_image_has_fewer_rows_than_stripes():
    with pytest.raises(ValueError, match="6.*5"):
        color_histogram(noise(height=5))
