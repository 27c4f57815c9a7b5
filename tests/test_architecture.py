"""The tree is the architecture: what imports what, what is pure, who may mint, what is public.

Read from the source, so that a rule holds for code that no test runs.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import orchestrator

ROOT = Path(orchestrator.__file__).parent
PROJECT = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
}
"""Every module by its path below the package, `core/table`, parsed."""
modules = pytest.mark.parametrize("module", SOURCES)

# --- floors ---------------------------------------------------------------------------------------

FLOORS = [
    {"core/errors", "core/states", "core/clocks", "core/verdict"},
    {"core/evidence", "core/expect"},
    {"core/facts", "core/spec"},
    {"core/table"},
    {"core/machine"},
    {"clock"},
    {"ports"},
    {"tree", "owner"},
    {"archive"},
    {"guest"},
    {"evidence", "workspace", "codec", "journalfile"},
    {"journal", "vault"},
    {"backends"},
    {"scoring", "result"},
    {"performer"},
    {"runner"},
    {"batch", "parity"},
    {"report", "diagrams", "specfile", "strays", "catalogue", "doctor"},
    {"testing"},
    {"verification"},
    {"tooling"},
    {"cli"},
    {"integrations"},
]
"""From the ground up. A module imports from floors below its own, and from nothing beside it.

`testing` is below `cli` because the command line runs the kit that `testing` ships.
"""
TOGETHER = {"guest", "testing", "backends", "integrations"}
"""Folders whose files may import each other; of the last two, those of one backend or host."""
FACES = {"__init__", "__main__", "core/__init__", "backends/__init__", "integrations/__init__"}
"""What is only a way in: it may import anything, and nothing imports it."""
NAMES_ONLY = {("ports", "evidence"): "the vault's port gives it; a name for the type checker"}
"""Upward imports that no program performs."""


def floor_of(module):
    """Give the floor of a module, by its own name or its folder's."""
    for number, floor in enumerate(FLOORS):
        if module in floor or (module.split("/")[0] in floor and not module.startswith("core/")):
            return number
    return None


def imports(module):
    """Give what of the package a module imports, and whether a program would."""
    tree = SOURCES[module]
    folder = module.split("/")[:-1]
    for node, typing_only in walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                assert not name.name.startswith("orchestrator"), f"{module}: import {name.name}"
        if not isinstance(node, ast.ImportFrom):
            continue
        assert not (node.module or "").startswith("orchestrator."), f"{module}: use relative"
        if node.level == 0:
            continue
        base = folder[: len(folder) - node.level + 1]
        base += node.module.split(".") if node.module else []
        for name in node.names:
            deep = "/".join([*base, name.name])
            known = deep if deep in SOURCES or f"{deep}/__init__" in SOURCES else "/".join(base)
            yield known, typing_only


def walk(node, typing_only=False):  # noqa: FBT002 - the recursion's own
    """Give every node, and whether it is for the type checker only."""
    for child in ast.iter_child_nodes(node):
        test = getattr(child, "test", None)
        hidden = isinstance(child, ast.If) and getattr(test, "id", "") == "TYPE_CHECKING"
        yield child, typing_only
        yield from walk(child, typing_only or hidden)


def test_every_module_has_a_floor():
    homeless = {module for module in SOURCES if floor_of(module) is None} - FACES
    assert not homeless, "give each of them a floor, in FLOORS"


@modules
def test_a_module_imports_only_from_floors_below(module):
    if module in FACES:
        return
    for imported, typing_only in imports(module):
        folder = module.split("/")[0]
        if folder in TOGETHER and imported.split("/")[0] == folder:
            continue
        if typing_only and (module, imported) in NAMES_ONLY:
            continue
        assert floor_of(imported) is not None, f"{module} imports {imported}, a way in"
        assert floor_of(imported) < floor_of(module), f"{module} imports {imported}"


def test_every_exception_to_the_floors_is_needed():
    taken = {(module, name) for module in SOURCES for name, typing in imports(module) if typing}
    assert set(NAMES_ONLY) <= taken


def test_nobody_imports_a_way_in():
    for module in SOURCES:
        for imported, _ in imports(module):
            assert imported not in FACES | {"", "core", "integrations"}, f"{module}: {imported}"


def test_no_backend_or_integration_imports_another():
    for module in SOURCES:
        folder = module.split("/")[0]
        if folder in {"backends", "integrations"} and module not in FACES:
            own = "/".join(module.split("/")[:2]).removesuffix("_evidence")
            beside = [name for name, _ in imports(module) if name.split("/")[0] == folder]
            assert all(f"{name}/".startswith((f"{own}/", f"{own}_")) for name in beside), module


def test_no_module_is_called_utils():
    vague = {"utils", "util", "helpers", "common", "misc", "base"}
    assert not [module for module in SOURCES if vague & set(module.split("/"))]


# --- purity ---------------------------------------------------------------------------------------

PURE = {
    "__future__": None,
    "attrs": None,
    "attrs.validators": None,
    "collections.abc": None,
    "copyreg": None,
    "difflib": None,
    "enum": None,
    "functools": {"partial"},
    "hashlib": None,
    "json": None,
    "pathlib": {"PurePosixPath"},
    "re": None,
    "transitions": {"Machine", "MachineError"},
    "types": None,
    "typing": None,
}
"""What the core may import of elsewhere, and which names: no clock, disk, socket or thread."""
IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "__import__", "breakpoint", "globals"}


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("core/")])
def test_the_core_is_pure(module):
    for node in ast.walk(SOURCES[module]):
        match node:
            case ast.Import():
                for name in node.names:
                    assert PURE.get(name.name, ()) is None, f"{module}: import {name.name}"
            case ast.ImportFrom(level=0):
                allowed = PURE.get(node.module, set())
                names = {name.name for name in node.names}
                assert allowed is None or names <= allowed, f"{module}: from {node.module}"
            case ast.Call(func=ast.Name(id=called)):
                assert called not in IMPURE_CALLS, f"{module}: {called}()"
            case ast.Global() | ast.AsyncFunctionDef() | ast.Await():
                pytest.fail(f"{module}: line {node.lineno}")
            case _:
                pass


def test_the_core_imports_nothing_of_the_rest():
    for module in SOURCES:
        if module.startswith("core/"):
            assert all(name.startswith("core/") for name, _ in imports(module)), module


# --- minting --------------------------------------------------------------------------------------

MINTS = {
    "CleanupPermit": {"core/machine", "testing/mutants"},
    "SealedEvidence": {"core/machine"},
    "Receipt": {"core/evidence", "vault"},
    "Receipt.for_tree": {"core/evidence", "vault", "testing/vault"},
}
"""Who may make the values that let a sandbox be destroyed and evidence be scored.

`testing/vault` is the vault's simulated twin, and compares as it does. `testing/mutants` does on
purpose what nobody may do, to see it found.
"""


def called(node):
    """Give the name that a call calls, with what it is an attribute of."""
    match node.func:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return f"{owner}.{name}"
        case ast.Attribute(attr=name):
            return name
    return ""


@pytest.mark.parametrize("value", MINTS)
def test_there_is_one_minter(value):
    makers = defaultdict(list)
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = called(node)
                if name == value or name.endswith(f".{value}"):
                    makers[module].append(node.lineno)
    assert set(makers) <= MINTS[value]
    if value != "Receipt":
        assert makers, f"nobody makes a {value}: is it still called that?"


def test_nobody_takes_another_name_for_what_only_one_may_make():
    guarded = {name.split(".")[0] for name in MINTS}
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    assert name.name not in guarded or name.asname is None, module
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
                source = getattr(node.value, "id", getattr(node.value, "attr", ""))
                assert source not in guarded, f"{module}: line {node.lineno}"


def test_nobody_builds_a_value_around_its_constructor():
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            assert getattr(node, "attr", "") != "__new__", f"{module}: line {node.lineno}"


# --- the public names -----------------------------------------------------------------------------


def test_the_public_names_are_sorted_and_exist():
    names = orchestrator.__all__
    constants = sorted(name for name in names if name.isupper())
    classes = sorted(name for name in names if name[0].isupper() and not name.isupper())
    functions = sorted(name for name in names if name[0].islower())
    assert names == [*constants, *classes, *functions]
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(orchestrator, name), name


def test_there_are_few_public_names():
    assert 24 <= len(orchestrator.__all__) <= 36


def test_every_name_that_the_package_imports_is_public():
    imported = {
        name.name
        for node in ast.walk(SOURCES["__init__"])
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert imported == set(orchestrator.__all__)


def test_every_public_name_is_documented():
    for name in orchestrator.__all__:
        value = getattr(orchestrator, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name
            # attrs writes a docstring of its own where there is none.
            assert not value.__doc__.startswith("Method generated"), name
        else:
            assert sys.modules[orchestrator.__name__].__doc__


def test_importing_the_package_is_light():
    program = """
import json, sys
import orchestrator
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout
    heavy = {"docker", "grpc", "hypothesis", "ray", "pytest", "_pytest", "rich", "typer", "click"}
    assert not heavy & set(json.loads(loaded))


@pytest.mark.parametrize("module", [name for name in SOURCES if "/" in name or name == "cli"])
def test_heavy_libraries_are_imported_only_where_they_are_used(module):
    allowed = {
        "backends/docker": {"docker", "requests", "urllib3"},
        "backends/openshell": {"grpc", "openshell", "google"},
        "cli": {"rich", "typer", "click"},
        "testing": {"hypothesis"},
        "testing/openshell_gateway": {"grpc", "openshell", "google"},
        "integrations": {"inspect_ai", "ray", "pytest", "_pytest", "gptme"},
    }
    parts = module.split("/")
    places = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    mine = next((allowed[place] for place in places if place in allowed), set())
    for node in SOURCES[module].body:
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in names:
            heavy = name.split(".")[0]
            others = set().union(*allowed.values()) - mine
            assert heavy not in others, f"{module}: {name}"


# --- shape ----------------------------------------------------------------------------------------

LONGEST_FILE = 450
LONGEST_FUNCTION = 70
LONG_FILES = {
    "testing/faults": (480, "one contract: every fault beside the way it is injected"),
    "testing/mutants": (500, "a list: each mutant is a few lines, and none needs another"),
    "vault": (480, "one noun, its intake and its store share every helper"),
}
"""Files that may be longer, to how many lines, and why."""


@modules
def test_a_file_fits_in_a_head(module):
    lines = len((ROOT / f"{module}.py").read_text().splitlines())
    limit, why = LONG_FILES.get(module, (LONGEST_FILE, ""))
    assert lines <= limit, why
    if why:
        assert lines > LONGEST_FILE, f"{module} is short again: strike it off the list"


@modules
def test_a_function_fits_on_a_screen(module):
    for node in ast.walk(SOURCES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{module}: {node.name}"


def public_definitions(body, where=""):
    """Give the public classes, functions and methods of a module."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_"):
                continue
            yield f"{where}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{node.name}.")


@modules
def test_everything_public_has_a_docstring(module):
    tree = SOURCES[module]
    assert ast.get_docstring(tree), f"{module} does not say what it is"
    for name, node in public_definitions(tree.body):
        if any("overload" in ast.dump(each) for each in node.decorator_list):
            continue
        assert ast.get_docstring(node), f"{module}: {name}"


def test_every_module_can_be_imported():
    for module in SOURCES:
        if module.startswith(("integrations/", "backends/", "guest/launcher")) or module == "cli":
            continue
        if module != "__main__":
            import_module("orchestrator." + module.removesuffix("/__init__").replace("/", "."))


# --- what is shipped ------------------------------------------------------------------------------


def test_types_and_the_guest_are_shipped():
    assert (ROOT / "py.typed").is_file()
    assert (ROOT / "guest" / "supervisor.sh").is_file()
    assert (ROOT / "guest" / "account.sh").is_file()
    assert (PROJECT / "LICENSE").is_file()


def test_nothing_is_shipped_that_is_not_needed():
    kinds = {path.suffix for path in ROOT.rglob("*") if path.is_file()}
    assert kinds <= {".py", ".pyc", ".sh", ".typed", ".proto"}
