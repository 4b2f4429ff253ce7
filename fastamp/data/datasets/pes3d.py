"""3DPeS."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class PeS3D(NamedImages):
    """Baltieri et al. 2011, "3DPeS: 3D people dataset for surveillance and forensics" (ACM workshop on human gesture
    and behavior understanding).

    Training images alone. A folder is an identity; all count as from one camera.

    Args:
        root: data root; the identities' folders are in ``root/3DPeS``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "pes3d"
    folder = "3DPeS"
    tree = "{pid}/*.bmp"
    layout = (r"(?P<pid>.+)", "")
    suffix = ".bmp"
    example = "12/1_2_3.bmp (identity 12)"
