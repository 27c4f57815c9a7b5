"""Asking the guest, and reading what it says.

`account.sh` runs beside the supervisor in the sandbox. How its words come and go is a backend's
(`Channel`): a line to process 1 of a container, a command of its own through a gateway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..core.errors import EvidenceIncompleteError, OrchestratorError

if TYPE_CHECKING:
    from collections.abc import Iterator


class GuestError(OrchestratorError):
    """The guest could not do what it was asked, or its answer was cut short."""


class Channel(Protocol):
    """A way to ask the guest."""

    def ask(self, verb: str, *words: str, stdin: bytes = b"") -> Iterator[bytes]:
        """Have `account.sh VERB WORDS...` run with `stdin`; give what it writes.

        Raises:
            GuestError: it failed, or whether it did is not known; at the end of what it wrote.
        """


class Reader:
    """Reads an answer in pieces of its own choosing."""

    def __init__(self, answer: Iterator[bytes]) -> None:
        """Read what comes in pieces of somebody else's."""
        self._answer = answer
        self._held = b""
        self._at = 0

    def _more(self) -> bool:
        chunk = next(self._answer, None)
        if chunk is None:
            return False
        self._held = self._held[self._at :] + chunk
        self._at = 0
        return True

    def read(self, size: int) -> bytes:
        """Give up to `size` bytes, none at the end."""
        if self._at == len(self._held) and not self._more():
            return b""
        piece = self._held[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def exactly(self, size: int) -> bytes:
        """Give `size` bytes.

        Raises:
            EvidenceIncompleteError: there are fewer.
        """
        pieces = []
        while size:
            piece = self.read(size)
            if not piece:
                raise EvidenceIncompleteError("the sandbox's answer was cut short")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def until(self, end: bytes) -> bytes:
        """Give what comes before `end`, or the rest."""
        while (found := self._held.find(end, self._at)) < 0:
            if not self._more():
                found = len(self._held)
                break
        piece = self._held[self._at : found]
        self._at = min(found + len(end), len(self._held))
        return piece

    def close(self) -> None:
        """Let go of the answer: what is left of it is not wanted."""
        if callable(close := getattr(self._answer, "close", None)):
            close()

    def finish(self) -> None:
        """Read to the end, where a failure of the guest is raised."""
        while self._more():
            self._at = len(self._held)


class Content:
    """One file's part of an answer that holds many."""

    def __init__(self, reader: Reader, size: int) -> None:
        """Be the next `size` bytes of an answer."""
        self._reader = reader
        self._left = size

    def read(self, size: int = -1) -> bytes:
        """Give up to `size` bytes, none at the end of the file."""
        size = self._left if size < 0 else min(size, self._left)
        piece = self._reader.read(size) if size else b""
        self._left -= len(piece)
        return piece
