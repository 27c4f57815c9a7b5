"""A proxy in front of a Docker daemon's socket, at which chosen calls go wrong.

It knows as much HTTP as it takes to tell the calls apart: method and path, with `*` for whatever is
a name or an id. Over a connection that was taken over (attach, exec) it knows the lines in which a
guest is asked: each is a call of its own, `ask VERB`. So a fault is `POST containers/create#1` or
`ask run#1`, and a way.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import Counter
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from attrs import frozen

_NAMED = re.compile(r"^(containers|images|exec)/(?!create\b|json$)(.+?)(/[a-z]+)?$")


class Way(StrEnum):
    """A way for a call to the daemon to go wrong."""

    ERROR = "error"
    """The daemon says 500, and has done nothing."""

    CUT_BEFORE = "cut-before"
    """The connection breaks before the daemon is asked."""

    CUT_AFTER = "cut-after"
    """The daemon does it, and the connection breaks before it can say so."""

    HANG_BEFORE = "hang-before"
    """No answer comes, and the daemon is never asked."""

    HANG_AFTER = "hang-after"
    """The daemon does it, and no answer comes."""

    LATE = "late"
    """The daemon is asked only when the proxy is released, and then it does answer."""


@frozen
class Rule:
    """The `number`-th call of a name goes wrong in a way; with `on`, every later call does, too."""

    call: str
    way: Way
    number: int = 1
    on: bool = False

    def __str__(self):
        return f"{self.call}#{self.number}:{self.way}{' and on' if self.on else ''}"


def call_name(method, path):
    path = re.sub(r"^/(v[0-9.]+/)?", "", path.partition("?")[0])
    return f"{method} " + _NAMED.sub(lambda found: f"{found[1]}/*{found[3] or ''}", path)


class CutError(Exception):
    """This connection is to break."""


class Proxy:
    """Listens at `url`. `calls` are those that came, in order; `met` is set at the chosen one."""

    def __init__(self, upstream, rule=None, then=lambda: None):
        self.rule = rule
        self.then = then  # what happens beside, after the daemon answered the call that goes wrong
        self.calls = []
        self.sent_bytes = 0  # in bodies of requests
        self.met = threading.Event()
        self._upstream = upstream
        self._counts = Counter()
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._busy = 0
        self._sockets = set()
        self._withheld = {}  # by connection: why nothing of it is passed on, and until when
        self._home = Path(mkdtemp(prefix="proxy-"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._home / "socket"))
        self._listener.listen(64)
        self.url = f"unix://{self._home / 'socket'}"
        self._start(self._accept)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.release()
        self._break(self._listener)
        self.hang_up()
        rmtree(self._home)

    def hang_up(self):
        """Break every connection."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            self._break(each)

    def release(self):
        """Let go what hangs, ask what is late, and spare every call from now on."""
        self._released.set()
        self.rule = None

    def drain(self, seconds=20.0):
        """Wait until the daemon has answered all that it was asked."""
        with self._idle:
            assert self._idle.wait_for(lambda: self._busy == 0, seconds), "calls are still open"

    # --- what comes and goes ----------------------------------------------------------------------

    def _start(self, target, *arguments):
        threading.Thread(target=target, args=arguments, daemon=True, name="proxy").start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _break(self, each):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def _serve(self, client):
        upstream = socket.socket(socket.AF_UNIX)
        with self._lock:
            self._sockets |= {client, upstream}
        asked, answered = client.makefile("rb"), upstream.makefile("rb")
        try:
            upstream.connect(self._upstream)
            self._requests(client, asked, upstream, answered)
        except (CutError, OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._sockets -= {client, upstream}
            self._break(client)
            self._break(upstream)
            asked.close()  # not before: somebody may be reading
            answered.close()

    def _requests(self, client, asked, upstream, answered):
        while head := _head(asked):
            method, path = head.split(b" ", 2)[:2]
            body = _body(asked, head, without=not _says(head, b"transfer-encoding"))
            self.sent_bytes += len(body)
            way = self._way(call_name(method.decode(), path.decode()))
            if way is Way.ERROR:
                text = json.dumps({"message": "injected"}).encode()
                client.sendall(
                    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (len(text), text)
                )
                continue
            self._before(way)
            with self._working():
                upstream.sendall(head + body)
                answer = _head(answered)
                if not answer:
                    return
                taken_over = b" 101 " in answer.split(b"\r\n", 1)[0]
                ends = _ends_with_its_connection(answer)
                if not taken_over:
                    answer += _body(answered, answer, without=method == b"HEAD")
            self._after(way)
            client.sendall(answer)
            if taken_over:
                self._start(self._tell, client, asked, upstream)
                self._hear(client, answered)
            if taken_over or ends:
                return

    def _working(self):
        proxy = self

        class Working:
            def __enter__(self):
                with proxy._lock:
                    proxy._busy += 1

            def __exit__(self, *_):
                with proxy._idle:
                    proxy._busy -= 1
                    proxy._idle.notify_all()

        return Working()

    def _way(self, name):
        with self._lock:
            self._counts[name] += 1
            self.calls.append(f"{name}#{self._counts[name]}")
            rule = self.rule
            if rule is None:
                return None
            if (name, self._counts[name]) == (rule.call, rule.number):
                self.met.set()
                return rule.way
            return rule.way if rule.on and self.met.is_set() else None

    def _before(self, way):
        if way is Way.CUT_BEFORE:
            raise CutError
        if way in {Way.HANG_BEFORE, Way.LATE}:
            self._released.wait()
            if way is Way.HANG_BEFORE:
                raise CutError

    def _after(self, way):
        if way is not None:
            self.then()
        if way is Way.HANG_AFTER:
            self._released.wait()
        if way in {Way.CUT_AFTER, Way.HANG_AFTER}:
            raise CutError

    # --- connections that were taken over ---------------------------------------------------------

    def _tell(self, client, asked, upstream):
        """Pass on what the client says, a line at a time."""
        try:
            while line := asked.readline():
                verb, _, rest = line.partition(b" ")
                way = None
                if re.fullmatch(rb"[a-z]+ [0-9a-f]{32}", line[: len(verb) + 33]):
                    way = self._way(f"ask {verb.decode()}")
                self._before(Way.CUT_BEFORE if way is Way.ERROR else way)
                if way in {Way.CUT_AFTER, Way.HANG_AFTER}:
                    with self._lock:
                        self._withheld[client] = (way, b"%s end " % rest[:32])
                upstream.sendall(line)
            upstream.shutdown(socket.SHUT_WR)
        except (CutError, OSError, ValueError):
            self._break(client)
            self._break(upstream)

    def _hear(self, client, answered):
        """Pass on what the guest says, but for an answer that is to be lost."""
        held = b""
        while data := answered.read1(1 << 16):
            with self._lock:
                way, end = self._withheld.get(client, (None, b""))
            if way is None:
                client.sendall(data)
                continue
            held += data
            if end in held:
                with self._lock:
                    del self._withheld[client]
                self._after(way)


def _head(stream):
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _says(head, name):
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip().lower()
    return b""


def _ends_with_its_connection(head):
    told = _says(head, b"transfer-encoding") or _says(head, b"content-length")
    return not told and head.split(b" ", 2)[1] not in {b"204", b"304"}


def _body(stream, head, *, without=False):
    """Read a message's body. `without`: it has none unless a length says so."""
    status = head.split(b" ", 2)[1]
    if _says(head, b"transfer-encoding") == b"chunked" and not without:
        pieces = []
        while line := stream.readline():
            size = int(line.split(b";")[0], 16)
            pieces += [line, stream.read(size + 2)]
            if not size:
                break
        return b"".join(pieces)
    if length := _says(head, b"content-length"):
        return stream.read(int(length))
    if without or status in {b"204", b"304"}:
        return b""
    return stream.read()
