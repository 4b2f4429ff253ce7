"""Reject pickles that would take a disproportionate amount of time or memory to load.

PyTorch's restricted unpickler does not execute code, but a few bytes can block it for hours: a dictionary key of nested
tuples that share elements has exponentially many leaves, which are hashed in C without handling signals; keys with
colliding hashes take quadratic time; deeply nested tuples overflow the stack. Therefore ``check_pickle`` first
simulates the opcodes, without creating objects.
"""

import pickletools
from typing import IO

from fastamp.utils.errors import UserError

LARGEST_DEPTH = 500
"""Maximum nesting of containers; model and optimizer states have about ten levels."""
WORK = 10**8
"""Maximum number of objects hashed or compared while reading a file; this takes a few seconds."""
SIZE, SIZE_PER_BYTE = 10**6, 10
"""Maximum number of objects, SIZE + SIZE_PER_BYTE per byte of the pickle; shared objects count at each reference."""
_HASH_IS_CHOSEN = 2**60  # hash collisions of larger integers are easy to construct; hashes of strings are salted


class PickleLimitError(UserError):
    """Raised if loading a pickle would take a disproportionate amount of time or memory."""


class _Object:
    """Simulated object of a pickle.

    Attributes:
        size: number of nodes if the object is expanded into a tree, in which shared objects are repeated.
        depth: depth of that tree.
        chosen: number of nodes of that tree whose hash the author of the file can choose.
        shared: True if the object was read from the memo, so other objects may reference it.
    """

    __slots__ = ("chosen", "depth", "shared", "size")

    def __init__(self, size: int = 1, depth: int = 0, chosen: int = 0) -> None:
        self.size, self.depth, self.chosen, self.shared = size, depth, chosen, False


# Pushed for a plain value, for a value whose hash can be chosen, for a function that creates tensors, and for one that
# does not hash its arguments.
_LEAF, _CHOSEN, _MAKES_TENSORS, _HASHES_NOTHING = _Object(), _Object(chosen=1), _Object(), _Object()
_SHARED_BY_ALL = (_LEAF, _CHOSEN, _MAKES_TENSORS, _HASHES_NOTHING)
_MARK = object()
_EMPTY = {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_PUT, _GET = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NUMBERS = {"INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_NAMED = {*_PUT, *_GET, *_EMPTY, *_TUPLES, *_NUMBERS, "MARK", "GLOBAL", "DUP", "MEMOIZE"}
_PLAIN = {
    opcode.name
    for opcode in pickletools.opcodes
    if opcode.name not in _NAMED and (opcode.stack_before, len(opcode.stack_after)) == ([], 1)
}


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
    _Machine(file).run(hash_items)


class _Machine:
    """Simulated unpickler, whose stack and memo contain ``_Object`` entries."""

    def __init__(self, file: IO[bytes] | bytes) -> None:
        self._opcodes = pickletools.genops(file)
        self._stack: list = []
        self._memo: dict[int, _Object] = {}
        self._work = self._keys = self._read = 0

    def run(self, hash_items: bool) -> None:
        """Simulate all opcodes; see ``check_pickle``."""
        stack, start = self._stack, None
        for opcode, argument, position in self._opcodes:
            start = position if start is None else start
            self._read = position - start
            name = opcode.name
            if name in _PLAIN:
                stack.append(_LEAF)
            elif name in _PUT or name == "MEMOIZE":
                self._memo[len(self._memo) if name == "MEMOIZE" else int(argument)] = self._top()
            elif name in _GET or name == "DUP":
                element = self._memo[int(argument)] if name in _GET else self._top()
                element.shared = True
                self._spend(element.size)
                stack.append(element)
            elif name == "MARK":
                stack.append(_MARK)
            elif name in _TUPLES:
                items = [self._pop() for _ in range(_TUPLES[name])]
                self._tuple(items)
            elif name == "TUPLE":
                self._tuple(self._pop_mark())
            elif name in _EMPTY:
                stack.append(_Object())
            elif name in _NUMBERS:
                small = isinstance(argument, int) and abs(argument) < _HASH_IS_CHOSEN
                stack.append(_LEAF if small else _CHOSEN)
            elif name in ("APPEND", "APPENDS"):
                items = [self._pop()] if name == "APPEND" else self._pop_mark()
                self._extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._pop_mark()
                for key in items[::2]:
                    self._hash(key)
                self._extend(items)
            elif name == "ADDITEMS":
                items = self._pop_mark()
                for key in items:
                    self._hash(key)
                self._extend(items)
            elif name == "GLOBAL":
                stack.append(_function(argument))
            elif name == "BUILD":
                state = self._pop()
                self._hash(state)
                self._extend([state])
            elif name == "BINPERSID":
                self._hash(self._pop(), items_only=True)
                stack.append(_Object())
            elif name in ("REDUCE", "NEWOBJ"):
                arguments, function = self._pop(), self._pop()
                if function not in (_MAKES_TENSORS, _HASHES_NOTHING):
                    self._hash(arguments, items_only=True)
                stack.append(_Object(arguments.size + 1, arguments.depth + 1, chosen=function is not _MAKES_TENSORS))
                self._limit(stack[-1])
            elif name == "STOP":
                if hash_items:
                    self._hash(self._pop())
            else:
                self._unsupported_opcode(opcode)

    def _unsupported_opcode(self, opcode: pickletools.OpcodeInfo) -> None:
        """Simulate an opcode that PyTorch does not support, based on its stack effect."""
        items: list[_Object] = []
        for kind in reversed(opcode.stack_before):
            if kind is pickletools.stackslice:
                items += self._pop_mark()
            elif kind is not pickletools.markobject:
                items.append(self._pop())
        for item in items:
            self._hash(item)
        for _ in opcode.stack_after:
            self._tuple(items)

    def _top(self) -> _Object:
        if self._stack[-1] is _MARK:
            raise ValueError("the stack is empty")
        return self._stack[-1]

    def _pop(self) -> _Object:
        top = self._top()
        self._stack.pop()
        return top

    def _pop_mark(self) -> list[_Object]:
        items: list[_Object] = []
        while self._stack[-1] is not _MARK:
            items.append(self._stack.pop())
        self._stack.pop()
        return items[::-1]

    def _tuple(self, items: list[_Object]) -> None:
        made = _Object()
        self._stack.append(made)
        self._extend(items)
        made.chosen += 1
        self._spend(made.size)

    def _extend(self, items: list[_Object]) -> None:
        """Add items to the container on top of the stack."""
        target = self._top()
        if target in _SHARED_BY_ALL:
            raise ValueError("not a container")
        if target.shared:  # its size is already counted in the objects that reference it, which may be among the items
            raise PickleLimitError("a container is modified after other objects reference it")
        target.size += sum(item.size for item in items)
        target.chosen += sum(item.chosen for item in items)
        target.depth = max([target.depth, *(item.depth + 1 for item in items)])
        self._limit(target)

    def _hash(self, key: _Object, *, items_only: bool = False) -> None:
        """Add the cost of hashing an object and of comparing it with all earlier keys.

        Args:
            key: object to hash.
            items_only: True to count only the hashes of the elements of a tuple. Default False.
        """
        chosen = max(key.chosen - items_only, 0)
        self._keys += chosen
        self._spend(key.size + chosen * self._keys)

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > WORK:
            raise PickleLimitError(
                "loading would take too long: repeated references to shared objects, or keys with colliding hashes"
            )

    def _limit(self, made: _Object) -> None:
        if made.depth > LARGEST_DEPTH:
            raise PickleLimitError(f"more than {LARGEST_DEPTH} nested containers")
        if made.size > SIZE + SIZE_PER_BYTE * self._read:
            raise PickleLimitError(f"repeated references to shared objects: {made.size} objects in {self._read} bytes")


def _function(name: str) -> _Object:
    """Return the simulated object of a function or class, given as ``"module attribute"``."""
    if name.startswith("torch._"):
        return _MAKES_TENSORS
    return _HASHES_NOTHING if name.startswith(("torch", "numpy")) else _LEAF
