"""Cache of decoded frames, so that a frame is decoded once for all its boxes."""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock

from torch import Tensor


class FrameCache:
    """The last used frames, for all threads of a process.

    Args:
        max_bytes: maximum size of the frames; the last one is kept even if it is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.clear()
        # A thread of the parent may hold the lock, or decode a frame.
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        """Remove all frames."""
        self._lock = Lock()
        self._frames: OrderedDict[Hashable, Future[Tensor]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, decode: Callable[[], Tensor]) -> Tensor:
        """Return the frame of ``key``, which must not be changed; other threads wait while one decodes it.

        Args:
            key: file, its state, and how it is decoded.
            decode: function that returns the frame; called if the cache does not contain it. Its errors are raised.
        """
        with self._lock:
            future = self._frames.get(key)
            is_new = future is None
            if future is None:
                future = self._frames[key] = Future()
            self._frames.move_to_end(key)
        if is_new:
            try:
                future.set_result(decode())
            except BaseException as error:
                future.set_exception(error)
                with self._lock:
                    self._frames.pop(key, None)
                raise
            self._make_room(future.result().nbytes)
        return future.result()

    def _make_room(self, added: int) -> None:
        """Count a new frame of ``added`` bytes, and remove the frames that were used least recently."""
        with self._lock:
            self._bytes += added
            for key in list(self._frames):
                if self._bytes <= self.max_bytes or len(self._frames) == 1:
                    break
                if self._frames[key].done():
                    self._bytes -= self._frames.pop(key).result().nbytes
