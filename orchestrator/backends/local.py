"""The local backend: a fresh copy of the workspace, and processes of this machine.

A sandbox is a directory, named after its run, with the copy of the workspace, an empty home, and
the guest's records. It isolates nothing else: the check is this user's process, with this user's
rights. What it does give is a clean environment, the whole process tree stopped, and an original
untouched.

Sandboxes live outside the project on purpose: a copy inside it would find the project's own
settings (`.git`, `pyproject.toml`, `node_modules`) in the directories above it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from .. import guest, tree
from ..core.errors import EvidenceIncompleteError, SandboxGoneError, SpecError
from ..core.evidence import Entry, Manifest
from ..core.facts import SandboxRef
from ..guest.processes import Launcher, inhabitants, open_kept, read_claim, read_small, wait
from ..owner import owner
from ..ports import Ending, Intake, Labelled, Order, Record, Slot, Workspace, demand

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..core.machine import CleanupPermit
    from ..core.spec import EvalSpec


class LocalBackend:
    """Makes sandboxes of directories and processes of this machine. `isolation` is `none`."""

    name = "local"
    isolation = "none"

    def __init__(self, root: str | Path | None = None, *, shell: str = "/bin/sh") -> None:
        """Make sandboxes below a directory.

        Args:
            root: directory for sandboxes, made if it is not there; None for one of this user's in
                TMPDIR or /var/tmp, which must be nobody else's. Runs are resumed with the one that
                they were begun with: in another, their sandboxes would not be found.
            shell: absolute path of the POSIX shell that runs the guest and every text command.

        Raises:
            PermissionError: the default directory belongs to somebody else.
        """
        self.root = Path(root) if root is not None else _own_root()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root = self.root.resolve()
        self.shell = shell
        self.state_dir = ""
        self._launcher = Launcher()

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse limits, which nothing here could enforce, and a workspace around the sandboxes.

        Raises:
            SpecError: naming the limit.
        """
        for name in ("memory_bytes", "cpus", "pids", "disk_bytes"):
            if getattr(spec.limits, name) is not None:
                raise SpecError(
                    f"limits.{name}",
                    "the local backend cannot enforce it",
                    "no such limit, or a backend with containers",
                )
        if spec.workspace is not None and self.root.is_relative_to(Path(spec.workspace).resolve()):
            raise SpecError(
                "workspace",
                f"the sandboxes, in {self.root}, would be a part of it",
                "a workspace elsewhere, or another TMPDIR",
            )

    def create(self, run_id: str, spec: EvalSpec) -> LocalSandbox:
        """Make the run's directory, or find it."""
        del spec
        self._launcher.warm()
        home = self.root / run_id
        home.mkdir(mode=0o700, exist_ok=True)
        identity = home / "identity"
        if not identity.exists():
            draft = home / "identity.new"
            draft.write_text(f"{os.urandom(16).hex()} {_boot()}\n", "ascii")
            draft.rename(identity)
        if not (home / "label").exists():
            draft = home / "label.new"
            draft.write_bytes(os.fsencode(f"{owner()}\n{self.state_dir}"))
            draft.rename(home / "label")
        for name in ("home", "records"):
            (home / name).mkdir(mode=0o700, exist_ok=True)
        return self._sandbox(home)

    def open(self, run_id: str) -> LocalSandbox | None:
        """Find the run's directory."""
        home = self.root / run_id
        return self._sandbox(home) if home.is_dir() else None

    def labelled(self) -> list[Labelled]:
        """List every sandbox below the root."""
        found = []
        for label in sorted(self.root.glob("*/label")):
            maker, _, state_dir = os.fsdecode(label.read_bytes()).partition("\n")
            found.append(Labelled(label.parent.name, maker, state_dir))
        return found

    def _sandbox(self, home: Path) -> LocalSandbox:
        ref = SandboxRef(home.name, _identity(home))
        return LocalSandbox(ref, home, self.shell, launcher=self._launcher)

    def close(self) -> None:
        """End the helper process. Sandboxes and checks that run in them are not touched."""
        self._launcher.close()


@define(eq=False)
class LocalSandbox:
    """One directory. See `ports.Sandbox`."""

    ref: SandboxRef
    home: Path
    shell: str
    _launcher: Launcher = field(alias="launcher")

    @property
    def workspace(self) -> Path:
        """The directory that the check runs in."""
        return self.home / "workspace"

    def upload(self, workspace: Workspace) -> bool:
        """Copy the workspace, in place of what an upload that was cut short left behind."""
        self._verify()
        if any((self.home / "records").glob("*/claim")):
            return False
        tree.remove(self.workspace)
        self.workspace.mkdir(mode=0o755)
        tree.build(self.workspace, workspace.manifest(), workspace.open)
        return True

    def manifest(self) -> Manifest:
        """Account for the workspace; one that the check removed is an empty one."""
        self._verify()
        try:
            info = self.workspace.lstat()
        except FileNotFoundError:
            return Manifest({})
        if not stat.S_ISDIR(info.st_mode):
            return Manifest({})
        if not os.access(self.workspace, os.R_OK | os.X_OK):
            self.workspace.chmod(stat.S_IMODE(info.st_mode) | 0o700)
        return tree.scan(self.workspace, ours=True)

    def execute(self, order: Order) -> Record:
        """Run the guest, or join the one that was started before."""
        self._verify()
        record = self._record(order.slot)
        record.mkdir(mode=0o700, exist_ok=True)
        started = None
        if not (record / "claim").exists():
            self._write_request(record, order)
            started = self._launcher.run(record, *self._guest("run", record))
            wait(started)
        done = self._finished(record, order)
        if done is None and (claim := read_claim(record)) is not None and claim.pid != started:
            wait(claim.pid, claim.born)
            done = self._finished(record, order)
        return done or self._lost(record)

    def settle(self, order: Order) -> Record:
        """Run the guest's `settle`, which stops the command and sees that it never starts again."""
        self._verify()
        record = self._record(order.slot)
        record.mkdir(mode=0o700, exist_ok=True)
        done = self._finished(record, order)
        if done is None:
            if not (
                record / "claim"
            ).exists():  # else nothing of it is needed; there may be no room
                self._write_request(record, order)
            wait(self._launcher.start(*self._guest("settle", record)))
            done = self._finished(record, order)
            if done and done.ending is Ending.NOT_STARTED and self._launcher.runs(record):
                done = None  # the command took its record away
        return done or self._lost(record)

    def fetch(self, entries: Iterable[Entry], slot: Slot, intake: Intake) -> None:
        """Deliver files straight from the directory."""
        self._verify()
        for entry in entries:
            with tree.open_file(self.workspace, entry.path, ours=True) as stream:
                intake.receive(entry, stream)
        record = self._record(slot)
        keep = _keep(record)
        for stream_name in ("stdout", "stderr"):
            _deliver(record, stream_name, keep, intake)
        self._verify()

    def destroy(self, permit: CleanupPermit) -> None:
        """Remove the directory, once nothing of the run is alive in it."""
        demand(permit, self.ref.sandbox_id)
        ended = {place.parent.name for place in (self.home / "records").glob("*/ended")}
        if {place.name for place in (self.home / "records").glob("*")} != ended or not ended:
            # Some supervisor left no record: it may be alive, or what it was killed over.
            for record in sorted((self.home / "records").glob("*")):
                claim = read_claim(record)
                if record.name not in ended and claim is not None and claim.alive():
                    raise OSError(errno.EBUSY, "its command is still running", str(record))
            for pid in inhabitants(self.home):
                raise OSError(errno.EBUSY, f"process {pid} is still running in it", str(self.home))
        tree.remove(self.home)

    # --- the guest --------------------------------------------------------------------------------

    def _record(self, slot: Slot) -> Path:
        return self.home / "records" / slot

    def _verify(self) -> None:
        """Make sure that this is the directory that the run created.

        Raises:
            SandboxGoneError: it is not.
        """
        if _identity(self.home) != self.ref.identity:
            raise SandboxGoneError(f"{self.home}: gone, or not the sandbox that this run created")

    def _write_request(self, record: Path, order: Order) -> None:
        text = guest.request(
            order,
            workdir=str(self.workspace),
            env={
                "PATH": guest.SANE_PATH,
                "HOME": str(self.home / "home"),
                "LANG": guest.SANE_LANG,
            },
            now_s=_guest_clock(),
        )
        draft = record / f"request.{os.urandom(4).hex()}"
        draft.touch(mode=0o600)
        draft.write_bytes(text.encode("utf-8", "surrogateescape"))
        draft.rename(record / "request")

    def _guest(self, verb: str, record: Path) -> tuple[list[str], dict[str, str], str]:
        return (
            [self.shell, str(guest.SUPERVISOR), verb, str(record)],
            {"PATH": guest.SANE_PATH},
            str(self.home),
        )

    def _finished(self, record: Path, order: Order) -> Record | None:
        text = read_small(record / "ended")
        done = guest.parse(text, order.nonce) if text is not None else None
        if done is None:
            return None  # not written by the supervisor
        if done.ending is not Ending.NOT_STARTED and done.ending is not Ending.LOST:
            for stream in ("stdout", "stderr"):
                if not (record / f"{stream}.size").exists() or (record / f"{stream}.lost").exists():
                    return guest.lost(f"{stream} of the command was not kept", still=done.still)
        return done

    def _lost(self, record: Path) -> Record:
        """Give the record of a command that has none, and stop what is left of it."""
        rebooted = self.ref.identity.split(" ")[-1] != _boot()
        still = rebooted or self._launcher.purge(record)
        return guest.lost("its supervisor ended without a record", still=still)


def _keep(record: Path) -> int:
    try:
        return int(read_small(record / "keep") or 0)
    except ValueError:
        return 0


def _deliver(record: Path, stream: Any, keep: int, intake: Intake) -> None:
    """Deliver head and tail of a stream from the parts that the guest kept of it."""
    try:
        size = read_small(record / f"{stream}.size")
        if size is None:
            return
        total, names = guest.output_parts(size)
    except ValueError as error:
        raise EvidenceIncompleteError(f"{record}: {stream}: {error}") from error
    parts = [record / f"{stream}.{name}" for name in names]
    sizes = [part.stat().st_size if part.exists() else 0 for part in parts]
    head, tail = guest.cut(sizes, total, keep)
    intake.output(stream, _first(parts, head), _first_of_last(parts, sizes, tail), total)


def _first(parts: list[Path], size: int) -> Iterator[bytes]:
    for part in parts:
        if size and part.exists():
            with open_kept(part) as file:
                while size and (chunk := file.read(min(size, tree.CHUNK))):
                    size -= len(chunk)
                    yield chunk


def _first_of_last(parts: list[Path], sizes: list[int], size: int) -> Iterator[bytes]:
    """Give the last `size` bytes of the parts laid end to end."""
    skip = sum(sizes) - size
    for part, length in zip(parts, sizes, strict=True):
        if skip < length and size:
            with open_kept(part) as file:
                file.seek(max(skip, 0))
                while chunk := file.read(tree.CHUNK):
                    yield chunk
        skip -= length


def _identity(home: Path) -> str:
    try:
        return (home / "identity").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _boot() -> str:
    """Name this boot of the machine: after another one, nothing that ran before is alive."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "unknown"


def _guest_clock() -> float:
    """Read the clock that the guest reads, seconds."""
    try:
        return float(Path("/proc/uptime").read_text("ascii").split()[0])
    except OSError:
        return time.time()


def _own_root() -> Path:
    """Give the default place for sandboxes: private, and provably this user's own."""
    base = Path(os.environ.get("TMPDIR") or "/var/tmp").absolute()  # noqa: S108 - made private below
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    root = base / f"orchestrator-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    info = root.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise PermissionError(
            errno.EACCES, "belongs to somebody else; give LocalBackend another root", str(root)
        )
    return root
