"""CUHK-SYSU."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class cuhkSYSU(NamedImages):
    """Xiao et al. 2017, "Joint detection and identification feature learning for person search" (CVPR).

    Training images alone, people cut out of scenes: ``p11422_s16929_1.jpg`` is person 11422. All count as from one
    camera.

    Args:
        root: data root; the images are in ``root/cuhk_sysu/cropped_images``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "cuhksysu"
    folder = "cuhk_sysu"
    tree = "cropped_images/*.jpg"
    train_folders = ("cropped_images",)
    layout = (r"p(?P<pid>-?\d+)_s\d",)
    example = "p11422_s16929_1.jpg (identity 11422)"
