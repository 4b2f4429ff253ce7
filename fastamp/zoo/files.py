"""Files of the catalog: the folder, downloads with their size and hash, and the config next to each file.

Published files have no config of fastamp. A record next to the file, ``NAME.pth.json``, has the config of the entry
together with the size and the SHA-256 of the file; ``read_checkpoint`` reads both files, so that every command takes
the file as it takes a checkpoint.
"""

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastamp.checkpoint.download import OFFLINE, DownloadError, download, is_offline, is_page
from fastamp.checkpoint.hub_client import download_file
from fastamp.checkpoint.record import add_to_record, read_record, record_of
from fastamp.config import CfgNode
from fastamp.utils.errors import ConfigError, HubError, WeightsError, system_cause, writing
from fastamp.utils.files import expand, file_sha256, is_zip, user_cache
from fastamp.utils.lock import waiting_lock
from fastamp.zoo.catalog import PREFIX, Entry, differences, find, list_entries

logger = logging.getLogger(__name__)

FOLDER = "FASTAMP_ZOO"
"""Environment variable with the folder of the files."""
ACCEPT_KEY = "MODEL.WEIGHTS_ACCEPT_WITHDRAWN"
_KEPT_SUFFIXES = (".safetensors", ".onnx", ".xml")
_PAGE_BYTES = 1024
_ZIP = b"PK\x03\x04"  # of the files that torch.save writes


def zoo_folder() -> Path:
    """Return the folder of the files: ``$FASTAMP_ZOO``, else ``$XDG_CACHE_HOME/fastamp/zoo``."""
    given = os.environ.get(FOLDER)
    return expand(given) if given else user_cache() / "zoo"


def path_of(entry: Entry) -> Path:
    """Return the path of the file of an entry: its name in the catalog, since the names of programs collide."""
    suffix = Path(entry.file).suffix
    return zoo_folder() / f"{entry.name}{suffix if suffix in _KEPT_SUFFIXES else '.pth'}"


def checkpoint(name: str | Entry, *, accept_withdrawn: bool = False) -> Path:
    """Return the file of an entry, downloaded if it is missing, with the config of its model in the record.

    Raises:
        ConfigError: if the name is unknown or ambiguous, or the entry has no recipe; see also ``local_file``.
        WeightsError: see ``local_file``.
    """
    entry = find(name) if isinstance(name, str) else name
    config = entry.config().dump()
    path = local_file(entry, accept_withdrawn=accept_withdrawn)
    add_to_record(path, {"config": config})
    return path


def local_file(entry: Entry, *, accept_withdrawn: bool = False) -> Path:
    """Return the file of an entry, downloaded if it is missing.

    The size and the SHA-256 are those that were published, else those of the first use; both are checked.

    Args:
        entry: entry of the catalog.
        accept_withdrawn: accept weights that were trained on withdrawn images. Default False.

    Raises:
        ConfigError: if the training images were withdrawn, and ``accept_withdrawn`` is False; or if the folder cannot
            be written.
        WeightsError: if the file cannot be downloaded, or is not the published one.
    """
    if entry.withdrawn and not accept_withdrawn:
        raise ConfigError(
            f"{entry.name} was trained on DukeMTMC, whose images were withdrawn by their owner in 2019.\n"
            f"  fix: choose another entry of `fastamp models`; or accept it with --accept-withdrawn, "
            f"accept_withdrawn=True or {ACCEPT_KEY} True"
        )
    path = path_of(entry)
    if not path.exists():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(path.with_name(f".{path.name}.lock")):
            if not path.exists():  # another process has not downloaded it meanwhile
                _download(entry, path)
                try:
                    _check(entry, path)
                except WeightsError:
                    path.unlink()
                    raise
    _check(entry, path)
    return path


def with_local_files(cfg: CfgNode) -> CfgNode:
    """Return a config in which the path of the file replaces each ``zoo:NAME``; files that are missing are downloaded.

    Raises:
        UserError: see ``local_file``.
    """
    values = {key.path: value for key, value in cfg.keys_below() if _names_entry(value)}
    if not values:
        return cfg
    accept = bool(cfg.MODEL.WEIGHTS_ACCEPT_WITHDRAWN)
    return cfg.with_values({key: _replaced(value, accept) for key, value in values.items()})


def warn_of_differences(cfg: CfgNode, *, evaluated: bool = False) -> None:
    """Warn of the keys that contradict the entry of MODEL.WEIGHTS, which is ``zoo:NAME`` or the path of its file.

    Args:
        cfg: config.
        evaluated: whether the weights are evaluated as they are, see ``differences``. Default False.

    Raises:
        ConfigError: if the name is unknown or ambiguous.
    """
    entry = entry_of(cfg.MODEL.WEIGHTS)
    found = differences(entry, cfg, evaluated=evaluated) if entry else {}
    if entry and found:
        listed = "".join(f"\n  {key}: {given}, published with {own}" for key, (given, own) in found.items())
        logger.warning(
            "the config contradicts the published weights %s%s: their features differ from the published ones.%s\n"
            "  fix: set these keys as published, unless the training is meant to change them",
            PREFIX,
            entry.name,
            listed,
        )


def entry_of(weights: str) -> Entry | None:
    """Return the entry that ``zoo:NAME`` names or whose file is at this path; None for other weights.

    Raises:
        ConfigError: if the name is unknown or ambiguous.
    """
    if weights.startswith(PREFIX):
        return find(weights)
    path = Path(os.path.abspath(expand(weights)))
    if path.parent != Path(os.path.abspath(zoo_folder())):
        return None
    return next((entry for entry in list_entries() if path_of(entry).name == path.name), None)


def _names_entry(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_names_entry, value))
    return isinstance(value, str) and value.startswith(PREFIX)


def _replaced(value: Any, accept: bool) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_replaced(item, accept) for item in value)
    return str(local_file(find(value), accept_withdrawn=accept)) if _names_entry(value) else value


def _download(entry: Entry, path: Path) -> None:
    """Download the file from the first address that has it."""
    place = f"download it from {_place(entry)} and save it as {path}"
    if not entry.addresses:
        raise WeightsError(
            f"{entry.name} is not in {path.parent}, and {entry.host} gives the file only through a web page.\n"
            f"  fix: {place}"
        )
    if is_offline():
        raise WeightsError(
            f"{entry.name} is not in {path.parent}, and {OFFLINE} forbids downloads.\n"
            f"  fix: unset {OFFLINE}, set {FOLDER} to a folder that has the file, or {place}"
        )
    problems = []
    for url in entry.addresses:
        try:
            _fetch(url, path, entry)
            logger.info("%s: saved as %s", entry.name, path)
            return
        except (DownloadError, HubError) as error:
            problems.append(str(error).partition("\n  fix: ")[0].replace("\n  ", "; "))
    listed = "\n    ".join(problems)
    raise WeightsError(
        f"{entry.name} cannot be downloaded.\n  found:\n    {listed}\n"
        f"  fix: try again later, which continues the download; check the proxy (https_proxy); or {place}"
    )


def _place(entry: Entry) -> str:
    """Return the addresses from which a person can download the file, those without a web page first."""
    return " or ".join([*entry.addresses, *([entry.url] if entry.page else [])])


def _fetch(url: str, path: Path, entry: Entry) -> None:
    logger.info("downloading %s", url)
    if url == entry.url and entry.hub_file and find_spec("huggingface_hub"):  # else without access tokens
        repository, revision, name = entry.hub_file
        download_file(repository, revision, name, path)
    else:
        download(url, path, sha256=entry.sha256 or entry.hash_suffix, size=entry.size)


def _check(entry: Entry, path: Path) -> None:
    """Compare the size and the SHA-256 of a file with those of the entry, else with its record, and record them.

    The file is hashed again if its size or its time of modification is not that of the record.
    """
    recorded = read_record(path)
    try:
        stat = path.stat()
        with open(path, "rb") as file:
            start = file.read(_PAGE_BYTES)
        # Hashing a large file takes seconds.
        is_checked = (recorded.get("size"), recorded.get("modified_ns")) == (stat.st_size, stat.st_mtime_ns)
        size, sha256 = stat.st_size, str(recorded.get("sha256") if is_checked else file_sha256(path))
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read: {system_cause(error)}.\n"
            f"  fix: remove it, or make it readable; {entry.name} lies at {_place(entry)}"
        ) from error
    if problem := _problem(path, start):
        raise WeightsError(
            f"{path} is {problem}, and not the file of {entry.name}.\n"
            f"  fix: delete it, download the file from {_place(entry)} and save it as {path}"
        )
    known_size, known = entry.size or recorded.get("size"), entry.sha256 or recorded.get("sha256") or entry.hash_suffix
    if (known_size and size != known_size) or (known and not sha256.startswith(known)):
        stated = "published" if entry.sha256 or entry.size else "recorded at the first use or published"
        replaced = "" if entry.sha256 or not recorded else f"; if you replaced it, delete only {record_of(path)}"
        raise WeightsError(
            f"{path} is not the file that was {stated}.\n"
            f"  found: {size} bytes, SHA-256 {sha256}\n"
            f"  expected: {known_size or 'any number of'} bytes, SHA-256 {known or 'any'}\n"
            f"  fix: delete it and {record_of(path)} to download it again{replaced}"
        )
    add_to_record(path, {"url": entry.url, "size": size, "modified_ns": stat.st_mtime_ns, "sha256": sha256})


def _problem(path: Path, start: bytes) -> str:
    """Describe why a file that begins with ``start`` cannot be the published one; empty if it can be."""
    if not start:
        return "empty"
    if path.suffix != ".xml" and is_page(start):
        return "a web page, e.g. of a login or a confirmation"
    is_truncated = start.startswith(_ZIP) and not is_zip(path)
    return "truncated (the end of the archive is missing)" if is_truncated else ""
