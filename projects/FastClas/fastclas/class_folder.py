"""Datasets for image classification, whose training and test images are of the same classes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.custom import IMAGE_SUFFIXES
from fastamp.data.datasets.file_utils import check_tree, list_entries
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.files import expand
from fastamp.utils.plural import plural

KEYS = (
    Key(
        "DATASETS.CLASSES",
        (),
        "FastClas: names of the classes in the order of the labels. A training sets it to those of its training sets; "
        "test images are labeled by it.",
        of=str,
    ),
    Key("DATASETS.CLASS_FOLDER", "", "ClassFolder: folder with train/<class>/ and val/<class>/."),
)

_PREFIX = "class_"


class ClassDataset(ImageDataset):
    """Base class of datasets for classification; subclasses define ``read``.

    Training sets with common class names are merged by name.

    Args:
        classes: names of the classes in the order of the labels. Default (): the classes of the training images,
            sorted.
    """

    identities_of = "class"
    requires_gallery = False
    has_cameras = False
    excludes_unknown = False  # a class may have such a name
    evaluator = "ClasEvaluator"

    def __init__(self, classes: Sequence[str] = ()) -> None:
        self.classes = tuple(classes)
        super().__init__(
            lambda: [ImageItem(path, _PREFIX + name, 0) for path, name in self.read("train")],
            lambda: [ImageItem(path, name, 0) for path, name in self.read("val")],
            (),
        )

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "ClassDataset":
        """Build the dataset with the classes ``DATASETS.CLASSES``.

        Raises:
            ConfigError: if ``DATASETS.COMBINEALL`` is True: test images would be of classes of their own.
        """
        if cfg.DATASETS.COMBINEALL:
            raise ConfigError(
                f"DATASETS.COMBINEALL is not supported by {cls.__name__}, whose test images are of the training "
                "classes.\n  fix: set DATASETS.COMBINEALL to False"
            )
        return cls(root=root, classes=cfg.DATASETS.CLASSES, **cls.options(cfg))

    @classmethod
    def options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments of a subclass other than ``root`` and ``classes``."""
        return {}

    def read(self, split: str) -> list[tuple[str, str]]:
        """Return the path and the class name of each image of a split, ``"train"`` or ``"val"``."""
        raise NotImplementedError

    def identity(self, pid: int | str) -> str:
        """Return the name of a class."""
        return str(pid).removeprefix(_PREFIX)

    def adapt_config(self, cfg: CfgNode, training_set: Any) -> Any:
        """Return the config with ``DATASETS.CLASSES`` set to the classes of the training images.

        Raises:
            ConfigError: if the key is already set to other names, or there are training sets of another kind.
        """
        if not all(isinstance(source, ClassDataset) for source in training_set.sources):
            raise ConfigError(
                f"DATASETS.NAMES ({', '.join(cfg.DATASETS.NAMES)}): datasets for classification cannot be combined "
                "with others.\n  fix: remove one kind of dataset"
            )
        names = tuple(self.identity(pid) for pid in sorted(training_set.items.pids.unique()[0]))
        if cfg.DATASETS.CLASSES not in ((), names):
            raise ConfigError(
                f"DATASETS.CLASSES differs from the {len(names)} classes of the training set "
                f"({', '.join(cfg.DATASETS.NAMES)}): got {', '.join(cfg.DATASETS.CLASSES[:5])}; expected "
                f"{', '.join(names[:5])}.\n"
                "  fix: set DATASETS.CLASSES to [], or to the names of the training classes in alphabetical order"
            )
        return cfg.with_values({"DATASETS.CLASSES": names})

    def test_items(self) -> tuple[Sequence[ImageItem], Sequence[ImageItem]]:
        """Return the test images, with the label as identity, and no gallery images.

        Raises:
            DataError: if a test image is of another class than the training images.
        """
        names = self.classes or tuple(sorted({name for _, name in self.read("train")}))
        label_of = {name: label for label, name in enumerate(names)}
        wrong = next((item for item in self.query if item.pid not in label_of), None)
        if wrong is not None:
            unknown = sorted({item.pid for item in self.query} - label_of.keys())
            raise DataError(
                f"{self.title}: test images of {plural(len(unknown), 'class', 'classes')} without training images: "
                f"{', '.join(map(repr, unknown[:5]))}; the model has {len(names)} classes, e.g. "
                f"{', '.join(map(repr, names[:5]))}.\n"
                f"  found: {wrong.path}\n"
                "  fix: remove these test images, or train on images of these classes"
            )
        return [item._replace(pid=label_of[item.pid]) for item in self.query], []


@DATASET_REGISTRY.register()
class ClassFolder(ClassDataset):
    """Dataset of a folder ``train/<class>/*`` and ``val/<class>/*``.

    Args:
        root: data root, to which a relative ``path`` belongs. Default "datasets".
        path: folder of the dataset. Default: the attribute ``folder``.
        classes: see ``ClassDataset``.

    Attributes:
        folder: folder of the dataset in the data root.

    Raises:
        ConfigError: if there is no path.
        DataError: if a folder is missing, or contains no images.
    """

    dataset_name = "classfolder"
    folder = ""

    def __init__(self, root: str | Path = "datasets", path: str = "", classes: Sequence[str] = ()) -> None:
        if not (path or self.folder):
            raise ConfigError(
                "DATASETS.CLASS_FOLDER is empty, but ClassFolder is in DATASETS.NAMES or DATASETS.TESTS.\n"
                "  fix: set DATASETS.CLASS_FOLDER to a folder with train/<class>/ and val/<class>/"
            )
        self.dataset_dir = Path(root) / expand(path or self.folder)
        needed = [self.dataset_dir / split for split in ("train", "val")]
        tree = "\n".join(f"{path or self.folder}/{split}/<class>/*.jpg" for split in ("train", "val"))
        check_tree(type(self).__name__, root, needed, tree, "" if path else self.folder)
        super().__init__(classes)

    @classmethod
    def options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the path ``DATASETS.CLASS_FOLDER``, unless the dataset has a folder."""
        return {} if cls.folder else {"path": cfg.DATASETS.CLASS_FOLDER}

    def read(self, split: str) -> list[tuple[str, str]]:
        """Return the images below each class folder of a split, in alphabetical order."""
        name, images = type(self).__name__, []
        for folder in list_entries(name, self.dataset_dir / split):
            if folder.is_dir():
                files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in IMAGE_SUFFIXES]
                if not files:
                    raise DataError(
                        f"{name}: no images in {folder.absolute()}.\n"
                        f"  fix: add images ({', '.join(IMAGE_SUFFIXES)}), or remove the folder"
                    )
                images += [(str(file), folder.name) for file in files]
        if not images:
            raise DataError(
                f"{name}: no class folders in {(self.dataset_dir / split).absolute()}.\n"
                "  fix: move the images of each class into a folder of its own"
            )
        return images
