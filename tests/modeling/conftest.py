"""Fixtures of the tests of models."""

import pytest
from torch import nn


@pytest.fixture(scope="module")
def without_initialization():
    """Skip the weight initialization of large models, because the tests load other weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.init, "trunc_normal_", lambda tensor, **options: tensor)
        yield
