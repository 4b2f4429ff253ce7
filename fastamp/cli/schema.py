"""Print the JSON Schema of config files, by which editors complete and check keys and values.

Write the schema next to a YAML file whose first line is `# yaml-language-server: $schema=fastamp.schema.json`. `fastamp
init` writes both, and `fastamp recipes NAME` prints that line. Editors with the YAML language server read it, such as
VS Code with the extension YAML.

examples:
  fastamp schema > fastamp.schema.json
  fastamp schema --plugin components.py > fastamp.schema.json
"""

import argparse
import json

from fastamp.cli.config import component_choices
from fastamp.cli.options import add_plugin_argument
from fastamp.config import read_config
from fastamp.config.schema import build_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_plugin_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the schema of all config keys, with the names of all components, including those of plugins."""
    keys = [key for key, _ in read_config("", [], plugin=args.plugin).keys_below()]
    print(json.dumps(build_schema(keys, component_choices()), indent=1))
    return 0
