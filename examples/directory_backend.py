"""A whole backend in one file, written against the ports: directories, and the shipped guest.

`docs/write-a-backend.md` goes through it step by step. It is kept short to be read; the local
backend that the library ships does the same with less delay.

What it does not do: it isolates nothing (the check is this user's process, and could tamper with
its own record); it enforces no limits, so it refuses them; it has no `tamper`, so the check that
makes a sandbox vanish in the middle of a call is not applicable to it; it needs Linux; and where a
check kills its own supervisor, what that left running cannot be found, so the run is unresolved.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator import EvidenceIncompleteError, Manifest, SpecError, guest, tree
from orchestrator.core.errors import PermitError, SandboxGoneError
from orchestrator.core.facts import SandboxRef
from orchestrator.guest.processes import read_claim, wait

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator import Entry, EvalSpec
    from orchestrator.core.machine import CleanupPermit
    from orchestrator.ports import Intake, Order, Record, Slot, Stream, Workspace

ADOPT_ORPHANS = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
    raise SystemExit("orphans cannot be adopted here")
os.execv(sys.argv[1], sys.argv[1:])
"""
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class DirectoryBackend:
    """Makes sandboxes of directories below `root`."""

    name = "directory"
    isolation = "none"

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse limits, by name."""
        for limit in ("memory_bytes", "cpus", "pids", "disk_bytes"):
            if getattr(spec.limits, limit) is not None:
                raise SpecError(f"limits.{limit}", "nothing here enforces it", "no such limit")

    def create(self, run_id: str, spec: EvalSpec) -> DirectorySandbox:
        """Make the run's directory, or find it."""
        del spec  # an image, say, would matter here
        place = self.root / run_id
        for name in ("home", "records"):
            (place / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = place / f"identity.{os.urandom(8).hex()}"
        draft.write_text(os.urandom(16).hex())
        try:
            (place / "identity").hardlink_to(draft)  # fails if there is one: the first one counts
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        return DirectorySandbox(place)

    def open(self, run_id: str) -> DirectorySandbox | None:
        """Find the run's directory."""
        place = self.root / run_id
        return DirectorySandbox(place) if place.exists() else None


class DirectorySandbox:
    """One directory: a workspace, an empty home, and the guest's records."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.workspace = place / "workspace"
        self.ref = SandboxRef(place.name, self.identity())

    def identity(self) -> str:
        """Read what no other directory of this name would have."""
        try:
            return (self.place / "identity").read_text()
        except FileNotFoundError:
            return ""

    def verify(self) -> None:
        """Make sure that this is still the sandbox that it was."""
        if not self.ref.identity or self.identity() != self.ref.identity:
            raise SandboxGoneError(f"{self.place} is not the sandbox that it was")

    # --- the tree ---------------------------------------------------------------------------------

    def upload(self, workspace: Workspace) -> bool:
        """Make the tree anew, unless a command has begun to change it."""
        self.verify()
        if any((self.place / "records").glob("*/claim")):
            return False
        tree.remove(self.workspace)
        self.workspace.mkdir(mode=0o755)
        tree.build(self.workspace, workspace.manifest(), workspace.open)
        return True

    def manifest(self) -> Manifest:
        """Account for what is in the directory now, and never for what ought to be."""
        self.verify()
        return tree.scan(self.workspace, ours=True) if self.workspace.is_dir() else Manifest({})

    def fetch(self, entries: Iterable[Entry], slot: Slot, intake: Intake) -> None:
        """Deliver files and output; the intake compares them with the manifest."""
        self.verify()
        for entry in entries:
            with tree.open_file(self.workspace, entry.path, ours=True) as stream:
                intake.receive(entry, stream)
        record = self.place / "records" / slot
        for name in STREAMS:
            if (record / f"{name}.size").exists():
                deliver(record, name, intake)
        self.verify()

    # --- the command ------------------------------------------------------------------------------

    def execute(self, order: Order) -> Record:
        """Run the command, or join whoever runs it."""
        return self.guest("run", order)

    def settle(self, order: Order) -> Record:
        """Stop the command if it runs; see that it never starts if it did not."""
        return self.guest("settle", order)

    def guest(self, verb: Literal["run", "settle"], order: Order) -> Record:
        """Have a supervisor do something about an order, wait for it, and read the record."""
        self.verify()
        record = self.place / "records" / order.slot
        record.mkdir(mode=0o700, exist_ok=True)
        claimed, ended = (record / "claim").exists(), (record / "ended").exists()
        if not ended and not (verb == "run" and claimed):
            self.write_request(record, order)
            adopt = [sys.executable, "-ISc", ADOPT_ORPHANS]
            subprocess.Popen(
                [*adopt, "/bin/sh", guest.SUPERVISOR, verb, record],
                env={"PATH": guest.SANE_PATH},
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ).wait()
        if (claim := read_claim(record)) is not None:
            wait(claim.pid, claim.born)  # another one's supervisor may have been first
        return read_record(record, order)

    def write_request(self, record: Path, order: Order) -> None:
        """Write the order where the supervisor reads it, all at once."""
        env = {"PATH": guest.SANE_PATH, "HOME": str(self.place / "home"), "LANG": guest.SANE_LANG}
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        text = guest.request(order, workdir=str(self.workspace), env=env, now_s=uptime_s)
        (record / "keep").write_text(str(order.output_bytes))
        draft = record / f"request.{os.urandom(8).hex()}"
        draft.touch(mode=0o600)
        draft.write_bytes(os.fsencode(text))
        draft.rename(record / "request")

    # --- the end ----------------------------------------------------------------------------------

    def destroy(self, permit: CleanupPermit) -> None:
        """Remove the directory, with leave for this one."""
        name = self.ref.sandbox_id
        if permit.run_id != name or permit.sandbox_id not in {None, name}:
            raise PermitError(f"sandbox {name}: the permit is for {permit}")
        for record in (self.place / "records").glob("*"):
            claim = read_claim(record)
            if claim is not None and claim.alive():
                raise SandboxGoneError(f"{record}: its command is still running")
        tree.remove(self.place)


def read_record(record: Path, order: Order) -> Record:
    """Read what the supervisor wrote, if it was the supervisor who wrote it."""
    try:
        text = (record / "ended").read_text("utf-8", "surrogateescape")
    except FileNotFoundError:
        return guest.lost("its supervisor ended without a record", still=False)
    found = guest.parse(text, order.nonce)
    if found is None:
        return guest.lost("its record was not written by the supervisor", still=False)
    if any((record / f"{stream}.lost").exists() for stream in STREAMS):
        return guest.lost("some of its output was not kept", still=found.still)
    return found


def deliver(record: Path, stream: Stream, intake: Intake) -> None:
    """Deliver head and tail of an output stream, and how many bytes there were."""
    try:
        total, names = guest.output_parts((record / f"{stream}.size").read_text())
    except ValueError as error:
        raise EvidenceIncompleteError(f"{stream}: {error}") from error
    parts = [record / f"{stream}.{name}" for name in names]
    kept = [part.read_bytes() if part.exists() else b"" for part in parts]
    keep = int((record / "keep").read_text())
    head, tail = guest.cut([len(part) for part in kept], total, keep)
    intake.output(stream, [kept[0][:head]], [b"".join(kept)[-tail:] if tail else b""], total)


if __name__ == "__main__":
    import tempfile

    from orchestrator.testing.conformance import conform, report_of

    with tempfile.TemporaryDirectory() as directory:
        findings = conform(lambda: DirectoryBackend(directory))
    print(report_of(findings))
    sys.exit(any(finding.ok is False for finding in findings))
