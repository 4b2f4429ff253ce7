"""Tests of the HTTP service: equality with the Predictor, access, limits, errors and the bounded queue."""

import asyncio
import io
import json
import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from random_calibration import random_calibration
from slow_resize import SLOW, SlowResize

from fastamp import Predictor
from fastamp.cli import command_parser
from fastamp.data.build import build_dataset
from fastamp.inference.export import export
from fastamp.inference.runtime import ExportedModel
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.utils.errors import ConfigError, DataError

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from fastapi.testclient import TestClient
from starlette.requests import Request

from fastamp.serving.app import create_app
from fastamp.serving.batching import Batcher
from fastamp.serving.decoding import Decoder, is_usual
from fastamp.serving.errors import RequestError
from fastamp.serving.options import Limits, read_api_key
from fastamp.serving.requests import read_form
from fastamp.serving.service import Service

pytestmark = pytest.mark.extras
KEY = "0123456789abcdef"


@pytest.fixture
def images(demo):
    return [item.path for item in build_dataset("Demo").query[:6]]


@pytest.fixture
def start(predictor, tmp_path):
    """Function that starts a service with a new gallery, and returns its client."""
    clients = []

    def start_service(*, model=predictor, gallery=True, api_key="", local=False, **limits):
        opened = MutableGallery(tmp_path / "a.gallery", model.model_id) if gallery else None
        service = Service(model, opened, Limits(**limits))
        client = TestClient(create_app(service, api_key=api_key, local=local), raise_server_exceptions=False)
        client.service = service
        clients.append(client.__enter__())
        return client

    yield start_service
    for client in clients:
        client.__exit__(None, None, None)


def upload(*paths, name="images"):
    return [(name, (Path(path).name, Path(path).read_bytes())) for path in paths]


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"} and answer.json()["error"].keys() == {"code", "message", "fix"}
    return answer.json()["error"]["code"]


def test_features_and_comparisons_equal_those_of_the_predictor(start, predictor, images):
    client = start(gallery=False)
    answer = client.post("/v1/features", files=upload(*images)).json()
    # Float32 sums in batches of other sizes.
    assert torch.allclose(torch.tensor(answer["features"]), predictor.features(images), rtol=1e-4, atol=1e-5)
    assert answer["model"] == predictor.config_hash and answer["metric"] == "cosine"
    found = client.post("/v1/compare", files=upload(*images[:2])).json()
    expected = predictor.compare(*images[:2])
    assert found["score"] == pytest.approx(expected.score, abs=1e-5)
    assert found["impostor_fraction"] == pytest.approx(expected.impostor_fraction, abs=1e-3)
    assert found["genuine_fraction"] == pytest.approx(expected.genuine_fraction, abs=1e-3)
    assert found["decision"] is None and found["probability"] is None  # not calibrated


def test_added_images_are_found_updated_and_removed(start, predictor, images, tmp_path):
    client = start()
    items = [{"id": "a/..b/c", "camera": "door", "time": "2026-01-31T10:00"}, {"name": "second"}, {}]
    answer = client.post("/v1/gallery/items", files=upload(*images[:3]), data={"items": json.dumps(items)})
    assert answer.status_code == 201
    ids = answer.json()["ids"]
    assert ids[0] == "a/..b/c" and len({*ids}) == 3
    assert client.get("/v1/gallery").json() == {
        "items": 3, "metric": "cosine", "model": predictor.config_hash, "recall": None
    }  # fmt: skip
    found = client.post("/v1/search", files=upload(*images[:3]), data={"k": 2}).json()
    assert [query["found"][0]["id"] for query in found["queries"]] == ids and found["searched"] == 3
    best = found["queries"][0]["found"][0]
    assert best["score"] == pytest.approx(1, abs=1e-5) and best["camera"] == "door" and best["rank"] == 1
    assert best["time"] == "2026-01-31T10:00:00+00:00" and best["name"] == Path(images[0]).name
    assert 0 <= best["impostor_fraction"] <= 1 and best["decision"] is None
    for conditions, count in (({"camera": ["door"]}, 1), ({"camera": ["x"]}, 0), ({"after": "2026-01-31T11:00"}, 0)):
        found = client.post("/v1/search", files=upload(images[0]), data=conditions).json()
        assert found["searched"] == count == len(found["queries"][0]["found"])
    picture = client.get("/v1/gallery/pictures/a%2F..b%2Fc")
    assert picture.headers["content-type"] == "image/jpeg" and PIL.Image.open(io.BytesIO(picture.content)).size
    changed = client.put(f"/v1/gallery/items/{ids[1]}", files=upload(images[4]), data={"items": '[{"camera": "c"}]'})
    assert changed.json() == {"id": ids[1], "name": "second", "identity": "", "camera": "c", "time": ""}
    assert client.post("/v1/search", files=upload(images[4])).json()["queries"][0]["found"][0]["id"] == ids[1]
    assert client.put(f"/v1/gallery/items/{ids[1]}", files=upload(images[1])).json()["camera"] == "c"
    assert client.delete(f"/v1/gallery/items/{ids[2]}").status_code == 204
    assert client.get("/v1/gallery/items?limit=5").json()["total"] == 2
    assert client.get(f"/v1/gallery/items/{ids[1]}").json()["camera"] == "c"
    with MutableGallery(tmp_path / "a.gallery", predictor.model_id) as other:  # what is on the disk
        assert [item.id for item in other.items] == ids[:2]
        other.remove([ids[0]])
    assert client.get("/v1/gallery").json()["items"] == 1
    for method, path in (("get", "items/x"), ("delete", "items/x"), ("get", "pictures/x")):
        assert error_of(client.request(method, f"/v1/gallery/{path}"), 404) in ("no_item", "no_picture")
    assert error_of(client.put("/v1/gallery/items/x", files=upload(images[0])), 404) == "no_item"
    other_id = [("items", (None, '[{"id": "other"}]'))]
    assert error_of(client.put(f"/v1/gallery/items/{ids[1]}", files=other_id), 422) == "invalid_field"
    no_fields = {"content": b"--a--\r\n", "headers": {"Content-Type": "multipart/form-data; boundary=a"}}
    assert error_of(client.put(f"/v1/gallery/items/{ids[1]}", **no_fields), 422) == "nothing_to_change"


def test_calibrated_models_return_decisions_and_probabilities(start, predictor, images, monkeypatch):
    client = start()
    calibration = random_calibration(predictor)
    monkeypatch.setitem(vars(predictor), "calibration", calibration)
    client.post("/v1/gallery/items", files=upload(*images[:3]))
    found = client.post("/v1/search", files=upload(images[0])).json()["queries"][0]
    assert found["decision"] == "match" and found["threshold"] == calibration.search_threshold
    assert found["fpir"] == pytest.approx(calibration.expected_fpir(3))
    for match in found["found"]:
        assert match["decision"] == calibration.decide(match["score"])
        assert match["probability"] == pytest.approx(float(calibration.probability(match["score"])))
    compared = client.post("/v1/compare", files=upload(images[0], images[0])).json()
    assert compared["decision"] == "same" and compared["probability"] > 0.5


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_an_exported_model_answers_as_the_checkpoint(start, checkpoint, images, tmp_path, suffix):
    pytest.importorskip({".onnx": "onnxruntime", ".xml": "openvino"}[suffix])
    predictor = Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])
    export(predictor, tmp_path / f"model{suffix}", data="")
    client = start(model=ExportedModel(tmp_path / f"model{suffix}"))
    found = client.post("/v1/features", files=upload(*images)).json()
    cosines = torch.cosine_similarity(torch.tensor(found["features"]), predictor.features(images))
    assert cosines.min() > 0.9999 and found["model"] == predictor.config_hash  # the limit of the export
    client.post("/v1/gallery/items", files=upload(*images[:3]))
    (query,) = client.post("/v1/search", files=upload(images[1])).json()["queries"]
    assert query["found"][0]["name"] == Path(images[1]).name and query["found"][0]["score"] > 0.9999


def test_an_empty_gallery_has_no_matches(start, images):
    found = start().post("/v1/search", files=upload(images[0])).json()
    assert found["searched"] == 0 and found["queries"][0]["found"] == []


@pytest.mark.parametrize(
    "headers", [{"Host": "[::1"}, {"Origin": "http://["}, {"Host": "127.0.0.1", "Origin": "http://[::1"}]
)
@pytest.mark.parametrize("local", [True, False])
def test_invalid_headers_are_errors_of_the_request(start, headers, local):
    answer = start(local=local).get("/v1/gallery", headers={"Host": "127.0.0.1"} | headers)
    assert error_of(answer, 400) == "invalid_header"


@pytest.mark.parametrize("charset", ["undefined", "none", "base64", "idna", "utf-7", '"\x00"', "x" * 300])
def test_an_invalid_charset_is_an_error_of_the_request(start, charset):
    body = b'--limit\r\nContent-Disposition: form-data; name="k\xff"\r\n\r\n\xff.\xfe..\r\n--limit--\r\n'
    headers = {"Content-Type": f"multipart/form-data; boundary=limit; charset={charset}"}
    answer = start(gallery=False).post("/v1/features", content=body, headers=headers)
    assert answer.status_code in (400, 422)
    error_of(answer, answer.status_code)


def test_all_requests_together_have_a_limited_size(start, images):
    client = start(megabytes=1, total_megabytes=1)
    client.service.counts["held"] = 10**6  # another request
    assert error_of(client.post("/v1/features", files=upload(images[0])), 429) == "queue_full"
    client.service.counts["held"] = 0
    assert client.post("/v1/features", files=upload(images[0])).status_code == 200
    assert client.service.counts["held"] == 0


def test_all_parts_of_a_body_without_length_count_together(start):
    client = start(gallery=False, megabytes=1)
    headers = {"Content-Type": "multipart/form-data; boundary=a"}
    parts = (bytes(600_000) for _ in range(3))
    assert error_of(client.post("/v1/features", content=parts, headers=headers), 413) == "request_too_large"
    assert client.service.counts["held"] == 0 and len([*parts]) == 0


def test_requests_need_the_api_key(start, images):
    client = start(api_key=KEY)
    routes = [("post", "/v1/features"), ("post", "/v1/search"), ("post", "/v1/gallery/items"), ("get", "/v1/gallery"),
              ("get", "/v1/gallery/items"), ("delete", "/v1/gallery/items/a"), ("put", "/v1/gallery/items/a"),
              ("get", "/v1/gallery/pictures/a"), ("get", "/metrics"), ("post", "/v1/compare")]  # fmt: skip
    described = {(method, path) for path, methods in client.get("/openapi.json").json()["paths"].items()
                 for method in methods}  # fmt: skip
    assert len(described) == len(routes) + 2  # GET items/{item_id} and /health
    for method, path in routes:
        for headers in ({}, {"X-API-Key": KEY[:-1]}, {"X-API-Key": "\xe9"}, {"Authorization": f"Basic {KEY}"}):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            assert error_of(client.request(method, path, headers=encoded), 401) == "unauthorized"
    for headers in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
        assert client.post("/v1/features", files=upload(images[0]), headers=headers).status_code == 200
    for path in ("/", "/docs", "/health", "/page.js", "/page.css"):
        assert client.get(path).status_code == 200


def test_without_a_key_requests_of_other_sites_are_rejected(start, images):
    client = start(local=True)
    local = {"Host": "127.0.0.1:8000"}
    assert client.get("/v1/gallery", headers=local | {"Origin": "http://127.0.0.1:8000"}).status_code == 200
    assert error_of(client.get("/v1/gallery", headers=local | {"Origin": "http://evil.test"}), 403) == "other_origin"
    assert error_of(client.get("/v1/gallery", headers={"Host": "evil.test"}), 403) == "other_host"
    files = upload(images[0])
    answer = client.post("/v1/gallery/items", files=files, headers=local | {"Origin": "null"})
    assert error_of(answer, 403) == "other_origin" and client.get("/v1/gallery", headers=local).json()["items"] == 0


def test_limits_and_invalid_requests_have_structured_errors(start, images):
    client = start(images=2, megabytes=1, megapixels=1, results=5)
    one = upload(images[0])
    buffer = io.BytesIO()
    PIL.Image.new("L", (2000, 1000)).save(buffer, "PNG")
    large = [("images", ("large.png", buffer.getvalue()))]
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    for files, data, status, code in (
        (upload(*images[:3]), {}, 400, "invalid_form"),  # count
        ([("images", ("a.jpg", bytes(1_100_000)))], {}, 413, "request_too_large"),
        (large, {}, 422, "invalid_image"),  # pixels
        ([("images", ("a.jpg", b""))], {}, 422, "invalid_image"),
        ([("images", ("a.eps", script))], {}, 422, "invalid_image"),  # would run Ghostscript
        ([("images", ("a.jpg", Path(images[0]).read_bytes()[:200]))], {}, 422, "invalid_image"),
        ([("other", ("a.jpg", b"x"))], {}, 422, "unknown_field"),
        (one, {"cameras": "door"}, 422, "unknown_field"),  # would search in all items
        ([*one, ("camera", ("a.txt", b"door"))], {}, 422, "invalid_field"),
        ([("k", (None, "1"))], {}, 422, "wrong_count"),
        (one, {"k": "6"}, 422, "invalid_field"),
        (one, {"k": "-1"}, 422, "invalid_field"),
        (one, {"k": "\u0663"}, 422, "invalid_field"),
        (one, {"after": "noon"}, 422, "invalid_value"),
    ):
        assert error_of(client.post("/v1/search", files=files, data=data), status) == code
    # A path on the server is not read, as text or as the name of a file.
    answer = client.post("/v1/features", files=[("images", (None, "/etc/passwd"))])
    assert error_of(answer, 422) == "not_a_file"
    wrong = ("[1]", '[{"path": "/etc/passwd"}]', '[{"time": "noon"}]', '[{"id": ""}]', '[{"id": ".."}]')
    segments = ('[{"id": "x/../b"}]', '[{"id": "./b"}]', '[{"id": "b/."}]')
    for items in ("{}", "[]", *wrong, *segments, '[{"id": "\\ud800"}]', "[" * 100_000):
        answer = client.post("/v1/gallery/items", files=one, data={"items": items})
        assert error_of(answer, 422) in ("invalid_field", "invalid_value")
    assert error_of(client.post("/v1/features", content=b"x"), 415) == "not_a_form"
    assert error_of(client.post("/v1/compare", files=one), 422) == "wrong_count"
    assert error_of(client.get("/v1/gallery/items?limit=6"), 422) == "invalid_field"
    assert error_of(client.get("/v1/gallery/items?limit=x"), 422) == "invalid_field"
    assert error_of(client.get("/nowhere"), 404) == "http_error"
    assert client.get("/v1/gallery").json()["items"] == 0
    named = [("images", ("../../etc/\x00pass\nwd", Path(images[0]).read_bytes()))]
    (item_id,) = client.post("/v1/gallery/items", files=named).json()["ids"]
    assert "/" not in client.get(f"/v1/gallery/items/{item_id}").json()["name"]
    answer = client.post("/v1/gallery/items", files=one, data={"items": json.dumps([{"id": item_id}])})
    assert error_of(answer, 422) == "invalid_value"


def test_items_at_the_ends_of_the_calendar_do_not_break_the_gallery(start, images):
    client = start()
    for moment in ("9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"):  # not in the years 1 to 9999 in UTC
        data = {"items": json.dumps([{"time": moment}])}
        answer = client.post("/v1/gallery/items", files=upload(images[0]), data=data)
        assert error_of(answer, 422) == "invalid_value"
    for moment in ("9999-12-31T23:59:59", "0001-01-01"):
        data = {"items": json.dumps([{"time": moment}])}
        client.post("/v1/gallery/items", files=upload(images[0]), data=data).raise_for_status()
    times = [item["time"] for item in client.get("/v1/gallery/items").json()["items"]]
    assert times == ["9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+00:00"]
    assert client.post("/v1/search", files=upload(images[0])).json()["searched"] == 2


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_kinds_of_images_are_read_as_by_the_predictor(start, predictor, images, tmp_path):
    image = PIL.Image.open(images[0])
    gray = PIL.Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    files = {
        "gray.png": encoded(image.convert("L"), "PNG"),
        "gray16.png": encoded(gray, "PNG"),
        "cmyk.jpg": encoded(image.convert("CMYK"), "JPEG"),
        "turned.png": encoded(image.rotate(90, expand=True), "PNG", exif=turned),
        "alpha.png": encoded(image.convert("RGBA"), "PNG"),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    client = start(gallery=False)
    answer = client.post("/v1/features", files=upload(*(tmp_path / name for name in files))).json()
    expected = predictor.features([tmp_path / name for name in files])
    # Float32 sums in batches of other sizes.
    assert torch.allclose(torch.tensor(answer["features"]), expected, rtol=1e-4, atol=1e-5)
    upright = predictor.features(images[0])
    assert torch.allclose(expected[3:], upright.expand(2, -1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected[0], upright[0], rtol=1e-4, atol=1e-5)  # without colors
    for content in (encoded(image.convert("F"), "TIFF"), b"<svg/>", b"text"):
        answer = client.post("/v1/features", files=[("images", ("a", content))])
        assert error_of(answer, 422) == "invalid_image"


def test_a_client_that_disconnects_is_an_error_of_the_request():
    async def disconnected():
        return {"type": "http.disconnect"}

    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=a")]}
    with pytest.raises(RequestError, match="disconnected") as raised:
        asyncio.run(read_form(Request(scope, disconnected), Limits(), ["images"]))
    assert raised.value.status == 400  # not a bug with a traceback in the log


def test_without_a_gallery_only_features_and_comparisons_work(start, images):
    client = start(gallery=False)
    for answer in (
        client.get("/v1/gallery"),
        client.post("/v1/search", files=upload(images[0])),
        client.post("/v1/gallery/items", files=upload(images[0])),
    ):
        assert error_of(answer, 404) == "no_gallery"
    assert client.get("/health").json() == {"status": "ok", "pending": 0, "computing_seconds": 0.0}


def test_bugs_are_answered_without_details(start, images, monkeypatch):
    client = start()
    monkeypatch.setattr(Batcher, "_results", lambda *_: 1 / 0)
    assert "division" not in (answer := client.post("/v1/features", files=upload(images[0]))).text
    assert error_of(answer, 500) == "internal_error"


def png(side=40, color=(9, 9, 9)):
    file = io.BytesIO()
    PIL.Image.new("RGB", (side, side), color).save(file, "PNG")
    return file.getvalue()


def test_images_are_decoded_in_a_process_that_ends_at_the_deadline(predictor):
    decoder = Decoder(predictor.transforms._replace(resize=SlowResize()), seconds=4, pictures=True)

    async def decode_both():
        slow, usual = await asyncio.gather(
            decoder.decode(png(color=SLOW), "slow"), decoder.decode(png(), "usual"), return_exceptions=True
        )
        again = await decoder.decode(png(), "again")
        for process in multiprocessing.active_children():
            process.kill()  # as the kernel does if it needs memory
        return slow, usual, again, await decoder.decode(png(), "after that")

    try:
        slow, *usual = asyncio.run(decode_both())
    finally:
        decoder.close()
    assert isinstance(slow, RequestError) and "within 4 seconds" in str(slow) and "smaller" in slow.fix
    for pixels, picture in usual:
        assert torch.equal(pixels, torch.full((3, 40, 40), 9, dtype=torch.uint8)) and picture[:2] == b"\xff\xd8"
    assert not multiprocessing.active_children()


def test_only_small_jpeg_files_with_few_scans_are_decoded_in_threads(images):
    plain = Path(images[0]).read_bytes()
    file = io.BytesIO()
    PIL.Image.new("RGB", (1100, 1100)).save(file, "JPEG")
    assert is_usual(plain)
    assert not any(map(is_usual, (png(), file.getvalue(), plain + bytes(2**20), plain[:20], b"")))


def test_health_reports_a_stuck_computation_and_requests_are_answered(start, images, monkeypatch):
    release, computing = threading.Event(), threading.Event()

    def compute(self, images):
        computing.set()
        assert release.wait(30)
        return [torch.zeros(16)] * len(images)

    monkeypatch.setattr(Batcher, "_results", compute)
    client = start(answer_seconds=1)
    try:
        assert error_of(client.post("/v1/features", files=upload(images[0])), 503) == "too_slow"
        assert computing.is_set()
        wait_until(lambda: client.get("/health").status_code == 503)
        health = client.get("/health").json()
        assert health["status"] == "stuck" and health["pending"] == 0  # its place is free
    finally:
        release.set()
    wait_until(lambda: client.get("/health").status_code == 200)
    assert client.post("/v1/features", files=upload(images[0])).status_code == 200


def test_health_reports_a_stuck_gallery(start, monkeypatch):
    release = threading.Event()
    client = start(answer_seconds=1)
    monkeypatch.setattr(MutableGallery, "refresh", lambda self: release.wait(30))
    try:
        assert error_of(client.get("/v1/gallery"), 503) == "too_slow"
        wait_until(lambda: client.get("/health").json()["status"] == "stuck")
    finally:
        release.set()
    wait_until(lambda: client.get("/health").status_code == 200)


def wait_until(condition):
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the condition did not become true within 10 seconds")


def test_an_abandoned_request_frees_its_places_and_is_not_computed():
    release, computed = threading.Event(), []

    def compute(images):
        assert release.wait(20)
        computed.extend(images)
        return torch.tensor([[float(image)] for image in images])

    async def work(batcher):
        first = asyncio.create_task(request(batcher, 0))
        await asyncio.sleep(0.05)  # is computed
        abandoned = asyncio.create_task(request(batcher, 1, 2))
        kept = asyncio.create_task(request(batcher, 3))
        await asyncio.sleep(0.05)
        abandoned.cancel()
        await asyncio.wait([abandoned])
        assert batcher.pending == 2
        release.set()
        return await asyncio.gather(first, kept)

    assert run_batches(work, compute) == [[[0.0]], [[3.0]]]
    assert computed == [0, 3]


def test_a_disconnected_client_frees_its_places(start, images, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(
        Batcher, "_results", lambda self, images: [torch.zeros(16)] * len(images) if release.wait(30) else []
    )
    client = start(gallery=False)
    body, boundary = b"", b"limit"
    for name, content in upload(images[0]):
        head = b'--%b\r\nContent-Disposition: form-data; name="%b"; filename="a.jpg"\r\n\r\n'
        body += head % (boundary, name.encode()) + content[1] + b"\r\n--%b--\r\n" % boundary
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        if messages:
            return messages.pop()
        while client.service.batcher.pending == 0:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/features",
        "raw_path": b"/v1/features",
        "query_string": b"",
        "headers": [(b"content-type", b"multipart/form-data; boundary=limit")],
    }
    try:
        client.portal.call(client.app, scope, receive, send)
        assert sent[0]["status"] == 400 and client.service.batcher.pending == 0
    finally:
        release.set()


def test_metrics_count_requests_and_images(start, images):
    client = start()
    client.post("/v1/gallery/items", files=upload(*images[:3]))
    client.post("/v1/features", files=upload(images[0]))
    client.get("/nowhere")
    for number in range(3):
        client.request(f"METHOD{number}", "/nowhere")
    lines = client.get("/metrics").text.splitlines()
    for line in (
        'fastamp_requests_total{method="POST",route="/v1/features",status="200"} 1.0',
        'fastamp_requests_total{method="GET",route="other",status="404"} 1.0',
        'fastamp_requests_total{method="other",route="other",status="404"} 3.0',
        "fastamp_batch_images_sum 4.0",
        "fastamp_gallery_items 3.0",
        "fastamp_pending_images 0.0",
    ):
        assert line in lines


def test_metrics_need_the_key_unless_they_are_open(start, predictor):
    assert error_of(start(api_key=KEY).get("/metrics"), 401) == "unauthorized"
    app = create_app(Service(predictor, None, Limits()), api_key=KEY, open_metrics=True)
    with TestClient(app) as client:
        assert client.get("/metrics").status_code == 200


def test_pages_contain_only_their_own_scripts(start):
    client = start()
    for path in ("/", "/docs"):
        answer = client.get(path)
        assert "http://" not in answer.text and "https://" not in answer.text and "<script>" not in answer.text
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    routes = client.get("/docs").text
    assert "POST /v1/search" in routes and "impostor_fraction" in routes and "<code>before</code>" in routes
    assert "Body_" not in routes


def run_batches(work, compute, workers=1, **options):
    """Run a coroutine function with a batcher, and return its result."""

    async def main():
        limits = Limits(images=1, queue=8, **{"batch": 4, "wait_ms": 0} | options)
        batcher = Batcher(compute, limits, workers)
        try:
            return await asyncio.wait_for(work(batcher), 30)
        finally:
            await batcher.stop()

    return asyncio.run(main())


async def request(batcher, *images):
    with batcher.places(len(images)):
        return (await batcher.features(images)).tolist()


def test_batches_collect_concurrent_images_and_keep_their_order():
    sizes = []

    def compute(images):
        sizes.append(len(images))
        return torch.tensor([[float(image)] for image in images])

    async def work(batcher):
        return await asyncio.gather(*(request(batcher, 2 * n, 2 * n + 1) for n in range(4)))

    found = run_batches(work, compute, wait_ms=50)
    assert found == [[[2.0 * n], [2.0 * n + 1]] for n in range(4)] and sizes == [4, 4]


def test_two_threads_compute_at_the_same_time_and_divide_the_images():
    sizes, together = [], threading.Barrier(2)

    def compute(images):
        sizes.append(len(images))
        together.wait(20)  # fails if one batch waits for the other
        return torch.tensor([[float(image)] for image in images])

    async def work(batcher):
        found = await asyncio.gather(*(request(batcher, n) for n in range(6)))
        assert not batcher.starts and batcher.pending == 0
        return found

    found = run_batches(work, compute, wait_ms=50, workers=2)
    assert found == [[[float(n)]] for n in range(6)] and sizes == [3, 3]


def test_an_image_waits_once(monkeypatch):
    delays, sizes = [], []

    async def work(batcher):
        loop = asyncio.get_running_loop()
        clock = loop.time

        def wait(delay, function):
            delays.append(delay)
            loop.call_soon(function)

        monkeypatch.setattr(loop, "call_later", wait)
        monkeypatch.setattr(loop, "time", lambda: clock() + sum(delays))
        await asyncio.gather(*(request(batcher, n) for n in range(4)))

    def compute(images):
        sizes.append(len(images))
        return torch.zeros(len(images), 1)

    run_batches(work, compute, wait_ms=10_000, workers=2, batch=8)
    assert sizes == [2, 2]
    assert len([delay for delay in delays if delay > 5]) == 1


def test_two_batches_divide_the_threads_and_one_uses_all(predictor, images, monkeypatch):
    before, found, used = torch.get_num_threads(), [], []
    compute, together = predictor.features_of_preprocessed, threading.Barrier(2)

    def record(pixels):
        used.append((len(pixels), torch.get_num_threads()))
        if len(pixels) > 1:
            together.wait(20)
        return compute(pixels)

    async def work(batcher):
        found.extend(await asyncio.gather(*(request(batcher, pixel) for pixel in pixels[:4])))
        found.extend([await request(batcher, image) for image in pixels[4:]])
        await batcher.stop()

    pixels = [predictor.preprocess(path) for path in images]
    expected = predictor.features(images)
    torch.set_num_threads(4)
    try:
        service = Service(predictor, None, Limits(wait_ms=50))
        monkeypatch.setattr(service, "_features", record)
        asyncio.run(asyncio.wait_for(work(service.batcher), 60))
    finally:
        torch.set_num_threads(before)
    assert used == [(2, 2), (2, 2), (1, 4), (1, 4)]
    # Float32 sums with other numbers of threads.
    assert torch.allclose(torch.tensor(found)[:, 0], expected, rtol=1e-2, atol=1e-3)


def test_an_invalid_image_fails_only_its_own_request():
    def compute(images):
        if 13 in images:
            raise DataError("unlucky")
        return torch.tensor([[float(image)] for image in images])

    async def work(batcher):
        requests = (request(batcher, 1, 2), request(batcher, 13), request(batcher, 3))
        return await asyncio.gather(*requests, return_exceptions=True)

    first, second, third = run_batches(work, compute, wait_ms=50)
    assert first == [[1.0], [2.0]] and isinstance(second, DataError) and third == [[3.0]]


def test_a_full_queue_rejects_requests_and_answers_all_others():
    release = threading.Event()

    def compute(images):
        assert release.wait(20)
        return torch.tensor([[float(image)] for image in images])

    async def work(batcher):
        tasks = [asyncio.create_task(request(batcher, n)) for n in range(80)]
        await asyncio.sleep(0.1)
        assert batcher.pending == 8
        tasks[1].cancel()  # a client that disconnects
        release.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert batcher.pending == 0
        assert await request(batcher, 99) == [[99.0]]
        return found

    found = run_batches(work, compute)
    assert [answer for answer in found if isinstance(answer, list)] == [[[float(n)]] for n in range(8) if n != 1]
    rejected = [answer for answer in found if isinstance(answer, RequestError)]
    assert len(rejected) == 72 and {error.status for error in rejected} == {429}


def test_options_are_checked(tmp_path, monkeypatch):
    args = command_parser("serve").parse_args(["model.onnx"])
    assert vars(Limits()).items() <= vars(args).items()
    for wrong in ({"images": 0}, {"megabytes": float("inf")}, {"wait_ms": -1}, {"queue": 31}, {"total_megabytes": 31}):
        with pytest.raises(ConfigError):
            Limits(**wrong)
    monkeypatch.delenv("FASTAMP_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert read_api_key(str(file), "0.0.0.0") == KEY
    assert read_api_key(None, "127.0.0.1") == "" == read_api_key(None, "0.0.0.0", no_key=True)
    with pytest.raises(ConfigError, match="FASTAMP_API_KEY"):
        read_api_key(None, "0.0.0.0")
    monkeypatch.setenv("FASTAMP_API_KEY", KEY)
    assert read_api_key(None, "0.0.0.0") == KEY
    for content in (b"", b"short", b"0123456789 abcdef", b"\xff" * 20):
        file.write_bytes(content)
        with pytest.raises(ConfigError):
            read_api_key(str(file), "127.0.0.1")
    with pytest.raises(ConfigError, match="none"):
        read_api_key(str(tmp_path / "none"), "127.0.0.1")
