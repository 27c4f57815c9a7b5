"""The tree that a spec asks to run over: a directory, with inline files laid over it."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Final

from attrs import define

from . import tree
from .core.errors import OrchestratorError
from .core.evidence import Entry, EntryKind, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

INLINE_MTIME_NS: Final = 946_684_800 * 10**9
"""Times of inline files: the start of the year 2000, so that equal specs make equal trees."""


@lru_cache(maxsize=16)
def _seen(directory: str) -> tree.Seen:
    """Give what this process knows of a directory."""
    del directory
    return tree.Seen()


class WorkspaceError(OrchestratorError):
    """The workspace cannot be read, or has an entry that no sandbox could be given."""


@define(slots=False)
class SpecWorkspace:
    """A workspace on this machine, read and never changed.

    Attributes:
        directory: its directory, None for none.
        files: content by path, in place of what the directory has there.
        leave_out: a directory that is not part of it, though it may lie below: the runner's own.
    """

    directory: str | None
    files: Mapping[str, bytes]
    leave_out: Path | None = None

    @cached_property
    def _manifest(self) -> Manifest:
        entries = dict(self._scanned().entries)
        for path, content in self.files.items():
            for parent in reversed(PurePosixPath(path).parents[:-1]):
                self._lay(entries, _inline_directory(str(parent)))
            self._lay(entries, _inline_file(path, content))
        return Manifest.of(entries.values())

    def _scanned(self) -> Manifest:
        if self.directory is None:
            return Manifest({})
        try:
            left_out = self._left_out(Path(self.directory))
            found = tree.scan(self.directory, leave_out=left_out, seen=_seen(self.directory))
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else self.directory
            raise WorkspaceError(
                f"workspace {self.directory}: {where}: {error.strerror}"
            ) from error
        for entry in found:
            if entry.kind in {EntryKind.SOCKET, EntryKind.DEVICE}:
                raise WorkspaceError(
                    f"workspace {self.directory}: {entry.path!r} is a {entry.kind}, "
                    "which cannot be copied; remove it or leave it out of the workspace"
                )
        return found

    def _left_out(self, directory: Path) -> str | None:
        if self.leave_out is None:
            return None
        inside, root = self.leave_out.resolve(), directory.resolve()
        if inside == root:
            raise WorkspaceError(f"workspace {directory}: it is the runner's own state directory")
        return str(inside.relative_to(root)) if inside.is_relative_to(root) else None

    def _lay(self, entries: dict[str, Entry], entry: Entry) -> None:
        """Put an inline entry in place; a directory that is there already stays as it is."""
        there = entries.get(entry.path)
        if there is not None and there.kind is EntryKind.DIRECTORY is entry.kind:
            return
        if there is not None and EntryKind.DIRECTORY in {there.kind, entry.kind}:
            raise WorkspaceError(
                f"workspace {self.directory}: {entry.path!r} is a {there.kind} there "
                f"and a {entry.kind} in the spec's files"
            )
        entries[entry.path] = entry

    def manifest(self) -> Manifest:
        """Give the account of the tree; it is taken once.

        Raises:
            WorkspaceError: it cannot be read, or has a socket or a device.
        """
        return self._manifest

    def open(self, entry: Entry) -> BinaryIO:
        """Open a file of the tree for reading."""
        if entry.path in self.files:
            return io.BytesIO(self.files[entry.path])
        assert self.directory is not None  # noqa: S101 - entries come from there or from `files`
        return tree.open_file(self.directory, entry.path)


def _inline_file(path: str, content: bytes) -> Entry:
    digest = hashlib.sha256(content).hexdigest()
    return Entry(path, EntryKind.FILE, 0o644, INLINE_MTIME_NS, len(content), digest)


def _inline_directory(path: str) -> Entry:
    return Entry(path, EntryKind.DIRECTORY, 0o755, INLINE_MTIME_NS)


def missing_directory(directory: str) -> str | None:
    """Say why a path is not a directory that can be a workspace, None if it is one."""
    try:
        mode = Path(directory).stat().st_mode
    except ValueError as error:  # a NUL, or what no path can hold
        return f"{error}: {directory!r}"
    except OSError as error:
        return f"{os.strerror(error.errno or 0)}: {directory}"
    return None if stat.S_ISDIR(mode) else f"not a directory: {directory}"
