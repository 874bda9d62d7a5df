"""A proxy before a store that holds the first request with a given beginning, so that a test can act at this moment."""

import contextlib
import socket
import socketserver
import threading


class HoldingProxy(socketserver.ThreadingTCPServer):
    """Forwards bytes to ``target``. After ``arm``, the first request that begins so is never forwarded, and ``held`` is set."""

    daemon_threads = True

    def __init__(self, target, listen):
        super().__init__((listen, 0), _Connection)
        self.target, self.held = target, threading.Event()
        self._wanted = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self):
        return self.server_address[1]

    def arm(self, beginning):
        self._wanted = beginning

    def hold(self, part):
        """Whether this part of a request is to be held. Clients send the head of a request in one piece."""
        if self._wanted is None or not part.startswith(self._wanted):
            return False
        self._wanted = None
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
