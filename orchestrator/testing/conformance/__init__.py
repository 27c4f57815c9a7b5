r"""What every backend must do, as named checks over a factory that anybody's backend can be put to.

    from orchestrator.testing.conformance import conform, report_of

    findings = conform(lambda: MyBackend("sandboxes"))
    print(report_of(findings))

A check is an ordinary function. Its docstring is the claim, and it carries the field case that it
was learned from: somebody lost a result to a backend that did otherwise. Each one gets a backend
from the factory and a directory of its own, and drives either the real runner over the backend or
the verbs of a sandbox; what it finds is raised as `AssertionError`. A check that needs what the
sandbox does not have (git, say) is not applicable, which is neither green nor red and gives its
reason. Under pytest: parametrize over `CHECKS`, and assert on `conform(make, only=[name])`.

The factory is called more than once, and all the backends that it makes must see the same
sandboxes: that is how a second runner takes over from one that is gone. What a backend holds open
it lets go in a `close` of its own, if it has one. Nothing of the checks is left in the backend.

Programs of the checks are POSIX `sh` with `head -c`, `stat -c` and a `sleep` that knows fractions,
as coreutils and busybox have them. Whatever they leave running ends by itself within seconds, so
that a backend which does not stop it is found out and does not keep it.
"""

from __future__ import annotations

import tempfile
import textwrap
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from ... import tree
from ...clock import SystemClock
from ...core.errors import SpecError
from ...core.expect import nearest
from .bench import BOUND_S, CLOSE_S, Bench, NotApplicableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ...ports import Backend

    Check = Callable[[Bench], None]

CHECKS: Final[dict[str, Check]] = {}
"""Every check by its name, in the order in which they are made."""
CASES: Final[dict[str, str]] = {}
"""The field case, or the port's own claim, that a check comes from, by its name."""


@frozen
class Finding:
    """What a check found.

    Attributes:
        name: of the check, as in `CHECKS`.
        ok: whether the backend does what the check claims; None where it is not applicable.
        reason: what is wrong, or why it is not applicable; empty where all is well.
        elapsed_s: seconds that the check took.
    """

    name: str
    ok: bool | None
    reason: str
    elapsed_s: float


def check(*, case: str) -> Callable[[Check], Check]:
    """Register a function as a check that comes from a field case."""

    def register(function: Check) -> Check:
        name = function.__name__
        CHECKS[name] = function
        CASES[name] = case
        return function

    return register


def conform(
    make_backend: Callable[[], Backend],
    *,
    only: Iterable[str] | None = None,
    report: Callable[[Finding], None] | None = None,
    bound_s: float = BOUND_S,
) -> list[Finding]:
    """Put a backend to the checks, one after the other.

    Args:
        make_backend: makes a backend; all that it makes must see the same sandboxes.
        only: names of the checks to make; None for all.
        report: called with every finding as soon as there is one.
        bound_s: seconds after which a check that does not end has failed.

    Raises:
        SpecError: there is no check of a name in `only`.
    """
    names = list(CHECKS) if only is None else list(only)
    for name in names:
        if name not in CHECKS:
            raise SpecError("only", f"no check is called {name!r}", nearest(name, CHECKS))
    findings = []
    for name in names:
        findings.append(_find(name, make_backend, bound_s))
        if report is not None:
            report(findings[-1])
    return findings


def _find(name: str, make_backend: Callable[[], Backend], bound_s: float) -> Finding:
    start, clock = time.monotonic(), SystemClock()
    directory = Path(tempfile.mkdtemp(prefix="conformance-"))
    bench = Bench(make_backend, directory)
    ok: bool | None = True
    reason = ""
    try:
        clock.call(partial(CHECKS[name], bench), bound_s)
    except NotApplicableError as error:
        ok, reason = None, str(error)
    except AssertionError as error:
        ok, reason = False, str(error) or "an assertion without words"
    except Exception as error:  # noqa: BLE001 - whatever it raises, the check did not hold
        ok, reason = False, f"{type(error).__name__}: {error}"
    finally:
        with suppress(Exception):
            clock.call(bench.close, CLOSE_S)
        with suppress(OSError):
            tree.remove(directory)
    return Finding(name, ok, reason, time.monotonic() - start)


def report_of(findings: Iterable[Finding]) -> str:
    """Give findings as text: a line each, reasons below, and the count of them."""
    findings = list(findings)
    width = max((len(finding.name) for finding in findings), default=0)
    words = {True: "ok", False: "FAILED", None: "n/a"}
    lines = []
    for finding in findings:
        name, case = finding.name.ljust(width), CASES.get(finding.name, "")
        lines.append(f"{words[finding.ok]:<6} {name} {finding.elapsed_s:6.2f} s  {case}".rstrip())
        if finding.reason:
            lines.append(textwrap.indent(textwrap.fill(finding.reason, 90), "       "))
    counts = {ok: sum(finding.ok is ok for finding in findings) for ok in words}
    total_s = sum(finding.elapsed_s for finding in findings)
    lines.append(
        f"{counts[True]} ok, {counts[False]} failed, {counts[None]} not applicable, "
        f"in {total_s:.1f} s"
    )
    return "\n".join(lines)


# Each of these registers its checks, in this order.
from . import ends, streams, uploads, downloads, orders, clients  # noqa: E402, F401, I001
