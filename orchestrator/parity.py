"""Whether backends agree: the same specs run on each of them, and compared point by point.

    report = parity({"local": LocalBackend(), "mine": MyBackend()}, load("hello.eval.toml"))
    assert report.status == "equal", report

A point has a name that stays: `contract.deadline_s`, `outcome.exit_code`, `stdout`,
`manifest:out/x.txt mode`. `contract.*` is what a run was begun with, as its journal has it; the
rest is what came of it. Left out is what no two runs share (ids, seconds, words of faults, times of
what setup or the check wrote) and what a backend may do better than another (isolation, and who saw
the check end). Points of evidence are compared where it is sealed: of a tree that did not arrive
whole, a file that is missing says nothing. A backend compared with another of its kind tells what
of an eval varies by itself.
"""

from __future__ import annotations

from contextlib import ExitStack
from fnmatch import fnmatchcase
from itertools import chain, count
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from attrs import asdict, field, frozen

from .core.errors import SpecError
from .runner import Runner

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from .core.evidence import Entry, Manifest
    from .core.spec import EvalSpec
    from .evidence import Evidence
    from .ports import Backend

    Points = Mapping[str, Any]
    Accounts = Mapping[str, Mapping[str, "Account"]]
T = TypeVar("T")
_ORDERED = ("check", "deadline_s", "grace_s", "backstop", "setup", "setup_deadline_s")
_ENDED = ("kind", "exit_code", "signal", "escalated", "descendants")
_BEFORE, _SHOWN = 20, 160  # characters of a text that are shown, about where it differs


@frozen
class Account:
    """What is compared of a run: its contract and end, and its evidence (None if not sealed)."""

    run_id: str
    stated: Points = field(repr=False)
    found: Points | None = field(repr=False)


@frozen
class Difference:
    """A point of an eval with the values of every backend, and why it is meant to be, if it is."""

    name: str
    point: str
    values: Points
    declared: str | None

    def __str__(self) -> str:
        """Say where it is, and what each backend has there."""
        values = ", ".join(f"{backend} {value!r}" for backend, value in self.values.items())
        why = f" (declared: {self.declared})" if self.declared else ""
        return f"{self.name}: {self.point}: {values}{why}"


@frozen
class Report:
    """What came of comparing runs, by eval and backend. `unmet`: patterns that were declared."""

    accounts: Accounts
    points: int
    differences: tuple[Difference, ...]
    unmet: tuple[str, ...]

    @property
    def unresolved(self) -> list[str]:
        """Say which runs tell nothing about their backend."""
        return [
            f"{name}: UNRESOLVED ({each.stated['reason']}) on {backend}, run {each.run_id}"
            for name, accounts in self.accounts.items()
            for backend, each in accounts.items()
            if each.stated["verdict"] not in {"PASSED", "FAILED"}
        ]

    @property
    def status(self) -> Literal["equal", "different", "unresolved"]:
        """`unresolved` if any run is, else `different` if a difference is not declared."""
        if self.unresolved:
            return "unresolved"
        return "equal" if all(each.declared for each in self.differences) else "different"

    def as_json(self) -> dict[str, Any]:
        """Give the report as JSON types."""
        said = asdict(self, filter=lambda attribute, _: attribute.name not in {"stated", "found"})
        return {"status": self.status, **said, "unresolved": self.unresolved}

    def __str__(self) -> str:
        """Say every difference, what is unresolved, and how much was compared."""
        unmet = [f"declared, but not met: {pattern}" for pattern in self.unmet]
        meant = sum(bool(each.declared) for each in self.differences)
        counts = f"{len(self.differences)} of {self.points} points differ, {meant} as declared"
        counts = f"{self.status}: {len(self.accounts)} evals, {counts}"
        return "\n".join([*map(str, self.differences), *self.unresolved, *unmet, counts])


def parity(
    backends: Mapping[str, Backend],
    specs: Iterable[EvalSpec],
    state_dir: str | os.PathLike[str] = ".orchestrator",
    *,
    declared: Mapping[str, str] | None = None,
    **options: Any,
) -> Report:
    """Run specs on two or more backends, by names for the report, and compare what came of each.

    `declared` is as `compare` takes it, `options` are those of `Runner`. All runs share a state
    directory, so that none of it is part of another run's workspace.

    Raises:
        SpecError: there is nothing to compare, or a backend refuses a spec; nothing was started.
    """
    evals = numbered((spec.name, spec) for spec in specs)
    if len(backends) < 2 or not evals:  # noqa: PLR2004 - to compare
        problem = f"got {len(evals)} evals on {len(backends)} backends"
        raise SpecError("parity", problem, "one eval or more, on two backends or more")
    with ExitStack() as stack:
        runners = {
            name: stack.enter_context(Runner(backend, state_dir, **options))
            for name, backend in backends.items()
        }
        for backend, runner in runners.items():
            for name, spec in evals.items():
                try:
                    runner.accept(spec)
                except SpecError as error:
                    problem = f"{error.problem} (eval {name!r} on backend {backend!r})"
                    raise SpecError(error.key, problem, error.expected) from None
        accounts = {
            name: {
                backend: account_of(runner, runner.run(spec).run_id)
                for backend, runner in runners.items()
            }
            for name, spec in evals.items()
        }
    return compare(accounts, declared)


def numbered(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Give values by names of which no two are the same: the second `x` is `x#2`."""
    result: dict[str, T] = {}
    for name, value in named:
        names = chain([name], (f"{name}#{number}" for number in count(2)))
        result[next(each for each in names if each not in result)] = value
    return result


def compare(accounts: Accounts, declared: Mapping[str, str] | None = None) -> Report:
    """Compare accounts, by eval and backend, in every point that any of them has.

    `declared` are differences that are meant to be and do not count: for a pattern, as of file
    names, of names of points (`POINT`, or `EVAL/POINT`), the reason.
    """
    points, differences, unmet = 0, [], dict(declared or {})
    for name, point, values in _points(accounts):
        points += 1
        if all(value == next(iter(values.values())) for value in values.values()):
            continue
        reason = None
        for pattern, why in (declared or {}).items():
            names = (point, f"{name}/{point}")
            if pattern in names or any(fnmatchcase(each, pattern) for each in names):
                reason = reason or why
                unmet.pop(pattern, None)
        differences.append(Difference(name, point, _shown(values), reason))
    return Report(accounts, points, tuple(differences), tuple(unmet))


def _points(accounts: Accounts) -> Iterator[tuple[str, str, Points]]:
    for name, runs in accounts.items():
        stated = {backend: run.stated for backend, run in runs.items()}
        found = {backend: run.found for backend, run in runs.items() if run.found is not None}
        for side in (stated, found):
            for point in dict.fromkeys(point for points in side.values() for point in points):
                # That an entry is missing somewhere is said once, as its kind.
                detail = point.startswith(("manifest:", "setup:")) and not point.endswith(" kind")
                there = {where: it for where, it in side.items() if point in it or not detail}
                if len(there) > 1:
                    yield name, point, {where: it.get(point) for where, it in there.items()}


def _shown(values: Points) -> Points:
    """Give values as they are, but of long text the part about where it begins to differ."""
    texts = [value for value in values.values() if isinstance(value, str)]
    start = max(len(commonprefix(texts)) - _BEFORE, 0)  # noqa: RUF071 - of text
    end = start + _SHOWN
    return {name: it[start:end] if isinstance(it, str) else it for name, it in values.items()}


def account_of(runner: Runner, run_id: str) -> Account:
    """Give what is compared of a run, from its runner's journal and vault."""
    spec, run = runner.journal.record(run_id).spec, runner.journal.step(run_id).run
    said = {
        "spec": spec.digest,
        "input": run.workspace,
        "shell": getattr(runner.backend, "shell", "/bin/sh"),
        **{name: getattr(spec, name) for name in _ORDERED},
        **{f"limits.{name}": value for name, value in asdict(spec.limits).items()},
        **{f"env.{name}": value for name, value in spec.env.items()},
    }
    result, found = runner.result(run_id), None
    if (evidence := result.evidence) is not None and evidence.sealed:
        found = dict(_found(evidence, runner.vault.manifest(run.workspace or "")))
    ended = {
        "verdict": getattr(result.verdict, "value", None),
        "reason": result.reason,
        **{f"outcome.{name}": getattr(result.outcome, name, None) for name in _ENDED},
        **numbered((f"expectation:{each.name}", each.passed) for each in result.expectations),
        "evidence": evidence and ("partial" if found is None else "sealed"),
    }
    return Account(run_id, {f"contract.{name}": it for name, it in said.items()} | ended, found)


def _found(evidence: Evidence, sent: Manifest) -> Iterator[tuple[str, Any]]:
    after, given = evidence.manifest.entries, evidence.baseline.entries
    for path, entry in after.items():
        yield from _entry(f"manifest:{path}", entry)
        before = sent.entries.get(path)
        same = before is not None and before.mtime_ns == entry.mtime_ns
        yield f"manifest:{path} mtime_ns", entry.mtime_ns if same else None
    for path in sorted(given.keys() | sent.entries.keys()):
        if given.get(path) != sent.entries.get(path):
            yield from _entry(f"setup:{path}", given.get(path))
    for path in sorted(after.keys() | given.keys()):
        yield f"provenance:{path}", evidence.provenance(path)
    for stream, output in (("stdout", evidence.stdout), ("stderr", evidence.stderr)):
        yield stream, (output.head + output.tail).decode("utf-8", "surrogateescape")
        yield f"{stream}.total", output.total


def _entry(name: str, entry: Entry | None) -> Iterator[tuple[str, Any]]:
    yield f"{name} kind", entry.kind if entry else "deleted"
    if entry:
        yield f"{name} mode", f"{entry.mode:04o}"
        for detail in ("size", "sha256", "target"):
            yield f"{name} {detail}", getattr(entry, detail)
