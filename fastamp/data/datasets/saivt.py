"""SAIVT-SoftBio."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class SAIVT(NamedImages):
    """Bialkowski et al. 2012, "A database for person re-identification in multi-camera surveillance networks" (DICTA).

    Training images alone. A folder is an identity; the third of a file name's parts between hyphens is the camera.

    Args:
        root: data root; the identities' folders are in ``root/SAIVT-SoftBio/cropped_images``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "saivt"
    folder = "SAIVT-SoftBio"
    tree = "cropped_images/{pid}/*-*-{camera}-*.jpeg"
    train_folders = ("cropped_images",)
    layout = (r"(?P<pid>.+)", r"^[^-]*-[^-]*-(?P<camera>[^-.]+)")
    suffix = ".jpeg"
    example = "0015/0015-0001-C3-0002.jpeg (identity 15, camera C3)"
