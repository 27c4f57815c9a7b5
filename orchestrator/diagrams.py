"""Pictures of the lifecycle: Mermaid, Graphviz and SVG, drawn from the table and from nothing else.

Extract, model, render: `extract` reads the table into a `Diagram`, and each format is one function
of it. Which states are sealed, lost or final is worked out from the table; the one thing written
here by hand is where the SVG puts what the table holds (`_PLACES`, `_ROUTES`). A state without a
place is an error, and an edge without a route is drawn straight, so nothing can be left out.

The emitters are our own. `transitions` has some (`GraphMachine`), but they paint the state that a
model happens to be in, merge the edges between two states into one, and, where their engine is not
installed, write another format under the same name without a word. A picture that is compared with
the table has to be the same bytes everywhere and have one arrow for each row.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from attrs import frozen

from .core import facts
from .core.errors import OrchestratorError
from .core.states import State
from .core.table import INITIAL, TABLE, edges, final_states

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .core.table import Table

    Row = tuple[State, type[facts.Fact]]
    Heat = Mapping[Row, int]
    Point = tuple[int, int]
    Port = tuple[str, int]

README_BEGIN: Final = "<!-- lifecycle:begin -->"
README_END: Final = "<!-- lifecycle:end -->"


class DiagramError(OrchestratorError):
    """A diagram cannot be drawn without leaving something out, or has no place to go."""


class Group(StrEnum):
    """What a state says about the evidence: the value is the legend."""

    OPEN = "evidence not yet sealed"
    SEALED = "evidence sealed"
    LOST = "will not be scored"


@frozen
class Edge:
    """One row of the table.

    Attributes:
        source: the state it leaves.
        fact: the fact that it takes.
        target: the state it leads to.
        count: how often it was walked; None where nobody counted.
    """

    source: State
    fact: type[facts.Fact]
    target: State
    count: int | None

    @property
    def label(self) -> str:
        """The name of the fact, and how often the edge was walked if that was counted."""
        counted = "" if self.count is None else f" ({self.count or 'never'})"
        return f"{self.fact.__name__}{counted}"


@frozen
class Diagram:
    """All that is drawn. Everything is in the table's order, so that the text is always the same.

    Attributes:
        groups: every state, with what it says about the evidence.
        edges: every row of the table.
        final: the states that nothing leaves.
        most: how often the edge that was walked most was walked.
    """

    groups: Mapping[State, Group]
    edges: tuple[Edge, ...]
    final: frozenset[State]
    most: int


def extract(table: Table = TABLE, heat: Heat | None = None) -> Diagram:
    """Read the table, and the counts if there are any, into what is drawn.

    Raises:
        DiagramError: something was counted that the table does not have.
    """
    rows = tuple(edges(table))
    counts = dict(heat or {})
    strange = counts.keys() - {(source, fact) for source, fact, _ in rows}
    if strange:
        names = ", ".join(sorted(f"{fact.__name__} in {source}" for source, fact in strange))
        raise DiagramError(f"counted, but not in the table: {names}")
    walked = [None if heat is None else counts.get(row[:2], 0) for row in rows]
    return Diagram(
        groups=_groups(table),
        edges=tuple(Edge(*row, count) for row, count in zip(rows, walked, strict=True)),
        final=final_states(table),
        most=max([1, *counts.values()]),
    )


def _groups(table: Table) -> dict[State, Group]:
    """Sort the states: SCORED is out of reach (lost), `Downloaded` is behind them (sealed)."""
    unsealed = _reachable(table, INITIAL, without=facts.Downloaded)

    def group(state: State) -> Group:
        if State.SCORED not in _reachable(table, state):
            return Group.LOST
        return Group.OPEN if state in unsealed else Group.SEALED

    return {state: group(state) for state in table}


def _reachable(table: Table, start: State, without: type[facts.Fact] | None = None) -> set[State]:
    seen: set[State] = set()
    pending = [start]
    while pending:
        state = pending.pop()
        if state not in seen:
            seen.add(state)
            pending += [target for fact, target in table[state].items() if fact is not without]
    return seen


_INK: Final = {  # fill, line, text
    Group.OPEN: ("#eef2f7", "#64748b", "#1e293b"),
    Group.SEALED: ("#dcf5e5", "#15803d", "#14532d"),
    Group.LOST: ("#fdeedd", "#c2570c", "#7c2d12"),
}
_COLD: Final = "#dc2626"
_WARM: Final = ("#5b8edb", "#437ccb", "#2f6cc4", "#1d4f9e", "#12346b")


def _stroke(diagram: Diagram, edge: Edge) -> tuple[str, float]:
    """Give the colour and width of an edge: where it leads, or how often it was walked."""
    if edge.count is None:
        return _INK[diagram.groups[edge.target]][1], 1.6
    if not edge.count:
        return _COLD, 1.6
    share = edge.count.bit_length() / diagram.most.bit_length()
    return _WARM[round(share * (len(_WARM) - 1))], round(1.6 + 2.4 * share, 1)


def mermaid(table: Table = TABLE, heat: Heat | None = None) -> str:
    """Give the lifecycle as a Mermaid state diagram.

    Mermaid cannot colour the edges of a state diagram: their labels bear the counts.
    """
    diagram = extract(table, heat)
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL}"]
    lines += [f"    {edge.source} --> {edge.target} : {edge.label}" for edge in diagram.edges]
    lines += [f"    {state} --> [*]" for state in diagram.groups if state in diagram.final]
    for group, (fill, line, text) in _INK.items():
        members = ", ".join(state for state, of in diagram.groups.items() if of is group)
        if members:
            name = group.name.lower()
            lines.append(f"    classDef {name} fill:{fill},stroke:{line},color:{text}")
            lines.append(f"    class {members} {name}")
    return "\n".join(lines) + "\n"


def dot(table: Table = TABLE, heat: Heat | None = None) -> str:
    """Give the lifecycle as Graphviz text."""
    diagram = extract(table, heat)
    lines = [
        "digraph lifecycle {",
        '    graph [rankdir=TB, nodesep=0.6, ranksep=0.5, bgcolor="white"];',
        '    node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=12];',
        '    edge [fontname="Helvetica", fontsize=11];',
        '    start [shape=point, width=0.15, label=""];',
        f"    start -> {INITIAL};",
    ]
    for state, group in diagram.groups.items():
        fill, line, text = _INK[group]
        rings = 2 if state in diagram.final else 1
        colours = f'fillcolor="{fill}", color="{line}", fontcolor="{text}"'
        lines.append(f"    {state} [{colours}, peripheries={rings}];")
    for edge in diagram.edges:
        colour, width = _stroke(diagram, edge)
        look = f'color="{colour}", fontcolor="{colour}", penwidth={width}'
        look += ", style=dashed" if edge.count == 0 else ""
        lines.append(f'    {edge.source} -> {edge.target} [label="{edge.label}", {look}];')
    return "\n".join([*lines, "}"]) + "\n"


# The SVG's layout. Down the left is the run in which nothing goes wrong, down the right the one
# that will not be scored, and no two edges cross.

_BOX: Final = (168, 44)
_PITCH: Final = (328, 86)
_FIRST: Final = (166, 164)
_CORNER, _HEAD, _LANE = 10, 9, 44

_PLACES: Final[Mapping[State, Point]] = {  # column, row
    State.NEW: (0, 0),
    State.UPLOADED: (0, 1),
    State.CLIENT_TIMED_OUT: (1, 2),
    State.BROKEN: (2, 2),
    State.CHECKED: (0, 3),
    State.SALVAGED: (2, 3),
    State.DOWNLOADED: (0, 4),
    State.CLEANED_UP: (0, 5),
    State.CLEANUP_FAILED: (1, 5),
    State.SCORED: (0, 6),
    State.UNRESOLVED: (2, 7),
}
_SIDES: Final = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
_ROUTES: Final[Mapping[Row, tuple[Port, Port]]] = {  # a side, and how far off its middle
    (State.NEW, facts.UploadFailed): (("right", 0), ("top", 42)),
    (State.UPLOADED, facts.ClientTimedOut): (("right", 11), ("top", 0)),
    (State.UPLOADED, facts.CheckLost): (("right", -11), ("top", -42)),
    (State.CLIENT_TIMED_OUT, facts.Checked): (("bottom", 0), ("right", -11)),
    (State.CHECKED, facts.DownloadFailed): (("right", 11), ("left", 11)),
    (State.BROKEN, facts.Downloaded): (("bottom", -42), ("top", -42)),
    (State.BROKEN, facts.DownloadFailed): (("bottom", 42), ("top", 42)),
    (State.DOWNLOADED, facts.CleanupFailed): (("right", 0), ("top", 0)),
    (State.SALVAGED, facts.CleanedUp): (("bottom", -42), ("top", -42)),
    (State.SALVAGED, facts.CleanupFailed): (("bottom", 42), ("top", 42)),
    (State.CLEANED_UP, facts.ScoringFailed): (("left", 0), ("left", 11)),
    (State.CLEANUP_FAILED, facts.Scored): (("bottom", -42), ("right", 0)),
    (State.CLEANUP_FAILED, facts.ScoringFailed): (("bottom", 42), ("left", -11)),
}


def _centre(state: State) -> Point:
    if state not in _PLACES:
        raise DiagramError(f"the SVG has no place for state {state}: give it one in _PLACES")
    column, row = _PLACES[state]
    return _FIRST[0] + column * _PITCH[0], _FIRST[1] + row * _PITCH[1]


def _dock(state: State, port: Port) -> Point:
    """Give the point on a state's border where an edge is tied."""
    (x, y), (side, off) = _centre(state), port
    dx, dy = _SIDES[side]
    return x + dx * _BOX[0] // 2 + off * abs(dy), y + dy * _BOX[1] // 2 + off * abs(dx)


def _straight(source: State, target: State) -> tuple[Port, Port]:
    """Give the ports of an edge that has no route."""
    (x1, y1), (x2, y2) = _centre(source), _centre(target)
    if source is target:
        return ("right", -11), ("right", 11)
    if x1 == x2:
        return (("bottom", 0), ("top", 0)) if y1 < y2 else (("top", 0), ("bottom", 0))
    return (("right", 0), ("left", 0)) if x1 < x2 else (("left", 0), ("right", 0))


def _points(edge: Edge) -> list[Point]:
    """Give the corners of an edge from border to border."""
    straight = _straight(edge.source, edge.target)
    leave, arrive = _ROUTES.get((edge.source, edge.fact), straight)
    (x1, y1), (x2, y2) = start, end = _dock(edge.source, leave), _dock(edge.target, arrive)
    flat = [bool(_SIDES[side][0]) for side, _ in (leave, arrive)]
    if all(flat) and leave[0] == arrive[0]:
        lane = min(x1, x2) - _LANE if leave[0] == "left" else max(x1, x2) + _LANE
        return [start, (lane, y1), (lane, y2), end]
    if flat[0] == flat[1]:
        return [start, end]
    return [start, (x2, y1) if flat[0] else (x1, y2), end]


def _toward(start: Point, end: Point, distance: float) -> tuple[float, float]:
    """Give the point that is some way from `start` towards `end`."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    part = distance / ((dx * dx + dy * dy) ** 0.5 or 1.0)
    return start[0] + dx * part, start[1] + dy * part


def _text(*numbers: float) -> str:
    return " ".join(f"{round(number, 1):g}" for number in numbers)


def _line(points: list[Point]) -> str:
    """Give the path of an edge, with round corners, up to its arrow head."""
    path = [f"M {_text(*points[0])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        into, out = _toward(corner, before, _CORNER), _toward(corner, after, _CORNER)
        path.append(f"L {_text(*into)} Q {_text(*corner, *out)}")
    return " ".join([*path, f"L {_text(*_toward(points[-1], points[-2], _HEAD - 1))}"])


def _head(points: list[Point]) -> str:
    tip, neck = points[-1], _toward(points[-1], points[-2], _HEAD)
    dx, dy = (tip[0] - neck[0]) / 2, (tip[1] - neck[1]) / 2
    return f"M {_text(*tip)} L {_text(neck[0] - dy, neck[1] + dx, neck[0] + dy, neck[1] - dx)} Z"


def _label(points: list[Point]) -> str:
    """Say where an edge's label goes: over or under a level stretch, else beside the edge.

    Stretches that share a row or a column are told apart by their side of its middle.
    """
    (x1, y1), (x2, y2) = max(pairwise(points), key=lambda ends: abs(ends[0][0] - ends[1][0]))
    if x1 != x2:
        gaps = (_FIRST[0] + _PITCH[0] * (2 * column + 1) // 2 for column in range(len(_PLACES)))
        x = next((gap for gap in gaps if min(x1, x2) < gap < max(x1, x2)), (x1 + x2) // 2)
        y = (y1 + y2) // 2
        under = 0 < (y - _FIRST[1]) % _PITCH[1] < _PITCH[1] // 2
        return f'x="{x}" y="{y + (16 if under else -7)}" text-anchor="middle"'
    left = (x1 - _FIRST[0]) % _PITCH[0] > _PITCH[0] // 2
    where = f'x="{x1 - 9}" text-anchor="end"' if left else f'x="{x1 + 9}" text-anchor="start"'
    return f'{where} y="{(y1 + y2) // 2 + 4}"'


_FRAME: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 860" width="1040" height="860" role="img"
 font-family="system-ui, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="13" fill="#1e293b">
<title>The lifecycle of a run</title>
<rect x="1" y="1" width="1038" height="858" rx="14" fill="#ffffff" stroke="#cbd5e1"/>
<text x="40" y="52" font-size="22" font-weight="700">The lifecycle of a run</text>
<text x="40" y="76" fill="#64748b">Boxes are states, arrows are facts: {size}.</text>
<circle cx="{x}" cy="{y}" r="6" fill="#64748b"/>
<path d="{line}" stroke="#64748b" stroke-width="1.6"/>
<path d="{head}" fill="#64748b"/>
{body}
</svg>
"""


def svg(table: Table = TABLE, heat: Heat | None = None) -> str:
    """Give the lifecycle as an SVG that needs nothing else: no fonts, no scripts, no other files.

    Raises:
        DiagramError: the table has a state that the layout has no place for.
    """
    diagram = extract(table, heat)
    x, y = _dock(INITIAL, ("top", 0))
    entry = [(x, y - 34), (x, y)]
    body = [_svg_edge(edge, *_stroke(diagram, edge)) for edge in diagram.edges]
    body += [_svg_state(*of, final=of[0] in diagram.final) for of in diagram.groups.items()]
    body += _svg_legend(heated=heat is not None)
    size = f"{len(diagram.groups)} states, {len(diagram.edges)} rows of the table"
    where = {"x": x, "y": y - 34, "line": _line(entry), "head": _head(entry)}
    return _FRAME.format(**where, size=size, body="\n".join(body))


def _svg_edge(edge: Edge, colour: str, width: float) -> str:
    points = _points(edge)
    dashes = ' stroke-dasharray="6 4"' if edge.count == 0 else ""
    return (
        f'<g class="edge" data-source="{edge.source}" data-fact="{edge.fact.__name__}" '
        f'data-target="{edge.target}"><title>{edge.source}: {edge.label}, then {edge.target}'
        f'</title><path d="{_line(points)}" fill="none" stroke="{colour}" '
        f'stroke-width="{width}"{dashes}/><path d="{_head(points)}" fill="{colour}"/>'
        f'<text {_label(points)} fill="{colour}">{edge.label}</text></g>'
    )


def _svg_state(state: State, group: Group, *, final: bool) -> str:
    (x, y), (width, height), (fill, line, text) = _centre(state), _BOX, _INK[group]
    box = '<rect x="{}" y="{}" width="{}" height="{}" rx="{}" fill="{}" stroke="{}"/>'
    left, top = x - width // 2, y - height // 2
    ring = box.format(left + 4, top + 4, width - 8, height - 8, 6, "none", line)
    return (
        f'<g class="state" data-state="{state}" stroke-width="1.4">'
        f"{box.format(left, top, width, height, 10, fill, line)}{ring if final else ''}"
        f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-weight="600" '
        f'fill="{text}">{state}</text></g>'
    )


def _svg_legend(*, heated: bool) -> list[str]:
    """Say what the colours and outlines mean, along the foot."""
    box = '<rect y="-8" width="26" height="16" rx="5" fill="{}" stroke="{}"/>'
    ring = '<rect x="3" y="-5" width="20" height="10" rx="3" fill="none" stroke="{}"/>'
    walk = '<path d="M 0 0 H 26" stroke="{}" stroke-width="{}" {}/>'
    grey = _INK[Group.OPEN][1]
    keys = [(box.format(fill, line), group.value) for group, (fill, line, _) in _INK.items()]
    keys.append((box.format("none", grey) + ring.format(grey), "final"))
    if heated:
        keys.append((walk.format(_WARM[-1], 4, ""), "walked (more is darker)"))
        keys.append((walk.format(_COLD, 1.6, 'stroke-dasharray="6 4"'), "never walked"))
    lines, x = [], 40
    for sign, words in keys:
        lines.append(
            f'<g class="key" transform="translate({x} 826)">{sign}'
            f'<text x="34" y="4" font-size="12">{words}</text></g>'
        )
        x += 68 + 11 * len(words) // 2
    return lines


def embed(readme_text: str) -> str:
    """Give the text of a README with the lifecycle, as it is now, between its two markers.

    Raises:
        DiagramError: the markers are not there, once each and in order.
    """
    before, begin, rest = readme_text.partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not (begin and end) or README_BEGIN in rest or README_END in before + after:
        raise DiagramError(f"the README needs {README_BEGIN} and then {README_END}, once each")
    return f"{before}{begin}\n```mermaid\n{mermaid()}```\n{end}{after}"
