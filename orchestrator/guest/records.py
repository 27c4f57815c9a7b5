"""What the guest has on record of a command, and what it kept of its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import frozen

from ..core.errors import EvidenceIncompleteError
from ..ports import Ending
from . import cut, lost, output_parts, parse
from .answers import Channel, GuestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..ports import Intake, Order, Record, Slot, Stream

STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr")
_PARTS: Final = ("head", "a", "b")


@frozen
class Recorded:
    """What the guest has on record of one command.

    Attributes:
        claimed: somebody has, or had, the right to start it.
        sizes: of each stream, the collector's line; empty where it was not kept.
        parts: of each stream, bytes that its parts hold, by their suffix.
        keep: bytes of each stream that the order asked for.
        ended: the supervisor's record; empty where there is none.
    """

    claimed: bool
    sizes: Mapping[str, str]
    parts: Mapping[str, Mapping[str, int]]
    keep: int
    ended: str

    @classmethod
    def read(cls, answer: Iterable[bytes]) -> Recorded:
        """Read what `account.sh record` wrote.

        Raises:
            GuestError: it is not that.
        """
        text = b"".join(answer).decode("utf-8", "surrogateescape")
        try:
            claimed, keep, *lines = text.split("\n", 10)
            rows = {"stdout": lines[:4], "stderr": lines[4:8]}
            return cls(
                {"claimed": True, "unclaimed": False}[claimed],
                {stream: row[0] for stream, row in rows.items()},
                {
                    stream: dict(zip(_PARTS, map(int, row[1:]), strict=True))
                    for stream, row in rows.items()
                },
                int(keep or 0),
                lines[8],
            )
        except (ValueError, KeyError, IndexError) as error:
            raise GuestError(f"not a record of a command: {text[:200]!r}") from error

    def finished(self, order: Order) -> Record | None:
        """Give the record, if it is one that the order's supervisor wrote."""
        done = parse(self.ended, order.nonce)
        if done is not None and done.ending not in {Ending.NOT_STARTED, Ending.LOST}:
            for stream in STREAMS:
                if not self.sizes[stream]:
                    return lost(f"{stream} of the command was not kept", still=done.still)
        return done


def deliver_output(channel: Channel, records: str, slot: Slot, intake: Intake) -> None:
    """Deliver what was kept of a command's output.

    Raises:
        EvidenceIncompleteError: it is not what the guest says that it kept.
    """
    recorded = Recorded.read(channel.ask("record", records, slot))
    for stream in STREAMS:
        if not recorded.sizes[stream]:
            continue
        try:
            total, names = output_parts(recorded.sizes[stream])
        except ValueError as error:
            raise EvidenceIncompleteError(f"{stream}: {error}") from error
        head, tail = cut([recorded.parts[stream][name] for name in names], total, recorded.keep)
        ends = {"first": b"", "last": b""}
        for end, size in (("first", head), ("last", tail)):
            if size:
                ends[end] = b"".join(channel.ask(end, records, slot, stream, str(size)))
                if len(ends[end]) != size:
                    raise EvidenceIncompleteError(f"{stream}: {len(ends[end])} bytes, not {size}")
        intake.output(stream, [ends["first"]], [ends["last"]], total)
