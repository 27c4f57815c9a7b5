"""The file under the journal: made whole or not at all, inspected without a trace, then opened.

Nothing but SQLite may open it. When any descriptor of a file is closed, the kernel drops every lock
that the process has on it, SQLite's too, and another process could then take away the log that this
one is writing to.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

from .core.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

APPLICATION_ID: Final = 0x6576616C  # "eval"
SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    backend TEXT NOT NULL,
    isolation TEXT NOT NULL,
    spec TEXT NOT NULL,
    spec_digest TEXT NOT NULL,
    nonce TEXT NOT NULL,
    retry_of TEXT,
    created_at REAL NOT NULL,
    digest TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE entries (
    run_id TEXT NOT NULL REFERENCES runs,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('intent', 'fact', 'owner', 'swept')),
    name TEXT NOT NULL,
    payload TEXT NOT NULL,
    at REAL NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (run_id, seq)
) WITHOUT ROWID;
CREATE TRIGGER runs_once BEFORE INSERT ON runs
    WHEN EXISTS (SELECT 1 FROM runs WHERE run_id = NEW.run_id)
    BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER entries_next BEFORE INSERT ON entries
    WHEN NEW.seq <> 1 + (SELECT coalesce(max(seq), 0) FROM entries WHERE run_id = NEW.run_id)
    BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER runs_stay BEFORE DELETE ON runs BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER entries_stay BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER runs_hold BEFORE UPDATE ON runs BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER entries_hold BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'append-only'); END;
"""
_BUSY_S: Final = 60.0


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep everybody else, threads and processes, from opening the journal meanwhile."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def create(path: Path) -> None:
    """Make an empty journal, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    connection = sqlite3.connect(draft, isolation_level=None)
    try:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
        draft.replace(path)
    finally:
        connection.close()
        for rest in ("", "-journal", "-wal", "-shm"):
            draft.with_name(draft.name + rest).unlink(missing_ok=True)


def inspect(path: Path) -> None:
    """Refuse a file that is not a whole journal of this version, without opening it for writing.

    Raises:
        JournalError: it is not one, or damaged, or another version's.
    """
    # Who has a journal open has a log beside it. Without one, nobody has, and nobody can until this
    # is done: SQLite may read the file as it is, and leaves nothing beside it.
    still = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro{still}", uri=True, timeout=_BUSY_S)
    try:
        problem = _problem(connection)
        pages, size = (
            connection.execute(f"PRAGMA {key}").fetchone()[0] for key in ("page_count", "page_size")
        )
        if not problem and still and path.stat().st_size != pages * size:
            problem = "damaged (it is not as long as it says)"
    except (sqlite3.DatabaseError, UnicodeError) as error:
        problem = f"not a journal, or damaged ({error})"
    finally:
        connection.close()
    if problem:
        raise JournalError(f"journal {path}: {problem}; left as it is")


def _problem(connection: sqlite3.Connection) -> str:
    """Say what is wrong with a file, nothing where nothing is."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        return "not a journal, or one that is damaged, or an SQLite file of another program"
    if version != SCHEMA_VERSION:
        return (
            f"written by version {version} of the journal, this is version {SCHEMA_VERSION}, "
            "use the program that wrote it"
        )
    connection.execute("PRAGMA mmap_size = 268435456")
    # Not `quick_check`: it does not see a key that is out of order, which hides all that follow it.
    (finding,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if finding != "ok":
        return f"damaged ({finding})"
    if connection.execute("PRAGMA foreign_key_check").fetchone():
        return "damaged (entries of a run that is not there)"
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(_SCHEMA)
        schema = "SELECT type, name, sql FROM sqlite_schema ORDER BY name"
        if connection.execute(schema).fetchall() != model.execute(schema).fetchall():
            return "damaged (its tables and triggers are not a journal's)"
    return ""


def connect(path: Path) -> sqlite3.Connection:
    """Open a journal that was inspected."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=_BUSY_S
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("SELECT count(*) FROM runs").fetchone()  # from here on there is a log
    except BaseException:
        connection.close()
        raise
    return connection
