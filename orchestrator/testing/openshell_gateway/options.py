"""How a simulated gateway is to behave."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen


@frozen(kw_only=True)
class Options:
    """How a simulated gateway is to behave.

    Attributes:
        root: directory of its sandboxes.
        port: of 127.0.0.1 to listen on; 0 for any.
        version: what it says that it is.
        ready_latency_s: seconds from creation until a sandbox is ready.
        delete_latency_s: seconds from an accepted deletion until it begins.
        slow_delete_s: the same under `Fault.SLOW_DELETE`.
        dispatch_delay_s: seconds that `Fault.LATE_DISPATCH` holds a command.
        output_patience_s: seconds that output may stay open after its command has ended.
        group_kills: `kill` reaches whole process groups, as with gateways 0.0.x.
    """

    root: Path = field(converter=Path)
    port: int = 0
    version: str = "0.1.5"
    ready_latency_s: float = 0.0
    delete_latency_s: float = 0.05
    slow_delete_s: float = 3.0
    dispatch_delay_s: float = 25.0
    output_patience_s: float = 30.0
    group_kills: bool = False
