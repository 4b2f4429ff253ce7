"""SYSU-MM01."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class SYSU_mm(NamedImages):
    """Wu et al. 2017, "RGB-infrared cross-modality person re-identification" (ICCV).

    Training images alone, those of the four cameras that see colour; ``cam3`` and ``cam6``, which are infrared, are not
    read. The folders are camera and identity.

    Args:
        root: data root; the cameras' folders are in ``root/SYSU-MM01``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "sysu_mm"
    folder = "SYSU-MM01"
    tree = "{cam1,cam2,cam4,cam5}/{pid}/*.jpg"
    needed = ("cam1", "cam2", "cam4", "cam5")
    layout = (r"(?P<camera>cam[1245])", r"(?P<pid>.+)", "")
    example = "cam1/0001/0001.jpg (identity 1, camera cam1)"
