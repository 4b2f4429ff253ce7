"""PRID 2011."""

from fastamp.data.datasets.base import DATASET_REGISTRY
from fastamp.data.datasets.named import NamedImages


@DATASET_REGISTRY.register()
class PRID(NamedImages):
    """Hirzer et al. 2011, "Person re-identification by descriptive and discriminative classification" (SCIA).

    Training images alone. A folder ``person_<identity>``, at any depth, holds an identity; a file name begins with the
    camera.

    Args:
        root: data root; the images are below ``root/prid_2011/slim_train``.

    Raises:
        DataError: a folder is missing (at once), or no image is named so (when they are first needed).
    """

    dataset_name = "prid"
    folder = "prid_2011"
    tree = "slim_train/**/person_{pid}/{camera}_*.png"
    train_folders = ("slim_train",)
    layout = ("**", r"person_(?P<pid>.+)", r"^(?P<camera>[^_]+)_")
    suffix = ".png"
    example = "person_0001/a_0001.png (identity 1, camera a)"
