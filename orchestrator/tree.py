"""Directory trees on this machine's disk: account for them, copy them, remove them.

Nothing here follows a symlink, opens anything but a regular file, or trusts a path to be short.
Directories are opened one by one by descriptor; a path that is longer than the kernel takes in one
call is walked in pieces.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from .core.errors import EvidenceIncompleteError
from .core.evidence import Entry, EntryKind, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK: Final = 1 << 20
_ZEROS: Final = bytes(CHUNK)
_PATH_BYTES: Final = 2048  # well under PATH_MAX (4096), which counts the whole path of one call
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_KINDS: Final = {
    stat.S_IFREG: EntryKind.FILE,
    stat.S_IFDIR: EntryKind.DIRECTORY,
    stat.S_IFLNK: EntryKind.SYMLINK,
    stat.S_IFIFO: EntryKind.FIFO,
    stat.S_IFSOCK: EntryKind.SOCKET,
    stat.S_IFCHR: EntryKind.DEVICE,
    stat.S_IFBLK: EntryKind.DEVICE,
}


@contextmanager
def opened(root: str | Path) -> Iterator[int]:
    """Give a descriptor of the directory `root` (which may itself be reached over symlinks)."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def place(root: int, path: str) -> Iterator[tuple[int, str]]:
    """Give (descriptor, rest) such that `rest` under `descriptor` is `path` and short enough."""
    held: int | None = None
    try:
        while len(path) > _PATH_BYTES // 4 and len(os.fsencode(path)) > _PATH_BYTES:
            cut = path.rindex("/", 0, _PATH_BYTES // 4)
            deeper = os.open(path[:cut], _DIRECTORY, dir_fd=root if held is None else held)
            if held is not None:
                os.close(held)
            held, path = deeper, path[cut + 1 :]
        yield (root if held is None else held), path
    finally:
        if held is not None:
            os.close(held)


def scan(root: str | Path, *, ours: bool = False, leave_out: str | None = None) -> Manifest:
    """Account for the tree below `root`: read every file, follow nothing.

    Args:
        root: directory; not itself an entry.
        ours: the tree is a copy that this library made, so that permissions which the check took
            from files and directories may be given back for as long as they are read.
        leave_out: path below `root` that is not part of the tree.

    Raises:
        OSError: something cannot be read.
        EvidenceIncompleteError: something changed while it was read.
    """
    entries: list[Entry] = []
    pending = [""]
    with opened(root) as base:
        while pending:
            path = pending.pop()
            prefix = f"{path}/" if path else ""
            with _directory(base, path, ours=ours) as descriptor, os.scandir(descriptor) as found:
                for item in found:
                    info = item.stat(follow_symlinks=False)
                    name = prefix + item.name
                    if name == leave_out:
                        continue
                    entry = _entry(descriptor, item.name, name, info, ours=ours)
                    entries.append(entry)
                    if entry.kind is EntryKind.DIRECTORY:
                        pending.append(name)
    return Manifest.of(entries)


@contextmanager
def _directory(base: int, path: str, *, ours: bool) -> Iterator[int]:
    """Open a directory to list it; give one of ours its permission back for as long."""
    if not path:
        yield base
        return
    with place(base, path) as (parent, name):
        mode = descriptor = None
        try:
            descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
            if ours and not os.access(".", os.R_OK | os.X_OK, dir_fd=descriptor):
                os.close(descriptor)
                descriptor = None
        except PermissionError:
            if not ours:
                raise
        if descriptor is None:
            mode = stat.S_IMODE(os.lstat(name, dir_fd=parent).st_mode)
            os.chmod(name, mode | 0o700, dir_fd=parent)
            descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            yield descriptor
        finally:
            if mode is not None:
                os.fchmod(descriptor, mode)
            os.close(descriptor)


def _entry(parent: int, name: str, path: str, info: os.stat_result, *, ours: bool) -> Entry:
    kind = _KINDS[stat.S_IFMT(info.st_mode)]
    mode = stat.S_IMODE(info.st_mode)
    if kind is EntryKind.FILE:
        descriptor = _open_file(parent, name, mode, ours=ours)
        try:
            size, digest = _hash(descriptor, path)
        finally:
            os.close(descriptor)
        return Entry(path, kind, mode, info.st_mtime_ns, size, digest)
    target = os.readlink(name, dir_fd=parent) if kind is EntryKind.SYMLINK else None
    return Entry(path, kind, mode, info.st_mtime_ns, target=target)


def _open_file(parent: int, name: str, mode: int, *, ours: bool) -> int:
    try:
        return os.open(name, _FILE, dir_fd=parent)
    except PermissionError:
        if not ours:
            raise
    os.chmod(name, mode | 0o400, dir_fd=parent)
    try:
        return os.open(name, _FILE, dir_fd=parent)
    finally:
        os.chmod(name, mode, dir_fd=parent)


def open_file(root: str | Path, path: str, *, ours: bool = False) -> BinaryIO:
    """Open a regular file of a tree for reading, without following a symlink at its end."""
    with opened(root) as base, place(base, path) as (parent, name):
        mode = stat.S_IMODE(os.lstat(name, dir_fd=parent).st_mode) if ours else 0
        return os.fdopen(_open_file(parent, name, mode, ours=ours), "rb", buffering=0)


def _hash(descriptor: int, path: str) -> tuple[int, str]:
    """Give size and SHA-256 of a file that must not change meanwhile."""
    before = os.fstat(descriptor)
    if not stat.S_ISREG(before.st_mode):
        raise EvidenceIncompleteError(f"{path!r} is no longer a file")
    size = 0
    digest = hashlib.sha256()
    while size < before.st_size and (
        chunk := os.read(descriptor, min(before.st_size - size, CHUNK))
    ):
        digest.update(chunk)
        size += len(chunk)
    after = os.fstat(descriptor)
    if size != before.st_size or _version(before) != _version(after):
        raise EvidenceIncompleteError(f"{path!r} changed while it was read")
    return size, digest.hexdigest()


def _version(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


class Readable(Protocol):
    """What can be read in chunks."""

    def read(self, size: int, /) -> bytes:
        """Give up to `size` bytes, none at the end."""


def write_sparse(stream: Readable, descriptor: int) -> tuple[int, str]:
    """Copy `stream` to a new file, leaving holes for zeros; give size and SHA-256."""
    size = 0
    digest = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
        if len(chunk) >= 1 << 12 and chunk == _ZEROS[: len(chunk)]:
            os.lseek(descriptor, len(chunk), os.SEEK_CUR)
            continue
        view = memoryview(chunk)
        while view:
            view = view[os.write(descriptor, view) :]
    os.ftruncate(descriptor, size)
    return size, digest.hexdigest()


def build(root: str | Path, manifest: Manifest, content: Callable[[Entry], BinaryIO]) -> None:
    """Make the tree of `manifest` in the empty directory `root`, with files from `content`.

    Modes and times of directories are set last, so that a read-only one can be filled.

    Raises:
        OSError: something cannot be made, a socket or a device always.
    """
    directories: list[Entry] = []
    with opened(root) as base:
        for entry in manifest:
            with place(base, entry.path) as (parent, name):
                match entry.kind:
                    case EntryKind.FILE:
                        with content(entry) as stream:
                            _make_file(parent, name, entry, stream)
                    case EntryKind.DIRECTORY:
                        os.mkdir(name, 0o700, dir_fd=parent)
                        directories.append(entry)
                    case EntryKind.SYMLINK:
                        os.symlink(entry.target or "", name, dir_fd=parent)
                        times = (entry.mtime_ns, entry.mtime_ns)
                        os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)
                    case EntryKind.FIFO:
                        os.mkfifo(name, 0o600, dir_fd=parent)
                        _finish(parent, name, entry)
                    case _:
                        raise OSError(errno.ENOTSUP, f"a {entry.kind} cannot be copied", entry.path)
        for entry in reversed(directories):
            with place(base, entry.path) as (parent, name):
                _finish(parent, name, entry)


def _make_file(parent: int, name: str, entry: Entry, stream: BinaryIO) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=parent)
    try:
        _copy(stream, descriptor, entry.size)
        os.fchmod(descriptor, entry.mode)
        os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(descriptor)


def _copy(stream: BinaryIO, descriptor: int, size: int) -> None:
    if not _clone(stream, descriptor, size):
        stream.seek(0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_sparse(stream, descriptor)


def _clone(stream: BinaryIO, descriptor: int, size: int) -> bool:
    """Copy within the kernel, which shares blocks where the file system can; False if it cannot."""
    try:
        source = stream.fileno()
        if os.fstat(source).st_blocks * 512 < size:
            return False  # it has holes, which the kernel would fill
        while size > 0 and (copied := os.copy_file_range(source, descriptor, min(size, 1 << 30))):
            size -= copied
    except (OSError, AttributeError):
        return False
    return True


def _finish(parent: int, name: str, entry: Entry) -> None:
    os.chmod(name, entry.mode, dir_fd=parent)
    os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent)


def remove(root: str | Path) -> None:
    """Remove a tree of ours, whatever the check did to its permissions or its depth.

    Raises:
        OSError: something of it is still there.
    """
    shutil.rmtree(root, ignore_errors=True)
    if not os.path.lexists(root):
        return
    # What `rmtree` could not do: directories without permissions, and trees deeper than it
    # recurses.
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", root], check=False, capture_output=True)
    if os.path.lexists(root):
        raise OSError(errno.ENOTEMPTY, "could not be removed", str(root))
