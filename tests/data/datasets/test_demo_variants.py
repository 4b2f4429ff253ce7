"""Generated datasets with columns."""

import pytest

from fastamp.data.datasets.demo_variants import DemoAerial, DemoClothes, DemoInfrared, DemoVideo
from fastamp.demo.variants import VARIANTS_VERSION, generate_variant


@pytest.mark.parametrize(
    ("dataset", "columns"),
    [
        (DemoInfrared, {"modality"}),
        (DemoClothes, {"clothes"}),
        (DemoVideo, {"tracklet"}),
        (DemoAerial, {"platform", "altitude"}),
    ],
)
def test_generated_dataset_reads_its_splits_and_columns(tmp_path, dataset, columns):
    folder = tmp_path / f"fastamp-demo-{dataset.variant}-v{VARIANTS_VERSION}"
    generate_variant(dataset.variant, folder, train_identities=2, test_identities=2, image_size=(32, 16))
    data = dataset(tmp_path)
    for items in (data.train, data.query, data.gallery):
        assert items and all(set(item.columns) == columns for item in items)
    assert data.train[0].pid.startswith(f"{data.name}_")
    if dataset is DemoAerial:
        assert {item.columns["altitude"] for item in data.query} == {0, 1, 2}
        assert {item.columns["altitude"] for item in data.gallery} == {None}
