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
from fastamp.serving.options import LOCAL_HOSTS, Limits, read_api_key
from fastamp.utils.errors import ConfigError

_PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")


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
    for limit in fields(Limits):
        help_ = f"{limit.metadata['help']} (default: {limit.default:g})"
        flag = f"--{limit.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(limit.default), default=limit.default, metavar="N", help=help_)


def run(args: argparse.Namespace) -> int:
    """Run the service."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"fastamp serve needs {', '.join(missing)}, which {verb} not installed.\n"
            '  fix: pip install "fastamp[serve]"'
        )
    from fastamp.retrieval.mutable_gallery import MutableGallery
    from fastamp.serving.app import create_app
    from fastamp.serving.run import serve
    from fastamp.serving.service import Service

    limits = Limits(**{field.name: vars(args)[field.name] for field in fields(Limits)})
    api_key = read_api_key(args.api_key_file, args.host, no_key=args.no_api_key)
    model = model_of(args, args.key_values)
    gallery = MutableGallery(args.gallery, model.model_id) if args.gallery else None
    service = Service(model, gallery, limits, pictures=not args.no_pictures)
    local = args.host in LOCAL_HOSTS
    app = create_app(service, api_key=api_key, local=local, open_metrics=args.open_metrics)
    serve(app, service, host=args.host, port=args.port)
    return 0
