"""What is put into a container beside its workspace, as pieces of tar."""

from __future__ import annotations

import time

from ... import archive
from ...core.evidence import Entry, EntryKind
from ...guest import scripts


def guests(root: str, user: tuple[int, int]) -> bytes:
    """Give the guest's own place as pieces of tar."""
    prefix = f"{root}/" if root else ""
    base = _directory(root, 0o755, (0, 0)) if root else b""
    scripts = [
        file(f"{prefix}{name}", path.read_bytes(), 0o644) for name, path in scripts().items()
    ]
    private = [_directory(f"{prefix}{name}", 0o700, user) for name in ("records", "home")]
    return base + b"".join(brought + private)


def directories(path: str, user: tuple[int, int]) -> bytes:
    """Give a directory, and those it lies in, as pieces of tar."""
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts))]
    return b"".join(_directory(part, 0o755, (0, 0)) for part in above) + _directory(
        path, 0o755, user
    )


def _directory(path: str, mode: int, owner: tuple[int, int]) -> bytes:
    return archive.header(Entry(path, EntryKind.DIRECTORY, mode, time.time_ns()), path, owner)


def file(path: str, data: bytes, mode: int) -> bytes:
    """Give a file of root's."""
    entry = Entry(path, EntryKind.FILE, mode, time.time_ns(), len(data))
    return archive.header(entry, path, (0, 0)) + data + archive.padding(len(data))
