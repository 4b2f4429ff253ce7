"""CAVIAR4REID."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class CAVIARa(NamedImages):
    """Cheng et al. 2011, "Custom pictorial structures for re-identification" (BMVC).

    Training images alone. The first four characters of a file name are the identity; all count as from one camera.

    Args:
        root: data root; the images are in ``root/CAVIARa``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "caviara"
    folder = "CAVIARa"
    tree = "*.jpg"
    layout = (r"^(?P<pid>[^.]{4})",)
    example = "0001001.jpg (identity 0001)"
