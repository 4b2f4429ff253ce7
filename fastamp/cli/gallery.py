"""Add images to a mutable gallery, remove and list them; search it with `fastamp search --gallery`.

A gallery is a folder, such as people.gallery. Each batch is on the disk before the next one starts: after an
interruption, the same command adds the rest, because it skips items that exist. The id of an item is the path of its
image, relative to the folder of the gallery if it is in that folder. Features that were extracted before (.npz) are
added without the model.

examples:
  fastamp gallery add people.gallery photos/ --model logs/run
  fastamp gallery add people.gallery a.jpg b.jpg --model logs/run --camera entrance --time 2026-01-31T14:30
  fastamp gallery add people.gallery features.npz
  fastamp gallery list people.gallery
  fastamp gallery remove people.gallery a.jpg
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fastamp.cli.model_arguments import EXPORTED_HELP, model_of
from fastamp.cli.options import add_plugin_argument
from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.plural import plural
from fastamp.utils.table import format_table

if TYPE_CHECKING:
    from fastamp.retrieval.mutable_gallery import MutableGallery


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands add, remove and list."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="add | remove | list")
    adding = actions.add_parser("add", help="add images, folders of images, or extracted features (.npz)")
    removing = actions.add_parser("remove", help="remove items by id")
    listing = actions.add_parser("list", help="print the items")
    for subparser in (adding, removing, listing):
        subparser.add_argument("gallery", metavar="GALLERY", help="folder of the gallery; `add` creates it")
    adding.add_argument("sources", nargs="+", metavar="SOURCE", help="image, folder of images, or .npz file")
    adding.add_argument("--model", dest="checkpoint", metavar="MODEL", help=f"{EXPORTED_HELP}; required for images")
    adding.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:N or mps (default: auto)")
    add_plugin_argument(adding)
    adding.add_argument("--opts", nargs="+", default=[], metavar="KEY VALUE", help="config keys and values")
    adding.add_argument("--camera", default="", metavar="NAME", help="camera of all images")
    adding.add_argument("--identity", default="", metavar="NAME", help="identity of all images")
    adding.add_argument("--time", metavar="TIME", help="time of all images, ISO 8601, in UTC without an offset")
    adding.add_argument("--replace", action="store_true", help="replace items that exist (default: skip them)")
    adding.add_argument("--skip-corrupt", action="store_true", help="skip and list images that cannot be read")
    adding.add_argument("--no-pictures", action="store_true", help="store no small pictures of the images")
    removing.add_argument("ids", nargs="+", metavar="ID", help="ids of items")
    listing.add_argument("--json", action="store_true", help="print the items as JSON, one per line")


def run(args: argparse.Namespace) -> int:
    """Change or print the gallery."""
    from fastamp.inference.gallery_source import id_of_path
    from fastamp.retrieval.mutable_gallery import MissingItemError, MutableGallery

    if args.action == "add":
        return _add(args)
    with MutableGallery(args.gallery) as gallery:
        if args.action == "remove":
            known = {item.id for item in gallery.items}
            ids = {name: id_of_path(args.gallery, name) for name in args.ids}
            chosen = [
                given if given in known or stored_id not in known else stored_id for given, stored_id in ids.items()
            ]
            if missing := [name for name in chosen if name not in known]:
                raise MissingItemError(
                    f"{len(missing)} of {plural(len(chosen), 'item')} not in {args.gallery}: {', '.join(missing[:5])}."
                    f"{did_you_mean(missing[0], known)}\n  fix: choose ids of `fastamp gallery list {args.gallery}`"
                )
            gallery.remove(chosen)
            print(f"removed {plural(len(args.ids), 'item')}; {len(gallery):,} remain")
        else:
            _list(gallery, args.json)
    return 0


def _add(args: argparse.Namespace) -> int:
    from fastamp.inference.gallery_source import Adding, add_extraction, add_images
    from fastamp.inference.image_list import image_paths
    from fastamp.retrieval.gallery_store import parse_time

    time = parse_time(args.time) if args.time else None
    how = {"replace": args.replace, "pictures": not args.no_pictures, "skip_corrupt": args.skip_corrupt}
    adding = Adding(args.camera, args.identity, time, **how)
    extractions = [source for source in args.sources if Path(source).suffix == ".npz"]
    paths = image_paths(source for source in args.sources if source not in extractions)
    if paths and not args.checkpoint:
        raise ConfigError("images need a model.\n  fix: add --model CHECKPOINT, or add extracted features (.npz)")
    model = model_of(args) if args.checkpoint else None
    added = skipped = 0
    unreadable: list[str] = []
    for extraction in extractions:
        counts = add_extraction(args.gallery, extraction, adding)
        added, skipped = added + counts[0], skipped + counts[1]
    if paths and model is not None:
        new, existing, unreadable = add_images(args.gallery, paths, model, adding)
        added, skipped = added + new, skipped + existing
    if unreadable:
        print(f"skipped {plural(len(unreadable), 'unreadable image')}:", *unreadable, sep="\n  ")
    present = f"; skipped {skipped:,} that existed (--replace replaces them)" if skipped else ""
    print(f"added {plural(added, 'item')} to {args.gallery}{present}")
    return 0


def _list(gallery: "MutableGallery", as_json: bool) -> None:
    rows = [item.texts() for item in gallery.items]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    search = "exact search" if gallery.recall is None else f"approximate search, recall {gallery.recall:.3f}"
    print(f"{gallery.path}: {plural(len(gallery), 'item')}, {search}; model {gallery.model.checkpoint}")
    if rows:
        names = [name for name in rows[0] if any(row[name] for row in rows)]
        print(format_table([[row[name] for name in names] for row in rows], names))
