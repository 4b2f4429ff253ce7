"""Errors that the service answers with a status code and a structured body."""

from typing import Any


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
        return error_body(self.code, self.message, self.fix)


def error_body(code: str, message: str, fix: str = "") -> dict[str, Any]:
    """Return the body of an answer with an error."""
    return {"error": {"code": code, "message": message, "fix": fix}}


def split_fix(text: str) -> tuple[str, str]:
    """Split the message of a UserError into message and fix."""
    message, _, fix = text.partition("\n  fix:")
    return " ".join(message.split()), " ".join(fix.split())
