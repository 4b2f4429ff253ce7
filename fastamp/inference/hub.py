"""Load models from folders and from the Hugging Face Hub, and upload packaged models."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastamp import zoo
from fastamp.checkpoint.hub_client import LOG_IN, UnreachableError, explained, hub_api, import_hub
from fastamp.checkpoint.load_state import examples
from fastamp.checkpoint.safetensors_file import CONFIG_NAME, WEIGHTS_NAME
from fastamp.inference.package import CARD_NAME, LICENSE_NAME, check_packaged
from fastamp.inference.predictor import Predictor
from fastamp.utils.errors import HubError, did_you_mean
from fastamp.utils.files import expand
from fastamp.utils.logger import log_to_console
from fastamp.utils.version import __version__

logger = logging.getLogger(__name__)

PREFIX = "hf://"
"""Prefix of the name of a model on the Hub, where a command also accepts paths."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_UPLOADED = (CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, LICENSE_NAME)
_TIMEOUT = 20  # seconds


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    opts: Sequence[str] = (),
    plugin: str = "",
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    accept_withdrawn: bool = False,
) -> Predictor:
    """Load a trained model from a folder, from the catalog of published weights, or from the Hugging Face Hub.

    From the Hub only ``model.safetensors`` and ``config.yaml`` are downloaded, which contain no code. Published weights
    of the catalog may be pickle files, which are read without executing code. Plugins are never downloaded.

    Args:
        name: packaged model (output folder of ``fastamp push --to``), run folder, or checkpoint; else a name in the
            catalog (``fastamp models``), or a part of it that no other name has, also written ``zoo:NAME``; else
            ``user/name`` on the Hub, also written ``hf://user/name`` and ``hf://user/name@revision``.
        device, opts, plugin: see ``Predictor``.
        revision: branch, tag or commit hash on the Hub. Default: None, the branch main. The files of a commit hash
            never change.
        cache_dir: folder for downloads. Default: None, the cache of huggingface_hub (``HF_HOME``).
        token: access token for the Hub; False for none. Default: None, the token of ``HF_TOKEN`` or ``hf auth login``.
        local_files_only: if True, use only files that have been downloaded before. Default: False.
        accept_withdrawn: accept weights of the catalog that were trained on images withdrawn by their owner.
            Default: False.

    Returns:
        A predictor: ``features``, ``compare`` and ``search``; its attribute ``model`` is the ``nn.Module``.

    Raises:
        HubError: if the model is missing on the Hub or cannot be downloaded.
        UserError: see ``Predictor``.
    """
    log_to_console()
    text = os.fspath(name)
    is_remote = text.startswith(PREFIX)
    path = expand(text)
    is_named = not (is_remote or path.exists() or isinstance(name, os.PathLike)) and bool(zoo.matches(text))
    if is_named or text.startswith(zoo.PREFIX):
        entry = zoo.find(text)
        if revision is not None or cache_dir is not None:
            raise HubError(
                f"revision and cache_dir apply to a model on the Hub, but {text} names {entry.name} of the catalog.\n"
                "  fix: remove them; FASTAMP_ZOO is the folder of published weights"
            )
        if local_files_only and not zoo.path_of(entry).exists():
            raise HubError(
                f"{entry.name} is not in {zoo.zoo_folder()}, and local_files_only=True forbids downloads.\n"
                "  fix: remove local_files_only, or set FASTAMP_ZOO to the folder that has the file"
            )
        path = zoo.checkpoint(entry, accept_withdrawn=accept_withdrawn)
    if is_remote or not (path.exists() or isinstance(name, os.PathLike)):
        path = download(text, revision=revision, cache_dir=cache_dir, token=token, local_files_only=local_files_only)
    elif revision is not None:
        raise HubError(
            f"revision={revision!r} applies to a model on the Hub, but {text} is a local path.\n"
            f"  fix: remove revision; to load a model from the Hub, pass {PREFIX}user/name"
        )
    return Predictor(path, device=device, opts=opts, plugin=plugin)


def download(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """Download a packaged model from the Hub. If the Hub cannot be reached, use the files of an earlier download.

    Args:
        name: ``user/name``, ``hf://user/name`` or ``hf://user/name@revision``.
        revision, cache_dir, token, local_files_only: see ``from_pretrained``.

    Returns:
        Folder with ``model.safetensors`` and ``config.yaml``.

    Raises:
        HubError: if the model is missing or cannot be downloaded.
        ConfigError: if huggingface_hub is not installed.
    """
    repository, _, at = name.removeprefix(PREFIX).partition("@")
    revision = revision or at or None
    if not _REPOSITORY.fullmatch(repository):
        raise HubError(
            f"{name!r} is neither an existing path, a name of published weights nor the name of a model on the Hub."
            f"{did_you_mean(name, zoo.names())}\n"
            "  fix: correct the path, or pass a name of `fastamp models` or user/name"
        )
    api = hub_api(token)
    unreachable: HubError | None = None
    if not local_files_only:
        try:
            with explained(repository, revision):
                info = api.model_info(repository, revision=revision, timeout=_TIMEOUT)
            _check_files(repository, _files_of(info))
        except UnreachableError as error:
            unreachable = error
    with explained(repository, revision):
        try:
            folder = api.snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=local_files_only or unreachable is not None,
                allow_patterns=[WEIGHTS_NAME, CONFIG_NAME],
            )
        except FileNotFoundError:  # not in the cache
            if unreachable:
                raise unreachable from None
            raise
    commit = Path(folder).name
    if unreachable:
        logger.warning("%s\n  using the files of revision %s, which were downloaded before", unreachable, commit)
    else:
        logger.info("%s: revision %s", repository, commit)
    return Path(folder)


def upload(folder: Path, repository: str, *, private: bool = False, update: bool = False) -> str:
    """Upload a packaged model to the Hub in one commit. The repository is created if it does not exist.

    Args:
        folder: packaged model. README.md, config.yaml, model.safetensors and LICENSE (optional) are uploaded.
        repository: ``user/name``.
        private: if True, create a private repository. Default: False, the default of the user or organization.
        update: if False (default), the repository must be new or empty.

    Returns:
        URL of the commit.

    Raises:
        HubError: if the token is missing or may not write, the repository is not empty, or the upload fails.
        ConfigError: if huggingface_hub is not installed, or the folder is not a packaged model with a license.
        WeightsError: if the weights are damaged.
    """
    api = hub_api(find_token(repository))
    check_packaged(folder)
    with explained(repository):
        api.create_repo(repository, private=private or None, exist_ok=True)
        info = api.model_info(repository, timeout=_TIMEOUT)
    _check_existing(info, repository, private=private, update=update)
    skipped = sorted(path.name for path in folder.iterdir() if path.name not in _UPLOADED)
    if skipped:
        logger.warning("not uploaded: %s; only %s are uploaded", ", ".join(skipped), ", ".join(_UPLOADED))
    if repository not in (folder / CARD_NAME).read_text(encoding="utf-8", errors="replace"):
        logger.warning(
            "%s does not mention %s, so its examples load another model.\n"
            "  fix: correct the name in the examples, or package the model with `fastamp push SOURCE %s --to FOLDER`",
            folder / CARD_NAME,
            repository,
            repository,
        )
    with explained(repository):
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(_UPLOADED),
            commit_message=f"Upload model with fastamp {__version__}",
        )
    return str(commit.commit_url)


def find_token(repository: str) -> str:
    """Return the access token of ``HF_TOKEN`` or ``hf auth login``.

    Raises:
        HubError: if there is none, or ``repository``, the repository to upload to, is not a valid name.
        ConfigError: if huggingface_hub is not installed.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise HubError(f"{repository!r} is not the name of a model on the Hub.\n  fix: pass user/name")
    token: str | None = import_hub().get_token()
    if not token:
        raise HubError(f"uploading to {repository} requires an access token with write permission.\n  fix: {LOG_IN}")
    return token


def _check_existing(info: Any, repository: str, *, private: bool, update: bool) -> None:
    """Check that a repository is empty, or that it may be updated."""
    files = [name for name in _files_of(info) if name != ".gitattributes"]
    if files and not update:
        raise HubError(
            f"{repository} already exists and has {len(files)} files{examples(files)}.\n"
            "  fix: choose another name, or add --update to replace the model and its card in a new commit"
        )
    if private and not info.private:
        raise HubError(
            f"--private: {repository} already exists and is public.\n"
            "  fix: make it private in its settings on the Hub, or choose another name"
        )


def _files_of(info: Any) -> list[str]:
    """List the files of a repository."""
    return sorted(sibling.rfilename for sibling in info.siblings or ())


def _check_files(repository: str, files: Sequence[str]) -> None:
    """Check that a repository contains a packaged model."""
    missing = [name for name in (WEIGHTS_NAME, CONFIG_NAME) if name not in files]
    if missing:
        raise HubError(
            f"{repository} is not a model of fastamp: {' and '.join(missing)} not found.\n"
            f"  found: {', '.join(files[:8]) or 'no files'}\n"
            "  fix: choose a model that was uploaded by `fastamp push`; to convert the weights of another program, "
            "download them and run `fastamp import`"
        )
