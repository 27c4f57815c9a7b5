"""The host's side of `supervisor.sh serve`: questions, one a line, and answers, over two streams.

An answer lies between two lines with a tag that is drawn for each question. Whatever comes before
the first of them, of a question that somebody gave up on, is passed over; so a new connection to a
sandbox finds its answers whatever an older one has left in the stream.
"""

from __future__ import annotations

import re
import secrets
import threading
from typing import TYPE_CHECKING, Final

from .answers import GuestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..ports import Slot

_PLAIN: Final = re.compile(rb"[^!-$&-\[\]-~]")
"""Bytes that `printf` would not give back as they are, or that some shell keeps for itself."""


def _escaped(data: bytes) -> bytes:
    """Write data as a format of `printf`, in one line of plain characters."""
    return _PLAIN.sub(lambda found: b"%%" if found[0] == b"%" else b"\\%03o" % ord(found[0]), data)


class Serving:
    """One connection to process 1 of a sandbox. Questions on it are asked one after the other."""

    def __init__(
        self,
        send: Callable[[bytes], None],
        receive: Callable[[], bytes],
        complaint: Callable[[], str],
    ) -> None:
        """Talk over a connection.

        Args:
            send: writes to the guest's standard input.
            receive: gives what came from its standard output, nothing at its end.
            complaint: gives the end of what came from its standard error.
        """
        self._send = send
        self._receive = receive
        self._complaint = complaint
        self._held = b""
        self.broken = False  # nothing can be asked any more
        self._lock = threading.Lock()

    def ask(self, verb: str, *words: str, stdin: bytes = b"") -> Iterator[bytes]:
        """Have `account.sh` do something. See `Channel`."""
        return self._answer(verb, words, _escaped(stdin))

    def order(self, verb: str, slot: Slot, request: str) -> None:
        """Have the supervisor run or settle an order, and wait until it has.

        Raises:
            GuestError: it is not known that it has.
        """
        text = request.encode("utf-8", "surrogateescape")
        for _ in self._answer(verb, (slot,), _escaped(text)):
            pass

    def _answer(self, verb: str, words: Sequence[str], stdin: bytes) -> Iterator[bytes]:
        tag = secrets.token_hex(16)
        # It ends with the tag: what a client that was killed has sent of a question is none.
        rest = " ".join([*words, tag]).encode("utf-8", "surrogateescape")
        question = f"{verb} {tag} .".encode() + stdin + b" " + rest + b"\n"
        begin, end = f"\n{tag} begin\n".encode(), f"\n{tag} end ".encode()
        with self._lock:  # until the answer is read, or whoever asked has closed it
            try:
                self._send(question)
            except OSError as error:
                self.broken = True
                raise GuestError(f"the guest cannot be asked: {error}") from error
            while (found := self._held.find(begin)) < 0:
                self._held = self._held[-len(begin) :] + self._more()
            self._held = self._held[found + len(begin) :]
            while (found := self._held.find(end)) < 0:
                if len(self._held) > len(end):
                    piece, self._held = self._held[: -len(end)], self._held[-len(end) :]
                    yield piece
                self._held += self._more()
            piece, self._held = self._held[:found], self._held[found:]
            if piece:
                yield piece
            status = self._status(end)
        if status != b"0":
            raise GuestError(f"the guest failed with {status.decode()}: {self._complaint()}")

    def _status(self, end: bytes) -> bytes:
        while b"\n" not in self._held[len(end) :]:
            self._held += self._more()
        status, _, self._held = self._held[len(end) :].partition(b"\n")
        return status

    def _more(self) -> bytes:
        try:
            data = self._receive()
        except GuestError:
            self.broken = True
            raise
        if not data:
            self.broken = True
            raise GuestError(f"the guest ended in the middle of its answer; {self._complaint()}")
        return data
