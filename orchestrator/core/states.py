"""The states of a run. Which facts lead from one to another is `table.py`'s business alone."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a run stands, as far as its journal can prove."""

    NEW = "NEW"
    """Nothing is known to have happened; a sandbox may or may not have been created."""

    UPLOADED = "UPLOADED"
    """The workspace arrived whole in a fresh sandbox; the check may have been started."""

    CLIENT_TIMED_OUT = "CLIENT_TIMED_OUT"
    """The client gave up waiting. Nothing is known of the check until it is settled."""

    CHECKED = "CHECKED"
    """The check ended, how it ended is known, and nothing of it is running any more."""

    BROKEN = "BROKEN"
    """The outcome of the check will never be known."""

    DOWNLOADED = "DOWNLOADED"
    """The evidence is sealed: proven whole and on this machine's disk."""

    SALVAGED = "SALVAGED"
    """Whatever could be saved is saved, and none of it will be scored."""

    CLEANED_UP = "CLEANED_UP"
    """The sandbox is confirmed gone; its evidence is sealed."""

    CLEANUP_FAILED = "CLEANUP_FAILED"
    """The sandbox is not confirmed gone and keeps its id; its evidence is sealed."""

    SCORED = "SCORED"
    """The verdict is PASSED or FAILED."""

    UNRESOLVED = "UNRESOLVED"
    """The verdict could not be determined, and never will be by this run."""
