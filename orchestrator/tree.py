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
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, Self

from .core.errors import EvidenceIncompleteError
from .core.evidence import Entry, EntryKind, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK: Final = 1 << 20
_ZEROS: Final = bytes(CHUNK)
_HELD: Final = 64  # directories that a walk keeps open
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

KINDS: Final = {
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
def _naming(path: str) -> Iterator[None]:
    """Have errors name an entry by its whole path, not by its name in its directory."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


class Walk:
    """Reaches the places of a tree by descriptor, one name at a time, and follows nothing.

    Keeps the last directories of the way it came open, so that a neighbour costs no call, and a
    way of any length a bounded number of descriptors.
    """

    def __init__(self, root: int, *, ours: bool = False) -> None:
        """Start at the descriptor `root`; give directories permission back if they are ours."""
        self._root = root
        self._ours = ours
        self._path = ""
        self._way: list[tuple[int, int, int | None]] = []  # end in `_path`, descriptor, mode

    def __enter__(self) -> Self:
        """Give the walk."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of every directory, with the permissions that it had."""
        while self._way:
            self._leave(self._way.pop())

    @staticmethod
    def _leave(step: tuple[int, int, int | None]) -> None:
        _, descriptor, mode = step
        try:
            if mode is not None:
                os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)

    def parent(self, path: str) -> tuple[int, str]:
        """Give the directory that holds `path`, open until the next call, and its name there."""
        folder, _, name = path.rpartition("/")
        return self.directory(folder), name

    def directory(self, path: str) -> int:
        """Give a directory, open until the next call."""
        if path == self._path and self._way:
            return self._way[-1][1]
        while self._way and not self._on_the_way(path, self._way[-1][0]):
            self._leave(self._way.pop())
        end, descriptor = self._way[-1][:2] if self._way else (0, self._root)
        self._path = path
        while end < len(path):
            start = end + 1 if end else 0
            end = path.find("/", start)
            end = len(path) if end < 0 else end
            with _naming(path[:end]):
                descriptor, mode = self._enter(descriptor, path[start:end])
            self._way.append((end, descriptor, mode))
            if len(self._way) > _HELD:
                self._leave(self._way.pop(0))
        return descriptor

    def _on_the_way(self, path: str, end: int) -> bool:
        return path[end : end + 1] in {"", "/"} and path[:end] == self._path[:end]

    def _enter(self, parent: int, name: str) -> tuple[int, int | None]:
        try:
            descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
        except PermissionError:
            if not self._ours:
                raise
        else:
            if not self._ours or os.access(".", os.R_OK | os.X_OK, dir_fd=descriptor):
                return descriptor, None
            os.close(descriptor)
        with _readable(parent, name, 0o700) as mode:
            return os.open(name, _DIRECTORY, dir_fd=parent), mode


@contextmanager
def _readable(parent: int, name: str, bits: int) -> Iterator[int]:
    """Give permission back to an entry that is ours; take it again only if that fails."""
    mode = stat.S_IMODE(os.lstat(name, dir_fd=parent).st_mode)
    _chmod(parent, name, mode | bits)
    try:
        yield mode
    except BaseException:
        _chmod(parent, name, mode)
        raise


def _chmod(parent: int, name: str, mode: int) -> None:
    """Change the mode of an entry that is no symlink."""
    if not hasattr(os, "O_PATH"):
        os.chmod(name, mode, dir_fd=parent, follow_symlinks=False)
        return
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        Path(f"/proc/self/fd/{descriptor}").chmod(mode)
    finally:
        os.close(descriptor)


class Seen:
    """What was found in files of a tree, to be read again only where a file may have changed.

    A file whose device, inode, size, mode, times and time of change are what they were has not
    been written to: no program sets the last of these, short of the clock. One that was changed
    within two seconds of the account is not taken for known: a file system's clock is coarse.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._files: dict[str, tuple[tuple[int, ...], Entry]] = {}

    def get(self, path: str, info: os.stat_result) -> Entry | None:
        """Give the entry of a file that is as it was."""
        stamp, entry = self._files.get(path, (None, None))
        return entry if stamp == _stamp(info) else None

    def learn(self, path: str, info: os.stat_result, entry: Entry, now_ns: int) -> None:
        """Take down what was found in a file, as it was at a moment."""
        if info.st_ctime_ns < now_ns - 2 * 10**9:
            self._files[path] = _stamp(info), entry


def _stamp(info: os.stat_result) -> tuple[int, ...]:
    whole = info.st_dev, info.st_ino, info.st_mode, info.st_size
    return *whole, info.st_mtime_ns, info.st_ctime_ns


def scan(
    root: str | Path,
    *,
    ours: bool = False,
    leave_out: str | None = None,
    seen: Seen | None = None,
) -> Manifest:
    """Account for the tree below `root`: read every file, follow nothing.

    Args:
        root: directory; not itself an entry.
        ours: the tree is a copy that this library made, so that permissions which the check took
            from files and directories may be given back for as long as they are read.
        leave_out: path below `root` that is not part of the tree.
        seen: what is known of its files, to be added to.

    Raises:
        OSError: something cannot be read.
        EvidenceIncompleteError: something changed while it was read.
    """
    entries: list[Entry] = []
    pending = [""]
    now_ns = time.time_ns()
    with opened(root) as base, Walk(base, ours=ours) as walk:
        while pending:
            path = pending.pop()
            prefix = f"{path}/" if path else ""
            descriptor = walk.directory(path)
            with os.scandir(descriptor) as found:
                for item in found:
                    name = prefix + item.name
                    if name == leave_out:
                        continue
                    with _naming(name):
                        info = item.stat(follow_symlinks=False)
                        entry = seen.get(name, info) if seen is not None else None
                        if entry is None:
                            entry = _entry(descriptor, item.name, name, info, ours=ours)
                            if seen is not None and entry.kind is EntryKind.FILE:
                                seen.learn(name, info, entry, now_ns)
                    entries.append(entry)
                    if entry.kind is EntryKind.DIRECTORY:
                        pending.append(name)
    return Manifest.of(entries)


def _entry(parent: int, name: str, path: str, info: os.stat_result, *, ours: bool) -> Entry:
    kind = KINDS[stat.S_IFMT(info.st_mode)]
    if kind is EntryKind.FILE:
        descriptor = _open(parent, name, ours=ours)
        try:
            info, digest = _hash(descriptor, path)
        finally:
            os.close(descriptor)
        mode = stat.S_IMODE(info.st_mode)
        return Entry(path, kind, mode, info.st_mtime_ns, info.st_size, digest)
    mode = stat.S_IMODE(info.st_mode)
    target = os.readlink(name, dir_fd=parent) if kind is EntryKind.SYMLINK else None
    return Entry(path, kind, mode, info.st_mtime_ns, target=target)


def _open(parent: int, name: str, *, ours: bool) -> int:
    try:
        return os.open(name, _FILE, dir_fd=parent)
    except PermissionError:
        if not ours:
            raise
    with _readable(parent, name, 0o400) as mode:
        descriptor = os.open(name, _FILE, dir_fd=parent)
    try:
        os.fchmod(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(root: str | Path, path: str, *, ours: bool = False) -> BinaryIO:
    """Open a regular file of a tree for reading, following no symlink below `root`."""
    with opened(root) as base, Walk(base, ours=ours) as walk:
        parent, name = walk.parent(path)
        descriptor = _open(parent, name, ours=ours)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise EvidenceIncompleteError(f"{path!r} is no longer a file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _hash(descriptor: int, path: str) -> tuple[os.stat_result, str]:
    """Give status and SHA-256 of a file that must not change meanwhile."""
    before = os.fstat(descriptor)
    if not stat.S_ISREG(before.st_mode):
        raise EvidenceIncompleteError(f"{path!r} is no longer a file")
    left = before.st_size
    digest = hashlib.sha256()
    while chunk := os.read(descriptor, min(left, CHUNK) or 1):
        digest.update(chunk)
        left -= len(chunk)
        if left <= 0:
            break
    after = os.fstat(descriptor)
    if left or _version(before) != _version(after):
        raise EvidenceIncompleteError(f"{path!r} changed while it was read")
    return before, digest.hexdigest()


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
        if len(chunk) >= 1 << 12 and _ZEROS.startswith(chunk):
            os.lseek(descriptor, len(chunk), os.SEEK_CUR)
            continue
        view = memoryview(chunk)
        while view:
            view = view[os.write(descriptor, view) :]
    os.ftruncate(descriptor, size)
    return size, digest.hexdigest()


def build(root: str | Path, manifest: Manifest, content: Callable[[Entry], BinaryIO]) -> None:
    """Make the tree of `manifest` in the empty directory `root`, with files from `content`.

    Modes and times of directories are set last, so that a read-only one can be filled. Nothing is
    made outside `root`, whatever the manifest says: only what was made here is entered.

    Raises:
        OSError: something cannot be made, a socket or a device always.
        EvidenceIncompleteError: an entry is not below a directory of the manifest.
    """
    directories: dict[str, Entry] = {}
    with opened(root) as base, Walk(base) as walk:
        for entry in manifest:
            folder, slash, name = entry.path.rpartition("/")
            if name in {"", ".", ".."} or (slash and folder not in directories):
                raise EvidenceIncompleteError(f"{entry.path!r} is in no directory of its tree")
            parent = walk.directory(folder)
            match entry.kind:
                case EntryKind.FILE:
                    with content(entry) as stream:
                        _make_file(parent, name, entry, stream)
                case EntryKind.DIRECTORY:
                    os.mkdir(name, 0o700, dir_fd=parent)
                    directories[entry.path] = entry
                case EntryKind.SYMLINK:
                    os.symlink(entry.target or "", name, dir_fd=parent)
                    times = (entry.mtime_ns, entry.mtime_ns)
                    os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)
                case EntryKind.FIFO:
                    os.mkfifo(name, 0o600, dir_fd=parent)
                    _finish(parent, name, entry)
                case _:
                    raise OSError(errno.ENOTSUP, f"a {entry.kind} cannot be copied", entry.path)
        for entry in reversed(directories.values()):
            _finish(*walk.parent(entry.path), entry)


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
    """Copy a file, sharing its blocks and leaving its holes where the file system can."""
    try:
        source = stream.fileno()
        if os.fstat(source).st_blocks * 512 >= size:
            _copy_range(source, descriptor, 0, size)
            return
        end = 0
        while end < size and (start := _data(source, end)) is not None:
            end = min(os.lseek(source, start, os.SEEK_HOLE), size)
            _copy_range(source, descriptor, start, end)
        os.ftruncate(descriptor, size)
    except (OSError, AttributeError):
        stream.seek(0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.ftruncate(descriptor, 0)
        write_sparse(stream, descriptor)


def _copy_range(source: int, descriptor: int, start: int, end: int) -> None:
    while start < end:
        copied = os.copy_file_range(source, descriptor, min(end - start, 1 << 30), start, start)
        if copied == 0:
            break
        start += copied


def _data(source: int, offset: int) -> int | None:
    """Say where the next data is at or after an offset; None where only a hole is left."""
    try:
        return os.lseek(source, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


def _finish(parent: int, name: str, entry: Entry) -> None:
    os.chmod(name, entry.mode, dir_fd=parent)
    os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent)


def remove(root: str | Path) -> None:
    """Remove a tree of ours, whatever the check did to its permissions or its depth.

    Raises:
        OSError: something of it is still there.
    """
    if Path(root).is_symlink():  # `chmod -R` would follow it
        Path(root).unlink()
        return
    with suppress(RecursionError):
        shutil.rmtree(root, ignore_errors=True)
    if not os.path.lexists(root):
        return
    # What `rmtree` could not do: directories without permissions, and trees deeper than it
    # recurses.
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", root], check=False, capture_output=True)
    if os.path.lexists(root):
        raise OSError(errno.ENOTEMPTY, "could not be removed", str(root))
