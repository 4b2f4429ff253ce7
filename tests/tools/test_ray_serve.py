"""tools/ray_serve.py: answers of errors, without Ray."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command import load_script

from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.utils.errors import DataError

pytest.importorskip("starlette")
pytest.importorskip("python_multipart")

from starlette.requests import Request

MODULE = load_script("tools/ray_serve.py")

pytestmark = pytest.mark.extras


def part(number):
    return f'--b\r\nContent-Disposition: form-data; name="images"; filename="{number}"\r\n\r\nx\r\n'.encode()


@pytest.mark.parametrize("scope", [{}, {"app": None}])
@pytest.mark.parametrize("body", [b"no form", b"".join(map(part, range(33))) + b"--b--\r\n"])
def test_broken_forms_and_too_many_files_have_status_400(scope, body):
    async def receive():
        return {"type": "http.request", "body": body}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    request = Request(
        {"type": "http", "method": "POST", "path": "/add", "query_string": b"", "headers": headers} | scope, receive
    )
    answer = asyncio.run(MODULE.Routes(None, None)(request))
    assert answer.status_code == 400 and json.loads(answer.body)["error"]


def test_errors_of_the_gallery_have_the_status_of_the_service(tmp_path):
    folder, feature = tmp_path / "a.gallery", np.ones((1, 4), np.float32)
    gallery = object.__new__(MODULE.Gallery)
    with MutableGallery(folder, ModelId(4, "cosine", "0" * 64, "a.pth")) as gallery._gallery:
        assert gallery.add(["a"], feature) == ({"added": 1}, 200)
        assert gallery.add(["a"], feature)[1] == 422
        assert gallery.search(feature, 1) == ({"found": [[{"id": "a", "score": pytest.approx(1)}]]}, 200)
        folder.rename(tmp_path / "b.gallery")
        for answer, status in (gallery.add(["b"], feature), gallery.search(feature, 1)):
            assert status == 503 and str(tmp_path) not in answer["error"]


def test_an_invalid_image_has_an_error_of_its_own():
    def features(images):
        if b"invalid" in images:
            raise DataError("cannot be read")
        return torch.ones(len(images), 4)

    model = object.__new__(MODULE.Model)
    model._predictor = SimpleNamespace(require_features=features)
    first, second, third = asyncio.run(model.features([b"a", b"invalid", b"b"]))
    assert second == "cannot be read" and first.tolist() == third.tolist() == [1] * 4
