"""ThermalWorld."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class Thermalworld(NamedImages):
    """Kniaz et al. 2018, "ThermalGAN: multimodal color-to-thermal image translation for person re-identification in
    multispectral dataset" (ECCV workshops).

    Training images alone, those in colour. A folder is an identity; all count as from one camera.

    Args:
        root: data root; the identities' folders are in ``root/thermalworld_rgb``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "thermalworld"
    folder = "thermalworld_rgb"
    tree = "{pid}/*.jpg"
    layout = (r"(?P<pid>.+)", "")
    example = "12/3.jpg (identity 12)"
