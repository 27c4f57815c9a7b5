"""Bounds: how long the client waits for each phase. None of them shortens a check's deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    from attrs import Attribute


def _ends(instance: object, attribute: Attribute[Any], value: float) -> None:
    del instance
    if not 0 < value < 1e9:  # noqa: PLR2004 - what threads can wait for
        raise ValueError(f"{attribute.name}: got {value!r}, expected seconds above 0")


@frozen(kw_only=True)
class Bounds:
    """Seconds that the client waits for one call of each phase before it is left behind.

    The check's own bound is the spec's `backstop_s`, because it must be later than the spec's
    deadline; setup's follows from its deadline in the same way.
    """

    upload_s: float = field(default=600.0, validator=_ends)
    settle_s: float = field(default=30.0, validator=_ends)
    download_s: float = field(default=600.0, validator=_ends)
    destroy_s: float = field(default=60.0, validator=_ends)
    score_s: float = field(default=120.0, validator=_ends)


def latest_start_s(deadline_s: float, grace_s: float, backstop_s: float) -> float:
    """Give how many seconds after dispatch the check may still start.

    Started later, it could not use its whole deadline and be stopped before the client gives up, so
    the supervisor refuses to start it. This is what makes the time after the backstop knowable.
    """
    return backstop_s - deadline_s - grace_s
