"""A proxy before a store that holds one request with a given beginning, so that a test can act at this moment."""

import contextlib
import itertools
import socket
import socketserver
import threading


class HoldingProxy(socketserver.ThreadingTCPServer):
    """Forwards bytes to ``target``; but one request, the one after ``passed`` others that begin so, is held, and ``held`` is set."""

    daemon_threads = True

    def __init__(self, target, listen, beginning, passed):
        super().__init__((listen, 0), _Connection)
        self.target, self.held = target, threading.Event()
        self._beginning, self._numbers, self._passed = beginning, itertools.count(), passed
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self):
        return self.server_address[1]

    def hold(self, part):
        """Whether this part of a request is to be held. Clients send the head of a request in one piece."""
        if not part.startswith(self._beginning) or next(self._numbers) != self._passed:
            return False
        self.held.set()
        return True


class _Connection(socketserver.BaseRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError), socket.create_connection(self.server.target) as store:
            threading.Thread(target=self._answer, args=(store,), daemon=True).start()
            while part := self.request.recv(65536):
                if self.server.hold(part):
                    threading.Event().wait()
                store.sendall(part)

    def _answer(self, store):
        with contextlib.suppress(OSError):
            while part := store.recv(65536):
                self.request.sendall(part)
            self.request.shutdown(socket.SHUT_RDWR)
