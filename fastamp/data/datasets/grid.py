"""GRID, the underground set of QMUL."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class GRID(NamedImages):
    """Loy et al. 2009, "Multi-camera activity correlation analysis" (CVPR).

    Training images alone. A file name begins with identity and camera, ``0001_1_25004_107_32_106_221.jpeg``. Identity 0
    stands for many people, each seen by one camera alone, and is left out.

    Args:
        root: data root; the images are in ``root/underground_reid/images``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "grid"
    folder = "underground_reid"
    tree = "images/*.jpeg"
    train_folders = ("images",)
    layout = (r"^(?P<pid>\d+)_(?P<camera>[^_.]+)",)
    suffix = ".jpeg"
    left_out = frozenset({0})
    example = "0001_1_25004_107_32_106_221.jpeg (identity 1, camera 1)"
