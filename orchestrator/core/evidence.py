"""What a run leaves behind: the manifest of a tree, its provenance, and the receipt for it.

A manifest is an account of a tree: every entry, by path, with all that this library promises to
keep. Two accounts of the same tree, one by the sandbox's storage and one of what arrived, are equal
or the evidence is not sealed. Paths are text with undecodable bytes as surrogate escapes (PEP 383),
so that names of any bytes survive.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import field, frozen

from .errors import OutputTruncatedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class EntryKind(StrEnum):
    """What a path is. Only files are ever opened."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


_KINDS = {kind.value: kind for kind in EntryKind}


@frozen
class Entry:
    """One path of a tree.

    Attributes:
        path: relative to the root of the tree, parts separated by `/`, never empty.
        kind: what it is; a symlink is never followed.
        mode: permission bits including set-id and sticky, 0 to 0o7777; 0o777 for symlinks.
        mtime_ns: last modification, nanoseconds since the epoch.
        size: bytes of a file, else 0.
        sha256: lower-case hex digest of a file's bytes, else None.
        target: where a symlink points, else None.
    """

    path: str
    kind: EntryKind
    mode: int
    mtime_ns: int
    size: int = 0
    sha256: str | None = None
    target: str | None = None

    def same_content(self, other: Entry) -> bool:
        """Tell whether both have the same kind, mode and content. Times are not content."""
        return (self.kind, self.mode, self.sha256, self.target) == (
            other.kind,
            other.mode,
            other.sha256,
            other.target,
        )


@frozen
class Manifest:
    """Every entry of a tree, by path, sorted by path."""

    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Manifest:
        """Make a manifest of entries in any order."""
        return cls({entry.path: entry for entry in sorted(entries, key=lambda entry: entry.path)})

    def __iter__(self) -> Iterator[Entry]:
        """Give the entries, parents before children."""
        return iter(self.entries.values())

    def __len__(self) -> int:
        """Count the entries."""
        return len(self.entries)

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of all files."""
        return sum(entry.size for entry in self)

    def encode(self) -> bytes:
        """Give the canonical form: equal manifests have equal bytes, whatever made them."""
        rows = [
            (e.path, e.kind, e.mode, e.mtime_ns, e.size, e.sha256, e.target)
            for _, e in sorted(self.entries.items())
        ]
        return json.dumps(rows, separators=(",", ":")).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read the canonical form back."""
        rows = json.loads(data)
        return cls({row[0]: Entry(row[0], _KINDS[row[1]], *row[2:]) for row in rows})

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form, lower-case hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    def differences(self, other: Manifest) -> list[str]:
        """Say how `other` differs from this account, an entry a line; empty where it does not."""
        found = []
        for path in sorted(self.entries.keys() | other.entries.keys()):
            mine, theirs = self.entries.get(path), other.entries.get(path)
            if mine == theirs:
                continue
            if theirs is None:
                found.append(f"{path!r}: missing")
            elif mine is None:
                found.append(f"{path!r}: not expected")
            else:
                fields = ("kind", "mode", "mtime_ns", "size", "sha256", "target")
                wrong = [
                    f"{name} {getattr(theirs, name)!r} instead of {getattr(mine, name)!r}"
                    for name in fields
                    if getattr(mine, name) != getattr(theirs, name)
                ]
                found.append(f"{path!r}: {', '.join(wrong)}")
        return found


class Provenance(StrEnum):
    """Where an entry of the evidence comes from."""

    UNCHANGED = "unchanged"
    MODIFIED = "modified"
    CREATED = "created"
    DELETED = "deleted"


@frozen
class Changes:
    """How the check left a tree, against the tree it was given.

    Attributes:
        entries: those that are new or differ in any field, times included.
        deleted: paths that are gone.
    """

    entries: tuple[Entry, ...]
    deleted: tuple[str, ...]

    @classmethod
    def between(cls, baseline: Manifest, after: Manifest) -> Changes:
        """Compare two manifests."""
        return cls(
            tuple(entry for entry in after if baseline.entries.get(entry.path) != entry),
            tuple(path for path in baseline.entries if path not in after.entries),
        )

    def apply(self, baseline: Manifest) -> Manifest:
        """Give the tree that these changes made of `baseline`."""
        entries = dict(baseline.entries)
        for path in self.deleted:
            del entries[path]
        entries.update((entry.path, entry) for entry in self.entries)
        return Manifest.of(entries.values())


def provenance(path: str, baseline: Manifest, after: Manifest) -> Provenance | None:
    """Tell where the entry at `path` comes from; None where there never was one.

    A change of times alone is no change: an entry is modified when its kind, mode, bytes or target
    differ from those that the check was given.
    """
    before, now = baseline.entries.get(path), after.entries.get(path)
    if now is None:
        return Provenance.DELETED if before else None
    if before is None:
        return Provenance.CREATED
    return Provenance.UNCHANGED if before.same_content(now) else Provenance.MODIFIED


@frozen
class Output:
    """One stream of a check's output: its first and last bytes, and how many there were.

    Compares with bytes and answers `in` as the whole stream would. Where the middle was not kept
    and the answer depends on it, it raises `OutputTruncatedError` rather than answer for the part.

    Attributes:
        head: the first bytes; the whole stream where nothing was left out.
        tail: the last bytes; empty where nothing was left out.
        total: bytes that the check wrote.
    """

    head: bytes = field(repr=lambda head: f"<{len(head)} bytes>")
    tail: bytes = field(default=b"", repr=lambda tail: f"<{len(tail)} bytes>")
    total: int = field(default=-1)

    def __attrs_post_init__(self) -> None:
        """Let `total` default to what was kept."""
        if self.total < 0:
            object.__setattr__(self, "total", len(self.head) + len(self.tail))

    @property
    def truncated(self) -> bool:
        """Whether bytes are missing between head and tail."""
        return len(self.head) + len(self.tail) < self.total

    def __bytes__(self) -> bytes:
        """Give the whole stream.

        Raises:
            OutputTruncatedError: its middle was not kept.
        """
        if self.truncated:
            raise OutputTruncatedError(self._explain())
        return self.head + self.tail

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        """Give the whole stream as text; bytes that are none become U+FFFD.

        Raises:
            OutputTruncatedError: its middle was not kept.
        """
        return bytes(self).decode(encoding, errors)

    @property
    def text(self) -> str:
        """What was kept, as text for a person, with a line in place of what was not."""
        if not self.truncated:
            return self.decode()
        missing = self.total - len(self.head) - len(self.tail)
        head, tail = (part.decode("utf-8", "replace") for part in (self.head, self.tail))
        return f"{head}\n[... {missing} bytes not kept ...]\n{tail}"

    def __eq__(self, other: object) -> bool:
        """Compare with bytes, or with another output."""
        if isinstance(other, Output):
            return (self.head, self.tail, self.total) == (other.head, other.tail, other.total)
        if not isinstance(other, bytes):
            return NotImplemented
        if not self.truncated:
            return self.head + self.tail == other
        fits = len(other) == self.total
        if fits and other.startswith(self.head) and other.endswith(self.tail):
            raise OutputTruncatedError(self._explain())
        return False

    __hash__ = None  # type: ignore[assignment]  # equal to bytes, so no hash of its own would do

    def __contains__(self, part: bytes) -> bool:
        """Tell whether the stream has `part`.

        Raises:
            OutputTruncatedError: it is not in what was kept, and not all was kept.
        """
        if not self.truncated:
            return part in self.head + self.tail
        if part in self.head or part in self.tail:
            return True
        raise OutputTruncatedError(self._explain())

    def __len__(self) -> int:
        """Count the bytes that the check wrote, kept or not."""
        return self.total

    def _explain(self) -> str:
        kept = len(self.head) + len(self.tail)
        return (
            f"only {kept} of {self.total} bytes of output were kept; "
            "raise limits.output_bytes of the spec to keep more"
        )


@frozen(kw_only=True)
class Receipt:
    """The vault's word that evidence is on disk, and whether it is whole.

    Only `Vault` gives one (`vault.py`), and only after it compared what arrived with the sandbox's
    own account. Reading it back from a journal is the one other way to have it.

    Attributes:
        run_id: the run whose evidence it is.
        sealed: proven whole; False for what was put aside of a run that cannot be scored.
        manifest: digest of the manifest of the tree.
        entries: entries of the tree.
        bytes: sum of the sizes of its files.
        created: entries that the check created.
        modified: entries that it modified.
        deleted: entries that it deleted.
        record: SHA-256 of the vault's record of the run, which names all the rest by digest.
    """

    run_id: str
    sealed: bool
    record: str
    manifest: str
    entries: int
    bytes: int
    created: int
    modified: int
    deleted: int

    @classmethod
    def for_tree(
        cls,
        run_id: str,
        baseline: Manifest,
        after: Manifest,
        changes: Changes,
        *,
        sealed: bool,
        record: str,
    ) -> Receipt:
        """Count a tree against the one that the check was given."""
        kinds = [provenance(entry.path, baseline, after) for entry in changes.entries]
        return cls(
            run_id=run_id,
            sealed=sealed,
            record=record,
            manifest=after.digest,
            entries=len(after),
            bytes=after.total_bytes,
            created=kinds.count(Provenance.CREATED),
            modified=kinds.count(Provenance.MODIFIED),
            deleted=len(changes.deleted),
        )
