"""Rows of sharded parameters in checkpoints, as one of three ranks sees them."""

import pytest
import torch
from torch import nn

from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.shards import full_state_form, load_full_state
from fastamp.layers import PartialFC
from fastamp.modeling.heads import ClasHead, EmbeddingHead
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError
from fastamp.utils.sharding import RowShard, divide_rows, replicated_tensors, row_shards

ROWS = torch.arange(14.0).view(7, 2)


@pytest.fixture
def model(monkeypatch):
    """Model of rank 1 of three ranks with seven classes."""
    monkeypatch.setattr(comm, "get_world_size", lambda: 3)
    monkeypatch.setattr(comm, "get_rank", lambda: 1)
    head = EmbeddingHead(feat_dim=2, num_classes=7, with_bnneck=False, sample_rate=1.0)
    return nn.ModuleDict({"backbone": nn.Linear(2, 2), "heads": head})


@pytest.mark.parametrize(("total", "ranks"), [(7, 3), (4, 4), (9, 2), (5, 1)])
def test_rows_are_divided_without_gaps(total, ranks):
    parts = [divide_rows(total, rank, ranks) for rank in range(ranks)]
    assert [row for start, count in parts for row in range(start, start + count)] == list(range(total))
    counts = [count for _, count in parts]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


def test_head_declares_the_rows_of_its_rank(model):
    assert row_shards(model) == {"heads.weight": RowShard(3, 7)} and model["heads"].weight.shape == (2, 2)
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(tensor)] for tensor in replicated_tensors(model)] == ["backbone.weight", "backbone.bias"]
    assert full_state_form(model)["heads.weight"].shape == (7, 2)


def test_rows_of_this_rank_are_loaded(model):
    load_full_state(model, model.state_dict() | {"heads.weight": ROWS})
    assert torch.equal(model["heads"].weight, ROWS[3:5])
    report = load_model_state(model, model.state_dict() | {"heads.weight": ROWS + 1}, source="x.pth")
    assert "heads.weight" in report.matched and torch.equal(model["heads"].weight, ROWS[3:5] + 1)


def test_file_with_as_many_identities_as_this_rank_has_rows_is_not_loaded(model):
    before = model["heads"].weight.clone()
    report = load_model_state(model, model.state_dict() | {"heads.weight": ROWS[:2]}, source="x.pth")
    assert report.other_shape == ["heads.weight"] and torch.equal(model["heads"].weight, before)


def test_ranks_start_with_different_centers(model, monkeypatch):
    monkeypatch.setattr(comm, "get_rank", lambda: 2)
    torch.manual_seed(0)
    other = EmbeddingHead(feat_dim=2, num_classes=7, with_bnneck=False, sample_rate=1.0)
    assert not torch.equal(other.weight, model["heads"].weight)


def test_a_part_of_the_centers_gives_no_class_logits(model):
    with pytest.raises(ConfigError, match=r"HEADS\.PFC"):
        model["heads"].logits(torch.ones(1, 2, 1, 1))
    with pytest.raises(ConfigError, match="ClasHead"):
        ClasHead(feat_dim=2, num_classes=7, sample_rate=1.0)
    with pytest.raises(ConfigError, match="2 classes"):
        PartialFC(num_classes=2)
