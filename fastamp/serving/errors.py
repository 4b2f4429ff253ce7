"""Errors that the service answers with a status code and a structured body."""

from typing import Any

from fastamp.retrieval.mutable_gallery import MissingItemError
from fastamp.utils.errors import UserError, WriteError


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status code.
        code: short name of the error, for programs.
        message: what is wrong.
        fix: what to change. Default: "".
    """

    def __init__(self, status: int, code: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.fix = status, code, message, fix

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {"error": {"code": self.code, "message": self.message, "fix": self.fix}}


def user_request_error(error: UserError) -> RequestError:
    """Return the answer of a UserError; a WriteError names paths of the server, which the answer does not show."""
    if isinstance(error, WriteError):
        return RequestError(503, "gallery_not_written", "the gallery cannot be read or written")
    status, code = (404, "no_item") if isinstance(error, MissingItemError) else (422, "invalid_value")
    return RequestError(status, code, *split_fix(str(error)))


def split_fix(text: str) -> tuple[str, str]:
    """Split the message of a UserError into message and fix."""
    message, _, fix = text.partition("\n  fix:")
    return " ".join(message.split()), " ".join(fix.split())
