"""Files as PyTorch wrote them under Python 2: before the zip format, with byte strings for all strings."""

import pickle
import struct
import types
from typing import ClassVar

import torch


class Python2Pickler(pickle._Pickler):
    """Pickler of protocol 2 that writes ``str`` and ``bytes`` as Python 2 wrote its ``str``."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def __init__(self, file, protocol=2):
        super().__init__(file, protocol, fix_imports=True)

    def save_byte_string(self, value):
        data = value.encode("latin1") if isinstance(value, str) else value
        short = len(data) < 256
        head = pickle.SHORT_BINSTRING + bytes([len(data)]) if short else pickle.BINSTRING + struct.pack("<i", len(data))
        self.write(head + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_byte_string


def save(content, path):
    """Write ``content`` to ``path``."""
    module = types.SimpleNamespace(
        Pickler=Python2Pickler, dump=lambda value, file, protocol: Python2Pickler(file).dump(value)
    )
    with path.open("wb") as file:
        torch.serialization._legacy_save(content, file, module, 2)
