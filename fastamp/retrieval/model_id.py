"""Model of stored features, which decides whether they can be compared with others."""

from dataclasses import dataclass

from fastamp.utils.errors import DataError


@dataclass(frozen=True)
class ModelId:
    """Model of features.

    Attributes:
        width: dimension D of the features.
        metric: ``"cosine"``, for which features are normalized before they are compared, or ``"euclidean"``.
        config_hash: hash of the model, see ``Predictor.config_hash``.
        checkpoint: path of the model's checkpoint.
    """

    width: int
    metric: str
    config_hash: str
    checkpoint: str

    def __post_init__(self) -> None:
        if self.metric not in ("cosine", "euclidean"):
            raise ValueError(f"the metric must be cosine or euclidean, not {self.metric!r:.50}")


def check_same_model(path: object, stored: ModelId, config_hash: str, checkpoint: object) -> None:
    """Check that the features of a model can be compared with stored ones.

    Args:
        path: file or folder of the stored features, for the message.
        stored: their model.
        config_hash, checkpoint: hash and file of the model.

    Raises:
        DataError: if the hashes differ.
    """
    if config_hash != stored.config_hash:
        raise DataError(
            f"model mismatch: the features in {path} were extracted with a different model.\n"
            f"  file:  {stored.checkpoint} ({stored.config_hash})\n"
            f"  model: {checkpoint} ({config_hash})\n"
            "  fix: use the model that extracted the features, or extract them again with this model"
        )
