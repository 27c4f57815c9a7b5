"""What is put into a container beside its workspace, as pieces of tar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ... import archive
from ...core.evidence import Entry, EntryKind
from ...guest import scripts
from ...guest.answers import GuestError
from .daemon import look_at

if TYPE_CHECKING:
    import docker


def guests(root: str, user: tuple[int, int]) -> bytes:
    """Give the guest's own place as pieces of tar."""
    prefix = f"{root}/" if root else ""
    base = directory(root, 0o755, (0, 0)) if root else b""
    brought = [
        file(f"{prefix}{name}", path.read_bytes(), 0o644) for name, path in scripts().items()
    ]
    private = [directory(f"{prefix}{name}", 0o700, user) for name in ("records", "home")]
    return base + b"".join(brought + private)


def directories(
    client: docker.APIClient, container: str, path: str, user: tuple[int, int]
) -> bytes:
    """Give a directory as pieces of tar, and those it lies in as a container has them.

    Raises:
        GuestError: one of them is there, and is none: a directory would take its place.
    """
    parts, pieces = path.split("/"), []
    for place in ("/".join(parts[:count]) for count in range(1, len(parts))):
        found = look_at(client, container, f"/{place}")
        if found is not None and not found.isdir():
            raise GuestError(f"/{path}: /{place} is no directory in the image")
        mode, owner = (0o755, (0, 0)) if found is None else (found.mode, (found.uid, found.gid))
        pieces.append(directory(place, mode, owner))
    return b"".join(pieces) + directory(path, 0o755, user)


def directory(path: str, mode: int, owner: tuple[int, int]) -> bytes:
    """Give a directory."""
    return archive.header(Entry(path, EntryKind.DIRECTORY, mode, time.time_ns()), path, owner)


def file(path: str, data: bytes, mode: int) -> bytes:
    """Give a file of root's."""
    entry = Entry(path, EntryKind.FILE, mode, time.time_ns(), len(data))
    return archive.header(entry, path, (0, 0)) + data + archive.padding(len(data))
