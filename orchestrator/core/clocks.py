"""Bounds: how long the client waits for each phase. None of them shortens a check's deadline."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import gt


@frozen(kw_only=True)
class Bounds:
    """Seconds that the client waits for one call of each phase before it is left behind.

    The check's own bound is the spec's `backstop_s`, because it must be later than the spec's
    deadline; setup's follows from its deadline in the same way.
    """

    upload_s: float = field(default=600.0, validator=gt(0))
    settle_s: float = field(default=30.0, validator=gt(0))
    download_s: float = field(default=600.0, validator=gt(0))
    destroy_s: float = field(default=60.0, validator=gt(0))
    score_s: float = field(default=120.0, validator=gt(0))


def latest_start_s(deadline_s: float, grace_s: float, backstop_s: float) -> float:
    """Give how many seconds after dispatch the check may still start.

    Started later, it could not use its whole deadline and be stopped before the client gives up, so
    the supervisor refuses to start it. This is what makes the time after the backstop knowable.
    """
    return backstop_s - deadline_s - grace_s
