"""What the tests share: a runner on this machine, and profiles for Hypothesis."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from orchestrator import Runner
from orchestrator.backends.local import LocalBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    """A local backend whose sandboxes are below the test's own directory."""
    made = LocalBackend(tmp_path / "sandboxes")
    yield made
    made.close()


@pytest.fixture
def runner(tmp_path: Path, backend: LocalBackend) -> Iterator[Runner]:
    """A runner on the local backend."""
    with Runner(backend, tmp_path / "state") as made:
        yield made
