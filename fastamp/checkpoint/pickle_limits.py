"""Reject pickles that would take a disproportionate amount of time or memory to load.

PyTorch's restricted unpickler does not execute code, but a few bytes can block it for hours: a dictionary key of nested
tuples that share elements has exponentially many leaves, which are hashed in C without handling signals; keys with
colliding hashes take quadratic time; deeply nested tuples overflow the stack. Therefore ``check_pickle`` first limits
the opcodes: it follows their effect on the stack and counts, without creating objects.
"""

import pickletools
from collections.abc import Iterator
from typing import IO, Any

from fastamp.utils.errors import UserError

LARGEST_DEPTH = 500
"""Maximum nesting of containers; model and optimizer states have about ten levels."""
MOST_KEYS = 15_000
"""Maximum number of keys whose hashes the file determines; comparing all of them takes a few seconds."""
SIZE, SIZE_PER_BYTE = 10**6, 10
"""Maximum number of objects in references to earlier objects, SIZE + SIZE_PER_BYTE per byte of the pickle."""
_HASH_IS_CHOSEN = 2**60  # hash collisions of larger integers are easy to construct; hashes of strings are salted
_PUT, _GET = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
_NUMBERS = {"INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_IN_PLACE = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}  # they modify the lowest object
_HASH_NOTHING = {*_TUPLES, "LIST", "APPEND", "APPENDS", "POP", "POP_MARK", "STOP"}
_NO_LEAVES = {*_GET, *_NUMBERS, "MARK", "GLOBAL", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_LEAVES = {
    opcode.name for opcode in pickletools.opcodes if (opcode.stack_before, len(opcode.stack_after)) == ([], 1)
} - _NO_LEAVES
_MARK = None


class PickleLimitError(UserError):
    """Raised if loading a pickle would take a disproportionate amount of time or memory."""


class _Object:
    """Counts of an object of a pickle.

    Attributes:
        size: number of nodes if the object is expanded into a tree, in which shared objects are repeated.
        depth: depth of that tree.
        chosen: number of nodes of that tree whose hash the author of the file can choose.
        shared: True if the object was read from the memo, so other objects may reference it.
        hashes: False for functions that create tensors or NumPy scalars, and do not hash their arguments.
    """

    __slots__ = ("chosen", "depth", "hashes", "shared", "size")

    def __init__(self, chosen: int = 0, *, hashes: bool = True) -> None:
        self.size, self.depth, self.chosen, self.shared, self.hashes = 1, 0, chosen, False, hashes

    def add(self, items: list["_Object"]) -> None:
        """Count the items of a container."""
        self.size += sum(item.size for item in items)
        self.chosen += sum(item.chosen for item in items)
        self.depth = max([self.depth, *(item.depth + 1 for item in items)])
        if self.depth > LARGEST_DEPTH:
            raise PickleLimitError(f"more than {LARGEST_DEPTH} nested containers")


_LEAF = _Object()
_LEAF.shared = True


def check_pickle(file: IO[bytes] | bytes, *, hash_items: bool = False) -> None:
    """Estimate the cost of loading a pickle from its opcodes, and reject it if the cost is too high.

    Args:
        file: file positioned at the start of the pickle, which is read to its end; or the bytes of the pickle.
        hash_items: True if the caller hashes the elements of the loaded object. Default False.

    Raises:
        PickleLimitError: if loading would exceed the limits of this module, or if an object contains itself.
        ValueError, LookupError and other errors of ``pickletools``: if the pickle is damaged, so that loading it would
            also fail.
    """
    stack: list[_Object | None] = []
    memo: dict[int, _Object] = {}
    start, referenced, keys = -1, 0, 0
    opcodes: Iterator[tuple[pickletools.OpcodeInfo, Any, Any]] = pickletools.genops(file)
    for opcode, argument, position in opcodes:
        start = position if start < 0 else start
        name = opcode.name
        if name in _LEAVES or name == "MARK":
            stack.append(_LEAF if name in _LEAVES else _MARK)
            continue
        if name in _PUT:
            memo[len(memo) if name == "MEMOIZE" else int(argument)] = _top(stack)
            continue
        if name in _GET or name == "DUP":
            made = memo[int(argument)] if name in _GET else _top(stack)
            made.shared = True
            stack.append(made)
            referenced += made.size
            if referenced > SIZE + SIZE_PER_BYTE * (position - start):
                raise PickleLimitError(f"shared objects: {referenced} references in {position - start} bytes")
            continue
        made, items = _Object(), _pop(stack, opcode)
        hashed = sum(item.chosen for item in items)
        if name in _IN_PLACE:
            made, *items = items
            if made.shared:  # the objects that reference it, which may be among the items, have counted its size
                raise PickleLimitError("a container is modified after other objects reference it")
            hashed -= made.chosen
        elif name in _NUMBERS:
            made.chosen = int(not isinstance(argument, int) or abs(argument) >= _HASH_IS_CHOSEN)
        elif name == "GLOBAL":
            made.hashes = not argument.startswith(("torch._", "numpy"))
        elif name in _TUPLES:
            made.chosen = 1
        made.add(items)
        stack += [made] * len(opcode.stack_after)
        if name in ("SETITEM", "SETITEMS"):
            hashed = sum(key.chosen for key in items[::2])
        elif name in ("REDUCE", "NEWOBJ", "BINPERSID"):  # the tuple of arguments is not hashed itself
            made.chosen = int(items[0].hashes)
            hashed = max(hashed - 1, 0) * made.chosen
        elif name in _HASH_NOTHING and not (name == "STOP" and hash_items):
            hashed = 0
        keys += hashed
        if keys > MOST_KEYS:
            raise PickleLimitError(f"colliding hashes are possible: {keys} keys of numbers and tuples")


def _top(stack: list[_Object | None]) -> _Object:
    top = stack[-1]
    if top is _MARK:
        raise ValueError("the stack is empty")
    return top


def _pop(stack: list[_Object | None], opcode: pickletools.OpcodeInfo) -> list[_Object]:
    """Remove the objects that an opcode uses, and return them in the order of the stack."""
    items: list[_Object] = []
    for kind in reversed(opcode.stack_before):
        if kind is pickletools.stackslice:
            while (top := stack[-1]) is not None:
                items.append(top)
                stack.pop()
        elif kind is pickletools.markobject:
            stack.pop()
        else:
            items.append(_top(stack))
            stack.pop()
    return items[::-1]
