"""PKU-Reid."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class PKU(NamedImages):
    """Ma et al. 2016, "Orientation driven bag of appearances for person re-identification" (arXiv:1605.02464).

    Training images alone. A file name begins with identity and camera.

    Args:
        root: data root; the images are in ``root/PKUv1a_128x48``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "pku"
    folder = "PKUv1a_128x48"
    tree = "{pid}_{camera}_*.png"
    layout = (r"^(?P<pid>[^_]+)_(?P<camera>[^_]+)_",)
    suffix = ".png"
    example = "001_1_4.png (identity 1, camera 1)"
