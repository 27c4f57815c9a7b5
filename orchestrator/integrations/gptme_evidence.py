"""What gptme's cases ask for, in its own words, and the order in which it may ask."""

from __future__ import annotations

import base64
import posixpath
from typing import TYPE_CHECKING, Any, NoReturn

from gptme.eval import types

from ..core.errors import EvidenceIncompleteError, IllegalFactError
from ..core.machine import legal_facts

if TYPE_CHECKING:
    from ..core.facts import Fact
    from ..core.machine import Run
    from ..evidence import Evidence
    from ..result import RunResult


class NotHere(dict[str, Any]):
    """Files that did not arrive: missing is not absent, so they refuse every question."""

    def _refuse(self, *_: object) -> NoReturn:
        raise EvidenceIncompleteError("the files did not arrive whole; see `download_failed`")

    __contains__ = __eq__ = __getitem__ = __iter__ = __len__ = get = items = keys = values = _refuse


def story(result: RunResult) -> str:
    """Say what went wrong around a program."""
    faults = "; ".join(f"{fault.phase} {fault.kind}: {fault.message}" for fault in result.faults)
    return f"\nrun {result.run_id}: {result.reason or result.state}: {faults}\n"


def demand(run: Run, fact: type[Fact], why: str, *, met: bool) -> None:
    """Refuse a verb whose fact may not follow, or not yet.

    Raises:
        IllegalFactError: it is refused.
    """
    if not met:
        legal = [each.__name__ for each in legal_facts(run.state)]
        raise IllegalFactError(
            run_id=run.run_id, state=run.state, fact=fact.__name__, legal=legal, why=why
        )


def _lines(data: bytes, errors: str = "strict") -> str:
    """Give text as gptme reads it: every line ends with a newline alone."""
    return data.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def context(evidence: Evidence) -> types.ResultContext:
    """Give what gptme's cases ask. Links are followed in the workspace: beyond is no evidence."""
    entries, files = evidence.manifest.entries, types.Files()
    for path in entries:
        found = entries.get(path)
        for _ in range(40):  # as many as Linux follows
            if found is not None and found.target is not None:
                to = posixpath.join(posixpath.dirname(found.path), found.target)
                found = entries.get(posixpath.normpath(to))
        if found is not None and found.sha256 is not None:
            data = evidence.read(found.path)
            try:
                files[path] = _lines(data)
            except UnicodeDecodeError:
                files[path] = base64.b64encode(data)
    out, err = (_lines(bytes(each), "replace") for each in (evidence.stdout, evidence.stderr))
    signal = evidence.outcome.signal if evidence.outcome else None
    code = evidence.exit_code if evidence.exit_code is not None else -(signal or 9)
    return types.ResultContext(files, out, err, code)
