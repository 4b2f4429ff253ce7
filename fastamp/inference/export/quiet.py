"""Output and errors of exporters and runtimes."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from fastamp.utils.errors import UserError, summarize_error

logger = logging.getLogger(__name__)


class ExportError(UserError):
    """Raised if a model cannot be exported, or the exported model fails the parity check."""


@contextlib.contextmanager
def quiet(what: str) -> Iterator[None]:
    """Suppress the output, logs and warnings of PyTorch's exporters, and convert exceptions to ExportError.

    Args:
        what: description of the failure, used as the beginning of the error message.

    Raises:
        ExportError: if an exception other than UserError and MemoryError is raised in the context; the message is a
            single line.
    """
    printed = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(record=True) as caught,
            contextlib.ExitStack() as stack,
        ):
            level = logging.root.manager.disable
            logging.disable(logging.ERROR)
            stack.callback(logging.disable, level)
            # logging.warning(), which onnxruntime calls, adds a handler to the root logger.
            stack.callback(setattr, logging.root, "handlers", logging.root.handlers[:])
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # exporters raise many exception types
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(f"{what}: {summarize_error(cause)}") from error
    finally:
        logger.debug("%s", printed.getvalue())
    for warning in caught:
        logger.debug("%s", warning.message)
