"""Messages of fastamp/inference/hub.py: downloads and uploads, through a local server with the Hub's API."""

import shutil
import sys

import fake_hub
import pytest
from messages import Recorder

import fastamp
from fastamp.inference.hub import download, upload
from fastamp.inference.package import License, package

SITES = ["fastamp/inference/hub.py"]
FILES = ("README.md", "config.yaml", "model.safetensors")


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue("run_folder")
    packaged = package(run, record.root / "model", license=License(name="mit"), repository="user/model").folder
    with fake_hub.serve() as hub, pytest.MonkeyPatch.context() as patch:
        hub.replace_hub(patch, record.root / "cache")
        files = {name: (packaged / name).read_bytes() for name in FILES}
        model = hub.add("user/model", files)
        record._names |= {hub.endpoint: "ENDPOINT", model.commits[0][0]: "COMMIT"}
        downloads(record, hub, files)
        uploads(record, hub, packaged)
        unreachable(record, patch)
        patch.setitem(sys.modules, "huggingface_hub", None)
        with record("a model on the Hub without huggingface_hub"):
            download("user/model")


def downloads(record, hub, files):
    """Load models from the Hub."""
    hub.add("user/other", {"pytorch_model.bin": b"", "README.md": b""})
    hub.add("user/gated", files, gated=True)
    for name, options in (
        ("logs/run/model.pth", {}), ("user/nothing", {}), ("Market1501/sbs_R50-ibn", {}), ("user/other", {}),
        ("user/gated", {}), ("user/model", {"revision": "v9"}), ("user/model", {"token": "hf_wrong"}),
        ("user/model", {}),
        ("user/model", {"local_files_only": True, "revision": "v1"}), ("user/a--b", {}),
    ):  # fmt: skip
        arguments = ", ".join([repr(name), *(f"{key}={value!r}" for key, value in options.items())])
        with record(f"from_pretrained({arguments})"):
            download(name, **options)
    with record("from_pretrained of a folder with a revision"):
        fastamp.from_pretrained(record.root / "model", revision="main")
    hub.fail["/resolve/"] = (404, "", "not found")
    hub.add("user/broken", files)
    with record("from_pretrained if a download fails"):
        download("user/broken")
    hub.fail.clear()
    record.root.joinpath("cache/models--user--file").write_text("")
    hub.add("user/file", files)
    with record("from_pretrained with a cache that cannot be written"):
        download("user/file")


def uploads(record, hub, packaged):
    """Upload models to the Hub."""
    with record("upload to a repository with files"):
        upload(packaged, "user/model")
    with record("upload to a public repository as private"):
        upload(packaged, "user/model", update=True, private=True)
    folder = record.root / "more"
    shutil.copytree(packaged, folder)
    record.file("more/notes.txt")
    with record("upload of a folder with other files under another name"):
        upload(folder, "user/more")
    with record("upload to an invalid name"):
        upload(packaged, "model")
    hub.fail["POST /api/repos/create"] = (403, "", "You don't have the rights to create a model under this namespace")
    with record("upload without write permission"):
        upload(packaged, "company/model")
    hub.fail = {"POST /api/validate-yaml": (400, "", "bad license")}
    with record("upload of an invalid model card"):
        upload(packaged, "user/new")
    hub.fail.clear()


def unreachable(record, patch):
    """Use the cache without a connection."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("user/model", "user/new"):
        with record(f"from_pretrained({name!r}) without a connection"):
            download(name)
    patch.delenv("HF_TOKEN")
    with record("upload without a token"):
        upload(record.root / "model", "user/model")
