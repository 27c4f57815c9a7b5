"""Who made a sandbox: a name for this process that no other one had or will have.

A process id comes again; with the machine, its boot and the moment at which the process started it
does not. Containers are machines of their own: they share an id or a boot, but not what a process
id means, so a machine is its id, its host name and the namespace of process ids. The name fits into
a label of any backend (letters, digits and dots, below 64 characters).
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path


def owner() -> str:
    """Name this process: machine, boot, process id, start in ticks since the boot."""
    machine, boot = _machine()
    return f"{machine}.{boot}.{os.getpid()}.{_started(os.getpid())}"


def alive(name: str) -> bool | None:
    """Tell whether the process of a name is there; None if that cannot be told from here."""
    machine, boot = _machine()
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != machine or not parts[2].isdigit():  # noqa: PLR2004
        return None  # of another machine, or no name at all
    return parts[1] == boot and _started(int(parts[2])) == parts[3]


def _machine() -> tuple[str, str]:
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    machine = f"{_said('/etc/machine-id')} {socket.gethostname()} {namespace}"
    boot = _said("/proc/sys/kernel/random/boot_id")
    return _short(machine), _short(boot or socket.gethostname())


def _said(place: str) -> str:
    try:
        return Path(place).read_text("ascii").strip()
    except OSError:
        return ""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _started(pid: int) -> str:
    """Give the moment at which a process started; "" if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
