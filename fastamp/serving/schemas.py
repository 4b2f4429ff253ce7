"""Metadata in requests and bodies of the answers."""

from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator


class ErrorDetail(BaseModel):
    code: str = Field(description="Short name of the error")
    message: str = Field(description="What is wrong")
    fix: str = Field(description='What to change; "" if that is not known')


class ErrorBody(BaseModel):
    error: ErrorDetail


class Features(BaseModel):
    model: str = Field(description="Hash of the model; only features with equal hashes can be compared")
    metric: str = Field(description="cosine or euclidean")
    features: list[list[float]] = Field(description="One feature per image, not normalized")


class Score(BaseModel):
    score: float = Field(description="Cosine similarity, or Euclidean distance")
    decision: str | None = Field(description="same, different or unknown; null without a calibration")
    probability: float | None = Field(
        description="Probability of the same identity at a prior of 0.5; null without a calibration"
    )
    genuine_fraction: float | None = Field(
        description="Fraction of pairs of the same identity that are less similar; null without reference pairs"
    )
    impostor_fraction: float | None = Field(
        description="Fraction of pairs of different identities that are less similar; null without reference pairs"
    )


class Compared(Score):
    metric: str


class ItemIn(BaseModel):
    """Metadata of an item."""

    model_config = ConfigDict(extra="forbid")
    id: str | None = Field(default=None, min_length=1, max_length=500, description="Default: a random id")
    name: str | None = Field(default=None, max_length=500, description="Default: the name of the uploaded file")
    identity: str = Field(default="", max_length=500)
    camera: str = Field(default="", max_length=500)
    time: str = Field(default="", max_length=50, description="ISO 8601, in UTC without an offset")

    @field_validator("id")
    @classmethod
    def _has_an_address(cls, value: str | None) -> str | None:
        """Reject the segments that HTTP clients remove from addresses."""
        if value is not None and {".", ".."} & set(value.split("/")):
            raise ValueError('"." and ".." cannot be segments of the address of an item')
        return value


class ItemsIn(RootModel[list[ItemIn]]):
    """Metadata of items, one per image."""


class ItemOut(BaseModel):
    id: str
    name: str
    identity: str
    camera: str
    time: str


class Match(Score, ItemOut):
    rank: int


class QueryResult(BaseModel):
    decision: str | None = Field(default=None, description="match or unknown; null without a calibration")
    threshold: float | None = Field(default=None, description="Score from which the best match is accepted")
    fpir: float | None = Field(default=None, description="Expected false-positive identification rate for this gallery")
    found: list[Match]


class Searched(BaseModel):
    metric: str
    searched: int = Field(description="Number of items that were compared with")
    recall: float | None = Field(description="Measured recall of the search; null if it is exact")
    queries: list[QueryResult]


class Ids(BaseModel):
    ids: list[str]


class GalleryInfo(BaseModel):
    items: int
    metric: str
    model: str
    recall: float | None = Field(description="Measured recall of the search; null if it is exact")


class Items(BaseModel):
    total: int
    items: list[ItemOut]


class Health(BaseModel):
    status: str = Field(description="ok, or stuck (with HTTP status 503) if a computation exceeds --answer-seconds")
    computing_seconds: float = Field(description="Time since the start of the oldest computation that has not ended")
    pending: int = Field(description="Number of images that wait or are computed")
