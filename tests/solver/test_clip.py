"""Gradient clipping compared with ``torch.nn.utils``, and invalid settings."""

import itertools

import pytest
import torch
from torch import nn

from fastamp.config import get_cfg
from fastamp.solver import build_gradient_clipping
from fastamp.utils.errors import ConfigError


def config(*opts):
    cfg = get_cfg()
    cfg.merge_from_list(list(opts))
    return cfg


def test_gradient_clipping_matches_torch(subtests):
    # All gradients are smaller than 100.
    cases = itertools.product(["value", "norm", "global_norm"], [1.0, 2.0, float("inf")], [0.5, 100.0])
    for clip_type, norm_type, clip_value in cases:
        with subtests.test(clip_type=clip_type, norm_type=norm_type, clip_value=clip_value):
            cfg = config("SOLVER.CLIP_GRADIENTS", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", clip_type)
            cfg.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = clip_value
            cfg.SOLVER.CLIP_GRADIENTS.NORM_TYPE = norm_type
            torch.manual_seed(0)
            model = nn.Linear(4, 3)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            gradients = [p.grad.clone() for p in model.parameters()]
            before = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
            coefficient = build_gradient_clipping(cfg)(gradients, before)
            if clip_type == "value":
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            elif clip_type == "global_norm":
                nn.utils.clip_grad_norm_(model.parameters(), clip_value, norm_type)
            else:
                for parameter in model.parameters():
                    nn.utils.clip_grad_norm_(parameter, clip_value, norm_type)
            for ours, parameter in zip(gradients, model.parameters(), strict=True):
                torch.testing.assert_close(ours, parameter.grad)
            after = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
            torch.testing.assert_close(coefficient, after / before)


def test_gradient_clipping_is_none_if_disabled_and_rejects_zero_clip_value():
    assert build_gradient_clipping(get_cfg()) is None
    with pytest.raises(ConfigError, match="SOLVER.CLIP_GRADIENTS.CLIP_VALUE"):
        build_gradient_clipping(config("SOLVER.CLIP_GRADIENTS", "True", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "0"))
