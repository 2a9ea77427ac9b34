"""What a forked child needs to know: gRPC works in it only if no call was in flight at the fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from .error import Error

#: Guards the channels of all clients. Held by the thread that forks, so that no child inherits it locked.
LOCK = threading.Lock()

_calls = 0
_broken = False


@contextmanager
def calling() -> Iterator[None]:
    """Around every call."""
    global _calls
    with LOCK:
        _calls += 1
    try:
        yield
    finally:
        with LOCK:
            _calls -= 1


def check() -> None:
    """Throws Error if this process cannot use gRPC."""
    if _broken:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            "this process was forked while another thread was in a call, and gRPC does not work after that; "
            "start it with the multiprocessing method 'spawn' or 'forkserver', or fork between calls",
        )


def _after_in_child() -> None:
    global _calls, _broken
    _broken = _broken or _calls > 0
    _calls = 0
    LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_after_in_child)
