"""TCP proxies in front of a process: links that are slow to answer, or that break."""

from __future__ import annotations

import socket
import struct
import threading
import time


class Link:
    """Passes connections to HOST:PORT on. `address` is known before the target is: connections wait until
    `lead_to` is called."""

    def __init__(self) -> None:
        self._target: tuple[str, int] | None = None
        self._has_target = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, target: str) -> Link:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._has_target.set()
        return self

    def _accept(self) -> None:
        self._has_target.wait()
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:  # nobody there
                client.close()
                continue
            self.connections += 1
            self._sockets += [client, server]
            for from_client, ends in ((True, (client, server)), (False, (server, client))):
                arguments = (*ends, self.connections, from_client)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, number: int, from_client: bool) -> None:
        """One direction of connection `number`, the first being 1."""
        passed = 0
        try:
            while data := source.recv(1 << 16):
                self._before(data, passed, number, from_client)
                passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the other side is gone
            for end in (source, sink):
                reset(end)

    def _before(self, data: bytes, passed: int, number: int, from_client: bool) -> None:
        """Called before `data` is passed on; raises OSError to break the connection."""

    def close(self) -> None:
        for end in [self._listener, *self._sockets]:
            end.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SlowLink(Link):
    """In each direction the first bytes take `seconds`, once per connection."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        super().__init__()

    def _before(self, data: bytes, passed: int, number: int, from_client: bool) -> None:
        if passed == 0:
            time.sleep(self._seconds)


class ThrottledLink(Link):
    """Answers come at this rate; requests as fast as they are sent."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        super().__init__()

    def _before(self, data: bytes, passed: int, number: int, from_client: bool) -> None:
        if not from_client:
            time.sleep(len(data) / self._bytes_per_second)


class BreakingLink(Link):
    """The first `times` connections are reset once more than `after` bytes have come from one side."""

    def __init__(self, times: int, after: int, *, from_client: bool = True) -> None:
        self._times, self._after, self._from_client = times, after, from_client
        super().__init__()

    def _before(self, data: bytes, passed: int, number: int, from_client: bool) -> None:
        if from_client == self._from_client and number <= self._times and passed + len(data) > self._after:
            raise ConnectionResetError


def reset(end: socket.socket) -> None:
    """Closes so that the other side hears of it at once, whatever is still under way."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads here
    except OSError:  # closed already
        pass
    end.close()
