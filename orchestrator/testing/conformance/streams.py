"""What a check is given, and what it prints."""

from __future__ import annotations

import os
from typing import Final

from ...core.verdict import Reason, Verdict
from . import check
from .bench import (
    TOLERANCE_S,
    Bench,
    _passed,
    _same,
    _story,
    _that,
)

# --- output and input -----------------------------------------------------------------------------


@check(case="F2")
def output_is_bytes(bench: Bench) -> None:
    """Output arrives byte for byte, each stream on its own, whatever the bytes are."""
    result = bench.run(r"printf '\377\000\033[2J\r\n'; printf '\200no text' >&2")
    evidence = _passed(result)
    _same("stdout", bytes(evidence.stdout), b"\xff\x00\x1b[2J\r\n")
    _same("stderr", bytes(evidence.stderr), b"\x80no text")


@check(case="F3")
def floods_are_cut_and_counted(bench: Bench) -> None:
    """Of 20 MB on both streams at once, head and tail are kept and every byte is counted."""
    flood = "{ echo HEAD; head -c 20000000 /dev/zero | tr '\\0' x; echo TAIL; }"
    result = bench.run(f"{flood} & {flood} >&2; wait", limits={"output_bytes": 100_000})
    evidence = _passed(result)
    for name, output in (("stdout", evidence.stdout), ("stderr", evidence.stderr)):
        _same(f"bytes of {name}", output.total, 20_000_010)
        kept = len(output.head) + len(output.tail)
        _that(output.truncated and 0 < kept <= 100_000, f"{kept} bytes of {name} were kept")  # noqa: PLR2004
        _same(f"first of {name}", output.head[:8], b"HEAD\nxxx")
        _same(f"last of {name}", output.tail[-8:], b"xxxTAIL\n")


@check(case="F3")
def truncated_output_answers_nothing(bench: Bench) -> None:
    """A question that output which was not kept could answer is not answered for the rest."""
    program = "head -c 500000 /dev/zero | tr '\\0' x; echo TAIL"
    limits = {"output_bytes": 1000}
    result = bench.run(program, limits=limits, expect={"stdout_contains": "never printed"})
    unanswered = result.verdict is Verdict.UNRESOLVED and result.reason is Reason.OUTPUT_TRUNCATED
    _that(unanswered, f"it should be output_truncated, and is {_story(result)}")


@check(case="A8")
def last_output_is_kept(bench: Bench) -> None:
    """The last of five megabytes arrives, though a child holds the stream open after the exit."""
    program = "head -c 5000000 /dev/zero | tr '\\0' x; echo END; sleep 6 & exit 3"
    result = bench.run(program, expect={"exit_code": 3})
    output = bytes(_passed(result).stdout)
    _same("bytes of output", len(output), 5_000_004)
    _same("end of the output", output[-5:], b"xEND\n")
    check_s = result.timings["check"]
    _that(check_s <= 1.0 + TOLERANCE_S, f"it was waited for {check_s:.1f} s")


@check(case="E1")
def silence_is_evidence(bench: Bench) -> None:
    """A check that prints nothing has two whole, empty streams, and not two lost ones."""
    evidence = _passed(bench.run("exit 0"))
    _same("output", (bytes(evidence.stdout), bytes(evidence.stderr)), (b"", b""))


@check(case="section 5")
def input_is_empty(bench: Bench) -> None:
    """Standard input is at its end, and no terminal, so a program that asks does not wait."""
    result = bench.run("[ ! -t 0 ] || exit 8; cat; if read -r x; then exit 9; fi", deadline_s=4.0)
    _same("output", bytes(_passed(result).stdout), b"")


# --- what a check is given ------------------------------------------------------------------------

WORDS: Final = ("a b", "", "'", '"', "$HOME `id` \\", "*", "line\nline\n", "-n", "ünï→", "a=b\t;")


@check(case="section 8")
def environment_arrives(bench: Bench) -> None:
    """Variables arrive as they were given: quotes, line ends, dollars, nothing, any letter."""
    env = {f"GIVEN_{number}": word for number, word in enumerate(WORDS)}
    show = "; ".join(f'printf %s "${name}" > {name}; [ "${{{name}+set}}" ]' for name in env)
    evidence = _passed(bench.run(f"set -e; {show}", env=env))
    arrived = {name: evidence.read(name).decode("utf-8", "replace") for name in env}
    _same("environment", arrived, env)


@check(case="section 8")
def arguments_arrive(bench: Bench) -> None:
    """A list of words is the program's arguments, and no shell reads them on their way."""
    show = 'for word do printf "%s|" "$word"; done'
    result = bench.run(["/bin/sh", "-c", show, "sh", *WORDS])
    _same("arguments", _passed(result).stdout.decode(), "".join(f"{word}|" for word in WORDS))


@check(case="section 5")
def environment_does_not_leak(bench: Bench) -> None:
    """Nothing of the runner's own environment reaches check or setup."""
    name, secret = f"CONFORMANCE_{os.getpid()}", "a secret of the runner"
    os.environ[name] = secret
    try:
        result = bench.run("env; cat setup.env", setup="env > setup.env; echo $HOME >> home")
    finally:
        del os.environ[name]
    shown = _passed(result).stdout.decode()
    _that(name not in shown and secret not in shown, "a variable of the runner is in the check's")
    _that("PATH=" in shown and "HOME=" in shown, "it has no PATH, or no HOME")


@check(case="section 1")
def check_runs_in_the_workspace(bench: Bench) -> None:
    """The check starts in its workspace, in which there is what was sent and nothing else."""
    files = {"given": "1", "below/given": "2"}
    evidence = _passed(bench.run('seen=$(ls -A); echo "$seen"; pwd > here', files=files))
    _same("what the check sees", evidence.stdout.decode().split(), ["below", "given"])
    expected = ["below", "below/given", "given", "here"]
    _same("entries of the evidence", sorted(evidence.manifest.entries), expected)
