"""A harness like SWE-bench's: the container is there, a patch is applied, a log is parsed.

The harness keeps its containers, patches and its parser of test logs. What it hands over is the
one step in which results get lost: running the test script and bringing back what it left. A log
is read from sealed evidence only: a container that died, a cut transfer or a client timeout gives
no results at all (UNRESOLVED), and not a log in which the last tests happen to be missing.

    python examples/swe_harness.py IMAGE    # one with python3; the daemon is the environment's
"""

from __future__ import annotations

import re
import sys
import tempfile
from typing import TYPE_CHECKING, Final

import docker

from orchestrator import EvalSpec, Runner, Verdict
from orchestrator.backends.docker import DockerBackend

if TYPE_CHECKING:
    from orchestrator import RunResult

# What an agent worked on, and what it came up with. A harness has these in its images and its data.
REPOSITORY: Final = """
mkdir -p /testbed && cd /testbed
printf 'def add(a, b):\\n    return a - b\\n' > calc.py
printf 'def double(a):\\n    return a * 2\\n' > more.py
"""
PATCH: Final = (
    "sed -i 's/a - b/a + b/' calc.py"  # the agent's own process made it, in the container
)
TEST_SCRIPT: Final = """
for name in test_add test_double test_negative; do
    if python3 -B tests.py "$name"; then echo "PASSED $name"; else echo "FAILED $name"; fi
done
"""
TESTS: Final = """
import sys
from calc import add
from more import double

def test_add(): assert add(2, 3) == 5
def test_double(): assert double(4) == 8
def test_negative(): assert add(-2, -3) == -5

globals()[sys.argv[1]]()
"""
FAIL_TO_PASS: Final = {"test_add", "test_negative"}
PASS_TO_PASS: Final = {"test_double"}


def parse_log(log: str) -> dict[str, bool]:
    """Read a log as the harness always has: a line for each test."""
    return {
        name: word == "PASSED"
        for word, name in re.findall(r"^(PASSED|FAILED) (\w+)$", log, re.MULTILINE)
    }


def evaluate(container: str, state_dir: str) -> tuple[RunResult, dict[str, bool] | None]:
    """Run the test script in a container that is there; give the tests, or None if unresolved."""
    backend = DockerBackend().attach(container, workdir="/testbed")
    spec = EvalSpec(
        name="calc__calc-1",
        files={"tests.py": TESTS, "eval.sh": TEST_SCRIPT},  # laid over the agent's tree
        check=["sh", "eval.sh"],
        deadline_s=60,
        expect={"the log is whole": lambda e: len(parse_log(e.stdout.decode())) == 3},  # noqa: PLR2004
    )
    with Runner(backend, state_dir) as runner:
        result = runner.run(spec)
    if result.verdict is Verdict.UNRESOLVED or result.evidence is None:
        return result, None  # not a failed instance: an instance to be tried again
    return result, parse_log(result.evidence.stdout.decode())


def main(image: str) -> int:
    """Evaluate one instance, as it was given and with the agent's patch."""
    daemon = docker.from_env()
    container = daemon.containers.run(
        image, ["sleep", "infinity"], detach=True, network_disabled=True
    )
    try:
        container.exec_run(["sh", "-c", REPOSITORY])
        for title, change in (("as given", ":"), ("with the patch", PATCH)):
            container.exec_run(["sh", "-c", change], workdir="/testbed")
            with tempfile.TemporaryDirectory() as state_dir:
                result, tests = evaluate(container.id, state_dir)
            resolved = tests is not None and all(tests.get(t) for t in FAIL_TO_PASS | PASS_TO_PASS)
            print(f"{title}: {result.verdict}, {tests}")
            print(f"  resolved: {resolved if tests is not None else 'unknown'}")
        return 0 if resolved else 1
    finally:
        container.remove(force=True)
        daemon.close()


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
