"""The client's clock, and calls that it stops waiting for: at a bound, or when it is told to.

Python cannot stop a thread. A call that does not come back is left behind on a daemon thread, and
what it answers later is dropped; the run goes on with what is known, which is nothing.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from .core.errors import OrchestratorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


class BoundExceededError(OrchestratorError):
    """A call did not come back within its bound."""


class AbruptEndError(OrchestratorError):
    """A call raised something that is not an `Exception`, in a thread that is not its caller's.

    `SystemExit` out of a library says nothing to the run that called it; Ctrl-C, which arrives in
    the caller and not in the call, says everything. So that the two can be told apart, only the
    second reaches the caller as it is.
    """


class CancelledError(OrchestratorError):
    """The client was told to stop waiting."""


class Cancellation:
    """Tells a run, from another thread, to stop waiting for its upload or its check.

    The run then goes on to settle, save and clean up, and ends UNRESOLVED: cancelled.
    """

    def __init__(self) -> None:
        """Start out not cancelled."""
        self._lock = threading.Lock()
        self._cancelled = False
        self._wakes: set[threading.Event] = set()

    def cancel(self) -> None:
        """Tell it, for good."""
        with self._lock:
            self._cancelled = True
            for wake in self._wakes:
                wake.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was told."""
        return self._cancelled

    @contextmanager
    def waking(self, wake: threading.Event) -> Iterator[None]:
        """Set `wake` when it is told, for as long as the context lasts."""
        with self._lock:
            self._wakes.add(wake)
            if self._cancelled:
                wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._wakes.discard(wake)


class _Call(Generic[T]):
    """One call on a thread of its own, and what came of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.done = threading.Event()
        self.finished = False
        self.value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's to judge
            self.error = error
        self.finished = True
        self.done.set()


class SystemClock:
    """The clock of this machine. See `ports.Clock`."""

    def now(self) -> float:
        """Give seconds on a clock that never jumps."""
        return time.monotonic()

    def call(
        self, function: Callable[[], T], bound_s: float, cancellation: Cancellation | None = None
    ) -> T:
        """Call a function on a thread of its own, and wait for it."""
        if cancellation is not None and cancellation.cancelled:
            raise CancelledError("the client was told to stop waiting")
        call = _Call(function)
        thread = threading.Thread(target=call.run, name="bounded call", daemon=True)
        with (cancellation or Cancellation()).waking(call.done):
            thread.start()
            call.done.wait(bound_s)
        if call.finished:
            if call.error is not None and not isinstance(call.error, Exception):
                raise AbruptEndError(f"{type(call.error).__name__}: {call.error}") from call.error
            if call.error is not None:
                raise call.error
            return call.value  # type: ignore[return-value]  # it finished without an error
        if cancellation is not None and cancellation.cancelled:
            raise CancelledError("the client was told to stop waiting")
        raise BoundExceededError(f"no answer within {bound_s:g} s")
