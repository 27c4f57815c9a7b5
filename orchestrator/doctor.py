"""What this machine can do for each backend, as a person wants to know it before the first run.

A daemon or a gateway is asked, each within seconds; nothing is left changed. What was found is a
line; what is missing says what would mend it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import Factory, frozen

from .clock import SystemClock
from .core.errors import OrchestratorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ASK_S: Final = 10.0
"""Seconds within which a daemon or a gateway answers, or counts as one that does not."""
PROBE_S: Final = 120.0
"""Seconds within which a gateway has made a sandbox and deleted it."""
_LANDLOCK_CREATE_RULESET: Final = 444  # the same on every architecture (landlock(7))


@frozen
class Found:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at.
        ok: whether it is as it should be; None where it only says what is there.
        said: what was found, and what would mend it.
    """

    subject: str
    ok: bool | None
    said: str


@frozen
class Examination:
    """What was found about one backend.

    Attributes:
        backend: its name.
        usable: whether runs can be begun on it here.
        found: in order.
    """

    backend: str
    usable: bool
    found: tuple[Found, ...] = Factory(tuple)

    def as_json(self) -> dict[str, Any]:
        """Give it as JSON types."""
        found = [{"subject": each.subject, "ok": each.ok, "said": each.said} for each in self.found]
        return {"backend": self.backend, "usable": self.usable, "found": found}


def examine(image: str | None = None, endpoint: str | None = None) -> list[Examination]:
    """Look at everything that a backend needs here.

    Args:
        image: to look for, where a backend has images.
        endpoint: of an OpenShell gateway; None for what the environment says.
    """
    looks: dict[str, Callable[[], Iterator[Found]]] = {
        "local": _local,
        "docker": lambda: _docker(image),
        "openshell": lambda: _openshell(endpoint, image),
    }
    # Only a gateway is asked for more than words: for a sandbox, if there is an image for it.
    bounds = {"openshell": PROBE_S if image is not None else ASK_S}
    return [_examined(name, look, bounds.get(name, ASK_S)) for name, look in looks.items()]


def _examined(name: str, look: Callable[[], Iterator[Found]], bound_s: float) -> Examination:
    found: list[Found] = []

    def work() -> None:
        for each in look():
            found.append(each)  # noqa: PERF402 - what was found before an error is kept

    try:
        SystemClock().call(work, bound_s)
    except ModuleNotFoundError as error:
        found.append(Found("package", ok=False, said=str(error)))
    except (OrchestratorError, OSError, RuntimeError) as error:
        found.append(Found("answer", ok=False, said=f"{type(error).__name__}: {error}"))
    except Exception as error:  # noqa: BLE001 - of a daemon's library, which may raise anything
        found.append(Found("answer", ok=False, said=f"{type(error).__name__}: {error}"))
    return Examination(name, all(each.ok is not False for each in found), tuple(found))


def _local() -> Iterator[Found]:
    yield Found("shell", Path("/bin/sh").exists(), str(Path("/bin/sh").resolve()))
    proc = Path("/proc/self/stat").exists()
    yield Found("/proc", proc, "mounted" if proc else "not mounted: escapees cannot be found")
    lists = Path(f"/proc/self/task/{os.getpid()}/children").exists()
    said = "lists of children" if lists else "no lists of children: finding descendants is slower"
    yield Found("kernel", None, f"{os.uname().release}; {said}")
    setsid = shutil.which("setsid")
    yield Found("setsid", None, setsid or "none: a check shares the session of its supervisor")
    yield Found("isolation", None, "none: a check has this user's rights, network and files")


def _docker(image: str | None) -> Iterator[Found]:
    from docker.errors import ImageNotFound  # noqa: PLC0415 - a package that may not be here

    from .backends.docker import DockerBackend  # noqa: PLC0415 - see above

    backend = DockerBackend(image)
    try:
        client = backend.client
        version, info = client.version(), client.info()
        yield Found("daemon", ok=True, said=f"{version['Version']} at {client.base_url}")
        yield Found("api", ok=None, said=f"{client.api_version} of {version.get('ApiVersion')}")
        cgroup = f"version {info.get('CgroupVersion', '1')} by {info.get('CgroupDriver')}"
        yield Found("cgroups", ok=None, said=cgroup)
        storage = dict(info.get("DriverStatus") or {})
        backing = storage.get("Backing Filesystem", "an unknown file system")
        able = info.get("Driver") == "overlay2" and backing == "xfs"
        disk = "limits.disk_bytes may be had" if able else "limits.disk_bytes cannot be enforced"
        yield Found("storage", ok=None, said=f"{info.get('Driver')} on {backing}: {disk}")
        for limit, key in (
            ("memory", "MemoryLimit"),
            ("cpu", "CpuCfsQuota"),
            ("pids", "PidsLimit"),
        ):
            said = "enforced" if info.get(key, True) else "not enforced by this kernel"
            yield Found(f"{limit} limit", bool(info.get(key, True)), said)
        security = ", ".join(info.get("SecurityOptions") or []) or "none"
        yield Found("security", ok=None, said=security)
        tags = sorted(tag for each in client.images() for tag in each.get("RepoTags") or [])
        shown = ", ".join(tag for tag in tags if not tag.startswith("orchestrator-workspace:"))
        yield Found("images", ok=None, said=shown or "none")
        kept = sum(tag.startswith("orchestrator-workspace:") for tag in tags)
        yield Found("workspaces", ok=None, said=f"{kept} kept (`sweep --workspaces` removes them)")
        if image is not None:
            try:
                said = f"{image} is {client.inspect_image(image)['Id']}"
                yield Found("image", ok=True, said=said)
            except ImageNotFound:
                yield Found("image", ok=False, said=f"the daemon has no {image}")
        left = backend.labelled()
        yield Found("sandboxes", ok=None, said=f"{len(left)} (`sweep` removes dead runners')")
    finally:
        backend.close()


def _openshell(endpoint: str | None, image: str | None) -> Iterator[Found]:
    from .backends.openshell import examine as ask  # noqa: PLC0415 - needs a package of its own

    yield from (Found(*each) for each in ask(endpoint, image))


def landlock() -> str:
    """Say in the manual's words what this kernel has of Landlock; see its man page."""
    flag_version = 1
    libc = ctypes.CDLL(None, use_errno=True)
    abi: int = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, flag_version)
    if abi > 0:
        return f"ABI {abi}"
    number = ctypes.get_errno()
    reasons = {
        errno.ENOSYS: "not in this kernel (ENOSYS)",
        errno.EOPNOTSUPP: "built in, but not enabled (ENOTSUP): `lsm=` of the kernel leaves it out",
        errno.EPERM: "forbidden from here (EPERM): by a seccomp filter around this process",
    }
    return reasons.get(number, f"unknown: {os.strerror(number)}")
