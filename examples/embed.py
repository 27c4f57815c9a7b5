"""A run from Python, in ten lines."""

from pathlib import Path

from orchestrator import EvalSpec, Runner
from orchestrator.backends.local import LocalBackend

spec = EvalSpec(
    name="hello",
    workspace=str(Path(__file__).with_name("hello")),
    check="python3 hello.py",
    expect={"greets": lambda e: e.stdout == b"Hello\n", "no junk": lambda e: not e.exists("junk")},
)
with Runner(LocalBackend()) as runner:
    result = runner.run(spec)
print(result.verdict, result.outcome, [found.name for found in result.expectations if found.passed])
