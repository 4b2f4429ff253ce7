"""Access to the Hugging Face Hub by huggingface_hub, with its errors explained."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fastamp.config.recipes import find_recipe
from fastamp.utils.errors import HubError, optional_package, writing
from fastamp.utils.version import __version__

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_DOWNLOAD = "download it with a connection to the Hub, or correct cache_dir"
_CONNECT = "check the network, the proxy and HF_ENDPOINT"
_FIXES = {
    400: "correct what the Hub rejected; the metadata of a model card is at the top of README.md",
    401: f"correct the access token: {LOG_IN}",
    403: "use a token with write permission for this user or organization",
    409: "choose another name",
}
"""HTTP status other than those of missing files and repositories -> fix."""


def import_hub() -> ModuleType:
    """Import huggingface_hub, which is an optional package.

    Raises:
        ConfigError: if it is not installed.
    """
    with optional_package("the Hub requires huggingface_hub", "hub", ", or pass the path of a downloaded folder"):
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    return huggingface_hub


def hub_api(token: str | bool | None) -> Any:
    """Create the client for the Hub's API."""
    return import_hub().HfApi(token=token, library_name="fastamp", library_version=__version__)


class UnreachableError(HubError):
    """The Hub cannot be reached."""


@contextmanager
def explained(repository: str, revision: str | None = None) -> Iterator[None]:
    """Convert the errors of huggingface_hub to HubErrors."""
    try:
        yield
    except Exception as error:
        hub = import_hub()
        errors, endpoint = hub.errors, hub.constants.ENDPOINT
        is_fallback = isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception)
        cause = error.__cause__ if is_fallback else error  # why the file was searched in the cache
        found, status = (str(cause).strip().splitlines() or [type(cause).__name__])[0], 0
        if isinstance(cause, errors.HfHubHTTPError):
            found, status = cause.server_message or found, cause.response.status_code
        recipe = f"; {repository} is a recipe, not a model" if find_recipe(repository) else ""
        page = f"{endpoint}/{repository}"
        explanations: list[tuple[Any, str, str]] = [
            (errors.GatedRepoError, "is gated", f"request access at {page}, and {LOG_IN}"),
            (errors.RevisionNotFoundError, f"has no revision {revision!r}", f"choose a commit of {page}/commits/main"),
            (
                errors.RepositoryNotFoundError,
                f"is not a local path, and at {endpoint} it does not exist or is private{recipe}",
                f"correct the name or path; for a private model, {LOG_IN}",
            ),
            (errors.LocalEntryNotFoundError, f"at revision {revision or 'main'} is not in the cache", _DOWNLOAD),
            (errors.HfHubHTTPError, f"got the status {status} from the Hub", _FIXES.get(status, "try again later")),
            ((ConnectionError, TimeoutError, errors.HTTPError), f"cannot be reached at {endpoint}", _CONNECT),
            (OSError, "cannot be transferred", "check the space and the permissions of the cache folder (HF_HOME)"),
            # Names that the Hub forbids, invalid model cards, answers of other servers.
            (ValueError, f"was rejected by {endpoint} or huggingface_hub", "correct the name, or the top of README.md"),
        ]
        for kinds, problem, fix in explanations:
            if isinstance(cause, kinds):
                kind = UnreachableError if fix is _CONNECT else HubError
                raise kind(f"{repository} {problem}.\n  found: {found}\n  fix: {fix}") from error
        raise


def download_file(repository: str, revision: str, name: str, path: Path) -> None:
    """Download a file of a repository. A later call continues an interrupted download.

    Args:
        repository: ``user/name``.
        revision: branch, tag or commit hash.
        name: name of the file in the repository.
        path: path of the file.

    Raises:
        HubError: if the file cannot be downloaded.
        ConfigError: if huggingface_hub is not installed.
        WriteError: if the file cannot be written.
    """
    arriving = path.with_name(f".{path.name}.hub")
    download = import_hub().hf_hub_download
    try:
        with explained(repository, revision):
            complete = download(repository, name, revision=revision, local_dir=arriving)
        with writing(path):
            os.replace(complete, path)
    except (UnreachableError, KeyboardInterrupt):
        raise  # continued by the next call
    except BaseException:
        shutil.rmtree(arriving, ignore_errors=True)
        raise
    shutil.rmtree(arriving, ignore_errors=True)
