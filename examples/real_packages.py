"""Evals of packages that nobody here wrote, by the tests that they ship.

    python examples/real_packages.py

Takes the source distributions of three small packages from PyPI, at fixed versions with fixed
digests, and makes two workspaces of each: as it was published, and with one line of its source
broken. The check is the package's own test suite. Then every package is evaluated three times:

* untouched, over the command line: PASSED;
* broken, over the command line: FAILED, with the suite's own words in the evidence;
* untouched, over a backend that cuts the suite's report short on its way back and says that all
  went well: UNRESOLVED, because a suite that passed and a report that arrived are different facts.

Exits with 1 if any verdict is another one. Needs pytest in the interpreter that runs it. None of
the packages is one that pytest itself imports: a broken one would break pytest, not its own tests.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from orchestrator import Runner
from orchestrator.backends.local import LocalBackend
from orchestrator.specfile import load
from orchestrator.testing.faults import FaultyBackend

if TYPE_CHECKING:
    from collections.abc import Iterable

REPORT: Final = "report.xml"


@dataclass(frozen=True)
class Package:
    """A published package, and a line of its source that its tests should miss.

    Attributes:
        name: on PyPI.
        version: of the source distribution.
        sha256: of the archive.
        source: directory with its modules, relative to its root.
        tests: file or directory with its tests, relative to its root.
        broken: file with the line to break.
        line: a text that is in that file once.
        instead: what to write in its place.
    """

    name: str
    version: str
    sha256: str
    source: str
    tests: str
    broken: str
    line: str
    instead: str

    @property
    def stem(self) -> str:
        """Name and version, as the archive and the directory in it are called."""
        return f"{self.name}-{self.version}"


PACKAGES: Final = (
    Package(  # an item that is replaced by a larger one no longer counts for what it grew by
        name="cachetools",
        version="5.5.0",
        sha256="2cc24fb4cbe39633fb7badd9db9ca6295d766d9c2995f245725a46715d050f2a",
        source="src",
        tests="tests",
        broken="src/cachetools/__init__.py",
        line="            diffsize = size - self.__size[key]\n",
        instead="            diffsize = 0\n",
    ),
    Package(  # 13 becomes "13rd"
        name="inflection",
        version="0.5.1",
        sha256="1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
        source=".",
        tests="test_inflection.py",
        broken="inflection/__init__.py",
        line="    if number % 100 in (11, 12, 13):\n",
        instead="    if number % 100 in (11, 12):\n",
    ),
    Package(  # every printable character is one cell wide
        name="wcwidth",
        version="0.2.13",
        sha256="72ea0c06399eb286d978fdedb6923a9eb47e1c486ce63e9b4e64fc18303972b5",
        source=".",
        tests="tests",
        broken="wcwidth/wcwidth.py",
        line="    return 1 + _bisearch(ucs, WIDE_EASTASIAN[_unicode_version])\n",
        instead="    return 1\n",
    ),
)


# --- archives and workspaces ----------------------------------------------------------------------


def download(packages: Iterable[Package], place: Path) -> None:
    """Take the archives from PyPI with pip, which checks their digests before it opens them."""
    wanted = place / "requirements.txt"
    wanted.write_text(
        "".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in packages), "utf-8"
    )
    names = ",".join(package.name for package in packages)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", names, "--dest", str(place), "--requirement"]
    done = subprocess.run([*command, str(wanted)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pip could not download {names}:\n{done.stderr.strip()}")


def unpack(package: Package, archive: Path, place: Path) -> Path:
    """Unpack an archive, if it is the one that is meant; give the directory in it."""
    if not archive.is_file():
        raise SystemExit(f"{archive}: there is no such archive")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package.sha256:
        raise SystemExit(f"{archive}: SHA-256 {found}, expected {package.sha256}")
    if not hasattr(tarfile, "data_filter"):
        raise SystemExit("this Python cannot unpack archives safely; update to its latest patch")
    place.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    root = place / package.stem
    if not (root / package.tests).exists():
        raise SystemExit(f"{archive}: has no {package.tests}: it does not ship its tests")
    return root


def break_line(package: Package, root: Path) -> None:
    """Break the package's one line."""
    file = root / package.broken
    text = file.read_text("utf-8")
    if text.count(package.line) != 1:
        raise SystemExit(
            f"{file}: expected once, found {text.count(package.line)} times: {package.line.strip()}"
        )
    file.write_text(text.replace(package.line, package.instead), "utf-8")


def prepare(packages: Iterable[Package], archives: Path, place: Path) -> Path:
    """Make both workspaces of every package and the spec file for them; give the file."""
    tables = ["# Written by real_packages.py.\n"]
    for package in packages:
        archive = archives / f"{package.stem}.tar.gz"
        for variant in ("untouched", "broken"):
            root = unpack(package, archive, place / variant / package.name)
            if variant == "broken":
                break_line(package, root)
            tables.append(spec_table(package, variant, root.relative_to(place)))
    file = place / "real_packages.eval.toml"
    file.write_text("\n".join(tables), "utf-8")
    return file


def spec_table(package: Package, variant: str, workspace: Path) -> str:
    """Write the spec that runs a package's tests over one of its workspaces.

    The options leave out what the package asks of its own developers' set-up (`addopts`), and what
    would write into the tree without being evidence.
    """
    check = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--override-ini=addopts="]
    check += [f"--junitxml={REPORT}", package.tests]
    env = {
        "PYTHONPATH": package.source,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return "\n".join(
        [
            "[[eval]]",
            f"name = {json.dumps(f'{package.name} {variant}')}",
            f"workspace = {json.dumps(workspace.as_posix())}",
            f"check = {json.dumps(check)}",
            "deadline_s = 120",
            f"tags = {json.dumps([package.name, variant])}",
            f"env = {{ {', '.join(f'{name} = {json.dumps(env[name])}' for name in env)} }}",
            "",
            "[eval.expect]",
            "exit_code = 0",
            f'files = [{{ path = "{REPORT}", exists = true }}]',
            "",
        ]
    )


# --- running --------------------------------------------------------------------------------------

Result = dict[str, Any]


def over_the_command_line(file: Path, state: Path) -> list[Result]:
    """Run a spec file with `orchestrator run --json`; give the results."""
    command = [sys.executable, "-m", "orchestrator", "run", str(file), "--json"]
    done = subprocess.run(
        [*command, "--state-dir", str(state)], check=False, capture_output=True, text=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode not in {0, 1, 3} or not results:
        raise SystemExit(f"the command exited with {done.returncode}:\n{done.stderr.strip()}")
    return results


def over_a_bad_way_back(file: Path, state: Path) -> list[Result]:
    """Run the specs of the untouched packages, with every attempt at a download cut short."""
    cut = [f"fetch#{attempt}:truncated" for attempt in range(1, 20)]  # far more than are made
    results = []
    for spec in load(file):
        if "untouched" in spec.tags:
            with FaultyBackend(LocalBackend(), cut) as backend, Runner(backend, state) as runner:
                results.append(runner.run(spec).as_json())
    return [{**result, "name": f"{result['name']}, report lost"} for result in results]


def expected(name: str) -> tuple[str, str | None]:
    """Give verdict and reason that an eval of that name should come to."""
    if name.endswith("lost"):
        return "UNRESOLVED", "download_failed"
    return ("PASSED" if name.endswith("untouched") else "FAILED"), None


def summary(result: Result) -> str:
    """Give the last line of what pytest printed, which says how many passed and failed."""
    text: str = (result["stdout"] or {}).get("text", "").strip()
    return text.splitlines()[-1].strip("= ") if text else ""


def as_expected(result: Result) -> bool:
    """Tell whether a result is what it should be, and says why in the suite's own words."""
    if (result["verdict"], result["reason"]) != expected(result["name"]):
        return False
    failed: bool = result["verdict"] == "FAILED"
    return (" failed" in summary(result)) is failed


def show(results: Iterable[Result]) -> None:
    """Print a table of results."""
    table = Table("eval", "verdict", "outcome", "the suite says", "as expected")
    for result in results:
        verdict = " ".join(filter(None, (result["verdict"], result["reason"])))
        code = result["outcome"]["exit_code"] if result["outcome"] else None
        table.add_row(
            result["name"],
            verdict,
            "" if code is None else f"exited({code})",
            summary(result),
            "yes" if as_expected(result) else "NO",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, help="new directory to work in (a temporary one)")
    parser.add_argument(
        "--offline-sdists",
        type=Path,
        metavar="DIR",
        help="directory with the archives, in place of downloading them",
    )
    options = parser.parse_args()
    if importlib.util.find_spec("pytest") is None:
        raise SystemExit(f"needs pytest: {sys.executable} -m pip install pytest")
    with contextlib.ExitStack() as stack:
        place = options.dir
        if place is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="packages-")))
        place = place.absolute()
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            parser.error(f"--dir: {place} is not empty")
        archives = options.offline_sdists
        if archives is None:
            archives = place / "sdists"
            archives.mkdir()
            download(PACKAGES, archives)
        file = prepare(PACKAGES, archives, place)
        results = over_the_command_line(file, place / "state")
        results += over_a_bad_way_back(file, place / "state")
    show(results)
    wrong = [result["name"] for result in results if not as_expected(result)]
    missing = 3 * len(PACKAGES) - len(results)
    if wrong or missing:
        raise SystemExit(f"not as expected: {', '.join(wrong) or f'{missing} results missing'}")


if __name__ == "__main__":
    main()
