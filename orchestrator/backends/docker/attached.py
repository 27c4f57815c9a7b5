"""A container of somebody else as a sandbox: an agent worked in it, and the check must run there.

The guest comes in by exec, beside whatever runs there already, and keeps its records under /tmp.
What is sent is laid over the tree that is there; the check is measured against the tree as it then
is. Processes that were there before the check are left alone; what the check leaves is stopped. The
container is destroyed at the end only if it was given away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field
from docker.errors import APIError, NotFound

from ...core.errors import SandboxGoneError, SpecError
from ...core.facts import SandboxRef
from ...guest.account import Account
from ...guest.shells import ShellSandbox
from ...ports import demand
from .daemon import ExecShell

if TYPE_CHECKING:
    import docker

    from ...core.machine import CleanupPermit
    from ...core.spec import EvalSpec


class AttachedBackend:
    """Has one container for a sandbox, for one run after another. `DockerBackend.attach` makes it.

    Attributes:
        adopts: its sandboxes come with a tree.
        container: id of the container.
        workdir: the tree's path in it.
    """

    name = "docker-attached"
    isolation = "container"
    shell = "/bin/sh"
    adopts = True

    def __init__(
        self, client: docker.APIClient, container: str, workdir: str, user: str, *, owned: bool
    ) -> None:
        self.client = client
        self.container = container
        self.workdir = workdir
        self.owned = owned
        self.guest_shell = ExecShell(client, container, user)
        self._accounts: dict[str, Account] = {}

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse what was decided when the container was made.

        Raises:
            SpecError: naming the key.
        """
        for name in ("memory_bytes", "cpus", "pids", "disk_bytes"):
            if getattr(spec.limits, name) is not None:
                problem = "the container is there already, with limits of its own"
                raise SpecError(f"limits.{name}", problem, "no such limit")
        if spec.image is not None:
            problem = "the container is there already, and made of another"
            raise SpecError("image", problem, "no image")

    def create(self, run_id: str, spec: EvalSpec) -> AttachedSandbox:
        """Bring the guest into the container."""
        del spec
        sandbox = self._sandbox(run_id)
        sandbox.install()
        return sandbox

    def open(self, run_id: str) -> AttachedSandbox | None:
        """Find the guest's place for a run; None where the container is gone, or it is."""
        try:
            state = self.client.inspect_container(self.container)["State"]
        except NotFound:
            return None
        sandbox = self._sandbox(run_id)
        if not state["Running"]:
            raise SandboxGoneError(f"container {self.container[:12]} is not running any more")
        look = ["/bin/sh", "-c", '[ ! -d "$1" ] || echo there', "sh", sandbox.base]
        return sandbox if b"".join(self.guest_shell.run(look)) else None

    def _sandbox(self, run_id: str) -> AttachedSandbox:
        account = self._accounts.setdefault(run_id, Account(self.workdir))
        return AttachedSandbox(
            SandboxRef(run_id, self.container),
            self.guest_shell,
            f"/tmp/.orchestrator-{run_id}",  # noqa: S108 - the guest makes it private
            account,
            {},
            keeps_tree=True,
            backend=self,
        )


@define(eq=False, kw_only=True)
class AttachedSandbox(ShellSandbox):
    """The container, for one run. See `ports.Sandbox`."""

    _backend: AttachedBackend = field(alias="backend")

    @property
    def conditions(self) -> dict[str, str]:
        """What it is made of."""
        found: dict[str, Any] = self._backend.client.inspect_container(self._backend.container)
        user = found["Config"].get("User") or "0"
        return {"container": found["Id"], "image": found["Image"], "user": user}

    def destroy(self, permit: CleanupPermit) -> None:
        """Remove the guest's place, or the container if it was given away."""
        demand(permit, self.ref.sandbox_id)
        if not self._backend.owned:
            remove = ["/bin/sh", "-c", 'chmod -R u+rwX "$1"; rm -rf "$1"', "sh", self.base]
            self._do(remove)
            return
        client, container = self._backend.client, self._backend.container
        try:
            client.remove_container(container, v=True, force=True)
        except NotFound:
            return
        except APIError as error:
            if error.status_code != 409:  # noqa: PLR2004 - somebody removes it already
                raise
        client.wait(container, condition="removed")
