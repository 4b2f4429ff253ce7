"""Model of stored features, which decides whether they can be compared with others."""

from dataclasses import dataclass

_LARGEST_WIDTH = 2**20


@dataclass(frozen=True)
class ModelId:
    """Model of features.

    Attributes:
        width: dimension D of the features, 1 to 2^20.
        metric: ``"cosine"``, for which features are normalized before they are compared, or ``"euclidean"``.
        config_hash: hash of the model, see ``Predictor.config_hash``.
        checkpoint: path of the model's checkpoint.
    """

    width: int
    metric: str
    config_hash: str
    checkpoint: str

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or not 1 <= self.width <= _LARGEST_WIDTH:
            raise ValueError(f"the dimension of features must be 1 to {_LARGEST_WIDTH}, not {self.width!r:.50}")
        if self.metric not in ("cosine", "euclidean"):
            raise ValueError(f"the metric must be cosine or euclidean, not {self.metric!r:.50}")
        if not isinstance(self.config_hash, str) or not isinstance(self.checkpoint, str):
            raise ValueError("the hash and the path of the model must be texts")
