"""The same inputs to several hosts, each run for real: what does each one say of the program?

    python examples/side_by_side.py

A host that is not installed is left out, and said to be. Each host is a function below: it is given
a row and an empty directory, and gives what the host says. gptme needs `pip install '.[gptme]'`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from orchestrator.backends.local import LocalBackend
from orchestrator.testing.faults import FaultyBackend

Case = Callable[[Any], bool]
SECRET = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Row:
    """An input: a check, and what is asked of what it left.

    Attributes:
        what: for a person.
        check: the command.
        truth: what an honest host can say of the program.
        case: the question, over `files`, `stdout`, `stderr` and `exit_code`.
        deadline_s: limit on the check, seconds.
        lost: nothing comes back of the workspace.
        env: variables that the host itself has.
    """

    what: str
    check: str
    truth: str
    case: Case
    deadline_s: float = 30.0
    lost: bool = False
    env: dict[str, str] = field(default_factory=dict)


ROWS = (
    Row(
        what="over its limit of 1 s",
        check="sleep 8; echo x",
        truth="timed out, at 1 s",
        case=lambda found: found.stdout == "x\n",
        deadline_s=1.0,
    ),
    Row(
        what="leaves a daemon",
        check="sleep 8 & echo hi; exit 0",
        truth="passed, at once",
        case=lambda found: found.stdout == "hi\n",
    ),
    Row(
        what="exits as a timeout would",
        check="exit 124",
        truth="passed",
        case=lambda found: found.exit_code == 124,  # noqa: PLR2004
    ),
    Row(
        what="makes junk; its workspace is lost",
        check="echo junk > junk",
        truth="not known",
        case=lambda found: "junk" not in found.files,
        lost=True,
    ),
    Row(
        what="prints a byte that is no text",
        check="printf '\\377'",
        truth="passed",
        case=lambda found: found.exit_code == 0,
    ),
    Row(
        what="looks for the host's secrets",
        check=f"echo ${SECRET}",
        truth="passed",
        case=lambda found: found.stdout == "\n",
        env={SECRET: "a secret"},
    ),
    Row(
        what="links to a file of the host",
        check="ln -s /etc/hostname link",
        truth="passed",
        case=lambda found: "link" not in found.files,
    ),
    Row(
        what="is asked by a broken case",
        check="echo hi",
        truth="not known",
        case=lambda found: found.files["no such file"] == "",
    ),
)


# --- hosts ----------------------------------------------------------------------------------------


def gptme_itself(row: Row, place: Path) -> str:
    """Run and judge as `gptme.eval.run.execute` does, in gptme's own environment.

    Its limit of 30 s is written into its code, and is made the row's here.
    """
    from gptme.eval.execenv import SimpleExecutionEnv  # noqa: PLC0415
    from gptme.eval.types import ResultContext  # noqa: PLC0415

    communicate = subprocess.Popen.communicate

    def limited(self: Any, text: Any = None, timeout: float | None = None) -> Any:
        return communicate(self, text, timeout and row.deadline_s)

    env = SimpleExecutionEnv(place / "gptme")
    try:
        with mock.patch.object(subprocess.Popen, "communicate", limited):
            stdout, stderr, code = env.run(row.check)
        if row.lost:
            shutil.rmtree(env.working_dir)
        context = ResultContext(env.download(), stdout, stderr, code)
    except Exception as error:  # noqa: BLE001 - gptme calls every one an error
        return f"error ({type(error).__name__})"
    finally:
        env.cleanup()
    try:
        passed = row.case(context)
    except Exception:  # noqa: BLE001 - as gptme does
        passed = False
    return f"{'passed' if passed else 'failed'} (exit {code})"


def gptme_through_us(row: Row, place: Path) -> str:
    """Judge the same as a test of gptme's."""
    from orchestrator.integrations.gptme import run_gptme_check  # noqa: PLC0415

    (place / "workspace").mkdir()
    test: Any = {"name": row.what, "files": {}, "run": row.check, "expect": {"case": row.case}}
    local = LocalBackend(place / "sandboxes")
    with FaultyBackend(local, ["fetch:vanished"] if row.lost else ()) as backend:
        result = run_gptme_check(
            test, place / "workspace", backend, place / "state", deadline_s=row.deadline_s
        )
    local.close()
    if result.status != "success":
        return result.status
    return "passed" if all(case.passed for case in result.results) else "failed"


HOSTS: dict[str, Callable[[Row, Path], str]] = {
    "gptme": gptme_itself,
    "gptme, through us": gptme_through_us,
}
"""Another host is another function; what it needs is imported in it."""


# --- the table ------------------------------------------------------------------------------------


def ask(host: Callable[[Row, Path], str], row: Row) -> str:
    """Run a row on a host; give what it says and how long that took."""
    noise = io.StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="side-by-side-") as place,
        mock.patch.dict(os.environ, row.env),
        contextlib.redirect_stdout(noise),
    ):
        start = time.monotonic()
        try:
            said = host(row, Path(place))
        except ModuleNotFoundError as missing:
            return f"not installed ({missing.name})"
        return f"{said}, {time.monotonic() - start:.1f} s"


def main() -> None:
    """Print a row for each input, a column for each host."""
    with contextlib.suppress(ModuleNotFoundError):
        import gptme.eval  # noqa: F401, PLC0415 - loading it is not to be part of a figure
    from side_by_side_inspect import HOSTS as MORE  # noqa: PLC0415 - it uses this module

    HOSTS.update(MORE)
    logging.disable(logging.INFO)  # some hosts show all that their libraries say
    table = Table(title="What is said of the same program", title_justify="left", show_lines=True)
    for name in ("input", "what can be known", *HOSTS):
        table.add_column(name)
    for row in ROWS:
        table.add_row(
            f"{row.what}\n[dim]{row.check}", row.truth, *(ask(host, row) for host in HOSTS.values())
        )
    Console().print(table)


if __name__ == "__main__":
    main()
