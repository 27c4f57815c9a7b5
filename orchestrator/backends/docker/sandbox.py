"""One container as a sandbox: what is asked of its guest, and what of its daemon.

Process 1 is the supervisor: it answers questions over the attached streams (`guest.serving`), so
that a run needs no exec and no second start; what outlives the check gathers under it; and its end,
whatever brings it about, ends everything. Where the daemon saw more than the guest could tell, as
of a guest that was killed for want of memory, its word is taken.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from attrs import Factory, define
from docker.errors import APIError, ImageNotFound, NotFound

from ... import archive, guest
from ...core.errors import OrchestratorError, SandboxGoneError, StorageError
from ...core.facts import SandboxRef
from ...core.verdict import ObservedBy
from ...guest.answers import Channel, GuestError
from ...guest.records import Recorded, deliver_output
from ...guest.serving import Serving
from ...guest.shells import Commands
from ...ports import Ending, Record, demand
from .bundles import directories, directory, file, guests
from .daemon import Attached, ExecShell

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...core.evidence import Entry, Manifest
    from ...core.machine import CleanupPermit
    from ...core.spec import EvalSpec
    from ...guest.account import Account
    from ...ports import Intake, Order, Slot, Workspace
    from . import DockerBackend
    from .workspaces import Held

BASE: Final = "/.orchestrator"
RECORDS: Final = f"{BASE}/records"
HOME: Final = f"{BASE}/home"
GUEST_PIDS: Final = 16
"""Processes that the guest itself may need, beside what the check is allowed."""
_HOSTS: Final = b"127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n"
_SLOTS: Final[tuple[Slot, ...]] = ("setup", "check")


_OUT_OF_MEMORY: Final = Record(
    ending=Ending.OUT_OF_MEMORY,
    oom_kills=1,
    observed_by=ObservedBy.BACKEND,
    message="the kernel killed the guest itself for want of memory",
)


@define(eq=False)
class Live:
    """What this process knows of a run's container.

    Attributes:
        account: of its workspace.
        fresh: it was created here, and nothing is in it yet.
        workspace: what was sent, whose content need not come back.
        sent: its manifest, until it is accounted for.
        held: the image that its workspace came with, if it did.
        busy: orders that process 1 runs for this process; it answers nothing meanwhile.
        gone: it was destroyed, or found to be gone.
    """

    account: Account
    fresh: bool = False
    workspace: Workspace | None = None
    sent: Manifest | None = None
    held: Held | None = None
    busy: int = 0
    gone: bool = False
    _attached: Attached | None = None
    _serving: Serving | None = None
    _lock: Any = Factory(threading.Lock)
    _connecting: Any = Factory(threading.Lock)

    def serving(self, attach: Any, *, anew: bool = False) -> Serving:
        """Give the connection to the guest; make one if there is none, or `anew`."""
        with self._connecting:  # which may take for ever, and must keep nobody from dropping it
            with self._lock:
                if not anew and self._serving is not None and not self._serving.broken:
                    return self._serving
                self._drop()
            attached = attach()
            serving = Serving(attached.send, attached.receive, attached.complaint)
            with self._lock:
                if self.gone:  # somebody had given up on this call
                    attached.close()
                    raise GuestError("the sandbox was destroyed meanwhile")
                self._attached, self._serving = attached, serving
            return serving

    def drop(self) -> None:
        """Let go of the connection; whoever waits for an answer on it gets an error."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._attached is not None:
            self._attached.close()
        self._attached = self._serving = None


@define(eq=False)
class DockerSandbox:
    """One container. See `ports.Sandbox`."""

    backend: DockerBackend
    run_id: str
    container: dict[str, Any]
    live: Live
    spec: EvalSpec | None = None

    @property
    def ref(self) -> SandboxRef:
        """Its run, and what was drawn for it when it was created."""
        return SandboxRef(self.run_id, self.container["Config"]["Labels"]["orchestrator.identity"])

    @property
    def conditions(self) -> dict[str, str]:
        """What it was made of, and what it enforces."""
        host, config = self.container["HostConfig"], self.container["Config"]
        pids, memory = host.get("PidsLimit"), host.get("Memory")
        return {
            "container": self.container["Id"],
            "image": config["Labels"]["orchestrator.image"],
            "user": config["User"] or "0",
            "network": self.backend.network or "none",
            "read_only": str(self.backend.read_only).lower(),
            "pids": str(pids - GUEST_PIDS) if pids else "unlimited",
            "memory_bytes": str(memory or "unlimited"),
        }

    # --- the tree ---------------------------------------------------------------------------------

    def upload(self, workspace: Workspace) -> bool:
        """Send the workspace, unless the daemon has it; start the guest."""
        live = self.live
        if not live.fresh and self._claimed():
            return False
        held = self._held(workspace)
        if held is not None or not live.fresh:
            try:
                live = self._make_anew(held.image if held else None)
            except ImageNotFound:  # somebody made room just now
                held, live = None, self._make_anew(None)
        live.fresh = False
        if held is None:
            self._send(workspace)
        else:
            live.account.known = dict(held.account.known)
            self._name_localhost()
        live.workspace, live.sent, live.held = workspace, workspace.manifest(), held
        self._guest(anew=True)
        return True

    def _claimed(self) -> bool:
        """Tell whether a command of the run was ever started here, or forbidden to."""
        if self.container["State"]["Status"] == "created":
            return False  # the guest never ran
        return any(self._recorded(slot).claimed for slot in _SLOTS)

    def _make_anew(self, image: str | None) -> Live:
        """Put a container in its place that has the workspace, or in which nothing was begun."""
        if self.spec is None:
            raise SandboxGoneError(f"run {self.run_id}: its container was not created here")
        identity = self.ref.identity
        with self.backend.making(self.run_id):
            if self.live.gone:
                raise SandboxGoneError(f"{self._name}: gone, and this call came too late")
            self._remove()
            made = self.backend.make(self.run_id, self.spec, identity, image)
        self.container, self.live = made.container, made.live
        return self.live

    def _held(self, workspace: Workspace) -> Held | None:
        """Have the daemon hold the workspace, where it can and that is worth it."""
        if self.spec is None or not self.backend.cache:
            return None
        manifest, user = workspace.manifest(), self.backend.ids_of_user(self.container)
        first, root = self._first(user), self.backend.workdir.strip("/")
        return self.backend.workspaces.hold(
            manifest,
            self.backend.pin(self.spec),
            self.container["Config"]["User"],
            lambda: chain([first], archive.pack(workspace, root, user), [archive.END]),
            lambda: len(first) + archive.length(manifest, root, user) + len(archive.END),
        )

    def _first(self, user: tuple[int, int]) -> bytes:
        """Give what goes before the workspace: the guest, and the directories it lies in."""
        root, container = self.backend.workdir.strip("/"), self.container["Id"]
        lies_in = directories(self.backend.client, container, root, user)
        return guests(BASE.strip("/"), user) + lies_in

    def _name_localhost(self) -> None:
        """Give the container a hosts file: that of its image is hidden by an empty one."""
        user, _ = self.backend.ids_of_user(self.container)
        if self.backend.network is None and user != 0:  # else the guest can, which is quicker
            hosts = file("etc/hosts", _HOSTS, 0o644) + archive.END
            self.backend.client.put_archive(self.container["Id"], "/", hosts)

    def _send(self, workspace: Workspace) -> None:
        user = self.backend.ids_of_user(self.container)
        client, container = self.backend.client, self.container["Id"]
        if not self.backend.read_only:
            packed = archive.pack(workspace, self.backend.workdir.strip("/"), user)
            hosts = file("etc/hosts", _HOSTS, 0o644) if self.backend.network is None else b""
            bundle = chain([self._first(user), hosts], packed, [archive.END])
            client.put_archive(container, "/", archive.squeeze(bundle))
            return
        # These are volumes, to be filled one by one.
        client.put_archive(container, BASE, guests("", user) + archive.END)
        volume, _, root = self.backend.workdir.rpartition("/")
        tree = chain([directory(root, 0o755, user)], archive.pack(workspace, root, user))
        client.put_archive(container, volume, archive.squeeze(chain(tree, [archive.END])))

    def manifest(self) -> Manifest:
        """Account for the workspace."""
        live, serving = self.live, self._channel()
        sent, live.sent = live.sent, None
        if sent is None or live.held is None:
            return live.account.manifest(serving)
        # An image's content is what its id says: only how the storage shows it is to be learnt,
        # and that is the same in every container that is made of it.
        if live.account.known:
            return sent
        found = live.account.manifest(serving, vouched=sent)
        if found != sent:
            self.backend.workspaces.distrust(live.held)
        elif live.account.settled:
            live.held.account.known = dict(live.account.known)
        return found

    def fetch(self, entries: Iterable[Entry], slot: Slot, intake: Intake) -> None:
        """Have the guest send files and output."""
        serving = self._guest()
        self.live.account.send(serving, self._not_sent(entries, intake), intake)
        deliver_output(serving, RECORDS, slot, intake)

    def _not_sent(self, entries: Iterable[Entry], intake: Intake) -> list[Entry]:
        """Deliver content that was sent from where it came from, by its digest; give the rest."""
        workspace = self.live.workspace
        given = workspace.manifest().entries if workspace is not None else {}
        left = []
        for entry in entries:
            sent = given.get(entry.path)
            if workspace is None or sent is None or sent.sha256 != entry.sha256:
                left.append(entry)
                continue
            try:
                with workspace.open(sent) as stream:
                    intake.receive(entry, stream)
            except StorageError:
                raise
            except (OSError, OrchestratorError):  # it is another one by now
                left.append(entry)
        return left

    # --- the command ------------------------------------------------------------------------------

    def execute(self, order: Order) -> Record:
        """Have the guest run the order, or wait for it to have run."""
        serving = self._guest()
        self.live.busy += 1
        try:
            serving.order("run", order.slot, self._request(serving, order))
            recorded = self._recorded(order.slot, serving)
        except GuestError as error:
            state = self._inspect()["State"]
            if state["OOMKilled"] and not state["Running"]:
                return _OUT_OF_MEMORY
            recorded = self._recorded(order.slot)  # somebody settled it over another connection
            if not recorded.ended:
                raise GuestError(f"{self._name}: {error}") from error
        finally:
            self.live.busy -= 1
        return recorded.finished(order) or guest.lost("its supervisor left no record", still=True)

    def settle(self, order: Order) -> Record:
        """Stop the command if it runs, with a supervisor of its own; see that it never starts."""
        self.live.drop()
        state = self._inspect()["State"]
        if state["Running"]:
            # Whatever becomes of it: process 1 may take it for something that the command left.
            with suppress(APIError, GuestError, OSError):
                self._settle_beside(order)
            with suppress(APIError, GuestError, OSError):
                return self._settled(order, within_s=guest.SETTLE_S)
            self._kill()  # what cannot be asked is ended
        return self._settled(order, within_s=guest.SETTLE_S)

    def _settle_beside(self, order: Order) -> None:
        """Run the guest's `settle` beside process 1, which may be waiting for the command."""
        client, container = self.backend.client, self.container["Id"]
        shell = ExecShell(client, container)
        record = f"{RECORDS}/{order.slot}"
        place = (
            'umask 077; mkdir -p "$1"; [ -e "$1/claim" ] || {'
            ' cat >"$1/request.$$" && mv "$1/request.$$" "$1/request"; };'
            ' exec /bin/sh "$0" settle "$1"'
        )
        argv = ["/bin/sh", "-c", place, f"{BASE}/supervisor.sh", record]
        text = self._request(None, order).encode("utf-8", "surrogateescape")
        for _ in shell.run(argv, stdin=text, bound_s=guest.SETTLE_S):
            pass

    def _settled(self, order: Order, within_s: float) -> Record:
        """Have process 1 settle, which by then has nothing else to do."""
        timer = threading.Timer(within_s, self.live.drop)
        timer.daemon = True
        timer.start()
        try:
            serving = self._guest(anew=True)
            recorded = self._recorded(order.slot, serving)
            if recorded.finished(order) is None:
                serving.order("settle", order.slot, self._request(serving, order))
                recorded = self._recorded(order.slot, serving)
        finally:
            timer.cancel()
        done = recorded.finished(order)
        return done or guest.lost("its supervisor ended without a record", still=True)

    def _request(self, serving: Serving | None, order: Order) -> str:
        now_s = 0.0 if serving is None else self.live.account.clock(serving)
        return guest.request(order, workdir=self.backend.workdir, env={}, now_s=now_s)

    def _recorded(self, slot: Slot, serving: Serving | None = None) -> Recorded:
        return Recorded.read((serving or self._guest()).ask("record", RECORDS, slot))

    # --- the container ----------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"container {self.container['Id'][:12]} of run {self.run_id}"

    def _inspect(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.backend.client.inspect_container(self.container["Id"])
        except NotFound as error:
            raise SandboxGoneError(f"{self._name}: gone") from error
        return found

    def _guest(self, *, anew: bool = False) -> Serving:
        """Give the connection to the guest; start it where it is not running."""
        return self.live.serving(self._attach, anew=anew)

    def _channel(self) -> Channel:
        """Give a way to ask the guest that waits for no command."""
        if not self.live.busy:
            return self._guest()
        return Commands(ExecShell(self.backend.client, self.container["Id"]), BASE)

    def _attach(self) -> Attached:
        client, container = self.backend.client, self.container["Id"]
        streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        attached = None
        try:
            # Before it starts: at a guest that has ended by then, one would wait for ever.
            attached = Attached(client.attach_socket(container, streams))
            with suppress(OSError):  # whoever asks next finds out
                attached.send(b"\n")  # what an earlier connection has left of a line ends here
            known = self.container["State"]["Status"]
            if known != "running" or not self._inspect()["State"]["Running"]:
                with self.backend.turn():
                    client.start(container)
                self.container["State"]["Status"] = "running"
        except BaseException as error:
            if attached is not None:
                attached.close()
            self._explain(error)
            raise
        return attached

    def _explain(self, error: BaseException) -> None:
        """Say what it means that a container cannot be started, where that is known."""
        if isinstance(error, NotFound) and "no such container" in str(error).lower():
            raise SandboxGoneError(f"{self._name}: gone") from error
        if isinstance(error, APIError) and "/bin/sh" in str(error.explanation or error):
            said = str(error.explanation or error)
            problem = f"the image has no /bin/sh, which the guest needs: {said}"
            raise GuestError(problem) from error

    def _kill(self) -> None:
        with suppress(APIError):
            self.backend.client.kill(self.container["Id"])
        self.backend.client.wait(self.container["Id"])
        self.container["State"]["Status"] = "exited"

    def destroy(self, permit: CleanupPermit) -> None:
        """Remove the container and what it wrote."""
        demand(permit, self.run_id)
        self.live.gone = True  # whoever was given up on must not put another one in its place
        self._remove()
        self.backend.forget(self.run_id)

    def _remove(self) -> None:
        """Remove the container; return when the daemon says that there is none.

        Raises:
            APIError: the daemon cannot.
        """
        self.live.drop()
        client, container = self.backend.client, self.container["Id"]
        with self.backend.turn():
            try:
                client.remove_container(container, v=True, force=True)
            except NotFound:
                return
            except APIError as error:
                if error.status_code != 409:  # noqa: PLR2004
                    raise
                self._wait_until_gone()  # somebody removes it already

    def _wait_until_gone(self) -> None:
        while True:
            try:
                self.backend.client.inspect_container(self.container["Id"])
            except NotFound:
                return
            time.sleep(0.02)
