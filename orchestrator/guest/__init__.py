"""The in-sandbox supervisor and its host side: what is sent to it, and how its record is read.

`supervisor.sh` runs inside every sandbox of every backend. It is given a directory of its own,
outside the workspace, and told what to do by a file in it, `request`: a fragment of shell, because
a shell can read nothing else that holds any text. Nothing of it is in an argument list or an
environment, which other processes can read.
"""

from __future__ import annotations

import math
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from ..ports import Ending, Order, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SUPERVISOR: Final = Path(__file__).with_name("supervisor.sh")
SANE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SANE_LANG: Final = "C.UTF-8"
SETTLE_S: Final = 20.0
"""Seconds within which `settle` of the supervisor is done, whatever the command does."""


def request(order: Order, *, workdir: str, env: Mapping[str, str], now_s: float) -> str:
    """Write an order as the supervisor reads it.

    Args:
        order: what to run.
        workdir: absolute path in the sandbox to run it in.
        env: the command's environment before the order's own.
        now_s: the sandbox's clock now (`/proc/uptime`, or the epoch where it has none), seconds.
    """
    exports = (
        f"export {name}={quote(value)} || return" for name, value in {**env, **order.env}.items()
    )
    return "\n".join(
        [
            f"nonce={quote(order.nonce)}",
            f"deadline_s={order.deadline_s:.3f}",
            f"deadline={_hundredths(order.deadline_s)}",
            f"grace={_hundredths(order.grace_s)}",
            f"latest={_hundredths(now_s + order.latest_start_s)}",
            f"keep={math.ceil(order.output_bytes / 2)}",
            f"output_bytes={order.output_bytes}",
            f"workdir={quote(workdir)}",
            "environment() {",
            "unset OLDPWD",
            *exports,
            "}",
            # Where there is a setsid, the command gets a session of its own.
            f'program() {{ exec ${{1:+"$1" --}} {" ".join(map(quote, order.argv))}; }}',
            "",
        ]
    )


def _hundredths(seconds: float) -> int:
    return math.ceil(round(seconds * 100, 6))


def parse(text: str, nonce: str) -> Record | None:
    """Read the supervisor's record; None if it is not one that this order's supervisor wrote."""
    lines = text.split("\n")
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    if not text.endswith("\n") or fields.get("nonce") != nonce:
        return None
    try:
        ending, oom_kills = Ending(fields["ending"]), int(fields["oom_kills"])
        code = int(fields["code"]) if ending in {Ending.EXITED, Ending.SIGNALLED} else None
        if oom_kills and code:  # it, or something that it needed, was killed for want of memory
            ending, code = Ending.OUT_OF_MEMORY, None
        return Record(
            ending=ending,
            code=code,
            elapsed_s=int(fields["elapsed"]) / 100,
            escalated=fields["escalated"] == "yes",
            descendants=int(fields["descendants"]),
            still=fields["still"] == "yes",
            message=fields["message"],
            oom_kills=oom_kills,
        )
    except (KeyError, ValueError):
        return None


def lost(message: str, *, still: bool) -> Record:
    """Give the record that stands for none."""
    return Record(ending=Ending.LOST, still=still, message=message)


def output_parts(size: str) -> tuple[int, tuple[str, ...]]:
    """Read a collector's `.size` file: bytes of the stream, and the suffixes of its parts in order.

    Raises:
        ValueError: it is not one.
    """
    total, part = size.split()
    parts = {"head": ("head",), "a": ("head", "b", "a"), "b": ("head", "a", "b")}
    if part not in parts:
        raise ValueError(f"not a part of a stream: {part!r}")
    return int(total), parts[part]


def cut(sizes: Iterable[int], total: int, keep: int) -> tuple[int, int]:
    """Say how many bytes of the parts laid end to end are head and tail of the stream.

    Everything is head where nothing was left out and it is not more than was asked for; then the
    tail is 0 bytes long.
    """
    if sum(sizes) == total <= keep:
        return total, 0
    return math.ceil(keep / 2), keep - math.ceil(keep / 2)


def scripts() -> dict[str, Path]:
    """Give the guest's scripts by name; in a sandbox they lie side by side."""
    return {name: SUPERVISOR.with_name(name) for name in ("supervisor.sh", "account.sh")}
