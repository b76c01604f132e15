"""A server of the live page in a thread, runs for it, and someone who asks it."""

import http.client
import json
import threading
import time
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import numpy as np

from gyroscope.page.server import Server
from gyroscope.store import Event, LayerInfo, QuantityInfo, Rows, Scalars, Writer

LAYERS = [LayerInfo(f"block{i}.weight", "linear", (8, 8)) for i in range(3)]
QUANTITIES = {"rotation": QuantityInfo("rotation", "1", "cosine distance to initialization")}


class Training:
    """A run that is written step by step, like that of a training."""

    def __init__(self, path, **options):
        self.writer = Writer(path, LAYERS, QUANTITIES, **options)
        self.step = options.get("step", 0)

    def proceed(self, steps=1):
        for _ in range(steps):
            values = np.full((1, len(LAYERS)), self.step / 1000, dtype=np.float32)
            self.writer.put(Rows(0, np.array([self.step]), {"rotation": values}))
            self.writer.put(Scalars(self.step, {"loss": 1.0 / (1 + self.step)}))
            self.step += 1
        self.writer.flush()
        return self

    def note(self, text, kind="note"):
        self.writer.put(Event(self.step, kind, text))
        self.writer.flush()
        return self

    def end(self):
        self.writer.close()
        return self


@contextmanager
def serving(*folders, **options):
    server = Server(folders, **{"port": 0, **options})
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Asker(server, thread)
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


class Asker:
    """Asks a server over HTTP, with its cookie unless `cookie` says otherwise."""

    def __init__(self, server, thread):
        self.server, self.thread = server, thread
        parts = urlsplit(server.address)
        self.host, self.query = parts.netloc, parts.query
        self.cookie = f"{server.access.cookie}={server.access.token}"

    def __call__(self, path, method="GET", body=None, *, cookie=True, port=None, **headers):
        """Return status, headers and body; names of headers are given with _ for -."""
        sent = {"Cookie": self.cookie} if cookie else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(http.client.HTTPConnection("127.0.0.1", port or self.server.port, timeout=20)) as connection:
            connection.request(method, path, body, {"Host": self.host, **sent})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def json(self, path, **headers):
        status, _, body = self(path, **headers)
        assert status == 200, body
        return json.loads(body)

    def error(self, path, *given, **headers):
        """Return the status and the sentence of a refusal."""
        status, _, body = self(path, *given, **headers)
        return status, json.loads(body)["error"]

    def until(self, path, holds, seconds=20):
        """Ask until the answer is what is waited for, and return it."""
        end = time.monotonic() + seconds
        while True:
            found = self.json(path)
            if holds(found):
                return found
            assert time.monotonic() < end, found
            time.sleep(0.05)

    @contextmanager
    def events(self, path="/api/changes", **headers):
        """Yield a function that returns the next change."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)  # less than between comments
        sent = {"Host": self.host, "Cookie": self.cookie, "Accept": "text/event-stream"}
        connection.request("GET", path, headers=sent | headers)
        answer = connection.getresponse()
        assert answer.headers["Content-Type"].startswith("text/event-stream")

        def following():
            while True:
                line = answer.readline().decode()
                assert line, "the connection has ended"
                if line.startswith("data: "):
                    return json.loads(line.removeprefix("data: "))

        try:
            yield following
        finally:
            answer.close()
            connection.close()
