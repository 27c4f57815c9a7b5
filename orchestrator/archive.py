"""A workspace as a stream of tar, for storage that takes archives: exact, and of bounded memory.

Archives are in the pax format (POSIX.1-2001), the one that holds times to the nanosecond and names
of any bytes and length. What pads and describes is more than the content where files are small, so
a stream may be compressed where that pays: headers are, content is not (gzip, RFC 1952, allows
members end to end).
"""

from __future__ import annotations

import stat
import tarfile
import zlib
from typing import TYPE_CHECKING, Final

from .core.errors import EvidenceIncompleteError
from .core.evidence import Entry, EntryKind
from .tree import CHUNK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .core.evidence import Manifest
    from .ports import Workspace

_TYPES: Final = {
    EntryKind.FILE: tarfile.REGTYPE,
    EntryKind.DIRECTORY: tarfile.DIRTYPE,
    EntryKind.SYMLINK: tarfile.SYMTYPE,
    EntryKind.FIFO: tarfile.FIFOTYPE,
}
END: Final = bytes(2 * tarfile.BLOCKSIZE)
_STORED: Final = 0
_FAST: Final = 1


def header(entry: Entry, path: str, owner: tuple[int, int]) -> bytes:
    """Give what goes before the content of an entry.

    Args:
        entry: what it says.
        path: where to put it, instead of `entry.path`.
        owner: ids of user and group to own it.

    Raises:
        OSError: it is a socket or a device, which no archive holds.
    """
    if entry.kind not in _TYPES:
        raise OSError(f"a {entry.kind} cannot be copied: {entry.path!r}")
    seconds, nanoseconds = divmod(entry.mtime_ns, 10**9)
    info = tarfile.TarInfo(path)
    info.type = _TYPES[entry.kind]
    info.mode = stat.S_IMODE(entry.mode)
    info.size = entry.size
    info.linkname = entry.target or ""
    info.uid, info.gid = owner
    info.mtime = seconds
    if nanoseconds or seconds < 0:
        info.pax_headers = {"mtime": _decimal(entry.mtime_ns)}
        info.mtime = max(seconds, 0)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _decimal(nanoseconds: int) -> str:
    sign, size = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    return f"{sign}{size // 10**9}.{size % 10**9:09d}"


def padding(size: int) -> bytes:
    """Give what goes after content of `size` bytes."""
    return bytes(-size % tarfile.BLOCKSIZE)


def length(manifest: Manifest, root: str, owner: tuple[int, int] = (0, 0)) -> int:
    """Give the size of what `pack` gives of a workspace with this account, bytes."""
    prefix = f"{root}/" if root else ""
    return sum(
        len(header(entry, prefix + entry.path, owner)) + entry.size + len(padding(entry.size))
        for entry in manifest
    )


def pack(workspace: Workspace, root: str, owner: tuple[int, int] = (0, 0)) -> Iterator[bytes]:
    """Give a workspace as pieces of tar, without the end of the archive.

    Args:
        workspace: the tree.
        root: path in the archive to put it under; "" for none.
        owner: ids of user and group to own every entry.

    Raises:
        OSError: something cannot be read, or cannot be in an archive.
        EvidenceIncompleteError: a file is not as long as the account of it says.
    """
    prefix = f"{root}/" if root else ""
    for entry in workspace.manifest():
        yield header(entry, prefix + entry.path, owner)
        if entry.kind is EntryKind.FILE:
            left = entry.size
            with workspace.open(entry) as stream:
                while left and (chunk := stream.read(min(left, CHUNK))):
                    left -= len(chunk)
                    yield chunk
            if left:
                raise EvidenceIncompleteError(f"{entry.path!r} became shorter while it was sent")
            yield padding(entry.size)


def squeeze(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Compress what is quick to compress: small pieces are headers, large ones are content."""
    waiting = bytearray()
    for piece in pieces:
        if len(piece) <= 8 * tarfile.BLOCKSIZE:
            waiting += piece
            if len(waiting) < CHUNK:
                continue
        if waiting:
            yield _member(bytes(waiting), _FAST)
            waiting.clear()
        if len(piece) > 8 * tarfile.BLOCKSIZE:
            yield _member(piece, _STORED)
    if waiting:
        yield _member(bytes(waiting), _FAST)


def _member(data: bytes, level: int) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, wbits=31)
    return packer.compress(data) + packer.flush()
