"""Tests of uploads to the Hub and downloads from it, through a local server with the Hub's API."""

import re
import shutil
import subprocess
import sys

import fake_hub
import numpy as np
import pytest
import torch

import fastamp
from fastamp.cli import main
from fastamp.inference.hub import download, upload
from fastamp.inference.package import License, package
from fastamp.utils.errors import ConfigError, HubError, WeightsError

pytestmark = pytest.mark.extras

IMAGES = list(np.random.default_rng(0).integers(0, 256, (3, 64, 32, 3), dtype=np.uint8))
FILES = ("README.md", "config.yaml", "model.safetensors")


@pytest.fixture(scope="module")
def packaged(run_folder, tmp_path_factory):
    """Package of the bfloat16 run."""
    folder = tmp_path_factory.mktemp("package") / "model"
    return package(run_folder, folder, license=License(name="mit"), repository="user/model").folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Local server that huggingface_hub uses instead of the Hub, with an empty cache and a token that may write."""
    pytest.importorskip("huggingface_hub")
    with fake_hub.serve() as server:
        server.replace_hub(monkeypatch, tmp_path / "cache")
        yield server


@pytest.fixture
def model(hub, packaged):
    """Repository user/model with the package."""
    return hub.add("user/model", {name: (packaged / name).read_bytes() for name in FILES})


def test_pushed_model_is_loaded_back_bit_for_bit(hub, run_folder, capsys):
    assert main(["push", str(run_folder), "user/model", "--license", "mit"]) == 0
    digest, files = hub.repositories["user/model"].commits[-1]
    assert files.keys() == {".gitattributes", *FILES} and len(hub.repositories["user/model"].commits) == 2
    assert f"{hub.endpoint}/user/model/commit/{digest}" in capsys.readouterr().out
    assert b'from_pretrained("user/model")' in files["README.md"]
    before, after = fastamp.Predictor(run_folder), fastamp.from_pretrained("user/model")
    assert torch.equal(before.features(IMAGES), after.features(IMAGES)) and before.config_hash == after.config_hash
    weights = after.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in before.model.state_dict().items())


def test_packaged_folder_is_uploaded_as_it_is(hub, packaged, tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(packaged, folder)
    card = (folder / "README.md").read_text().replace("not stated", "twelve cameras of a test hall, with consent")
    (folder / "README.md").write_text(card)
    (folder / "LICENSE").write_text("text")
    (folder / "notes.txt").write_text("mine")
    (folder / "model.pth").write_bytes(b"pickle")
    assert main(["push", str(folder), "user/model", "--private"]) == 0
    assert "not uploaded: model.pth, notes.txt" in caplog.text
    repository = hub.repositories["user/model"]
    assert repository.private and repository.commits[-1][1].keys() == {".gitattributes", "LICENSE", *FILES}
    assert all(repository.commits[-1][1][name] == (folder / name).read_bytes() for name in FILES)


def test_card_with_another_name_causes_a_warning(hub, packaged, caplog):
    upload(packaged, "user/other")
    assert "user/other" in caplog.text


def test_card_is_valid_for_huggingface_hub(packaged):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    card = huggingface_hub.ModelCard.load(packaged / "README.md")
    assert card.data.license == "mit" and card.data.library_name == "fastamp"
    assert {eval_result.metric_type for eval_result in card.data.eval_results} >= {"mAP", "Rank-1"}


def test_repository_with_files_is_only_replaced_with_update(hub, model, packaged, run_folder, capsys):
    with pytest.raises(HubError, match="--update"):
        upload(packaged, "user/model")
    assert len(model.commits) == 1
    assert main(["push", str(run_folder), "user/model", "--license", "apache-2.0", "--update"]) == 0
    assert len(model.commits) == 2 and b"license: apache-2.0" in model.commits[-1][1]["README.md"]
    with pytest.raises(HubError, match="public"):
        upload(packaged, "user/model", update=True, private=True)
    hub.add("user/empty", {".gitattributes": b""})  # created on the website
    upload(packaged, "user/empty")
    assert "model.safetensors" in hub.repositories["user/empty"].commits[-1][1]


def test_failed_upload_can_be_repeated(hub, packaged):
    hub.fail["/commit/"] = (500, "", "internal error")
    with pytest.raises(HubError, match="internal error"):
        upload(packaged, "user/model")
    hub.fail.clear()
    upload(packaged, "user/model")
    assert hub.repositories["user/model"].commits[-1][1].keys() >= set(FILES)


def test_revision_pins_the_files(hub, model, packaged):
    first = model.commits[0][0]
    config = (packaged / "config.yaml").read_bytes()
    second = model.commit({"config.yaml": config.replace(b"IMS_PER_BATCH: 64", b"IMS_PER_BATCH: 2")})
    batch = {name: download(name, **options) for name, options in (
        ("user/model", {"revision": first}), ("hf://user/model", {}), (f"user/model@{first}", {}),
    )}  # fmt: skip
    assert [path.name for path in batch.values()] == [first, second, first]
    assert fastamp.from_pretrained("user/model", revision=first).cfg.TEST.IMS_PER_BATCH == 64
    assert fastamp.from_pretrained("user/model").cfg.TEST.IMS_PER_BATCH == 2
    with pytest.raises(HubError, match="v9"):
        download("user/model", revision="v9")


def test_only_weights_and_config_are_downloaded(hub, model):
    model.commit({"evil.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x02", "plugin.py": b""})
    folder = download("user/model")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "model.safetensors"]
    assert not [
        request for request in hub.requests if "resolve" in request and request.endswith((".py", ".bin", ".md"))
    ]


@pytest.mark.parametrize(
    "files", [{"pytorch_model.bin": b"\x80"}, {"model.safetensors": b"", "config.json": b"{}"}, {}]
)
def test_repository_without_a_packaged_model_is_rejected_before_downloading(hub, files):
    hub.add("user/other", files)
    with pytest.raises(HubError, match="user/other .*config.yaml"):
        fastamp.from_pretrained("user/other")
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_damaged_download_is_detected(hub, model, packaged):
    content = bytearray((packaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    model.commit({"model.safetensors": bytes(content)})
    with pytest.raises(WeightsError, match="checksum"):
        fastamp.from_pretrained("user/model")


def test_hub_models_are_sources_of_commands(hub, model, demo, run_folder, tmp_path):
    for source, name in (("hf://user/model", "a.npz"), (str(run_folder), "b.npz")):
        assert main(["extract", source, "Demo", "--splits", "query", "-o", str(tmp_path / name)]) == 0
    assert np.array_equal(np.load(tmp_path / "a.npz")["features"], np.load(tmp_path / "b.npz")["features"])
    assert main(["eval", f"hf://user/model@{model.commits[0][0]}", "OUTPUT_DIR", str(tmp_path / "eval")]) == 0
    assert main(["push", "hf://user/model", "user/copy"]) == 2  # the card is not downloaded


def test_private_models_need_a_token(hub, packaged, monkeypatch):
    hub.add("user/secret", {name: (packaged / name).read_bytes() for name in FILES}, private=True)
    download("user/secret")
    with pytest.raises(HubError, match="user/secret"):
        download("user/secret", token=False)
    download("user/secret", token=fake_hub.TOKEN)
    with pytest.raises(HubError, match="token"):
        download("user/secret", token="hf_wrong")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="HF_TOKEN"):
        upload(packaged, "user/secret")


def test_gated_models_are_explained(hub, packaged):
    hub.add("user/gated", {name: (packaged / name).read_bytes() for name in FILES}, gated=True)
    with pytest.raises(HubError, match="gated"):
        download("user/gated")


def test_models_that_do_not_exist_and_recipes_are_explained(hub):
    with pytest.raises(HubError, match="user/nothing"):
        fastamp.from_pretrained("user/nothing")
    with pytest.raises(HubError, match="recipe"):
        fastamp.from_pretrained("Market1501/sbs_R50-ibn")
    before = len(hub.requests)
    for name in ("logs/run/model_best.pth", "model", "https://example.org/x", "../x/y", "user/name/", "user/a b"):
        with pytest.raises(HubError, match=re.escape(repr(name))):
            fastamp.from_pretrained(name)
    assert len(hub.requests) == before


def test_without_connection_the_cached_files_are_used_with_a_warning(hub, model, monkeypatch, caplog):
    commit = model.commits[0][0]
    download("user/model")
    hub.requests.clear()
    assert download("user/model", local_files_only=True).name == commit and not hub.requests
    constants = sys.modules["huggingface_hub.constants"]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fastamp.from_pretrained("user/model") is not None
    assert "cannot be reached" in caplog.text and commit in caplog.text
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9"):
        download("user/other")
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9"):
        download("user/model", revision="v2")
    with pytest.raises(HubError, match="cache"):
        download("user/other", local_files_only=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download("user/model").name == commit


def test_cache_dir_is_used(hub, model, tmp_path):
    folder = download("user/model", cache_dir=tmp_path / "mine")
    assert folder.is_relative_to(tmp_path / "mine")


def test_local_paths_have_precedence_and_no_revision(hub, model, packaged, elsewhere):
    shutil.copytree(packaged, "user/model")
    assert str(fastamp.from_pretrained("user/model").checkpoint) == "user/model/model.safetensors"
    assert not hub.requests
    assert "cache" in str(fastamp.from_pretrained("hf://user/model").checkpoint)
    with pytest.raises(HubError, match="revision='main'"):
        fastamp.from_pretrained("user/model", revision="main")
    with pytest.raises(WeightsError, match="nowhere"):
        fastamp.from_pretrained(packaged.parent / "nowhere.pth")


def test_upload_without_write_permission_or_with_an_invalid_card(hub, packaged, tmp_path):
    hub.fail["POST /api/repos/create"] = (403, "", "You don't have the rights to create a model under this namespace")
    with pytest.raises(HubError, match="403"):
        upload(packaged, "company/model")
    hub.fail = {"POST /api/validate-yaml": (400, "", "bad license")}
    with pytest.raises(HubError, match=r"README\.md"):
        upload(packaged, "user/model")
    assert "model.safetensors" not in hub.repositories["user/model"].commits[-1][1]
    for name in ("model", "user/na me", "a/b/c", ""):
        with pytest.raises(HubError, match="user/name"):
            upload(packaged, name)


def test_damaged_folder_is_not_uploaded(hub, packaged, tmp_path):
    shutil.copytree(packaged, tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(WeightsError):
        upload(tmp_path / "model", "user/model")
    assert "user/model" not in hub.repositories


def test_missing_huggingface_hub_is_explained(packaged, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="fastamp.hub"):
        fastamp.from_pretrained("user/model")
    fastamp.from_pretrained(packaged)  # folders do not need it


def test_help_does_not_import_torch_or_huggingface_hub():
    code = (
        "import sys; from fastamp.cli import main\n"
        "for words in (['--help'], ['push', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "print({'torch', 'huggingface_hub', 'safetensors'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "set()"
