"""A sandbox that can run a program and nothing else: the guest brought there, and made use of.

What a backend has to have is a `Shell`. Everything goes through it: the guest's scripts, the
workspace as a tar file in pieces, the orders, and what comes back. The sandbox is shared with
processes that are not of the run (`supervisor.sh ... shared`), and needs tar beside what the guest
needs.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from attrs import define, evolve

from .. import archive
from . import SANE_LANG, SETTLE_S, lost, request, scripts
from .answers import GuestError
from .records import Recorded, deliver_output

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..core.evidence import Entry, Manifest
    from ..core.facts import SandboxRef
    from ..ports import Intake, Order, Record, Slot, Workspace
    from .account import Account

PIECE: Final = 700 * 1024
"""Bytes that are sent at once: gateways refuse a mebibyte."""
ASK_S: Final = 120.0
"""Seconds within which a question about a tree is answered."""
SLACK_S: Final = 15.0
"""Seconds beyond its own bounds within which the guest's end is seen."""
TREE_S: Final = 3600.0
"""The same for the content of a tree, whose bound is that of its phase."""
ASKS: Final = 3
"""How often a question is asked of which the answer was lost, where asking changes nothing."""
PAUSE_S: Final = 0.2
_PLACE: Final = (
    'umask 077; mkdir -p "$1"; [ -e "$1/claim" ] ||'
    ' { cat >"$1/request.$$" && mv "$1/request.$$" "$1/request"; }'
)
_OF_TREES: Final = {"list", "hash", "send", "first", "last"}
_UNPACK: Final = 'mv "$2" "$2.$$" && exec /bin/sh "$0" "$1" "$2.$$" "$3"'
"""Whoever has the archive unpacks it: a request that comes late, or again, touches nothing."""


class Shell(Protocol):
    """Runs programs in a sandbox."""

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", bound_s: float = ASK_S
    ) -> Iterator[bytes]:
        """Run a program; give what it writes to its standard output.

        Args:
            argv: the program and its arguments; no string of them is longer than 32 KiB.
            stdin: up to `PIECE` bytes for its standard input, which then ends.
            bound_s: seconds after which nothing is waited for any more.

        Raises:
            GuestError: it did not end with status 0, or that is not known; after what it wrote.
        """


@define
class Commands:
    """The guest, each question to it a program of its own. See `Channel`."""

    shell: Shell
    base: str

    def ask(self, verb: str, *words: str, stdin: bytes = b"") -> Iterator[bytes]:
        """Run `account.sh`."""
        argv = ["/bin/sh", f"{self.base}/account.sh", verb, *words]
        return self.shell.run(argv, stdin=stdin, bound_s=TREE_S if verb in _OF_TREES else ASK_S)


@define(eq=False)
class ShellSandbox:
    """The verbs of `ports.Sandbox` but `destroy`, over a shell.

    Attributes:
        ref: which sandbox it is.
        shell: its shell.
        base: absolute path in it of a directory for the guest, outside the workspace.
        account: of its workspace; kept by the backend while the sandbox lives, to save reading.
        env: of every command, beside what its programs are given anyway and the order's own.
        keeps_tree: what is in the workspace already stays, and what is sent is laid over it.
    """

    ref: SandboxRef
    shell: Shell
    base: str
    account: Account
    env: Mapping[str, str]
    keeps_tree: bool = False

    @property
    def channel(self) -> Commands:
        """The guest."""
        return Commands(self.shell, self.base)

    @property
    def records(self) -> str:
        """Where the guest keeps its records."""
        return f"{self.base}/records"

    def install(self) -> None:
        """Bring the guest there, as often as wanted."""
        make = (
            'umask 077; mkdir -p "$1/records" "$1/home"'
            ' && cat >"$1/$2.new" && mv "$1/$2.new" "$1/$2"'
        )
        for name, path in scripts().items():
            self._do(["/bin/sh", "-c", make, "sh", self.base, name], path.read_bytes())

    def upload(self, workspace: Workspace) -> bool:
        """Send the workspace in pieces; what arrived of an attempt before is not sent again."""
        if any(self._recorded(slot).claimed for slot in ("setup", "check")):
            return False
        stored = f"{self.base}/{workspace.manifest().digest}.tar"
        have = int(self._answer("take", stored, "0"))
        offset = 0
        for piece in _pieces(chain(archive.pack(workspace, ""), [archive.END])):
            offset += len(piece)
            if offset > have:
                have = self._send(stored, have, piece[have - offset :])
        verb = "lay" if self.keeps_tree else "unpack"
        argv = [f"{self.base}/account.sh", verb, stored, self.account.root]
        self._do(["/bin/sh", "-c", _UNPACK, *argv], bound_s=TREE_S)
        return True

    def _send(self, stored: str, offset: int, piece: bytes) -> int:
        """Append a piece to a file there; give the size that it then has to have."""
        end = offset + len(piece)
        have = int(self._answer("take", stored, str(offset), stdin=piece))
        if have != end:
            raise GuestError(f"{stored}: {have} bytes arrived, where it should be {end}")
        return end

    def manifest(self) -> Manifest:
        """Have the guest account for the workspace."""
        return self.account.manifest(self.channel)

    def execute(self, order: Order) -> Record:
        """Have a supervisor run the order, or wait for the one that does."""
        recorded = self._recorded(order.slot)
        bound_s = order.latest_start_s + order.deadline_s + order.grace_s + SLACK_S
        if not recorded.claimed:
            self._order("run", order, bound_s)
            recorded = self._recorded(order.slot)
        if not recorded.ended and recorded.claimed:
            recorded = self._join(order.slot, bound_s)
        return recorded.finished(order) or lost("there is no record of its end", still=False)

    def _join(self, slot: Slot, bound_s: float) -> Recorded:
        """Wait for another one's supervisor, which may take who waits here for the command's."""
        argv = ["/bin/sh", f"{self.base}/supervisor.sh", "join", self._record(slot), "shared"]
        for asked in range(1, ASKS + 1):
            try:
                self._do(argv, bound_s=bound_s)
                break
            except GuestError:
                time.sleep(PAUSE_S)  # in which it finds nobody, and writes its record
                recorded = self._recorded(slot)
                if recorded.ended:
                    return recorded
                if asked == ASKS:
                    raise
        return self._recorded(slot)

    def settle(self, order: Order) -> Record:
        """Have the guest stop the order and see that it never starts."""
        recorded = self._recorded(order.slot)
        if recorded.finished(order) is None:
            self._order("settle", order, SETTLE_S + SLACK_S)
            recorded = self._recorded(order.slot)
        # The guest ends with another status where something of the command may be left.
        return recorded.finished(order) or lost("its supervisor left no record", still=True)

    def _order(self, verb: str, order: Order, bound_s: float) -> None:
        """Have a supervisor run or settle an order."""
        program, text = self._placing(verb, order)
        program += f' && exec /bin/sh "$0" {verb} "$1" shared'
        argv = ["/bin/sh", "-c", program, f"{self.base}/supervisor.sh", self._record(order.slot)]
        self._do(argv, text, bound_s=bound_s)

    def _placing(self, verb: str, order: Order) -> tuple[str, bytes]:
        """Give what places an order in the directory `$1`, unless it is claimed; and its input."""
        if verb == "settle":  # were it read by a supervisor that is to run it, it is too late
            order = evolve(order, start_by=order.now())
        text = request(
            order,
            workdir=self.account.root,
            env={"LANG": SANE_LANG, **self.env},
            now_s=self._clock(),
        ).encode("utf-8", "surrogateescape")
        if len(text) <= PIECE:
            return _PLACE, text
        stored, offset = f"{self.base}/{verb}.{order.slot}", 0
        self._do(["/bin/sh", "-c", 'rm -f "$1"', "sh", stored])
        for piece in _pieces([text]):
            offset = self._send(stored, offset, piece)
        return f'exec <"{stored}" && rm -f "{stored}"; {_PLACE}', b""  # not for the command to read

    def _record(self, slot: Slot) -> str:
        return f"{self.records}/{slot}"

    def _clock(self) -> float:
        listing = self.account.listing
        return (listing or self.account.look(self.channel)).clock()

    def fetch(self, entries: Iterable[Entry], slot: Slot, intake: Intake) -> None:
        """Have the guest send files and output."""
        self.account.send(self.channel, entries, intake)
        deliver_output(self.channel, self.records, slot, intake)

    def _recorded(self, slot: Slot) -> Recorded:
        return Recorded.read([self._answer("record", self.records, slot)])

    def _answer(self, verb: str, *words: str, stdin: bytes = b"") -> bytes:
        """Give the answer to a question that may be asked again."""
        for _ in range(ASKS - 1):
            with suppress(GuestError):
                return b"".join(self.channel.ask(verb, *words, stdin=stdin))
            time.sleep(PAUSE_S)
        return b"".join(self.channel.ask(verb, *words, stdin=stdin))

    def _do(self, argv: Sequence[str], stdin: bytes = b"", *, bound_s: float = ASK_S) -> None:
        self._finish(self.shell.run(argv, stdin=stdin, bound_s=bound_s))

    @staticmethod
    def _finish(answer: Iterator[bytes]) -> None:
        for _ in answer:
            pass


def _pieces(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Cut a stream into pieces of `PIECE` bytes, the last one shorter."""
    held = bytearray()
    for chunk in stream:
        held += chunk
        while len(held) >= PIECE:
            yield bytes(held[:PIECE])
            del held[:PIECE]
    if held:
        yield bytes(held)
