"""Expectations over sealed evidence: what each one found, or why it could not be evaluated.

All of them are evaluated, whatever the others do. One that raises says nothing about the program.
"""

from __future__ import annotations

import hashlib
import re
import traceback
from typing import TYPE_CHECKING

from .core.errors import EvidenceIncompleteError, OrchestratorError, OutputTruncatedError
from .core.evidence import EntryKind, Provenance
from .core.facts import Fact, Fault, FaultKind, Phase, Scored, ScoringFailed
from .core.verdict import ExpectationResult, OutcomeKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .core.evidence import Output
    from .core.expect import Expect, FileExpectation, Predicate
    from .core.spec import EvalSpec
    from .evidence import Evidence

    Answer = tuple[bool, str]
    Question = Callable[[], Answer]

_SHOWN = 200


class ExpectationsMissingError(OrchestratorError):
    """A spec came back from a journal without the functions that it expects with."""


def score(spec: EvalSpec, evidence: Evidence) -> Fact:
    """Evaluate every expectation of a spec; give the fact that follows.

    Raises:
        ExpectationsMissingError: the spec has names of functions in place of functions.
    """
    gone = [name for name, test in spec.expect.predicates.items() if test is None]
    if gone:
        raise ExpectationsMissingError(
            f"run {evidence.run_id}: {', '.join(gone)}: expected by functions, which a "
            "journal cannot hold; resume it from Python, with the spec that has them"
        )
    results: list[ExpectationResult] = []
    faults: list[Fault] = []
    for name, question in _questions(spec.expect, evidence):
        result, fault = _ask(name, question)
        results.append(result)
        faults += [fault] if fault else []
    if faults:
        return ScoringFailed(fault=faults[0], faults=tuple(faults[1:]), expectations=tuple(results))
    return Scored(expectations=tuple(results))


def _ask(name: str, question: Question) -> tuple[ExpectationResult, Fault | None]:
    """Evaluate one expectation."""
    try:
        passed, message = question()
    except OutputTruncatedError as error:
        kind, message = FaultKind.OUTPUT_TRUNCATED, str(error)
    except EvidenceIncompleteError as error:
        kind, message = FaultKind.INCOMPLETE, str(error)
    except BaseException:  # noqa: BLE001 - also what `sys.exit` or a broken test framework raises
        kind, message = FaultKind.SCORER_ERROR, traceback.format_exc()
    else:
        return ExpectationResult(name, passed, message), None
    fault = Fault(Phase.SCORE, kind, f"{name}: {message}")
    return ExpectationResult(name, None, message.strip()), fault


def _questions(expect: Expect, evidence: Evidence) -> Iterator[tuple[str, Question]]:
    """Give every expectation by name, in the order of the fields of `Expect`."""
    yield from _about_the_end(expect, evidence)
    for stream in ("stdout", "stderr"):
        yield from _about_output(expect, stream, evidence)
    for file in expect.files:
        yield from _about_file(file, evidence)
    for name, predicate in expect.predicates.items():
        if predicate is not None:
            yield name, _predicate(predicate, evidence)


def _about_the_end(expect: Expect, evidence: Evidence) -> Iterator[tuple[str, Question]]:
    outcome = evidence.outcome
    if expect.exit_code is not None:
        code = expect.exit_code
        yield (
            "exit_code",
            lambda: (evidence.exit_code == code, f"expected exited({code}), {outcome}"),
        )
    late = outcome is not None and outcome.kind is OutcomeKind.DEADLINE_EXCEEDED
    if expect.timed_out is not None or late:
        wanted = bool(expect.timed_out)
        words = "its deadline to be exceeded" if wanted else "an end before the deadline"
        yield "timed_out", lambda: (late is wanted, f"expected {words}, {outcome}")


def _about_output(
    expect: Expect, stream: str, evidence: Evidence
) -> Iterator[tuple[str, Question]]:
    equals: str | None = getattr(expect, f"{stream}_equals")
    if equals is not None:
        whole = equals
        yield (
            f"{stream}_equals",
            lambda: (
                _stream(evidence, stream) == whole.encode(),
                f"expected {_short(whole)}, got {_short(_stream(evidence, stream).text)}",
            ),
        )
    for part in getattr(expect, f"{stream}_contains"):
        yield f"{stream}_contains", _contains(evidence, stream, part)
    for pattern in getattr(expect, f"{stream}_matches"):
        yield f"{stream}_matches", _matches(evidence, stream, pattern)


def _stream(evidence: Evidence, stream: str) -> Output:
    return evidence.stdout if stream == "stdout" else evidence.stderr


def _contains(evidence: Evidence, stream: str, part: str) -> Question:
    def question() -> Answer:
        output = _stream(evidence, stream)
        return part.encode() in output, f"expected {_short(part)} in {_short(output.text)}"

    return question


def _matches(evidence: Evidence, stream: str, pattern: str) -> Question:
    def question() -> Answer:
        output = _stream(evidence, stream)
        message = f"expected a match of {_short(pattern)} in {_short(output.text)}"
        # A match over bytes that were not kept cannot be ruled out, nor one that they would break.
        return re.search(pattern, output.decode(), re.MULTILINE) is not None, message

    return question


def _about_file(file: FileExpectation, evidence: Evidence) -> Iterator[tuple[str, Question]]:
    name = f"files[{file.path}]"
    if file.exists is not None:
        yield (
            f"{name}.exists",
            lambda: (
                evidence.exists(file.path) is file.exists,
                f"expected it {'there' if file.exists else 'gone'}, {_found(file.path, evidence)}",
            ),
        )
    if file.equals is not None:
        text = file.equals
        yield (
            f"{name}.equals",
            _content(
                file.path, evidence, lambda data: data == text.encode(), f"content {_short(text)}"
            ),
        )
    if file.contains is not None:
        part = file.contains
        yield (
            f"{name}.contains",
            _content(
                file.path, evidence, lambda data: part.encode() in data, f"{_short(part)} in it"
            ),
        )
    if file.sha256 is not None:
        digest = file.sha256
        yield (
            f"{name}.sha256",
            _content(
                file.path,
                evidence,
                lambda data: hashlib.sha256(data).hexdigest() == digest,
                f"SHA-256 {digest}",
            ),
        )
    if file.unchanged is not None:
        yield (
            f"{name}.unchanged",
            lambda: (
                (evidence.provenance(file.path) is Provenance.UNCHANGED) is file.unchanged,
                f"expected {'un' if file.unchanged else ''}changed, {_found(file.path, evidence)}",
            ),
        )


def _content(
    path: str, evidence: Evidence, test: Callable[[bytes], bool], expected: str
) -> Question:
    def question() -> Answer:
        entry = evidence.entry(path)
        if entry is None or entry.kind is not EntryKind.FILE:
            return False, f"expected {expected}, {_found(path, evidence)}"
        data = evidence.read(path)
        return test(data), f"expected {expected}, got {_short(data.decode(errors='replace'))}"

    return question


def _predicate(predicate: Predicate, evidence: Evidence) -> Question:
    def question() -> Answer:
        answer = predicate(evidence)
        if not isinstance(answer, bool):
            raise TypeError(f"answered {answer!r}; expected True or False")
        return answer, f"answered {answer}"

    return question


def _found(path: str, evidence: Evidence) -> str:
    entry, origin = evidence.entry(path), evidence.provenance(path)
    if entry is None:
        return "it was deleted by the check" if origin else "it is not there"
    points = f" to {entry.target!r}" if entry.target is not None else ""
    return f"there is a {entry.kind}{points}, {origin} by the check"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
