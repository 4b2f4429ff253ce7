"""tools/benchmark/clustering.py: the variants and the stages give the same labels, and the stages continue."""

import numpy as np
import pytest
from command import load_script

MODULE = load_script("tools/benchmark/clustering.py")


def check(count, width, folder):
    dense, sparse = (MODULE.measure(variant, count, width) for variant in ("dense", "sparse"))
    stages = MODULE.measure_in_stages(count, width, folder)
    assert dense["labels"] == sparse["labels"] == stages["labels"]
    assert len(set(sparse["labels"])) > count / 40 and sparse["labels"].count(-1) < count / 2
    assert MODULE.estimated_memory(count, width) > 2 * 4 * count * width


def test_variants_and_stages_give_the_same_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "PART", 150)
    check(400, 32, tmp_path)
    # An interrupted measurement continues with the parts that are saved.
    for name in ("400x32.weights.npz", "400x32.neighbors.300.npy"):
        (tmp_path / name).unlink()
    found = []
    search = MODULE.nearest_neighbors
    monkeypatch.setattr(
        MODULE, "nearest_neighbors", lambda part, *rest, **how: found.append(len(part)) or search(part, *rest, **how)
    )
    again = MODULE.measure_in_stages(400, 32, tmp_path)
    assert found == [100] and again["labels"] == MODULE.measure("sparse", 400, 32)["labels"]


@pytest.mark.integration
def test_five_thousand_images(tmp_path):
    check(5000, 256, tmp_path)


def test_search_with_and_without_lower_bounds():
    rows = MODULE.main(["--images", "3000", "--width", "128", "--latent", "8", "--search", "200", "--rounds", "2"])
    assert [(row["round"], row["neighbors"]) for row in rows] == [(1, "identical"), (2, "identical")]


def test_features_do_not_depend_on_the_process():
    features, identities = MODULE.generate(40, 8)
    again = MODULE.generate(40, 8)
    assert (features == again[0]).all() and np.array_equal(identities, again[1])
