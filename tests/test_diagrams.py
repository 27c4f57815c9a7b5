"""The pictures say what the table says, and the files that are committed say it too."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from orchestrator import diagrams
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.facts import CheckLost, Downloaded, DownloadFailed, Scored, UploadFailed
from orchestrator.core.machine import _ENGINE
from orchestrator.core.states import State
from orchestrator.core.table import INITIAL, TABLE, edges, final_states
from orchestrator.diagrams import README_BEGIN, README_END, DiagramError, Group, embed, extract

ROOT = Path(__file__).parent.parent
FORMATS = {"mmd": diagrams.mermaid, "dot": diagrams.dot, "svg": diagrams.svg}
SVG = "{http://www.w3.org/2000/svg}"

WANTED = Counter((state.value, fact.__name__, target.value) for state, fact, target in edges())
HEAT = {(state, fact): 10**number for number, (state, fact, _) in enumerate(edges())}
HEAT[State.UPLOADED, CheckLost] = 0
del HEAT[State.NEW, UploadFailed]
UNWALKED = {("UPLOADED", "CheckLost"), ("NEW", "UploadFailed")}

MORE = {**TABLE, State.CHECKED: {**TABLE[State.CHECKED], CheckLost: State.BROKEN}}
LESS = {**TABLE, State.BROKEN: {DownloadFailed: State.SALVAGED}}


def mermaid_edges(text):
    return Counter(
        (source, fact, target)
        for source, target, fact in re.findall(r"(?m)^ +(\w+) --> (\w+) : (\w+)", text)
    )


def dot_edges(text):
    return Counter(
        (source, fact, target)
        for source, target, fact in re.findall(r'(?m)^ +(\w+) -> (\w+) \[label="(\w+)', text)
    )


def groups(text, name):
    return [group for group in ET.fromstring(text).iter(f"{SVG}g") if group.get("class") == name]


def svg_edges(text):
    """Give the edges of an SVG: each has to have one line, one head and one label of its own."""
    found = Counter()
    for group in groups(text, "edge"):
        assert len(group.findall(f"{SVG}path")) == 2
        (label,) = group.findall(f"{SVG}text")
        assert label.text.split()[0] == group.get("data-fact")
        found[group.get("data-source"), group.get("data-fact"), group.get("data-target")] += 1
    return found


PARSERS = {"mmd": mermaid_edges, "dot": dot_edges, "svg": svg_edges}
each_format = pytest.mark.parametrize("ending", FORMATS)


@each_format
def test_the_committed_file_is_what_the_table_gives(ending):
    committed = (ROOT / "diagrams" / f"lifecycle.{ending}").read_text("utf-8")
    assert committed == FORMATS[ending]()


def test_the_readme_shows_the_lifecycle_as_it_is():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert embed(readme) == readme


@each_format
def test_every_row_of_the_table_is_drawn_once_and_nothing_else(ending):
    assert PARSERS[ending](FORMATS[ending]()) == WANTED


@each_format
def test_what_is_drawn_is_what_the_engine_runs(ending):
    engine = Counter(
        (transition.source, event.name, transition.dest)
        for event in _ENGINE.events.values()
        for transitions in event.transitions.values()
        for transition in transitions
    )
    assert PARSERS[ending](FORMATS[ending]()) == engine


@each_format
def test_counting_changes_no_edge(ending):
    assert PARSERS[ending](FORMATS[ending](heat=HEAT)) == WANTED


@each_format
@pytest.mark.parametrize("table", [MORE, LESS])
def test_another_table_is_another_picture(ending, table):
    text = FORMATS[ending](table)
    assert text != FORMATS[ending]()
    assert PARSERS[ending](text) == Counter(
        (state.value, fact.__name__, target.value) for state, fact, target in edges(table)
    )


def test_the_beginning_and_the_ends_are_marked_in_every_format():
    final = {state.value for state in final_states()}
    mermaid, dot, svg = (draw() for draw in FORMATS.values())
    assert re.findall(r"\[\*\] --> (\w+)", mermaid) == [INITIAL]
    assert set(re.findall(r"(\w+) --> \[\*\]", mermaid)) == final
    assert re.findall(r"start -> (\w+)", dot) == [INITIAL]
    assert set(re.findall(r"(?m)^ +(\w+) \[.*peripheries=2", dot)) == final
    ringed = [box for box in groups(svg, "state") if len(box.findall(f"{SVG}rect")) == 2]
    assert {box.get("data-state") for box in ringed} == final
    assert len(ET.fromstring(svg).findall(f"{SVG}circle")) == 1


def test_sealed_and_lost_states_are_told_apart_and_found_in_the_table():
    found = extract().groups
    assert {state for state in found if found[state] is Group.SEALED} == {
        State.DOWNLOADED,
        State.CLEANED_UP,
        State.CLEANUP_FAILED,
        State.SCORED,
    }
    assert {state for state in found if found[state] is Group.LOST} == {
        State.BROKEN,
        State.SALVAGED,
        State.UNRESOLVED,
    }
    leaky = {**TABLE, State.BROKEN: {Downloaded: State.SALVAGED, DownloadFailed: State.CLEANED_UP}}
    assert extract(leaky).groups[State.BROKEN] is Group.OPEN
    assert extract(leaky).groups[State.CLEANED_UP] is Group.OPEN


def test_unwalked_edges_are_marked_in_mermaid():
    text = diagrams.mermaid(heat=HEAT)
    marked = re.findall(r"(?m)^ +(\w+) --> \w+ : (\w+) \(never\)$", text)
    assert set(marked) == UNWALKED
    assert "never" not in diagrams.mermaid()


def test_unwalked_edges_are_dashed_and_red_in_graphviz():
    text = diagrams.dot(heat=HEAT)
    marked = re.findall(r'(?m)^ +(\w+) -> \w+ \[label="(\w+) \(never\)".*style=dashed\]', text)
    assert set(marked) == UNWALKED
    assert text.count("dashed") == text.count(f'fontcolor="{diagrams._COLD}"') == len(UNWALKED)
    assert "dashed" not in diagrams.dot()


def test_unwalked_edges_are_dashed_and_red_in_the_svg():
    for group in groups(diagrams.svg(heat=HEAT), "edge"):
        line = group.find(f"{SVG}path")
        walked = (group.get("data-source"), group.get("data-fact")) not in UNWALKED
        assert (line.get("stroke-dasharray") is None) == walked
        assert (line.get("stroke") != diagrams._COLD) == walked
        assert ("(never)" not in group.find(f"{SVG}text").text) == walked
    assert "dash" not in diagrams.svg()


def test_edges_walked_more_are_drawn_heavier():
    svg = diagrams.svg(heat=HEAT)
    widths = [
        float(group.find(f"{SVG}path").get("stroke-width"))
        for group in groups(svg, "edge")
        if (group.get("data-source"), group.get("data-fact")) not in UNWALKED
    ]
    assert widths == sorted(widths)
    assert len(set(widths)) == len(widths)


def test_no_walks_at_all_leave_every_edge_unwalked():
    assert diagrams.mermaid(heat={}).count("(never)") == WANTED.total()


@each_format
def test_a_count_for_an_edge_that_is_not_there_is_refused(ending):
    with pytest.raises(DiagramError, match="CheckLost in SCORED"):
        FORMATS[ending](heat={(State.SCORED, CheckLost): 1})


def test_a_state_without_a_place_is_refused_by_name(monkeypatch):
    places = {state: place for state, place in diagrams._PLACES.items() if state != "BROKEN"}
    monkeypatch.setattr(diagrams, "_PLACES", places)
    with pytest.raises(DiagramError, match="no place for state BROKEN"):
        diagrams.svg()


def test_the_layout_has_nothing_that_the_table_does_not_have():
    assert diagrams._PLACES.keys() == TABLE.keys()
    assert len(set(diagrams._PLACES.values())) == len(TABLE)
    assert diagrams._ROUTES.keys() <= {(state, fact) for state, fact, _ in edges()}


class Box:
    """A rectangle, with room for `slack` around it."""

    def __init__(self, x, y, width, height, slack=0.0):
        self.left, self.right = x - slack, x + width + slack
        self.top, self.bottom = y - slack, y + height + slack

    def meets(self, other):
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def numbers(element, *names):
    return [float(element.get(name)) for name in names]


def state_boxes(svg):
    return {
        group.get("data-state"): Box(
            *numbers(group.find(f"{SVG}rect"), "x", "y", "width", "height")
        )
        for group in groups(svg, "state")
    }


def label_box(group):
    """Give the room that a label takes in a wide font."""
    text = group.find(f"{SVG}text")
    x, y = numbers(text, "x", "y")
    width = 7.2 * len(text.text)
    left = {"start": x, "middle": x - width / 2, "end": x - width}[text.get("text-anchor")]
    return Box(left, y - 11, width, 14)


def stretches(group):
    """Give the straight pieces of an edge as thin boxes, and its two ends."""
    line, head = (path.get("d") for path in group.findall(f"{SVG}path"))
    points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", line)]
    tip = tuple(map(float, re.match(r"M ([\d.]+) ([\d.]+)", head).groups()))
    points.append(tip)
    boxes = [
        Box(min(x1, x2), min(y1, y2), abs(x1 - x2), abs(y1 - y2), slack=0.5)
        for (x1, y1), (x2, y2) in pairwise(points)
    ]
    return boxes, points[0], tip


def on_border(box, point):
    x, y = point
    inside = box.left <= x <= box.right and box.top <= y <= box.bottom
    return inside and (x in {box.left, box.right} or y in {box.top, box.bottom})


heats = pytest.mark.parametrize("heat", [None, {}, dict.fromkeys(HEAT, 9999)])


@heats
def test_every_arrow_goes_from_the_border_of_its_state_to_the_border_of_the_next(heat):
    svg = diagrams.svg(heat=heat)
    boxes = state_boxes(svg)
    for group in groups(svg, "edge"):
        _, start, tip = stretches(group)
        assert on_border(boxes[group.get("data-source")], start)
        assert on_border(boxes[group.get("data-target")], tip)


@heats
def test_no_label_touches_a_box_an_edge_or_another_label(heat):
    svg = diagrams.svg(heat=heat)
    frame = Box(0, 0, *numbers(ET.fromstring(svg), "width", "height"))
    drawn = groups(svg, "edge")
    labels = [label_box(group) for group in drawn]
    lines = [box for group in drawn for box in stretches(group)[0]]
    assert not any(one.meets(other) for one, other in combinations(labels, 2))
    for label in labels:
        assert not any(label.meets(box) for box in state_boxes(svg).values())
        assert not any(label.meets(line) for line in lines)
        assert label.left > frame.left
        assert label.right < frame.right


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (State.NEW, State.SCORED),
        (State.CHECKED, State.UPLOADED),
        (State.NEW, State.UNRESOLVED),
        (State.BROKEN, State.NEW),
        (State.CHECKED, State.CHECKED),
    ],
)
def test_an_edge_without_a_route_is_drawn_all_the_same(source, target):
    svg = diagrams.svg({**TABLE, source: {**TABLE[source], Scored: target}})
    assert svg_edges(svg) == WANTED + Counter([(source.value, "Scored", target.value)])
    (drawn,) = (
        group
        for group in groups(svg, "edge")
        if (group.get("data-source"), group.get("data-fact")) == (source, "Scored")
    )
    _, start, tip = stretches(drawn)
    assert on_border(state_boxes(svg)[source], start)
    assert on_border(state_boxes(svg)[target], tip)
    assert start != tip


def test_no_edge_crosses_another_or_runs_through_a_box():
    svg = diagrams.svg()
    drawn = groups(svg, "edge")
    for one, other in combinations(drawn, 2):
        assert not any(a.meets(b) for a in stretches(one)[0] for b in stretches(other)[0])
    for group in drawn:
        ends = {group.get("data-source"), group.get("data-target")}
        for state, box in state_boxes(svg).items():
            if state not in ends:
                assert not any(piece.meets(box) for piece in stretches(group)[0])


def test_the_svg_needs_nothing_from_elsewhere():
    svg = diagrams.svg(heat=HEAT)
    assert not re.search(r"<script|<style|<image|<use|href|url\(|@import|<!ENTITY", svg)
    assert svg.count("http") == 1  # the name of the SVG namespace
    assert svg.isascii()


def test_the_text_does_not_depend_on_the_hash_seed():
    program = (
        "from orchestrator import diagrams as d\n"
        "from orchestrator.core.table import edges\n"
        "heat = {(s, f): n for n, (s, f, _) in enumerate(edges())}\n"
        "draw = (d.mermaid, d.dot, d.svg)\n"
        "print(''.join(one() + one(heat=heat) for one in draw), end='')\n"
    )
    heat = {(state, fact): number for number, (state, fact, _) in enumerate(edges())}
    here = "".join(draw() + draw(heat=heat) for draw in FORMATS.values())
    for seed in ("0", "1", "4242"):
        there = subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
        ).stdout
        assert hashlib.sha256(there).digest() == hashlib.sha256(here.encode()).digest()


def test_embed_replaces_what_is_between_the_markers_and_nothing_else():
    text = embed(f"before\n{README_BEGIN}\nold\n{README_END}\nafter\n")
    assert text == (
        f"before\n{README_BEGIN}\n```mermaid\n{diagrams.mermaid()}```\n{README_END}\nafter\n"
    )
    assert embed(text) == text


@pytest.mark.parametrize(
    "readme",
    [
        "",
        README_BEGIN,
        README_END,
        f"{README_END}\n{README_BEGIN}",
        f"{README_BEGIN}{README_BEGIN}{README_END}",
        f"{README_BEGIN}{README_END}{README_END}",
        f"{README_END}{README_BEGIN}{README_END}",
        f"{README_BEGIN}{README_END}{README_BEGIN}{README_END}",
    ],
)
def test_embed_refuses_a_readme_without_its_two_markers(readme):
    with pytest.raises(DiagramError, match="once each"):
        embed(readme)


def test_a_diagram_error_is_one_of_this_library():
    assert issubclass(DiagramError, OrchestratorError)
