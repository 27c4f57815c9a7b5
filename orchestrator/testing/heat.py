"""How often each edge of the lifecycle was walked: kept in a file, and read back to be drawn.

A test suite that is green and never walked an edge has tested nothing about it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import SpecError
from ..core.table import edges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core.facts import Fact
    from ..core.states import State

    Edge = tuple[State, type[Fact]]


def unwalked(heat: Mapping[Edge, int]) -> list[str]:
    """List the edges that were never walked."""
    return [
        f"{state} --{fact.__name__}--> {target}"
        for state, fact, target in edges()
        if not heat.get((state, fact))
    ]


def write(file: str | Path, heat: Mapping[Edge, int]) -> None:
    """Write counts as JSON, every edge of the table in its order."""
    rows = {f"{state} {fact.__name__}": heat.get((state, fact), 0) for state, fact, _ in edges()}
    Path(file).write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def read(file: str | Path) -> Counter[Edge]:
    """Read counts back.

    Raises:
        SpecError: the file is not one that `write` wrote for this table.
    """
    known = {f"{state} {fact.__name__}": (state, fact) for state, fact, _ in edges()}
    expected = "a file of counts by edge, as `orchestrator verify --heat FILE` writes it"
    try:
        rows = json.loads(Path(file).read_text("utf-8"))
        heat = Counter({known[name]: int(count) for name, count in rows.items()})
    except OSError as error:
        raise SpecError(str(file), error.strerror or str(error), expected) from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SpecError(str(file), f"not one: {error}", expected) from None
    return heat
