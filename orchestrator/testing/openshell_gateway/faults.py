"""What the gateway may do wrong, and where."""

from __future__ import annotations

import re
import threading
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from attrs import define

from .limits import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

FAULT_LABEL: Final = "orchestrator-fault"
"""A sandbox with this label has the faults that it names, joined by `.`.

`late_dispatch-3.slow_delete` dispatches the third exec of the sandbox late, and deletes it slowly;
without a number a fault hits every exec.
"""


class Fault(StrEnum):
    """What goes wrong; the first ones once for a sandbox, the others in an exec."""

    CREATE_LOST = "create_lost"
    """The sandbox is created, and the answer is lost: UNAVAILABLE."""
    STUCK_PROVISIONING = "stuck_provisioning"
    """It never becomes ready."""
    ERROR_PHASE = "error_phase"
    """Its phase becomes ERROR, with a condition Ready=False that says why."""
    COMPLETED_PHASE = "completed_phase"
    """Its phase becomes COMPLETED, which the SDK's `wait_ready` takes for ready."""
    GLOBAL_POLICY = "global_policy"
    """The gateway's own policy overrides the sandbox's."""
    NOT_ADMITTED = "not_admitted"
    """Its policy is reported as not admitted."""
    DELETE_FAILS = "delete_fails"
    """DeleteSandbox is answered with INTERNAL, and nothing is deleted."""
    DELETE_STUCK = "delete_stuck"
    """Deletion is accepted and never happens."""
    SLOW_DELETE = "slow_delete"
    """Deletion takes `slow_delete_s`."""

    NO_SESSION = "no_session"
    """UNAVAILABLE `supervisor relay failed`; the command is not started."""
    RELAY_TIMEOUT = "relay_timeout"
    """DEADLINE_EXCEEDED `relay open timed out`; the command is not started."""
    RELAY_LIMIT = "relay_limit"
    """RESOURCE_EXHAUSTED; the command is not started."""
    LATE_DISPATCH = "late_dispatch"
    """The command starts `dispatch_delay_s` late, whether or not anybody still waits for it."""
    RESTARTED_BLANK = "restarted_blank"
    """The sandbox is restarted with an empty disk before the command starts, as after a kill for
    memory: same name, same id, nothing that was there before."""
    KILLED_GATEWAY = "killed_gateway"
    """The gateway is killed as soon as the command runs; the command goes on."""
    RELAY_LOST = "relay_lost"
    """UNAVAILABLE as soon as the command runs; the command goes on."""
    EXIT_124_EARLY = "exit_124_early"
    """The gateway's exit event for a timeout comes as soon as the command runs; it goes on."""
    BIG_EVENT = "big_event"
    """An event that is larger than a client of default settings receives."""
    NO_EXIT = "no_exit"
    """The stream ends well, without an exit event."""
    SHORT_OUTPUT = "short_output"
    """The last of each output stream is lost, and the exit event is as if it were not."""
    DELIVERY_UNKNOWN = "delivery_unknown"
    """The exit event says 74, by which the supervisor tells that it does not know."""


_LABELLED = re.compile(r"([a-z0-9_]+?)(?:-([1-9][0-9]*))?")


def _labelled(labels: Mapping[str, str]) -> list[tuple[Fault, int | None]]:
    found = []
    for word in filter(None, labels.get(FAULT_LABEL, "").split(".")):
        match = _LABELLED.fullmatch(word)
        if match is None or match[1] not in set(Fault):
            raise invalid(f"label {FAULT_LABEL}: there is no fault '{word}'")
        found.append((Fault(match[1]), int(match[2]) if match[2] else None))
    return found


def check_label(labels: Mapping[str, str]) -> None:
    """Refuse a label that names what is no fault, so that no test passes for want of one."""
    _labelled(labels)


@define
class Rule:
    """Where a fault is wanted: all that is given has to hold.

    Attributes:
        fault: what is to go wrong.
        sandbox: name of the sandbox; any if it is empty.
        number: which exec of the sandbox, counted from 1; any if it is 0.
        matching: what the command or its input contains; anything if it is empty.
        times: how often at most; 0 for always.
    """

    fault: Fault
    sandbox: str = ""
    number: int = 0
    matching: str = ""
    times: int = 0


class Faults:
    """The faults that are wanted of a gateway, beside those that sandboxes are labelled with."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    def add(self, rule: Rule) -> None:
        """Want a fault."""
        with self._lock:
            self._rules.append(rule)

    def clear(self) -> None:
        """Want none of those that were added."""
        with self._lock:
            self._rules.clear()

    def hit(
        self,
        fault: Fault,
        name: str,
        labels: Mapping[str, str],
        *,
        number: int = 0,
        text: str = "",
    ) -> bool:
        """Tell whether a fault is to happen here, and count it."""
        if any(each is fault and at in {None, number} for each, at in _labelled(labels)):
            return True
        with self._lock:
            for rule in self._rules:
                if (
                    rule.fault is fault
                    and rule.sandbox in {"", name}
                    and rule.number in {0, number}
                    and rule.matching in text
                ):
                    rule.times -= 1
                    if not rule.times:
                        self._rules.remove(rule)
                    return True
        return False
