"""The Docker backend: one container a run, with the guest as its process 1.

The container is named and labelled after its run when it is created, so that an answer which gets
lost leaves something to find. Nothing is asked of the daemon that it does slowly: no network is
made where none is wanted, no log is kept, and nothing waits for a stop grace.

A workspace that this daemon has is not sent again: it is kept as an image, on top of the one that
was asked for, and named by the digest of both. Such images hold no run's traces, and
`forget_workspaces` removes them.
"""

from __future__ import annotations

import os
import posixpath
import re
import secrets
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

try:
    from docker.errors import APIError, DockerException, ImageNotFound, NotFound
    from docker.utils import parse_repository_tag
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the Docker backend needs the package docker: pip install 'eval-orchestrator[docker]'"
    ) from error

from ... import guest
from ...core.errors import SandboxGoneError, SpecError
from ...guest.account import Account
from ...owner import owner
from ...ports import Labelled
from .attached import AttachedBackend
from .daemon import ExecShell, connect, read_file
from .sandbox import BASE, GUEST_PIDS, HOME, RECORDS, DockerSandbox, Live
from .workspaces import Workspaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import docker

    from ...core.spec import EvalSpec, Limits

RUN_LABEL: Final = "orchestrator.run"
IDENTITY_LABEL: Final = "orchestrator.identity"
OWNER_LABEL: Final = "orchestrator.owner"
STATE_LABEL: Final = "orchestrator.state-dir"
IMAGE_LABEL: Final = "orchestrator.image"
_PATH: Final = re.compile(r"(/[^/\s%\\]+)+")
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,200}")


class TakenError(Exception):
    """The container's name is taken."""


class DockerBackend:
    """Makes sandboxes of containers. `isolation` is `container`."""

    name = "docker"
    isolation = "container"
    shell = "/bin/sh"

    def __init__(
        self,
        image: str | None = None,
        *,
        client: docker.APIClient | None = None,
        user: str | None = None,
        network: str | None = None,
        read_only: bool = False,
        pids: int | None = 4096,
        workdir: str | None = None,
        pull: bool = True,
        cache: bool = True,
        starts_at_once: int | None = None,
        labels: Mapping[str, str] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Make sandboxes with a daemon: that of DOCKER_HOST or of the current context.

        Nothing is asked of the daemon before there is something to run.

        Args:
            image: of sandboxes whose spec names none. It needs /bin/sh, find, stat, xargs,
                sha256sum and readlink, as every image with coreutils or busybox has them.
            client: of the daemon, in place of the one that the environment names.
            user: `UID` or `UID:GID`, numbers, to run as; None for the image's own.
            network: of the daemon, to join; None for none at all.
            read_only: nothing but the workspace, /tmp and the guest's own place can be written to.
                The directory that the workspace lies in is then a volume of the container's own.
            pids: processes and threads where the spec sets no limit; None for no limit.
            workdir: absolute path in the sandbox of the workspace; None for /workspace, or for
                /workspace/tree where the rest is read only.
            pull: fetch an image that the daemon does not have, before any run of it is begun.
            cache: keep workspaces of a megabyte and more on the daemon, to send them once.
            starts_at_once: containers that may be starting or going at one time, twice the
                processors of this machine if None. Daemons have stopped for good over more.
            labels: of every container, beside the backend's own.
            progress: told, in a line, what an image that is being fetched is waiting for.

        Raises:
            ValueError: `user` or `workdir` is not of that form.
        """
        if user is not None and not re.fullmatch(r"\d+(:\d+)?", user):
            raise ValueError(f"user: got {user!r}; expected UID or UID:GID, in numbers")
        if workdir is None:
            workdir = "/workspace/tree" if read_only else "/workspace"
        if not _PATH.fullmatch(workdir) or workdir.startswith(BASE):
            raise ValueError(f"workdir: got {workdir!r}; expected an absolute path without blanks")
        if read_only and workdir.count("/") == 1:
            # A volume belongs to root, whoever the check is; a directory in it does not.
            raise ValueError(f"workdir: got {workdir!r}; expected two names at least if read_only")
        self.image = image
        self.user = user
        self.network = network
        self.read_only = read_only
        self.pids = pids
        self.workdir = workdir
        self.pull = pull
        self.cache = cache and not read_only
        self.labels = dict(labels or {})
        self.state_dir = ""
        self._client = client
        self._progress = progress or (lambda _: None)
        self._gate = threading.BoundedSemaphore(starts_at_once or 2 * (os.cpu_count() or 1))
        self._live: dict[str, Live] = {}
        self._making: set[str] = set()
        self._pins: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self.workspaces = Workspaces(lambda: self.client, workdir)

    @property
    def client(self) -> docker.APIClient:
        """The daemon's client, made when it is first needed.

        Raises:
            DaemonError: no daemon answers.
        """
        with self._lock:
            if self._client is None:
                self._client = connect()
            return self._client

    def close(self) -> None:
        """Let go of every connection. Sandboxes are not touched."""
        for live in list(self._live.values()):
            live.drop()
        if self._client is not None:
            self._client.close()

    # --- what can be honoured ---------------------------------------------------------------------

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse what the daemon cannot do; fetch the image, if it is not there, and pin it.

        Raises:
            SpecError: naming the key.
            DaemonError: no daemon answers.
            APIError: one does, with an error.
        """
        self.pin(spec)
        limits = spec.limits
        if {limits.memory_bytes, limits.cpus, limits.pids, limits.disk_bytes} == {None}:
            return
        info = self.client.info()
        if limits.memory_bytes is not None and limits.memory_bytes < 6 << 20:
            raise SpecError("limits.memory_bytes", "a container needs 6 MiB", "at least 6291456")
        if limits.cpus is not None and not 0.01 <= limits.cpus <= info["NCPU"]:  # noqa: PLR2004
            raise SpecError(
                "limits.cpus", f"got {limits.cpus:g}", f"from 0.01 to the {info['NCPU']} there are"
            )
        for name, able in (("memory_bytes", "MemoryLimit"), ("cpus", "CpuCfsQuota"), ("pids", "")):
            if getattr(limits, name) is not None and not info.get(able or "PidsLimit", True):
                raise SpecError(f"limits.{name}", "this daemon cannot enforce it", "no such limit")
        backing = dict(info.get("DriverStatus") or []).get("Backing Filesystem")
        if limits.disk_bytes is not None and (info.get("Driver"), backing) != ("overlay2", "xfs"):
            raise SpecError(
                "limits.disk_bytes",
                f"this daemon, with {info.get('Driver')} on {backing}, cannot enforce it",
                "no such limit, or a daemon with overlay2 on xfs with quotas",
            )

    def pin(self, spec: EvalSpec) -> dict[str, Any]:
        """Give the image of a spec as the daemon has it, the same one for as long as this lives.

        Raises:
            SpecError: there is none.
        """
        name = spec.image or self.image
        if name is None:
            raise SpecError("image", "there is none", "an image, in the spec or for the backend")
        if name not in self._pins:
            try:
                found = self.client.inspect_image(name)
            except ImageNotFound as error:
                if not self.pull:
                    problem = f"the daemon has no {name!r}"
                    raise SpecError("image", problem, "one that it has") from error
                self._fetch(name)
                found = self.client.inspect_image(name)
            self._pins[name] = found
        return self._pins[name]

    def _fetch(self, name: str) -> None:
        repository, tag = parse_repository_tag(name)
        try:
            for line in self.client.pull(repository, tag or "latest", stream=True, decode=True):
                if "error" in line:
                    raise APIError(line["error"])
                words = (line.get(key) for key in ("id", "status", "progress"))
                self._progress(" ".join(str(word) for word in words if word))
        except DockerException as error:
            problem = f"the daemon has no {name!r}, and cannot fetch it: {error}"
            raise SpecError("image", problem, "an image that it has or can fetch") from error

    # --- sandboxes --------------------------------------------------------------------------------

    def create(self, run_id: str, spec: EvalSpec) -> DockerSandbox:
        """Create the run's container, or find it; nothing runs in it yet."""
        if not _NAME.fullmatch(run_id):
            raise ValueError(f"run id {run_id!r}: expected letters, digits, `_`, `.` and `-`")
        found = self._found(run_id, spec)
        if found is not None:
            return found
        try:
            return self.make(run_id, spec, secrets.token_hex(16))
        except TakenError:  # an earlier call that was given up on has come after all
            found = self._found(run_id, spec)
            if found is None:
                problem = f"{name_of(run_id)}: created by somebody, and gone"
                raise SandboxGoneError(problem) from None
            return found

    def make(
        self, run_id: str, spec: EvalSpec, identity: str, holding: str | None = None
    ) -> DockerSandbox:
        """Create the run's container.

        Args:
            run_id: its run.
            spec: of the run.
            identity: what no other sandbox of the run's name has.
            holding: id of the image that has the workspace in it, None for the spec's own image.

        Raises:
            TakenError: there is a container of its name.
        """
        image = self.pin(spec)
        labels = {
            **self.labels,
            RUN_LABEL: run_id,
            IDENTITY_LABEL: identity,
            OWNER_LABEL: owner(),
            STATE_LABEL: self.state_dir,
            IMAGE_LABEL: image["Id"],
        }
        options = self._enforced(spec.limits)
        try:
            made = self.client.create_container(
                holding or image["Id"],
                entrypoint=["/bin/sh", f"{BASE}/supervisor.sh", "serve", RECORDS],
                command=[],
                name=name_of(run_id),
                hostname="sandbox",
                user=self.user,
                working_dir="/",
                environment=self._environment(image),
                labels=labels,
                stdin_open=True,
                detach=True,  # its standard input does not end with the first connection to it
                stop_signal="SIGKILL",  # process 1 heeds no other
                healthcheck={"test": ["NONE"]},
                volumes=[posixpath.dirname(self.workdir), BASE] if self.read_only else None,
                # A network that is not there costs less than one that leads nowhere.
                network_disabled=self.network is None and not self.read_only,
                host_config=self.client.create_host_config(**options),
            )
        except APIError as error:
            if error.status_code == 409:  # noqa: PLR2004
                raise TakenError from error
            raise
        container = {
            "Id": made["Id"],
            "State": {"Status": "created"},
            "Config": {"Labels": labels, "User": self.user or image["Config"].get("User") or ""},
            "HostConfig": {
                "PidsLimit": options.get("pids_limit"),
                "Memory": options.get("mem_limit"),
            },
        }
        live = self._live[run_id] = Live(Account(self.workdir), fresh=True)
        return DockerSandbox(self, run_id, container, live, spec)

    def _enforced(self, limits: Limits) -> dict[str, Any]:
        """Give what the daemon is to keep the container from, and within."""
        pids = limits.pids or self.pids
        options = {
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "log_config": {"Type": "none", "Config": {}},
            "read_only": self.read_only,
            "tmpfs": {"/tmp": "mode=1777,exec"} if self.read_only else None,  # noqa: S108
            "network_mode": self.network or ("none" if self.read_only else None),
            "pids_limit": None if pids is None else pids + GUEST_PIDS,
            "mem_limit": limits.memory_bytes,
            "memswap_limit": limits.memory_bytes,
            "nano_cpus": None if limits.cpus is None else int(limits.cpus * 10**9),
            "storage_opt": None if limits.disk_bytes is None else {"size": str(limits.disk_bytes)},
        }
        return {name: value for name, value in options.items() if value is not None}

    def _environment(self, image: Mapping[str, Any]) -> dict[str, str]:
        names = {entry.partition("=")[0] for entry in image["Config"].get("Env") or []}
        environment = {} if "LANG" in names else {"LANG": guest.SANE_LANG}
        if self.user is not None:
            environment["HOME"] = HOME  # what the image says of it is another user's
        return environment

    def _found(self, run_id: str, spec: EvalSpec) -> DockerSandbox | None:
        found = self.open(run_id)
        if found is not None:
            found.spec = spec
        return found

    def open(self, run_id: str) -> DockerSandbox | None:
        """Find the run's container.

        Raises:
            SandboxGoneError: a container of somebody else has its name.
        """
        try:
            found = self.client.inspect_container(name_of(run_id))
        except NotFound:
            if run_id in self._making:
                problem = f"{name_of(run_id)}: one is being put in its place, and may yet come"
                raise SandboxGoneError(problem) from None
            self.forget(run_id)
            return None
        if (found["Config"].get("Labels") or {}).get(RUN_LABEL) != run_id:
            raise SandboxGoneError(f"{name_of(run_id)}: a container of somebody else has this name")
        live = self._live.setdefault(run_id, Live(Account(self.workdir)))
        return DockerSandbox(self, run_id, found, live)

    def forget(self, run_id: str) -> None:
        """Let go of what is known of a run's container."""
        if live := self._live.pop(run_id, None):
            live.gone = True
            live.drop()

    @contextmanager
    def making(self, run_id: str) -> Iterator[None]:
        """Put another container in the place of a run's: till then nobody can say there is none."""
        self._making.add(run_id)
        try:
            yield
        finally:
            self._making.discard(run_id)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn to have the daemon start or remove a container."""
        with self._gate:
            yield

    def ids_of_user(self, container: Mapping[str, Any]) -> tuple[int, int]:
        """Give user and group that the programs in a container run as.

        Raises:
            SandboxGoneError: it names a user that it does not have.
        """
        user, _, group = container["Config"]["User"].partition(":")
        if user.isdigit() or not user:
            return int(user or 0), int(group) if group.isdigit() else 0
        text = read_file(self.client, container["Id"], "/etc/passwd").decode("utf-8", "replace")
        for line in text.splitlines():
            if (fields := line.split(":"))[0] == user:
                return int(fields[2]), int(fields[3])
        raise SandboxGoneError(f"the image's user {user!r} is not in its /etc/passwd")

    def attach(
        self, container: str, *, workdir: str | None = None, user: str = "", owned: bool = False
    ) -> AttachedBackend:
        """Give a backend whose one sandbox is a container that is running already.

        Args:
            container: its name or id.
            workdir: absolute path in it of the tree to check; None for its working directory.
            user: to run as; "" for the container's own.
            owned: it is ours from now on, and is destroyed at the end of a run.

        Raises:
            SandboxGoneError: there is none, or it is not running.
            ValueError: its working directory is no place for a check.
        """
        try:
            found = self.client.inspect_container(container)
        except NotFound as error:
            raise SandboxGoneError(f"container {container!r}: there is none") from error
        if not found["State"]["Running"]:
            raise SandboxGoneError(f"container {container!r}: it is not running")
        place = workdir or found["Config"].get("WorkingDir") or "/"
        if not _PATH.fullmatch(place):
            raise ValueError(f"workdir: got {place!r}; expected an absolute path below /")
        return AttachedBackend(
            self.client, found["Id"], self._real(found["Id"], place, user), user, owned=owned
        )

    def _real(self, container: str, place: str, user: str) -> str:
        """Give the directory that a path leads to: an account of a tree follows no symlink.

        Raises:
            ValueError: it leads to another kind of place.
        """
        argv = ["/bin/sh", "-c", '[ ! -d "$1" ] || { cd -P "$1" && pwd -P; }', "sh", place]
        shell = ExecShell(self.client, container, user)
        said = b"".join(shell.run(argv)).decode("utf-8", "surrogateescape")
        real = said.removesuffix("\n") or place
        if not _PATH.fullmatch(real):
            raise ValueError(f"workdir: {place!r} is {real!r}; expected an absolute path below /")
        return real

    # --- what is left on the daemon ---------------------------------------------------------------

    def forget_workspaces(self) -> int:
        """Remove the workspaces that are kept on the daemon; give how many there were."""
        return self.workspaces.forget()

    def labelled(self) -> list[Labelled]:
        """List every container on the daemon that is a run's."""
        found = self.client.containers(all=True, filters={"label": [RUN_LABEL]})
        return [
            Labelled(labels[RUN_LABEL], labels.get(OWNER_LABEL, ""), labels.get(STATE_LABEL, ""))
            for labels in (item["Labels"] for item in found)
        ]


def name_of(run_id: str) -> str:
    """Name a run's container."""
    return f"orchestrator-{run_id}"
