"""A shell in a sandbox of Inspect AI's, of whatever provider.

Nothing is asked of a provider but `exec` and `read_file`, and nothing that it says of time or
output is believed: the guest keeps the deadline, every answer comes with its length. Programs are
run for threads, which wait for the event loop in which the sandbox was taken; that has to run.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import inspect
import math
import secrets
import sys
from typing import TYPE_CHECKING, Any, Final

from ..guest import SANE_PATH
from ..guest.answers import GuestError
from ..guest.shells import ASK_S

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

LATE_S: Final = 60.0  # beyond our own bound: when Inspect may end a command, never a measure
INLINE: Final = 1 << 20  # bytes of an answer that come with its command; longer ones are files
PIECE: Final = 32 << 20
ANSWER: Final = f"""out=$1; shift
"$@" >"$out" || {{ code=$?; rm "$out"; exit $code; }}
wc -c <"$out"; [ "$(wc -c <"$out")" -gt {INLINE} ] || {{ base64 <"$out"; rm "$out"; }}"""
CUT: Final = f'dd if="$1" of="$1.cut" bs={PIECE} skip="$2" count=1 2>/dev/null'
ALONE: Final = f"""import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) and sys.exit("orphans cannot be adopted here")
child = os.spawnve(os.P_NOWAIT, sys.argv[1], sys.argv[1:], {{"PATH": {SANE_PATH!r}}})
while (ended := os.wait())[0] != child: pass
sys.exit(os.waitstatus_to_exitcode(ended[1]) & 255)"""
"""On this machine a check gets nothing of our environment, and its orphans nobody else's parent."""


class InspectShell:
    """Runs programs in an Inspect sandbox. See `guest.shells.Shell`."""

    def __init__(self, environment: Any) -> None:
        """Take a sandbox (`inspect_ai.util.SandboxEnvironment`), in its event loop."""
        self._environment = environment
        self.provider = type(environment).__name__.removesuffix("SandboxEnvironment").lower()
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()
        queues = "concurrency" in inspect.signature(environment.exec).parameters
        self._options = {"timeout_retry": False} | ({"concurrency": False} if queues else {})

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._context.copy().run(asyncio.run_coroutine_threadsafe, call, self._loop).result()

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", bound_s: float = ASK_S
    ) -> Iterator[bytes]:
        """Run a program; raises where its answer did not arrive whole, too."""
        out = f"/tmp/orchestrator-{secrets.token_hex(8)}"  # noqa: S108 - in there
        told, _, text = self._exec(bound_s, ANSWER, out, *argv, stdin=stdin).partition("\n")
        size = int(told)
        for start in range(0, size, PIECE):
            piece = base64.b64decode(text) if size <= INLINE else self._cut(out, start // PIECE)
            if len(piece) != min(PIECE, size - start):
                raise GuestError(f"{len(piece)} bytes arrived at {start} of an answer of {size}")
            yield piece
        if size > INLINE:
            self._exec(ASK_S, 'rm "$1" "$1.cut"', out)

    def _cut(self, out: str, number: int) -> bytes:
        self._exec(ASK_S, CUT, out, str(number))
        return bytes(self._wait(self._environment.read_file(f"{out}.cut", text=False)))

    def _exec(self, bound_s: float, script: str, *words: str, stdin: bytes = b"") -> str:
        supervisor = any(word.endswith("/supervisor.sh") for word in words)
        alone = [sys.executable, "-ISc", ALONE] if supervisor and self.provider == "local" else []
        argv, late_s = [*alone, "/bin/sh", "-c", script, "sh", *words], math.ceil(bound_s + LATE_S)
        call = self._environment.exec(argv, input=stdin or None, timeout=late_s, **self._options)
        done = self._wait(call)
        if not done.success:
            raise GuestError(f"{words[1:]} ended with {done.returncode}: {done.stderr[-500:]}")
        return str(done.stdout)

    def ask(self, script: str, *words: str) -> str:
        """Run a script that answers in text."""
        return b"".join(self.run(["/bin/sh", "-c", script, "sh", *words])).decode()
