#!/usr/bin/env python
"""Run the service on several machines with Ray Serve: replicas of the model, and one process with the gallery.

Replicas compute features, and scale with the machines of the Ray cluster. The gallery is one process, which adds and
searches features. Needs `pip install "ray[serve]" python-multipart`.

    python tools/ray_serve.py logs/run/model_best.pth --gallery people.gallery --replicas 4

Routes: POST /features and POST /search with images (multipart/form-data, field `images`), POST /add with images and the
field `ids`. There are no API key, limits and pages, as in `fastamp serve`: put the routes behind a proxy that has them.
"""

import argparse
import logging
import signal
from typing import TYPE_CHECKING, Any

import numpy as np

from fastamp import Predictor
from fastamp.retrieval.gallery_store import Item
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.retrieval.search import search
from fastamp.serving.errors import user_request_error
from fastamp.utils.errors import DataError, UserError

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger(__name__)


class Model:
    """Compute features of images; ``main`` adds dynamic batches."""

    def __init__(self, checkpoint: str, device: str) -> None:
        self._predictor = Predictor(checkpoint, device=device)

    async def features(self, images: list[bytes]) -> list[np.ndarray | str]:
        """Return the feature of each image, or the message of its error."""
        try:
            return list(self._predictor.require_features(images).numpy())
        except DataError as error:
            if len(images) == 1:
                return [str(error)]
            return [answer for image in images for answer in await Model.features(self, [image])]


class Gallery:
    """The gallery, in one process."""

    def __init__(self, checkpoint: str, gallery: str) -> None:
        self._gallery = MutableGallery(gallery, Predictor(checkpoint, device="cpu").model_id)

    def add(self, ids: list[str], features: np.ndarray) -> tuple[dict[str, Any], int]:
        """Add items; return their number when they are on the disk, or an error, and the HTTP status."""
        try:
            self._gallery.add([Item(item_id) for item_id in ids], features)
        except UserError as error:
            return _error_answer(error)
        return {"added": len(ids)}, 200

    def search(self, features: np.ndarray, k: int) -> tuple[dict[str, Any], int]:
        """Return the k nearest items of each feature (Q, D), or an error, and the HTTP status."""
        try:
            result = search(features, self._gallery, k)
        except UserError as error:
            return _error_answer(error)
        rows = zip(result.images.further["id"].tolist(), result.scores.tolist(), strict=True)
        return {"found": [[{"id": e, "score": score} for e, score in zip(*row, strict=True)] for row in rows]}, 200


def _error_answer(error: UserError) -> tuple[dict[str, Any], int]:
    """Return the body and the HTTP status of an error; the log has its whole message."""
    logger.error("%s", error)
    answer = user_request_error(error)
    return {"error": answer.message}, answer.status


class Routes:
    """Receive requests; more than 256 that wait get status 503."""

    def __init__(self, model: Any, gallery: Any) -> None:
        self._model, self._gallery = model, gallery

    async def __call__(self, request: "Request") -> Any:
        from starlette.exceptions import HTTPException
        from starlette.formparsers import MultiPartException
        from starlette.responses import JSONResponse

        def error(message: str, status: int = 422) -> JSONResponse:
            return JSONResponse({"error": message}, status_code=status)

        route = request.url.path.strip("/")
        if route not in ("features", "search", "add"):
            return error("the routes are /features, /search and /add", 404)
        try:
            form = await request.form(max_files=32)
        except HTTPException as failure:
            return error(str(failure.detail), failure.status_code)
        except MultiPartException as failure:  # outside an application of Starlette
            return error(failure.message, 400)
        images = [await image.read() for image in form.getlist("images") if not isinstance(image, str)]
        if not images:
            return error("no images in the field images")
        ids, k = [str(item_id) for item_id in form.getlist("ids")], str(form.get("k", 10))
        if route == "add" and len(ids) != len(images):
            return error(f"expected {len(images)} ids, one per image, got {len(ids)}")
        if not (k.isascii() and k.isdecimal() and 1 <= len(k) <= 4 and int(k)):
            return error(f"k: expected an integer from 1 to 9999, got {k[:50]!r}")
        answers = [self._model.features.remote(image) for image in images]
        results = [await answer for answer in answers]
        wrong = next((answer for answer in results if isinstance(answer, str)), None)
        if wrong is not None:
            return error(wrong)
        features = np.stack(results)
        if route == "features":
            return {"features": features.tolist()}
        gallery = self._gallery
        answer, status = await (
            gallery.search.remote(features, int(k)) if route == "search" else gallery.add.remote(ids, features)
        )
        return JSONResponse(answer, status_code=status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="checkpoint, on a path that all machines can read")
    parser.add_argument("--gallery", required=True, help="folder of the gallery, on the machine of its process")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the model (default: %(default)s)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica (default: 0, CPU)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: %(default)s)")
    args = parser.parse_args()
    from ray import serve

    class BatchedModel(Model):
        features = serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)(Model.features)

    resources = {"num_cpus": 1, "num_gpus": args.gpus}
    model = serve.deployment(
        BatchedModel, num_replicas=args.replicas, max_ongoing_requests=64, ray_actor_options=resources
    )
    # These need little time of a CPU.
    light = {"num_cpus": 0.1}
    gallery = serve.deployment(Gallery, num_replicas=1, max_ongoing_requests=16, ray_actor_options=light)
    routes = serve.deployment(Routes, max_ongoing_requests=64, max_queued_requests=256, ray_actor_options=light)
    device = "cuda" if args.gpus else "cpu"
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(routes.bind(model.bind(args.checkpoint, device), gallery.bind(args.checkpoint, args.gallery)))
    print(f"serving at http://127.0.0.1:{args.port}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


if __name__ == "__main__":
    main()
