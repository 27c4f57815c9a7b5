"""The guest's account of a tree, where its storage can be asked in no other way.

Cost follows the change. A file whose inode, size, mode, times and time of *change* are what they
were when it was last accounted for has not been written to: no program can set the last of these,
short of the clock, and no sandbox may set that. So the content of such a file is not read again.
A file that was changed within two seconds of the account is not taken for known (the clock of a
file system is coarse), and nothing is on storage that keeps no time of what is written through a
mapping (tmpfs).
"""

from __future__ import annotations

import re
import stat
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, cast

from attrs import Factory, define, evolve, frozen

from ..core.errors import EvidenceIncompleteError
from ..core.evidence import Entry, EntryKind, Manifest
from ..tree import KINDS
from .answers import Channel, Content, GuestError, Reader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import BinaryIO

    from ..ports import Intake

_YOUNG_S: Final = 2
_UNSTEADY: Final = {b"1021994", b"858458f6", b"1021997"}
"""tmpfs, ramfs, 9p: what is written through a mapping may change no time there (statfs(2))."""
_BATCH: Final = 256 * 1024
"""Bytes of names that are sent at once: less than any known gateway takes."""
_TIME: Final = re.compile(r"(\d+)-(\d+)-(\d+) (\d+):(\d+):(\d+)(?:\.(\d+))?")


@frozen
class Stamp:
    """What the storage says about an entry without reading it."""

    mode: int
    size: int
    inode: str
    mtime_ns: int
    ctime_ns: int

    @property
    def kind(self) -> EntryKind:
        """What it is."""
        return KINDS[stat.S_IFMT(self.mode)]


@frozen
class Listing:
    """Every entry of a tree, as the storage has it.

    Attributes:
        clock_s: the sandbox's clock when the listing began (see `guest.request`).
        asked_s: this process's monotonic clock when its first line arrived here.
        time_s: the sandbox's time of day then, whole seconds.
        stamps: by path.
        steady: its storage tells of every change by a time of change.
    """

    clock_s: float
    asked_s: float
    time_s: int
    stamps: Mapping[str, Stamp]
    steady: bool = True

    def clock(self) -> float:
        """Give the sandbox's clock now, or a little less than it is."""
        return self.clock_s + time.monotonic() - self.asked_s


def _agree(stamp: Stamp, entry: Entry) -> bool:
    """Tell whether a stamp is that of an entry, as far as it says."""
    size = len(_bytes(entry.target)) if entry.target is not None else entry.size
    return (
        stamp.kind is entry.kind
        and stamp.mtime_ns == entry.mtime_ns
        and (entry.kind is EntryKind.SYMLINK or stat.S_IMODE(stamp.mode) == entry.mode)
        and (entry.kind is EntryKind.DIRECTORY or stamp.size == size)
    )


@define(eq=False)
class Account:
    """Accounts for the tree at `root`, and brings content from it.

    Attributes:
        known: what was found of entries that cannot have changed unless their stamp has.
        listing: the last one.
    """

    root: str
    known: dict[str, tuple[Stamp, Entry]] = Factory(dict)
    listing: Listing | None = None

    @property
    def settled(self) -> bool:
        """Whether every entry of the last listing is known."""
        return self.listing is not None and len(self.known) == len(self.listing.stamps)

    def manifest(self, channel: Channel, vouched: Manifest | None = None) -> Manifest:
        """Account for the tree; read what is not known.

        Args:
            channel: to the guest.
            vouched: what the tree was made of by its storage, whose content need not be read.

        Raises:
            GuestError: the guest cannot.
            EvidenceIncompleteError: it changed meanwhile.
        """
        listing = self.look(channel)
        if vouched is not None:
            self.known = {
                path: (stamp, entry)
                for path, stamp in listing.stamps.items()
                if (entry := vouched.entries.get(path)) and _agree(stamp, entry)
            }
        fresh = [path for path, stamp in listing.stamps.items() if not self._knows(path, stamp)]
        files = [path for path in fresh if listing.stamps[path].kind is EntryKind.FILE]
        links = [path for path in fresh if listing.stamps[path].kind is EntryKind.SYMLINK]
        digests = dict(zip(files, self._digests(channel, files), strict=True))
        targets = dict(zip(links, self._targets(channel, links), strict=True))
        entries = {}
        for path, stamp in listing.stamps.items():
            if self._knows(path, stamp):
                entries[path] = self.known[path][1]
                continue
            is_file = stamp.kind is EntryKind.FILE
            entries[path] = Entry(
                path,
                stamp.kind,
                0o777 if stamp.kind is EntryKind.SYMLINK else stat.S_IMODE(stamp.mode),
                stamp.mtime_ns,
                stamp.size if is_file else 0,
                digests.get(path),
                targets.get(path),
            )
        self.learn(listing, entries)
        return Manifest.of(entries.values())

    def _knows(self, path: str, stamp: Stamp) -> bool:
        return path in self.known and self.known[path][0] == stamp

    def learn(self, listing: Listing, entries: Mapping[str, Entry]) -> None:
        """Take down what was found of each entry, unless it could still change unseen."""
        old_ns = (listing.time_s - _YOUNG_S) * 10**9
        self.known = {
            path: (stamp, entries[path])
            for path, stamp in listing.stamps.items()
            if listing.steady and stamp.ctime_ns < old_ns
        }

    def look(self, channel: Channel) -> Listing:
        """List the tree; give a check's own places back the permission to be listed, if need be."""
        try:
            self.listing = read_listing(channel.ask("list", self.root))
        except GuestError:
            self.listing = read_listing(channel.ask("list", self.root, "unlocked"))
        return self.listing

    def clock(self, channel: Channel) -> float:
        """Give the sandbox's clock now, or a little less than it is."""
        if self.listing is not None:
            return self.listing.clock()
        answer = b"".join(channel.ask("clock"))
        try:
            return float(answer.split()[0])
        except (ValueError, IndexError) as error:
            raise GuestError(f"not a clock: {answer[:200]!r}") from error

    def send(self, channel: Channel, entries: Iterable[Entry], intake: Intake) -> None:
        """Deliver the content of files."""
        for batch in _batches(entries, lambda entry: entry.path):
            names = _names(entry.path for entry in batch)
            words = self._unlocked(batch)
            with closing(Reader(channel.ask("send", self.root, *words, stdin=names))) as answer:
                for entry in batch:
                    intake.receive(entry, cast("BinaryIO", Content(answer, entry.size)))
                answer.finish()

    def _unlocked(self, entries: Iterable[Entry]) -> tuple[str, ...]:
        """Say whether something on the way to `entries`, or one of them, may not be read."""
        stamps = self.listing.stamps if self.listing else {}
        shut = any(
            stamp.kind is EntryKind.DIRECTORY and stamp.mode & 0o500 != 0o500  # noqa: PLR2004
            for stamp in stamps.values()
        )
        return ("unlocked",) if shut or any(not entry.mode & 0o400 for entry in entries) else ()

    def _digests(self, channel: Channel, paths: list[str]) -> Iterator[str]:
        stamps = self.listing.stamps if self.listing else {}
        modes = [Entry(path, EntryKind.FILE, stamps[path].mode, 0) for path in paths]
        words = self._unlocked(modes)
        found: dict[str, str] = {}
        plain = [path for path in paths if not set(path) & set("\n\\\r")]
        for batch in _batches(plain, str):
            lines = b"".join(channel.ask("hash", self.root, *words, stdin=_names(batch)))
            for path, line in zip(batch, lines.split(b"\n"), strict=False):
                if line[66:] == b"./" + _bytes(path):
                    found[path] = line[:64].decode("ascii", "replace")
        for path in set(paths) - set(plain):  # whose names would come escaped, each in its own way
            answer = b"".join(channel.ask("hash", self.root, *words, stdin=_names([path])))
            found[path] = answer.lstrip(b"\\")[:64].decode("ascii", "replace")
        for path in paths:
            if not re.fullmatch("[0-9a-f]{64}", found.get(path, "")):
                raise EvidenceIncompleteError(f"{path!r}: the sandbox gave no digest of it")
            yield found[path]

    def _targets(self, channel: Channel, paths: list[str]) -> Iterator[str]:
        stamps = self.listing.stamps if self.listing else {}
        for batch in _batches(paths, str):
            words = self._unlocked([])
            asked = channel.ask("links", self.root, *words, stdin=_names(batch))
            with closing(Reader(asked)) as answer:
                for path in batch:
                    target = answer.exactly(stamps[path].size)
                    if answer.exactly(1) != b"\n":
                        raise EvidenceIncompleteError(f"{path!r} changed while it was read")
                    yield target.decode("utf-8", "surrogateescape")
                answer.finish()


def read_listing(answer: Iterable[bytes]) -> Listing:
    """Read what `account.sh list` wrote.

    Raises:
        GuestError: it is not that, or was cut short.
    """
    with closing(Reader(iter(answer))) as reader:
        return _listing(reader)


def _listing(reader: Reader) -> Listing:
    stamps: dict[str, Stamp] = {}
    modes: dict[str, int] = {}
    rooted = False
    try:
        first = reader.until(b"\n")
        asked_s = time.monotonic()
        clock, now, *storage = first.split()
        while (count := reader.until(b"\n")) not in {b"", b"locked", b"absent"}:
            names = [reader.until(b"\0") for _ in range(int(count))]
            for name in names:
                line = reader.until(b"\n").decode("ascii")
                stamp = _stamp(line)
                if name != b".":
                    stamps[_path(name)] = stamp
                else:
                    rooted = stamp.kind is EntryKind.DIRECTORY
        while count and (digits := reader.until(b"\0")):
            modes.setdefault(_path(reader.until(b"\0")), int(digits, 8))
    except (ValueError, KeyError) as error:
        raise GuestError(f"not a list of a tree: {error}") from error
    if not rooted and count != b"absent":  # no word of it is no word that nothing is there
        raise GuestError("not a list of a tree: its root is not in it")
    for path, mode in modes.items():
        if found := stamps.get(path):
            stamps[path] = evolve(found, mode=stat.S_IFMT(found.mode) | mode)
    steady = bool(storage) and storage[0] not in _UNSTEADY
    return Listing(float(clock), asked_s, int(now), stamps, steady)


def _stamp(line: str) -> Stamp:
    numbers, mtime, ctime = line.split("|")
    mode, size, *inode = numbers.split(" ")
    times = _nanoseconds(mtime), _nanoseconds(ctime)
    return Stamp(int(mode, 16), int(size), " ".join(inode), *times)


def _nanoseconds(text: str) -> int:
    """Read a moment as `stat -c %y` writes it, in UTC."""
    found = _TIME.match(text)
    if found is None:
        raise ValueError(f"not a moment: {text!r}")
    year, month, day, hour, minute, second = map(int, found.groups()[:6])
    seconds = _days(year, month, day) * 86400 + hour * 3600 + minute * 60 + second
    return seconds * 10**9 + int((found[7] or "").ljust(9, "0")[:9])


_DAYS: dict[tuple[int, int, int], int] = {}


def _days(year: int, month: int, day: int) -> int:
    """Count the days from the epoch to a date."""
    key = (year, month, day)
    if key not in _DAYS:
        from datetime import date  # noqa: PLC0415 - most sandboxes show a few dates

        _DAYS[key] = date(*key).toordinal() - date(1970, 1, 1).toordinal()
    return _DAYS[key]


def _bytes(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _path(name: bytes) -> str:
    return name.removeprefix(b"./").decode("utf-8", "surrogateescape")


def _names(paths: Iterable[str]) -> bytes:
    return b"".join(b"./" + _bytes(path) + b"\0" for path in paths)


def _batches(items: Iterable[Any], name: Any) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for item in items:
        length = len(name(item)) * 2 + 3
        if batch and size + length > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += length
    if batch:
        yield batch
