"""Small checkpoints whose loading would exhaust time or memory, written as opcodes in both file formats of torch.save.

Run as a script, it reads the given files in one process and prints the first line of each error from
``read_checkpoint``.
"""

import pickle
import struct
import sys
import time
import zipfile

PROTO, STOP = b"\x80\x02", b"."
_STR = b"X" + struct.pack("<I", 5) + b"model"


def _put(number):
    return b"r" + struct.pack("<I", number)


def _get(number):
    return b"j" + struct.pack("<I", number)


def shared_tuples(levels=60):
    """Create nested tuples of two references to the next level: 2**levels leaves in a few bytes per level."""
    return b")" + b"".join(_put(n) + _get(n) + b"\x86" for n in range(levels))


def wide_tuples():
    """Create four levels of tuples with 1,000 references each: 1e12 leaves at an ordinary depth."""
    code = b")" + _put(0)
    for level in range(4):
        code += b"(" + _get(level) * 1000 + b"t" + _put(level + 1)
    return b"(" + code + b"t"


def _big_ints(count):
    """Yield the opcodes of ``count`` different integers with the same hash."""
    for number in range(1, count + 1):
        data = pickle.encode_long(number * (2**61 - 1))
        yield b"\x8a" + bytes([len(data)]) + data


def _with_key(key):
    return b"}" + key + b"K\x00" + b"s"


def _with_value(value):
    return b"}" + _STR + value + b"s"


ORDERED_DICT = b"ccollections\nOrderedDict\n"
_SHARED_LISTS = b"(]" + b"".join(_put(n) + b"](" + _get(n) * 2 + b"e" for n in range(60)) + b"t"
_FILLED_LATER = b"(]" + _put(0) + b"\x85" + _put(1) + _get(0) + b"(" + b"K\x00K\x00\x86" * 20_000 + b"e"
_FILLED_LATER += (ORDERED_DICT + _get(1) + b"R") * 20_000 + b"t"
_PAIRS = b"](" + b"".join(b"](" + key + b"K\x00e" for key in _big_ints(40_000)) + b"e"
_USED_OFTEN = b"}((" + b"K\x00" * 20_000 + b"t" + _put(0) + b"K\x00" + (_get(0) + b"K\x00") * 40_000 + b"u"
_STORAGE_KEY = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + shared_tuples() + b"X\x03\x00\x00\x00cpuK\x01tQ"
PICKLES = {
    "a key of shared tuples": _with_key(shared_tuples()),
    "a key of wide tuples": _with_key(wide_tuples()),
    "a key of very deep tuples": _with_key(b")" + b"\x85" * 400_000),
    "keys with the same hash": b"}(" + b"".join(key + b"K\x00" for key in _big_ints(40_000)) + b"u",
    "pairs with the same hash": ORDERED_DICT + _PAIRS + b"\x85R",
    "a large key used often": _USED_OFTEN,
    "an argument filled later": _with_value(_FILLED_LATER),
    "a storage of shared tuples": _with_value(_STORAGE_KEY),
    "a size of shared tuples": b"}" + _STR + b"ctorch\nSize\n" + shared_tuples() + b"\x85Rs",
    "values that share lists": _with_value(_SHARED_LISTS),
    "a list of itself": _with_value(b"]" + _put(0) + _get(0) + b"a"),
    "very deep lists": _with_value(b"]" * 20_000 + b"a" * 19_999),
}  # fmt: skip
"""Pickles of a dict, without the first and last opcode."""


def write(code, path, *, legacy=False):
    """Write a checkpoint that contains the pickle ``code``."""
    main = PROTO + code + STOP
    if legacy:
        parts = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
        path.write_bytes(b"".join(pickle.dumps(part, 2) for part in parts) + main + pickle.dumps([], 2))
        return path
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", main)
        archive.writestr("a/version", "3\n")
    return path


def legacy_keys(path):
    """Write a file of the older format with nested tuples in its list of storages."""
    write(b"}", path, legacy=True)
    content = path.read_bytes()
    path.write_bytes(content.removesuffix(pickle.dumps([], 2)) + PROTO + b"]" + shared_tuples() + b"a.")
    return path


def main():
    from fastamp.checkpoint.weights_file import read_checkpoint
    from fastamp.utils.errors import WeightsError

    for path in sys.argv[1:]:
        started = time.perf_counter()
        try:
            read_checkpoint(path)
            text = "no error"
        except WeightsError as error:
            text = str(error).splitlines()[0]
        print(f"{time.perf_counter() - started:.2f} s\t{text}", flush=True)


if __name__ == "__main__":
    main()
