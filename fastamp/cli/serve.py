"""Answer HTTP requests with a model: features, comparison, search in a mutable gallery, and changes of it.

Needs the extra `serve`: pip install "fastamp[serve]". The page at the printed address shows the matches of a picture;
/docs describes the routes, /metrics has metrics for Prometheus. Requests send the API key in the header X-API-Key; it
is read from --api-key-file or the environment variable FASTAMP_API_KEY, and is required unless only this machine can
reach the service. SIGTERM and Ctrl-C stop the service after it has answered all requests.

examples:
  fastamp serve logs/run
  fastamp serve logs/run --gallery people.gallery --port 8080
  fastamp serve model.onnx --gallery people.gallery
  fastamp serve logs/run --gallery people.gallery --host 0.0.0.0 --api-key-file key.txt
"""

import argparse
import importlib.util
from dataclasses import fields

from fastamp.cli.model_arguments import EXPORTED_HELP, add_model_arguments, model_of
from fastamp.cli.options import add_key_values
from fastamp.utils.errors import ConfigError

_PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
# Defaults of fastamp.serving.options.Limits, which is not imported for the help.
_LIMITS = {
    "images": (32, "images per request"),
    "megabytes": (32.0, "size of a request in MB"),
    "megapixels": (50.0, "size of an image in megapixels"),
    "results": (1000, "results per image"),
    "receive-seconds": (30.0, "time to receive a request"),
    "decode-seconds": (5.0, "time to decode an image"),
    "answer-seconds": (60.0, "time to answer a request that was received"),
    "header-seconds": (10.0, "time to receive the header of a request"),
    "idle-seconds": (5.0, "time that a connection without a request stays open"),
    "send-seconds": (30.0, "time to send an answer"),
    "connections": (512, "connections; a further one closes the one that is idle for the longest time"),
    "stop-seconds": (60.0, "time to answer the remaining requests after SIGTERM or Ctrl-C"),
    "total-megabytes": (256.0, "size of all requests that are not yet answered; further ones get status 429"),
    "queue": (256, "images that wait or are computed; further requests get status 429"),
    "batch": (32, "images that the model computes at once"),
    "wait-ms": (10.0, "time that the first image of a batch waits for others, in milliseconds"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_model_arguments(parser, EXPORTED_HELP)
    add_key_values(parser, dest="key_values")
    parser.add_argument("--gallery", metavar="GALLERY", help="mutable gallery; created if it does not exist")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s, only this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 chooses a free one (default: %(default)s)")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the API key")
    parser.add_argument("--no-api-key", action="store_true", help="let other machines use the service without a key")
    parser.add_argument("--open-metrics", action="store_true", help="let /metrics be read without the API key")
    parser.add_argument("--no-pictures", action="store_true", help="store no small pictures of images that are added")
    for name, (default, meaning) in _LIMITS.items():
        parser.add_argument(
            f"--{name}", type=type(default), default=default, metavar="N", help=f"{meaning} (default: {default:g})"
        )


def run(args: argparse.Namespace) -> int:
    """Run the service."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"fastamp serve needs {', '.join(missing)}, which {verb} not installed.\n"
            '  fix: pip install "fastamp[serve]"'
        )
    from fastamp.inference.gallery import create_or_open
    from fastamp.inference.gallery_source import gallery_model
    from fastamp.serving.options import LOCAL_HOSTS, Limits, read_api_key
    from fastamp.serving.run import serve
    from fastamp.serving.service import Service

    limits = Limits(**{field.name: getattr(args, field.name) for field in fields(Limits)})
    api_key = read_api_key(args.api_key_file, args.host, no_key=args.no_api_key)
    model = model_of(args, args.key_values)
    gallery = create_or_open(args.gallery, gallery_model(model)) if args.gallery else None
    service = Service(model, gallery, limits, pictures=not args.no_pictures)
    local = args.host in LOCAL_HOSTS
    serve(service, host=args.host, port=args.port, api_key=api_key, local=local, open_metrics=args.open_metrics)
    return 0
