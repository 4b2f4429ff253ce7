"""tools/benchmark/search.py: generated features, and figures of each kind of index."""

import pytest
from command import load_script

from fastamp.retrieval.features_file import read_features

benchmark = load_script("tools/benchmark/search.py")


@pytest.mark.parametrize("kind", benchmark.KINDS)
def test_each_kind_of_index_is_built_and_searched(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "BLOCK", 300)
    benchmark.generate(tmp_path, identities=100, images=10, width=32, queries=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gallery.npz", "queries.npy"]
    assert read_features(tmp_path / "gallery.npz").matrix.shape == (1000, 32)
    assert benchmark.build(tmp_path, kind)["peak_mb"] > 0
    (found,) = benchmark.search(tmp_path, kind, [])
    assert 0 < found["recall_10"] <= 1 and (kind != "flat" or found["recall_1"] == 1)
