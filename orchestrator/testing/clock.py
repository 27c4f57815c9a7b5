"""The twin of the client's clock: a number, and the events that happen as it grows."""

from __future__ import annotations

import heapq
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from ..clock import AbruptEndError, BoundExceededError, CancelledError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..clock import Cancellation


class Crash(BaseException):
    """The runner is killed here. Not an `Exception`: nothing of it may catch it."""


class Hang(BaseException):
    """A call does not come back while somebody waits for it."""


class SimulatedClock:
    """A clock that is a number, and the events that happen as it grows. See `ports.Clock`."""

    def __init__(self) -> None:
        """Begin at 0, with nothing to come."""
        self.time = 0.0
        self.life: Callable[[], int] = lambda: 0
        self.late_from: int | None = None
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._bounds: list[float] = []

    def now(self) -> float:
        """Give the time."""
        return self.time

    def at(self, moment: float, event: Callable[[], object]) -> None:
        """Have something happen at a time."""
        heapq.heappush(self._events, (moment, next(self._order), event))

    def advance(self, moment: float) -> None:
        """Let time pass up to a moment, and happen what happens until then."""
        while self._events and self._events[0][0] <= moment:
            at, _, event = heapq.heappop(self._events)
            self.time = max(self.time, at)
            event()
        self.time = max(self.time, moment)

    def sleep(self, seconds: float) -> None:
        """Let time pass inside a call; the caller stops waiting at its bound."""
        moment = self.time + seconds
        if self._bounds and moment > min(self._bounds):
            raise Hang
        self.advance(moment)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait inside a call until something is so, or the caller stops waiting."""
        while not condition():
            if not self._events or (self._bounds and self._events[0][0] > min(self._bounds)):
                raise Hang
            self.advance(self._events[0][0])

    def call(
        self,
        function: Callable[[], Any],
        bound_s: float,
        cancellation: Cancellation | None = None,
    ) -> Any:
        """Call a function; what would not come back in time ends at the bound."""
        if cancellation is not None and cancellation.cancelled:
            raise CancelledError("the client was told to stop waiting")
        bound = self.time + bound_s
        self._bounds.append(bound)
        try:
            return function()
        except Hang:
            self.advance(bound)
            raise BoundExceededError(f"no answer within {bound_s:g} s") from None
        except (Exception, Crash):
            raise
        except BaseException as error:
            raise AbruptEndError(f"{type(error).__name__}: {error}") from error
        finally:
            self._bounds.remove(bound)

    # How injected faults let time pass: `faults.Waiting`.

    def hang(self) -> None:
        """Never come back."""
        raise Hang

    def later(self, act: Callable[[], object]) -> None:
        """Act a second after the client has given up."""
        asked_by = self.life()

        def event() -> None:
            self.late_from = asked_by
            with suppress(Exception, Hang):  # nobody waits for it any more
                act()
            self.late_from = None

        self.at((min(self._bounds) if self._bounds else self.time) + 1.0, event)
        raise Hang

    def pause(self) -> None:
        """Take half of what is left until the bound."""
        left = min(self._bounds) - self.time if self._bounds else 1.0
        self.sleep(min(left / 2, 5.0))
