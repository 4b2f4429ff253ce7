"""LPW, Labeled Pedestrian in the Wild."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class LPW(NamedImages):
    """Song et al. 2018, "Region-based quality estimation network for large-scale person re-identification" (AAAI).

    Training images alone. Identities are numbered within a scene, so scene and folder together are the identity;
    cameras of the same name in different scenes count as one, as in FastReID.

    Args:
        root: data root; the scenes' folders are in ``root/pep_256x128/data_slim``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "lpw"
    folder = "pep_256x128"
    tree = "data_slim/{scene}/{camera}/{pid}/*.jpg"
    train_folders = ("data_slim",)
    layout = (r"(?P<scene>.+)", r"(?P<camera>.+)", r"(?P<pid>.+)", "")
    example = "scen1/view2/3/0001.jpg (identity scen1-3, camera view2)"
