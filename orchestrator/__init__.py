r"""Eval runs that cannot delete a sandbox before its evidence is safely on your disk.

    from orchestrator import EvalSpec, Runner
    from orchestrator.backends.local import LocalBackend

    spec = EvalSpec(name="hello", workspace="hello/", check="python3 hello.py",
                    expect={"greets": lambda e: e.stdout == b"Hello\n"})
    result = Runner(LocalBackend()).run(spec)

Facts and commands are in `orchestrator.core`; backends, the testing kit and the command line are
submodules too, and load only where they are used.
"""

from .batch import run_batch
from .clock import Cancellation
from .core.clocks import Bounds
from .core.errors import (
    EvidenceIncompleteError,
    IllegalFactError,
    OrchestratorError,
    OutputTruncatedError,
    SpecError,
    StorageError,
)
from .core.evidence import Entry, Manifest, Output, Provenance
from .core.expect import Expect, FileExpectation
from .core.facts import Fault, FaultKind
from .core.machine import Run, Step, advance, begin, legal_facts, replay
from .core.spec import EvalSpec, Limits
from .core.states import State
from .core.table import TABLE
from .core.verdict import Outcome, OutcomeKind, Reason, Tally, Verdict
from .evidence import Evidence
from .result import RunResult
from .runner import Progress, Runner

__all__ = [
    "TABLE",
    "Bounds",
    "Cancellation",
    "Entry",
    "EvalSpec",
    "Evidence",
    "EvidenceIncompleteError",
    "Expect",
    "Fault",
    "FaultKind",
    "FileExpectation",
    "IllegalFactError",
    "Limits",
    "Manifest",
    "OrchestratorError",
    "Outcome",
    "OutcomeKind",
    "Output",
    "OutputTruncatedError",
    "Progress",
    "Provenance",
    "Reason",
    "Run",
    "RunResult",
    "Runner",
    "SpecError",
    "State",
    "Step",
    "StorageError",
    "Tally",
    "Verdict",
    "advance",
    "begin",
    "legal_facts",
    "replay",
    "run_batch",
]
