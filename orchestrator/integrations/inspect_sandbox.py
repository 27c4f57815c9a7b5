"""Inspect AI: a sandbox of any of its providers as a backend of ours, and as a source of work.

    check_scorer(spec, partial(InspectSandboxBackend, directory="/app"))  # where the agent worked
    check_scorer(spec, DockerBackend(), work=copy_of("/app"))             # elsewhere, over a copy

A sandbox in which an agent worked is one that it can have prepared: where that matters, elsewhere.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from attrs import frozen
from inspect_ai.util import SandboxEnvironment

from .. import tree
from ..backends.inspect_shell import InspectShell
from ..core.errors import EvidenceIncompleteError, SpecError
from ..core.evidence import EntryKind
from ..core.facts import SandboxRef
from ..guest.account import Account
from ..guest.shells import ShellSandbox
from ..ports import demand

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import BinaryIO

    from ..core.evidence import Entry
    from ..core.machine import CleanupPermit
    from ..core.spec import EvalSpec
    from ..ports import Intake

CREATE: Final = """[ -d "$3" ] && [ ! -L "$3" ] || { echo "$3: not a directory" >&2; exit 1; }
umask 077; mkdir -p "$1"; set -C; { echo "$2" >"$1/identity"; } 2>/dev/null
cat "$1/identity" """
OPEN: Final = '[ ! -d "$1" ] || cat "$1/identity" || echo'
DESTROY: Final = """for claim in "$1"/records/*/claim; do
pid=; [ ! -e "$claim" ] || [ -e "${claim%claim}ended" ] || read -r pid born <"$claim" || exit
[ -z "$pid" ] || ! kill -0 "$pid" 2>/dev/null || { echo "its command still runs" >&2; exit 1; }
done; [ ! -e "$1" ] || chmod -R u+rwX "$1"; rm -rf "$1"; [ ! -e "$1" ]"""


class InspectSandboxBackend:
    """Makes sandboxes of directories in one Inspect sandbox, and isolates as that one does."""

    name = "inspect"

    def __init__(
        self,
        environment: Any,
        *,
        directory: str | None = None,
        root: str = "/tmp/orchestrator",  # noqa: S108 - in there
    ) -> None:
        """Take a sandbox, in its event loop.

        Args:
            environment: Inspect's sandbox.
            directory: absolute path in it of the tree to run over, which is there and stays, and
                over which the workspace is laid; None to run in a directory of the run's own.
            root: absolute path in it of the place for what runs need.
        """
        self._shell = _shell(environment)
        self.isolation = {"local": "none"}.get(self._shell.provider, self._shell.provider)
        self.adopts = directory is not None
        self._directory = directory
        self._root = root
        self._accounts: dict[str, Account] = {}

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse limits and an image: those are Inspect's to set."""
        names = ("memory_bytes", "cpus", "pids", "disk_bytes")
        set_here = {f"limits.{name}": getattr(spec.limits, name) for name in names}
        for key, value in {**set_here, "image": spec.image}.items():
            if value is not None:
                raise SpecError(key, "the sandbox is Inspect's", "it to be set there")

    def create(self, run_id: str, spec: EvalSpec) -> InspectSandbox:
        """Make the run's directory, or find it."""
        del spec
        place, token = f"{self._root}/{run_id}", secrets.token_hex(16)
        identity = self._shell.ask(CREATE, place, token, self._directory or "/")
        made = self._sandbox(run_id, identity)
        made.install()
        return made

    def open(self, run_id: str) -> InspectSandbox | None:
        """Find the run's directory."""
        found = self._shell.ask(OPEN, f"{self._root}/{run_id}")
        return self._sandbox(run_id, found) if found else None

    def _sandbox(self, run_id: str, identity: str) -> InspectSandbox:
        base = f"{self._root}/{run_id}"
        ref = SandboxRef(run_id, identity.strip())
        fresh = Account(self._directory or f"{base}/workspace")
        account = self._accounts.setdefault(ref.identity, fresh)
        env = {"HOME": f"{base}/home"}
        return InspectSandbox(ref, self._shell, base, account, env, keeps_tree=self.adopts)


class InspectSandbox(ShellSandbox):
    """One directory. See `ports.Sandbox`."""

    def destroy(self, permit: CleanupPermit) -> None:
        """Remove the directory, unless something of the run is alive."""
        demand(permit, self.ref.sandbox_id)
        self._do(["/bin/sh", "-c", DESTROY, "sh", self.base])


def _shell(environment: Any) -> InspectShell:
    return InspectShell(environment.as_type(SandboxEnvironment))  # whose events do not tell nonces


def copy_of(directory: str = ".") -> Callable[[Any, Path], Awaitable[None]]:
    """Make what copies a directory of a sample's sandbox, whole, to one of this machine."""

    def copy(shell: InspectShell, place: Path) -> None:
        root = shell.ask('cd "$1" && pwd -P', directory).removesuffix("\n")
        base = f"/tmp/orchestrator-{secrets.token_hex(8)}"  # noqa: S108 - in there
        guest = ShellSandbox(SandboxRef(base, base), shell, base, Account(root), {})
        guest.install()
        manifest = guest.manifest()
        with tempfile.TemporaryDirectory(prefix="orchestrator-") as spool:
            files = {entry.sha256: entry for entry in manifest if entry.kind is EntryKind.FILE}
            intake = cast("Intake", _Spool(Path(spool)))
            guest.account.send(guest.channel, files.values(), intake)
            tree.build(place, manifest, lambda entry: tree.open_file(spool, entry.sha256 or ""))
        shell.ask('rm -r "$1"', base)

    async def copied(environment: Any, place: Path) -> None:
        await asyncio.to_thread(copy, _shell(environment), place)

    return copied


@frozen
class _Spool:
    place: Path

    def receive(self, entry: Entry, stream: BinaryIO) -> None:
        with (self.place / (entry.sha256 or "")).open("wb") as file:
            size, digest = tree.write_sparse(stream, file.fileno())
        if (size, digest) != (entry.size, entry.sha256):
            raise EvidenceIncompleteError(f"{entry.path!r} of the sample's work is not what it was")
