"""What has happened to every run, on disk, in order, for good.

One SQLite file in WAL mode. An entry is an intent (the command about to be performed), a fact (what
came of it) or an owner (the runner that drives the run from there on); entries are only ever added,
numbered from 1 within their run, and `PRIMARY KEY (run_id, seq)` makes the file itself refuse a
second writer of the same run. A fact and the intent that follows from it are one transaction, and
it is on disk before the command is performed (`synchronous=FULL`). The state of a run is nowhere:
it is the fold of its facts. Each entry has a digest of itself and of the entry before it, so that
damage is found and never folded. That the sandbox of a run that is over was swept is recorded, too,
and changes nothing of its lifecycle.

Who may drive a run is settled by a lock file for each live runner, held by the kernel for as long
as the process lives: no process id is compared, so none can be reused.

A file that is not a journal, is damaged, or is of another version is refused before
anything is opened for writing, and stays byte for byte as it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, frozen

from .codec import FACTS, decode, encode
from .core.errors import JournalConflictError, JournalError, OrchestratorError
from .core.machine import Command, Step, begin, replay
from .core.spec import EvalSpec
from .journalfile import alone, connect, create, inspect
from .ports import RunRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .core.facts import Fact


T = TypeVar("T")


@frozen(kw_only=True)
class JournalEntry:
    """One entry of a run.

    Attributes:
        seq: from 1, without gaps.
        kind: `intent`, `fact`, `owner` or `swept`.
        name: of the command, the fact, or the runner.
        at: seconds since the epoch, for display.
        fact: the fact, None for other kinds.
    """

    seq: int
    kind: str
    name: str
    at: float
    fact: Fact | None


@frozen
class _Last:
    """The last entry of a run that is driven here: what the next one follows."""

    seq: int
    digest: str


class Journal:
    """The journal at a path. Safe to share among threads, and among processes by its path."""

    def __init__(self, path: str | Path) -> None:
        """Open the journal, or make a new one where there is no file.

        Raises:
            JournalError: the file is damaged, foreign or newer. It is left as it was.
        """
        self.path = Path(path).absolute()
        self._lock = threading.Lock()
        self._driven: dict[str, _Last] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with alone(self.path):
                if not self.path.exists():
                    create(self.path)
                inspect(self.path)
                self._connection = connect(self.path)
        except OSError as error:
            raise JournalError(f"journal {self.path}: {error.strerror}") from error
        except sqlite3.Error as error:
            raise JournalError(f"journal {self.path}: {error}") from error
        self._runners = self.path.parent / "runners"
        self.owner = ""
        self._owner_lock: int | None = None

    def close(self) -> None:
        """Close the file and let go of the runs that this process drives."""
        with self._lock:
            self._connection.close()
            self._driven.clear()
            if self._owner_lock is not None:
                with suppress(FileNotFoundError):
                    (self._runners / self.owner).unlink()
                os.close(self._owner_lock)
                self._owner_lock = None

    # --- writing ----------------------------------------------------------------------------------

    def begin(
        self,
        run_id: str,
        spec: EvalSpec,
        *,
        backend: str,
        isolation: str,
        retry_of: str | None = None,
    ) -> tuple[RunRecord, Step]:
        """Begin a run: its record, its owner, and the intent to upload, in one transaction.

        Raises:
            JournalConflictError: there is a run of that name.
            JournalError: it could not be written.
        """
        record = RunRecord(
            run_id=run_id,
            spec=spec,
            backend=backend,
            isolation=isolation,
            nonce=secrets.token_hex(16),
            retry_of=retry_of,
            created_at=time.time(),
        )
        step = begin(run_id, spec.retain)
        with self._transaction(run_id) as connection:
            row = (
                run_id,
                spec.name,
                backend,
                isolation,
                encode(spec),
                spec.digest,
                record.nonce,
                retry_of,
                record.created_at,
            )
            digest = _digest(row)
            connection.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, digest)
            )
            self._driven[run_id] = _Last(0, digest)
            self._add(run_id, "owner", self._own(), "{}")
            self._add_intent(run_id, step.command)
        return record, step

    def take_over(self, run_id: str) -> None:
        """Become the owner of a run whose runner is gone.

        Raises:
            JournalConflictError: its runner is alive, or another one took it over just now.
            JournalError: there is no such run, or it could not be written.
        """
        last = self._verified(run_id)[-1]
        if self.driven(run_id):
            raise JournalConflictError(f"run {run_id} is being driven by a live runner")
        with self._transaction(run_id):
            if run_id in self._driven:
                raise JournalConflictError(f"run {run_id} is being driven by this runner")
            self._driven[run_id] = _Last(last[0], last[-1])
            self._add(run_id, "owner", self._own(), "{}")

    def release(self, run_id: str) -> None:
        """Let go of a run: it is finished, or stopped where it is, to be taken up again."""
        with self._lock:
            self._driven.pop(run_id, None)

    def append(self, run_id: str, fact: Fact, command: Command | None) -> None:
        """Record a fact and the intent to perform the command that follows from it.

        Raises:
            JournalConflictError: another runner has written to the run.
            JournalError: it could not be written; neither is recorded.
        """
        with self._transaction(run_id):
            if run_id not in self._driven:
                raise JournalConflictError(f"run {run_id} is not driven by this runner")
            payload = encode(fact)
            self._add(run_id, "fact", type(fact).__name__, payload)
            self._add_intent(run_id, command)

    def swept(self, run_id: str) -> None:
        """Record that what a finished run left is gone. It has to be taken over for that.

        Raises:
            JournalConflictError: another runner has written to the run.
            JournalError: it could not be written.
        """
        with self._transaction(run_id):
            if run_id not in self._driven:
                raise JournalConflictError(f"run {run_id} is not driven by this runner")
            self._add(run_id, "swept", "Swept", "{}")

    def _add_intent(self, run_id: str, command: Command | None) -> None:
        if command is not None:
            self._add(run_id, "intent", type(command).__name__, "{}")

    def _add(self, run_id: str, kind: str, name: str, payload: str) -> None:
        last = self._driven[run_id]
        row = (run_id, last.seq + 1, kind, name, payload, time.time())
        digest = _digest((last.digest, *row))
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, digest))
        self._driven[run_id] = _Last(last.seq + 1, digest)

    @contextmanager
    def _transaction(self, run_id: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            before = self._driven.get(run_id)
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                    self._driven.pop(run_id, None)
                    if before is not None:
                        self._driven[run_id] = before
                    raise
            except sqlite3.IntegrityError as error:
                raise JournalConflictError(
                    f"journal {self.path}: another runner has written to run {run_id}; "
                    "this one stops driving it"
                ) from error
            except (sqlite3.Error, OSError) as error:
                raise JournalError(
                    f"journal {self.path}: run {run_id}: {error}; "
                    "nothing that was written is lost: make room or mend it, then resume"
                ) from error

    # --- owners -----------------------------------------------------------------------------------

    def _own(self) -> str:
        """Give this runner's name, after taking the lock that says it lives."""
        if self._owner_lock is None:
            self._runners.mkdir(exist_ok=True)
            self.owner = f"{os.getpid()}-{secrets.token_hex(4)}"
            self._owner_lock = os.open(
                self._runners / self.owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._owner_lock, fcntl.LOCK_EX)
        return self.owner

    def _alive(self, owner: str) -> bool:
        """Tell whether a runner holds its lock; a lock that nobody holds is removed."""
        place = self._runners / owner
        try:
            descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # somebody else's: nothing proves that it is dead
        try:
            # Shared among those who look: only the runner itself is in their way.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        with suppress(OSError):
            place.unlink()
        return False

    def driven(self, run_id: str) -> bool:
        """Tell whether a live runner, this one included, drives a run."""
        owner = self.owner_of(run_id)
        if owner == self.owner:
            return run_id in self._driven
        return bool(owner) and self._alive(owner)

    def owner_of(self, run_id: str) -> str:
        """Give the name of the runner that drives, or drove, a run."""
        rows = self._read(
            "SELECT name FROM entries WHERE run_id = ? AND kind = 'owner' "
            "ORDER BY seq DESC LIMIT 1",
            run_id,
        )
        return str(rows[0][0]) if rows else ""

    # --- reading ----------------------------------------------------------------------------------

    def run_ids(self) -> list[str]:
        """Give every run, oldest first."""
        return [row[0] for row in self._read("SELECT run_id FROM runs ORDER BY created_at, run_id")]

    def record(self, run_id: str) -> RunRecord:
        """Give a run as it was begun.

        Raises:
            JournalError: there is no such run, or its record cannot be read.
        """
        rows = self._read(
            "SELECT run_id, name, backend, isolation, spec, spec_digest, nonce, retry_of, "
            "created_at, digest FROM runs WHERE run_id = ?",
            run_id,
        )
        if not rows:
            raise JournalError(f"journal {self.path}: there is no run {run_id}")
        *row, digest = rows[0]
        if _digest(row) != digest:
            raise JournalError(f"journal {self.path}: the record of run {run_id} is damaged")
        _, _, backend, isolation, spec, _, nonce, retry_of, created_at = row
        return RunRecord(
            run_id=run_id,
            spec=self._structure(spec, EvalSpec, run_id),
            backend=backend,
            isolation=isolation,
            nonce=nonce,
            retry_of=retry_of,
            created_at=created_at,
        )

    def entries(self, run_id: str) -> list[JournalEntry]:
        """Give the entries of a run, in order.

        Raises:
            JournalError: there is no such run, an entry is missing, or one cannot be read.
        """
        return [
            JournalEntry(
                seq=seq, kind=kind, name=name, at=at, fact=self._fact(kind, name, payload, run_id)
            )
            for seq, kind, name, payload, at, _ in self._verified(run_id)
        ]

    def _verified(self, run_id: str) -> list[tuple[Any, ...]]:
        """Give the rows of a run, each proven to be as it was written after the one before it."""
        rows = self._read(
            "SELECT seq, kind, name, payload, at, digest FROM entries WHERE run_id = ? "
            "ORDER BY seq",
            run_id,
        )
        begun = self._read("SELECT digest FROM runs WHERE run_id = ?", run_id)
        if not rows or not begun or [row[0] for row in rows] != list(range(1, len(rows) + 1)):
            raise JournalError(f"journal {self.path}: entries of run {run_id} are missing")
        previous = begun[0][0]
        for *row, digest in rows:
            if _digest((previous, run_id, *row)) != digest:
                raise JournalError(
                    f"journal {self.path}: entry {row[0]} of run {run_id} is damaged"
                )
            previous = digest
        return rows

    def _fact(self, kind: str, name: str, payload: str, run_id: str) -> Fact | None:
        if kind != "fact":
            return None
        if name not in FACTS:
            raise JournalError(f"journal {self.path}: run {run_id}: no fact is called {name!r}")
        return self._structure(payload, FACTS[name], run_id)

    def step(self, run_id: str) -> Step:
        """Give where a run stands and what may be done next: the fold of its facts.

        Raises:
            JournalError: it cannot be read, or its facts are not a lifecycle.
        """
        entries = self.entries(run_id)
        found = [entry.fact for entry in entries if entry.fact is not None]
        try:
            step = replay(run_id, found, self.record(run_id).spec.retain)
            swept = any(entry.kind == "swept" for entry in entries)
            return evolve(step, run=evolve(step.run, sandbox_gone=True)) if swept else step
        except OrchestratorError as error:
            raise JournalError(f"journal {self.path}: {error}") from error

    def _read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._connection.execute(query, arguments).fetchall()
            except (sqlite3.Error, UnicodeError) as error:
                raise JournalError(f"journal {self.path}: {error}") from error

    def _structure(self, payload: str, kind: type[T], run_id: str) -> T:
        try:
            return decode(payload, kind)
        except ValueError as error:
            raise JournalError(f"journal {self.path}: run {run_id}: {error}") from error


def _digest(row: Iterable[object]) -> str:
    return hashlib.sha256(json.dumps(list(row), default=repr).encode()).hexdigest()
