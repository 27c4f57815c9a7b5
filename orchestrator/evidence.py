"""Evidence as expectations see it: read-only, and verified as it is read."""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Protocol

from attrs import field, frozen

from . import tree
from .core.errors import EvidenceIncompleteError
from .core.evidence import Entry, EntryKind, Manifest, Output, Provenance, provenance

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .core.verdict import Outcome
    from .ports import Stream


class Contents(Protocol):
    """Where the content of evidence is."""

    def content(self, digest: str) -> bytes:
        """Give content, verified."""

    def open(self, digest: str) -> BinaryIO:
        """Open content for reading."""


@frozen
class Evidence:
    """What a run left behind, as expectations see it. Read-only, and verified as it is read.

    Attributes:
        run_id: the run.
        sealed: proven whole.
        outcome: how the check ended; None where that is not known.
        manifest: every entry of the tree as the check left it.
        baseline: every entry of the tree that the check was given.
        path: directory on disk with the record and the output.
    """

    run_id: str
    sealed: bool
    outcome: Outcome | None
    manifest: Manifest = field(repr=False)
    baseline: Manifest = field(repr=False)
    path: Path
    _outputs: Mapping[str, Output] = field(repr=False, alias="outputs")
    _vault: Contents = field(repr=False, alias="vault")

    def output(self, stream: Stream) -> Output | None:
        """Give an output stream of the check; None if it never arrived, which sealed ones did."""
        return self._outputs.get(stream)

    @property
    def stdout(self) -> Output:
        """The check's standard output; compares with bytes.

        Raises:
            EvidenceIncompleteError: it never arrived.
        """
        return self._arrived("stdout")

    @property
    def stderr(self) -> Output:
        """The check's standard error; raises as `stdout` does."""
        return self._arrived("stderr")

    def _arrived(self, stream: Stream) -> Output:
        output = self.output(stream)
        if output is None:
            raise EvidenceIncompleteError(f"run {self.run_id}: {stream} never arrived")
        return output

    @property
    def exit_code(self) -> int | None:
        """Exit code of the check, None if it did not end by exiting."""
        return self.outcome.exit_code if self.outcome else None

    def entry(self, path: str) -> Entry | None:
        """Give the entry at a path relative to the workspace, None if there is none.

        Raises:
            ValueError: the path leads out of the workspace.
        """
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ValueError(f"{path!r}: expected a relative path without `..`")
        return self.manifest.entries.get(str(pure))

    def exists(self, path: str) -> bool:
        """Tell whether there is an entry at a path. Symlinks are entries and are not followed."""
        return self.entry(path) is not None

    def read(self, path: str) -> bytes:
        """Give the content of a file.

        Raises:
            FileNotFoundError: there is no entry at the path: a fact about the workspace.
            IsADirectoryError, OSError: what is there is no file.
            EvidenceIncompleteError: the content is not here, which says nothing of the workspace.
        """
        entry = self.entry(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "not in the evidence", path)
        if entry.kind is EntryKind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, "a directory", path)
        if entry.sha256 is None:
            raise OSError(errno.EINVAL, f"a {entry.kind}, not a file", path)
        return self._vault.content(entry.sha256)

    def text(self, path: str, encoding: str = "utf-8") -> str:
        """Give the content of a file as text; raises as `read` does, and `UnicodeDecodeError`."""
        return self.read(path).decode(encoding)

    def provenance(self, path: str) -> Provenance | None:
        """Tell whether the check left, modified, created or deleted an entry; None: never there."""
        self.entry(path)
        return provenance(str(PurePosixPath(path)), self.baseline, self.manifest)

    def paths(self, kind: Provenance) -> list[str]:
        """Give the paths of one provenance, sorted."""
        paths = sorted(self.manifest.entries.keys() | self.baseline.entries.keys())
        return [path for path in paths if self.provenance(path) is kind]

    def export(self, destination: str | Path) -> None:
        """Write the tree out to a new directory, as the check left it.

        Sockets and devices are left out: they are in the manifest and cannot be made again.

        Raises:
            FileExistsError: there is something at the destination.
            EvidenceIncompleteError: content is not here.
        """
        whole: dict[str, Entry] = {}
        for entry in self.manifest:
            if entry.kind in {EntryKind.SOCKET, EntryKind.DEVICE}:
                continue
            whole[entry.path] = entry
            above = entry.path.rpartition("/")[0]
            while not self.sealed and above and above not in whole:  # a part may lack directories
                whole[above] = Entry(above, EntryKind.DIRECTORY, 0o755, entry.mtime_ns)
                above = above.rpartition("/")[0]
        Path(destination).mkdir(parents=True)
        manifest = Manifest.of(whole.values())
        tree.build(destination, manifest, lambda entry: self._vault.open(entry.sha256 or ""))
