"""The OpenShell backend: one sandbox of a gateway for each run, and the guest in it.

A gateway runs commands and nothing else: it neither copies files nor stops what it has started.
What it says of a command is not how a check ended. Its exit event may be missing, or say 124 of a
command that runs on; a request may be carried out long after its client is gone. So the guest keeps
the deadline, and its record says how a check ended. The gateway is believed where it must be: about
which sandboxes there are, and about requests that it has had before.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from ...core.errors import SandboxGoneError, SpecError
from ...core.facts import SandboxRef
from ...guest.account import Account
from ...owner import owner
from ...ports import Labelled
from .gateway import REFUSALS, CallError, Gateway, OpenShellError
from .sandbox import GatewayShell, Guest, OpenShellSandbox, home_of, install

# isort: split
from openshell._proto import openshell_pb2, sandbox_pb2

from ...core.spec import EvalSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


__all__ = ["CallError", "OpenShellBackend", "OpenShellError", "default_policy", "examine"]

MADE_BY: Final = ("made-by", "eval-orchestrator")
RUN_LABEL: Final = "orchestrator.run"
OWNER_LABEL: Final = "orchestrator.owner"
STATE_LABEL: Final = "orchestrator.state-dir"
DOUBT_S: Final = 60.0
"""Seconds after a lost answer to a creation in which a sandbox that is not there may yet come."""
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,17}[a-z0-9])?")
_LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def default_policy() -> Any:
    """Give the policy of checks: their own directory and /tmp to write, no network, Landlock."""
    return sandbox_pb2.SandboxPolicy(
        version=1,
        filesystem=sandbox_pb2.FilesystemPolicy(
            include_workdir=True,
            read_only=[
                *("/bin", "/usr", "/lib", "/lib64", "/etc", "/proc", "/dev/urandom", "/var/log")
            ],
            read_write=["/tmp", "/dev/null", "/dev/shm"],  # noqa: S108 - of the sandbox
        ),
        landlock=sandbox_pb2.LandlockPolicy(compatibility="hard_requirement"),
    )


def name_of(run_id: str) -> str:
    """Name a run's sandbox: a label of DNS, of at most 19 characters."""
    if _NAME.fullmatch(run_id) and "--" not in run_id:
        return run_id
    return f"r-{hashlib.sha256(run_id.encode()).hexdigest()[:17]}"


def label_of(run_id: str) -> str:
    """Give the label of a run's sandbox: its id, or a digest of one that no label can hold."""
    if _LABEL.fullmatch(run_id):
        return run_id
    return f"sha256.{hashlib.sha256(run_id.encode()).hexdigest()[:56]}"


class OpenShellBackend:
    """Makes sandboxes at a gateway of version 0.1.x."""

    name = "openshell"
    shell = "/bin/sh"

    def __init__(
        self,
        image: str | None = None,
        *,
        endpoint: str | None = None,
        gateway: str | None = None,
        workspace: str = "default",
        policy: Any = None,
        labels: Mapping[str, str] | None = None,
        ready_s: float = 300.0,
        call_s: float = 30.0,
    ) -> None:
        """Make sandboxes at a gateway, of which nothing is asked before there is something to run.

        Runs are resumed and swept with the gateway and the workspace that they were begun with: at
        another one their sandboxes would not be found.

        Args:
            image: of sandboxes whose spec names none, `REPOSITORY:TAG`. It needs bash or /bin/sh,
                tar, find, stat, xargs, sha256sum and readlink, and a directory of its user's own to
                work in.
            endpoint: `HOST:PORT`, `http://HOST:PORT`, `https://HOST:PORT` or `unix:/PATH`; if
                None, OPENSHELL_GATEWAY_ENDPOINT, or that of `gateway`.
            gateway: name under which the `openshell` command has registered one; if None,
                OPENSHELL_GATEWAY, or the active one.
            workspace: of the gateway.
            policy: `openshell._proto.sandbox_pb2.SandboxPolicy` of the sandboxes; None for
                `default_policy`.
            labels: of every sandbox, beside the backend's own.
            ready_s: seconds within which a new sandbox has to be ready.
            call_s: seconds for a call to the gateway that is no command, a restart of it included.
        """
        self.image = image
        self.policy = policy if policy is not None else default_policy()
        self.isolation = "landlock, no network" if policy is None else "a policy of its own"
        self.labels = dict(labels or {})
        self.ready_s = ready_s
        self.state_dir = ""
        self._connection = (endpoint, gateway, workspace, call_s)
        self._gateway: Gateway | None = None
        self._guests: dict[str, Guest] = {}
        self._doubts: dict[str, float] = {}
        self._lock = threading.Lock()

    def connect(self, *, patient: bool = True) -> Gateway:
        """Give the connection, to a gateway that was found to speak as we do.

        Raises:
            OpenShellError: there is none, or it does not.
        """
        with self._lock:
            if self._gateway is None:
                self._gateway = Gateway.connect(*self._connection)
            gateway = self._gateway
        gateway.check(patient=patient)
        return gateway

    def close(self) -> None:
        """Let go of the connection. Sandboxes are not touched."""
        with self._lock:
            gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.close()

    # --- what can be honoured ---------------------------------------------------------------------

    def refuse(self, spec: EvalSpec) -> None:
        """Refuse limits, which no answer of a gateway shows to be enforced; ask if it is there.

        Raises:
            SpecError: naming the key.
            OpenShellError: the gateway does not answer, or is of another version.
        """
        for name in ("memory_bytes", "cpus", "pids", "disk_bytes"):
            if getattr(spec.limits, name) is not None:
                raise SpecError(
                    f"limits.{name}",
                    "no gateway says whether it enforces it",
                    "no such limit, or the docker backend",
                )
        self._image(spec)
        self.connect(patient=False)

    def _image(self, spec: EvalSpec) -> str:
        image = spec.image or self.image
        if image is None:
            raise SpecError("image", "there is none", "an image, in the spec or for the backend")
        return image

    # --- sandboxes --------------------------------------------------------------------------------

    def create(self, run_id: str, spec: EvalSpec) -> OpenShellSandbox:
        """Create the run's sandbox, or find it; wait until it is ready, and verify its policy.

        Raises:
            OpenShellError: it is not ready, or not under the policy that was asked for.
            SandboxGoneError: a sandbox of somebody else has its name.
        """
        image, gateway = self._image(spec), self.connect()
        identity = self._created(gateway, run_id, image).metadata.id
        name = name_of(run_id)
        gateway.ready(name, self.ready_s)
        ref = SandboxRef(run_id, identity)
        conditions = self._verified(gateway, run_id) | {"image": image}
        shell = GatewayShell(gateway, name)
        self._guests[identity] = self._guest(ref, shell, install(shell))
        return self.sandbox(ref, conditions)

    def _created(self, gateway: Gateway, run_id: str, image: str) -> Any:
        """Create the run's sandbox unless there is one; give its record, ready or not."""
        name, end = name_of(run_id), time.monotonic() + self.ready_s
        request = openshell_pb2.CreateSandboxRequest(
            name=name,
            labels={
                **self.labels,
                **dict([MADE_BY]),
                RUN_LABEL: label_of(run_id),
                OWNER_LABEL: owner(),
            },
            annotations={RUN_LABEL: run_id, STATE_LABEL: self.state_dir},
            spec=openshell_pb2.SandboxSpec(
                template=openshell_pb2.SandboxTemplate(image=image),
                policy=self.policy,
                restart_policy=openshell_pb2.SANDBOX_RESTART_POLICY_NEVER,
            ),
        )
        while True:
            try:
                return gateway.call("CreateSandbox", request).sandbox
            except CallError as error:
                if error.code not in REFUSALS:
                    self._doubts[run_id] = time.monotonic() + DOUBT_S
                found = None if error.code in REFUSALS - {"ALREADY_EXISTS"} else self._find(run_id)
                if found is None and (error.code != "ALREADY_EXISTS" or time.monotonic() > end):
                    raise
                if found is None:
                    continue
                if found.status.phase != openshell_pb2.SANDBOX_PHASE_DELETING:
                    return found
                gateway.delete(name, found.metadata.id)  # which it is already: wait for its end

    def _verified(self, gateway: Gateway, run_id: str) -> dict[str, str]:
        """Make sure that a sandbox's policy is the one that was asked for; give the conditions."""
        name = name_of(run_id)
        found = gateway.call("GetSandboxConfig", sandbox_pb2.GetSandboxConfigRequest(name=name))
        source = sandbox_pb2.PolicySource.Name(found.policy_source)
        policy, wanted, settings = found.policy, self.policy, found.settings
        problems = {
            f"policy_source is {source}": found.policy_source != sandbox_pb2.POLICY_SOURCE_SANDBOX,
            f"not admitted: {found.configuration_error}": not found.configuration_admitted,
            f"landlock is {policy.landlock.compatibility!r}": policy.landlock != wanted.landlock,
            f"network_policies are {sorted(policy.network_policies)}": (
                dict(policy.network_policies) != dict(wanted.network_policies)
            ),
            f"network_middlewares are {sorted(policy.network_middlewares)}": (
                dict(policy.network_middlewares) != dict(wanted.network_middlewares)
            ),
            "proposal_approval_mode is auto": (
                "proposal_approval_mode" in settings
                and settings["proposal_approval_mode"].value.string_value == "auto"
            ),
            "agent_policy_proposals_enabled": (
                "agent_policy_proposals_enabled" in settings
                and settings["agent_policy_proposals_enabled"].value.bool_value
            ),
        }
        if any(problems.values()):
            said = "; ".join(text for text, holds in problems.items() if holds)
            raise OpenShellError(
                f"sandbox {name} of run {run_id}: it is not under the policy that was asked for: "
                f"{said}"
            )
        return {
            "sandbox": name,
            "gateway": f"{gateway.target} {gateway.version}",
            "policy": found.policy_hash,
            "landlock": policy.landlock.compatibility,
            "network": ", ".join(sorted(policy.network_policies)) or "none",
        }

    def open(self, run_id: str) -> OpenShellSandbox | None:
        """Find the run's sandbox; None where the gateway has none and no creation is in doubt.

        Raises:
            OpenShellError: that cannot be known.
            SandboxGoneError: a sandbox of somebody else has its name.
        """
        self.connect()
        found = self._find(run_id)
        if found is not None:
            return self.sandbox(SandboxRef(run_id, found.metadata.id), {})
        if time.monotonic() < self._doubts.get(run_id, 0.0):
            raise OpenShellError(
                f"sandbox {name_of(run_id)} of run {run_id}: not there, and the answer to its "
                "creation was lost, so it may come yet"
            )
        return None

    def _find(self, run_id: str) -> Any:
        name = name_of(run_id)
        found = self.connect().find(name)
        if found is not None and found.metadata.labels.get(RUN_LABEL) != label_of(run_id):
            raise SandboxGoneError(f"sandbox {name}: one of somebody else has this name")
        return found

    def sandbox(self, ref: SandboxRef, conditions: Mapping[str, str]) -> OpenShellSandbox:
        """Give the handle of a sandbox."""
        return OpenShellSandbox(ref, conditions, self)

    def guest(self, ref: SandboxRef) -> Guest:
        """Give the guest in a sandbox, where it was brought by this process or another."""
        found = self._guests.get(ref.identity)
        if found is None:
            gateway, name = self.connect(), name_of(ref.sandbox_id)
            gateway.ready(name, gateway.call_s)
            shell = GatewayShell(gateway, name)
            found = self._guests.setdefault(ref.identity, self._guest(ref, shell, home_of(shell)))
        return found

    @staticmethod
    def _guest(ref: SandboxRef, shell: GatewayShell, home: str) -> Guest:
        base = f"{home}/.orchestrator"
        return Guest(
            ref=ref,
            shell=shell,
            base=base,
            account=Account(f"{home}/workspace"),
            env={"HOME": f"{base}/home"},
        )

    def delete(self, ref: SandboxRef) -> None:
        """Delete a sandbox; return when it is gone.

        Raises:
            OpenShellError: it is not known to be gone.
        """
        self.connect().delete(name_of(ref.sandbox_id), ref.identity)
        self._guests.pop(ref.identity, None)

    def labelled(self) -> list[Labelled]:
        """List every sandbox of the workspace that is a run's."""
        found = (each.metadata for each in self.connect().listed("=".join(MADE_BY)))
        return [
            Labelled(
                each.annotations.get(RUN_LABEL) or each.labels.get(RUN_LABEL, ""),
                each.labels.get(OWNER_LABEL, ""),
                each.annotations.get(STATE_LABEL, ""),
            )
            for each in found
        ]


def examine(
    endpoint: str | None = None, image: str | None = None
) -> Iterator[tuple[str, bool | None, str]]:
    """Look at the gateway: what was looked at, whether it is right, and a text about it.

    Args:
        endpoint: of the gateway; None for what the environment says.
        image: to make a sandbox of, and delete it again: a gateway says whether it admits a policy,
            and what its kernel lacks, only when there is a sandbox.
    """
    backend = OpenShellBackend(image, endpoint=endpoint, call_s=5.0)
    try:
        gateway = backend.connect(patient=False)
        yield "gateway", True, f"{gateway.version} at {gateway.target}"
        asked = f"no network, Landlock {backend.policy.landlock.compatibility}"
        if image is None:
            yield "policy", None, f"{asked}; --image IMAGE has a sandbox made, to see it admitted"
        else:
            yield "policy", *_probe(backend, asked)
        yield "sandboxes", None, f"{len(backend.labelled())} (`sweep` removes dead runners')"
    finally:
        backend.close()


def _probe(backend: OpenShellBackend, asked: str) -> tuple[bool, str]:
    """Make a sandbox and delete it; tell whether it came up under the policy that is asked for."""
    run_id = f"doctor-{secrets.token_hex(4)}"
    try:
        conditions = backend.create(run_id, EvalSpec(name="doctor", check=":")).conditions
    except OpenShellError as error:
        hint = (
            " (ENOTSUP: the gateway's kernel has Landlock built in, and not enabled; its `lsm=`"
            " leaves it out)"
        )
        return False, f"{error}{hint if 'landlock' in str(error).lower() else ''}"
    finally:
        if (left := backend.open(run_id)) is not None:
            backend.delete(left.ref)
    return True, f"admitted, {asked}: {', '.join(map(' '.join, conditions.items()))}"
