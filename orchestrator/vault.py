"""Evidence on this machine's disk: content by its digest, and a record for each run.

    objects/ab/abcd…        content, named by its SHA-256
    manifests/abcd….json    accounts of workspaces, named by the digest of the manifest
    evidence/RUN/           record.json, stdout, stderr (and *.tail after a gap)

Everything is written aside, flushed, renamed into place, and then its directory is flushed; a
record is written when all that it names is there. So what has its name is whole, and a crash leaves
nothing that could be taken for evidence. Content is read back through its digest: damage is found,
never returned.

What a run costs here follows what its check changed. The record holds the changes against the
manifest of the workspace, which is kept once; content that is here already is not fetched again.
Content that the check did not change is copied once and not flushed: until the system has written
it, it can be had from the workspace again. Nothing is shared with a sandbox by hard links, though
that would save the copy: whoever wrote to a sandbox that is kept would write to evidence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from attrs import define, field

from . import tree
from .core.errors import EvidenceIncompleteError, VaultError
from .core.evidence import (
    Changes,
    Entry,
    EntryKind,
    Manifest,
    Output,
    Receipt,
)
from .evidence import Evidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .core.verdict import Outcome
    from .ports import Stream

RECORD_VERSION: Final = 1
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@define(eq=False)
class VaultIntake:
    """Takes delivery of one run's evidence. See `ports.Intake`."""

    run_id: str
    baseline: Manifest
    _vault: Vault = field(alias="vault")
    arrived: dict[str, Entry] = field(factory=dict)
    outputs: dict[str, Output] = field(factory=dict)

    def missing(self, manifest: Manifest) -> list[Entry]:
        """Give the files of `manifest` whose content is not here yet, each content once."""
        wanted: dict[str, Entry] = {}
        for entry in manifest:
            if entry.kind is not EntryKind.FILE or entry.sha256 in wanted:
                continue
            if entry.sha256 is None or not self._vault.has(entry.sha256, entry.size):
                wanted[entry.sha256 or ""] = entry
        return list(wanted.values())

    def receive(self, entry: Entry, stream: BinaryIO) -> None:
        """Take the content of a file; what is not what `entry` says is kept aside and refused."""
        before = self.baseline.entries.get(entry.path)
        unchanged = before is not None and before.same_content(entry)
        size, digest = self._vault.keep(stream, flush=not unchanged)
        arrived = Entry(entry.path, entry.kind, entry.mode, entry.mtime_ns, size, digest)
        self.arrived[entry.path] = arrived
        if digest != entry.sha256:
            raise EvidenceIncompleteError(
                f"{entry.path!r} arrived with {size} bytes and SHA-256 {digest}; "
                f"the sandbox has {entry.size} bytes and {entry.sha256}"
            )

    def output(
        self, stream: Stream, head: Iterable[bytes], tail: Iterable[bytes], total: int
    ) -> None:
        """Take what was kept of an output stream."""
        output = Output(b"".join(head), b"".join(tail), total)
        kept = len(output.head) + len(output.tail)
        if kept > total or (output.truncated and not (output.head and output.tail)):
            raise EvidenceIncompleteError(
                f"{stream}: {kept} bytes arrived of {total}, and not both ends of them"
            )
        self.outputs[stream] = output


class Vault:
    """A directory of evidence. May be shared by many threads and processes."""

    def __init__(self, path: str | Path) -> None:
        """Use the vault at `path`, made if it is not there.

        Raises:
            VaultError: it cannot be made.
        """
        self.path = Path(path)
        with _storing(self.path):
            for name in ("objects", "manifests", "evidence", "staging"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        self._fans: set[str] = set()
        self._objects = str(self.path / "objects")

    # --- content ----------------------------------------------------------------------------------

    def has(self, digest: str, size: int | None = None) -> bool:
        """Tell whether content is here, and of the size that it should have."""
        try:
            info = os.lstat(self._object(digest))
        except (OSError, EvidenceIncompleteError):
            return False
        return stat.S_ISREG(info.st_mode) and size in {None, info.st_size}

    def content(self, digest: str) -> bytes:
        """Give content.

        Raises:
            EvidenceIncompleteError: it is not here, or is not what its name says.
        """
        with self.open(digest) as stream:
            return stream.read()

    def open(self, digest: str) -> BinaryIO:
        """Open content for reading, after reading it once to see that it is what its name says.

        Raises:
            EvidenceIncompleteError: it is not here, or is not what its name says.
        """
        place = self._object(digest)
        try:
            stream = open(place, "rb")  # noqa: SIM115 - given to the caller, or closed below
        except OSError as error:
            raise EvidenceIncompleteError(
                f"{place}: {error.strerror}: the content was not kept"
            ) from error
        try:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            stream.seek(0)
        except OSError as error:
            stream.close()
            raise EvidenceIncompleteError(f"{place}: {error.strerror}") from error
        if found != digest:
            stream.close()
            with contextlib.suppress(OSError):  # kept, and out of the way: it can be brought anew
                os.replace(place, self.path / "staging" / f"{digest}.damaged")
            raise EvidenceIncompleteError(f"{place} is damaged")
        return stream

    def keep(self, stream: BinaryIO, *, flush: bool) -> tuple[int, str]:
        """Store content under the digest that it turns out to have; give size and digest.

        Args:
            stream: the content.
            flush: have it on disk, and not only in the system's cache, before it has its name.
        """
        with _storing(self.path):
            descriptor, name = tempfile.mkstemp(dir=self.path / "staging")
        try:
            size, digest = _write_content(stream, descriptor, self.path)
            with _storing(self.path):
                if flush:
                    os.fsync(descriptor)
                os.fchmod(descriptor, 0o444)
                place = self._make_place(digest)
                os.replace(name, place)
                if flush:
                    _flush(os.path.dirname(place))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        finally:
            os.close(descriptor)
        return size, digest

    def _object(self, digest: str) -> str:
        if not _SHA256.fullmatch(digest):
            raise EvidenceIncompleteError(f"{digest!r} is no SHA-256, so no content has that name")
        return f"{self._objects}/{digest[:2]}/{digest}"

    def _make_place(self, digest: str) -> str:
        fan = digest[:2]
        if fan not in self._fans:
            (self.path / "objects" / fan).mkdir(exist_ok=True)
            _flush(self.path / "objects")
            self._fans.add(fan)
        return self._object(digest)

    # --- manifests --------------------------------------------------------------------------------

    def keep_manifest(self, manifest: Manifest) -> str:
        """Store a manifest, if it is not here yet; give its digest."""
        data = manifest.encode()
        digest = hashlib.sha256(data).hexdigest()
        place = self.path / "manifests" / f"{digest}.json"
        if not place.exists() or place.stat().st_size != len(data):
            with _storing(self.path):
                _write_whole(self.path / "staging", place, data)
        return digest

    def manifest(self, digest: str) -> Manifest:
        """Give a stored manifest.

        Raises:
            EvidenceIncompleteError: it is not here, or is damaged.
        """
        place = self.path / "manifests" / f"{digest}.json"
        try:
            data = place.read_bytes()
        except OSError as error:
            raise EvidenceIncompleteError(f"{place}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise EvidenceIncompleteError(f"{place} is damaged")
        return Manifest.decode(data)

    # --- evidence ---------------------------------------------------------------------------------

    def intake(self, run_id: str, baseline: Manifest) -> VaultIntake:
        """Open a delivery for a run whose check was given the tree `baseline`."""
        return VaultIntake(run_id, baseline, vault=self)

    def seal(self, intake: VaultIntake, manifest: Manifest) -> Receipt:
        """Seal what was delivered, after proving that it is all there.

        Args:
            intake: the delivery.
            manifest: the sandbox's own account of its workspace after the check.

        Raises:
            EvidenceIncompleteError: something is not here. Nothing was sealed.
            VaultError: it could not be written.
        """
        missing = intake.missing(manifest)
        if missing:
            names = ", ".join(repr(entry.path) for entry in missing[:3])
            raise EvidenceIncompleteError(
                f"{len(missing)} files did not arrive, among them {names}"
            )
        for stream in ("stdout", "stderr"):
            if stream not in intake.outputs:
                raise EvidenceIncompleteError(f"{stream} did not arrive")
        return self._record(intake, manifest, sealed=True)

    def put_aside(self, intake: VaultIntake, manifest: Manifest | None) -> Receipt:
        """Keep what was delivered of evidence that will not be scored, as what it is: a part.

        Files that did not arrive are not in its manifest; ones that arrived damaged are, as they
        came.
        """
        known = manifest.entries if manifest else {}
        entries = {
            path: entry
            for path, entry in known.items()
            if entry.sha256 is None or self.has(entry.sha256, entry.size)
        }
        return self._record(
            intake, Manifest.of({**entries, **intake.arrived}.values()), sealed=False
        )

    def _record(self, intake: VaultIntake, manifest: Manifest, *, sealed: bool) -> Receipt:
        """Write a run's directory and give the receipt for it."""
        changes = Changes.between(intake.baseline, manifest)
        outputs = dict(intake.outputs)
        data = json.dumps(
            {
                "version": RECORD_VERSION,
                "run_id": intake.run_id,
                "sealed": sealed,
                "baseline": self.keep_manifest(intake.baseline),
                "manifest": manifest.digest,
                "changed": json.loads(Manifest.of(changes.entries).encode()),
                "deleted": changes.deleted,
                "output": {name: _describe(output) for name, output in outputs.items()},
            },
            indent=1,
        ).encode("ascii")
        with _storing(self.path):
            stage = Path(tempfile.mkdtemp(dir=self.path / "staging", prefix=f"{intake.run_id}."))
            try:
                for name, output in outputs.items():
                    _write_new(stage / name, output.head)
                    if output.tail:
                        _write_new(stage / f"{name}.tail", output.tail)
                _write_new(stage / "record.json", data)
                _flush(stage)
                stage.chmod(0o755)
                self._put_in_place(stage, self.path / "evidence" / intake.run_id)
            except BaseException:
                shutil.rmtree(stage, ignore_errors=True)
                raise
        return Receipt.for_tree(
            intake.run_id,
            intake.baseline,
            manifest,
            changes,
            sealed=sealed,
            record=hashlib.sha256(data).hexdigest(),
        )

    def _put_in_place(self, stage: Path, place: Path) -> None:
        """Rename a finished directory; one that a crashed runner left there keeps another name."""
        if os.path.lexists(place):
            if _same_files(stage, place):
                shutil.rmtree(stage)
                return
            generation = 1
            while os.path.lexists(
                older := place.with_name(f"{place.name}.superseded-{generation}")
            ):
                generation += 1
            place.rename(older)
        stage.rename(place)
        _flush(place.parent)

    def evidence(self, receipt: Receipt, outcome: Outcome | None) -> Evidence:
        """Give the evidence that a receipt was given for.

        Raises:
            EvidenceIncompleteError: the record is not the one that the receipt names.
        """
        return _Loaded(self, receipt).evidence(outcome)


@define(slots=False)
class _Loaded:
    """Reads a record back, through the digests that it was written with."""

    vault: Vault
    receipt: Receipt

    @property
    def path(self) -> Path:
        return self.vault.path / "evidence" / self.receipt.run_id

    @cached_property
    def record(self) -> dict[str, Any]:
        try:
            data = (self.path / "record.json").read_bytes()
        except OSError as error:
            raise EvidenceIncompleteError(f"{self.path}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != self.receipt.record:
            raise EvidenceIncompleteError(f"{self.path / 'record.json'} is damaged")
        record: dict[str, Any] = json.loads(data)
        return record

    def evidence(self, outcome: Outcome | None) -> Evidence:
        baseline = self.vault.manifest(self.record["baseline"])
        changed = Manifest.decode(json.dumps(self.record["changed"]).encode())
        changes = Changes(tuple(changed), tuple(self.record["deleted"]))
        return Evidence(
            run_id=self.receipt.run_id,
            sealed=self.receipt.sealed,
            outcome=outcome,
            manifest=changes.apply(baseline),
            baseline=baseline,
            path=self.path,
            outputs={name: self._output(name) for name in self.record["output"]},
            vault=self.vault,
        )

    def _output(self, stream: str) -> Output:
        described = self.record["output"][stream]
        parts = []
        for name, digest in ((stream, described["head"]), (f"{stream}.tail", described["tail"])):
            try:
                data = (self.path / name).read_bytes() if digest else b""
            except OSError as error:
                raise EvidenceIncompleteError(f"{self.path / name}: {error.strerror}") from error
            if digest and hashlib.sha256(data).hexdigest() != digest:
                raise EvidenceIncompleteError(f"{self.path / name} is damaged")
            parts.append(data)
        return Output(parts[0], parts[1], described["bytes"])


def _describe(output: Output) -> dict[str, object]:
    return {
        "bytes": output.total,
        "head": hashlib.sha256(output.head).hexdigest(),
        "tail": hashlib.sha256(output.tail).hexdigest() if output.tail else None,
    }


@contextlib.contextmanager
def _storing(path: Path) -> Iterator[None]:
    """Tell trouble with this machine's disk from trouble with what is stored on it."""
    try:
        yield
    except OSError as error:
        raise _storage_error(path, error) from error


def _storage_error(path: Path, error: OSError) -> VaultError:
    return VaultError(
        f"evidence cannot be kept in {path}: {error.filename or path}: {error.strerror}; nothing "
        "that was kept is lost, the sandbox is untouched: make room or mend it, then resume"
    )


@define(eq=False)
class _Reader:
    """Reads a stream, and remembers whether it was the stream that failed, or the disk."""

    stream: BinaryIO
    failed: bool = False

    def read(self, size: int) -> bytes:
        try:
            return self.stream.read(size)
        except BaseException:
            self.failed = True
            raise


def _write_content(stream: BinaryIO, descriptor: int, path: Path) -> tuple[int, str]:
    """Copy a stream to disk; only an error of the disk is a `VaultError`."""
    reader = _Reader(stream)
    try:
        return tree.write_sparse(reader, descriptor)
    except OSError as error:
        if reader.failed:
            raise
        raise _storage_error(path, error) from error


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(descriptor)


def _write_whole(staging: Path, place: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=staging)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
        os.chmod(name, 0o444)
        os.replace(name, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _flush(place.parent)


def _same_files(one: Path, other: Path) -> bool:
    """Tell whether two directories have the same files; one that cannot be read is another."""
    try:
        names = sorted(os.listdir(one))
        return names == sorted(os.listdir(other)) and all(
            (one / name).read_bytes() == (other / name).read_bytes() for name in names
        )
    except OSError:
        return False


def _flush(directory: str | Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
