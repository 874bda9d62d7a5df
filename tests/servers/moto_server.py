"""moto's S3 server, one request at a time. Usage: python moto_server.py PORT

moto looks for an object and stores it in two steps with no lock between them: of two conditional puts at one time, both may be told that
they created the object, and on a slow machine they are. tensorcask's probe refuses such a server, as it should. S3 lets one of them win.
"""

import io
import sys
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


class OneAtATime:
    """Reads a request's body before it waits for its turn, so that a client that stalls holds up itself alone."""

    def __init__(self, app):
        self.app = app
        self.turn = threading.Lock()

    def __call__(self, environ, start_response):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length:
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self.turn:
            return list(self.app(environ, start_response))


if __name__ == "__main__":
    app = OneAtATime(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=MotoRequestHandler)
