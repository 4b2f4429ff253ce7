"""float32 regions selected by decorator, class attribute and pattern, in training and evaluation."""

import copy
import pickle

import pytest
import tiny
import torch
from torch import nn

from fastamp.amp import apply_force_fp32, force_fp32, to_float32
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_force_fp32_computes_in_float32_in_every_gradient_mode(mode, dtype):
    @force_fp32
    def product(x, y):
        return x @ y

    x = torch.randn(8, 8)
    with MODES[mode](), torch.autocast("cpu", dtype=dtype):
        low = x @ x
        inside = product(x.to(dtype), x.to(dtype))
        after = x @ x
    assert low.dtype == after.dtype == dtype  # autocast is enabled again after the region
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, x.to(dtype).float() @ x.to(dtype).float())


def test_force_fp32_avoids_float16_overflow():
    def cube(x):
        return x.pow(3)

    x = torch.full((4,), 41.0, dtype=torch.float16)
    assert torch.isinf(cube(x)).all()  # the negative control
    torch.testing.assert_close(force_fp32(cube)(x), torch.full((4,), 41.0**3))


def test_to_float32_casts_nested_tensors_and_keeps_float64():
    half = torch.ones(2, dtype=torch.float16)
    cast = to_float32({"a": [half, (half, 3)], "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(1).long()})
    assert cast["a"][0].dtype == cast["a"][1][0].dtype == torch.float32
    assert cast["a"][1][1] == 3
    assert cast["b"].dtype == torch.float64
    assert cast["c"].dtype == torch.int64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x))


def output_dtypes(model):
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, i, out, name=name: seen.__setitem__(name, out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 4))
    return seen


@pytest.mark.parametrize(
    "patterns, forced",
    [([], set()), (["second.*"], {"second.0"}), (["Linear"], {"first", "second.0"}), (["second"], {"second.0"})],
)
def test_force_fp32_patterns_match_module_names_and_class_names(patterns, forced):
    model = Net()
    keys = list(model.state_dict())
    apply_force_fp32(model, patterns)
    model = copy.deepcopy(model)
    dtypes = output_dtypes(model)
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == forced
    assert list(model.state_dict()) == keys


def test_float32_regions_survive_pickling_and_patched_forward():
    model = Net()
    model.first.forward = model.first.forward
    apply_force_fp32(model, ["second.*", "first"])
    assert output_dtypes(model) == {"first": torch.float32, "second.0": torch.float32}
    plain = Net()
    apply_force_fp32(plain, ["second.*"])
    again = pickle.loads(pickle.dumps(plain))
    assert output_dtypes(again) == {"first": torch.bfloat16, "second.0": torch.float32}


def test_class_attribute_force_fp32_makes_a_module_a_float32_region():
    class Sensitive(nn.Linear):
        force_fp32 = True

    model = nn.Sequential(Sensitive(4, 4))
    assert apply_force_fp32(model, []) == ["0"]
    assert output_dtypes(model) == {"0": torch.float32}


def test_force_fp32_pattern_without_a_match_suggests_nearest_module_name():
    with pytest.raises(ConfigError, match=r"FORCE_FP32.*'secnd'.*Did you mean 'second'"):
        apply_force_fp32(Net(), ["secnd"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("patterns", [["backbone.4"], ["Conv2d"], ["backbone", "heads"]])
def test_force_fp32_changes_features_only_by_rounding(tmp_path, dtype, patterns):
    """The model does not overflow, so its features with and without float32 regions must almost agree in all modes."""
    cfg = tiny.tiny_config(tmp_path, "MODEL.HEADS.NUM_CLASSES", "4")
    images = torch.randint(256, (16, 3, 64, 32), dtype=torch.uint8)

    def features(patterns, dtype):
        torch.manual_seed(0)
        model = build_model(cfg)
        apply_force_fp32(model, patterns)
        model({"images": images, "targets": torch.arange(16) % 4})  # sets the running statistics
        model.eval()
        modes = []
        for mode in MODES.values():
            with mode(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                modes.append(model({"images": images}).float().detach().clone())
        assert all(torch.equal(modes[0], other) for other in modes[1:])
        return modes[0]

    reference, free, forced = features([], torch.float32), features([], dtype), features(patterns, dtype)
    scale = reference.abs().max()
    tolerance = 0.04 if dtype == torch.bfloat16 else 0.005
    assert (free - forced).abs().max() < tolerance * scale
    assert (forced - reference).abs().max() < tolerance * scale
    assert not torch.equal(free, forced)  # the negative control: forcing does something
    if patterns == ["backbone", "heads"]:
        assert torch.equal(forced, reference)
