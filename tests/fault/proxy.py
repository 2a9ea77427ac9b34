"""A TCP proxy in front of a process: a link that is slow to answer."""

from __future__ import annotations

import socket
import threading
import time


class SlowLink:
    """Passes connections to HOST:PORT on; in each direction the first bytes take `seconds`, once per connection.

    `address` is known before the target is: connections wait until `lead_to` is called.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._target: tuple[str, int] | None = None
        self._has_target = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, target: str) -> SlowLink:
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
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        delay = self._seconds
        try:
            while data := source.recv(1 << 16):
                time.sleep(delay)
                delay = 0
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the other side is gone
            for end in (source, sink):
                end.close()

    def close(self) -> None:
        for end in [self._listener, *self._sockets]:
            end.close()

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
