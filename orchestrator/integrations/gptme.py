"""gptme's evals with their evidence kept; what changes, and why: docs/integrations/gptme.md.

`use_in_gptme` has gptme's own runner do it, `run_gptme_check` judges a workspace without a model.
"""

from __future__ import annotations

import base64
import logging
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve
from gptme.eval import execenv, types
from gptme.eval import run as host

from ..core.errors import OrchestratorError, SpecError
from ..core.expect import Expect
from ..core.facts import CleanedUp, Downloaded, Uploaded
from ..core.machine import Destroy, Keep, begin, legal_facts
from ..core.spec import EvalSpec
from ..core.verdict import OutcomeKind, Verdict
from ..result import RunResult, result_of
from ..runner import Runner
from .gptme_evidence import NotHere, context, demand, story

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..evidence import Evidence
    from ..ports import Backend

DIR = Path(".orchestrator")
logging.getLogger("transitions").setLevel(logging.WARNING)  # gptme shows all from INFO up


class GptmeExecutionEnv(execenv.ExecutionEnv):
    """gptme's verbs in the order that the lifecycle allows; any other order is refused."""

    def __init__(
        self, backend: Backend, workspace: Path | None = None, state: Path = DIR, **keys: Any
    ) -> None:
        """Take a workspace, which is never changed, and further keys of our `EvalSpec`."""
        path = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
        env = {"PATH": path} if backend.isolation == "none" else {}
        spec: dict[str, Any] = {"name": "gptme", "deadline_s": 30, "expect": {"timed_out": False}}
        spec |= {**keys, "check": "true", "workspace": workspace, "env": env | keys.get("env", {})}
        self.spec, self.backend, self.state = EvalSpec(**spec), backend, state
        self.download_failed = False
        self.result: RunResult | None = None
        self._files: types.Files = NotHere()
        self._life: Iterator[RunResult] | None = None
        self._step = begin("(not begun)")

    @property
    def sandbox_id(self) -> str | None:
        """Id of a sandbox that is not confirmed gone: `orchestrator sweep` takes it."""
        return self.result.retained_sandbox if self.result else None

    def upload(self, files: types.Files) -> None:
        """Lay files over the workspace, to be sent with the check; gptme's bytes are base64."""
        demand(self._step.run, Uploaded, "its check was begun", met=self._life is None)
        laid = dict(self.spec.files)
        for path, data in files.items():
            laid[path] = data.encode() if isinstance(data, str) else base64.b64decode(data)
        self.spec = evolve(self.spec, files=laid)

    def run(self, command: str) -> tuple[str, str, int]:
        """Run a check, and bring its evidence here; a deadline exceeded raises `TimeoutError`."""
        demand(self._step.run, Uploaded, "one check an environment", met=self._life is None)
        self._life = self.drive(command)
        self.result = result = next(self._life)
        self.download_failed = result.evidence is None or not result.evidence.sealed
        if result.outcome is None:
            raise OrchestratorError(f"how the check ended is not known; {story(result)}")
        if result.evidence is None or self.download_failed:
            return "", story(result), -1
        found = context(result.evidence)
        self._files = found.files
        if result.outcome.kind is OutcomeKind.DEADLINE_EXCEEDED:
            raise TimeoutError(f"run {result.run_id}: {result.outcome}")
        return found.stdout, found.stderr, found.exit_code

    def download(self) -> types.Files:
        """Give the files that the check left; if they are not all here, they answer nothing."""
        demand(self._step.run, Downloaded, "`run` has brought nothing", met=self.result is not None)
        return self._files

    def cleanup(self) -> None:
        """Destroy the sandbox, with leave; if it is not confirmed gone, its id stays here."""
        if self._life is None or self._step.run.finished:
            return
        legal = CleanedUp in legal_facts(self._step.run.state)
        demand(self._step.run, CleanedUp, "its evidence is not here: resume the run", met=legal)
        *_, self.result = self._life
        if self.sandbox_id:
            logging.getLogger(__name__).warning("a sandbox is left; %s", story(self.result))

    def drive(self, command: str) -> Iterator[RunResult]:
        """Drive a run: give what is known once its evidence is here, and again at its end."""
        with Runner(self.backend, self.state) as runner:
            record, step = runner.begin(evolve(self.spec, check=("/bin/bash", "-c", command)))
            for self._step in runner.steps(record, step):
                if self._step.command is None or isinstance(self._step.command, Destroy | Keep):
                    yield result_of(runner.vault, record, self._step.run)


def use_in_gptme(make: Callable[[], Backend], state: Path = DIR, **keys: Any) -> None:
    """Have gptme's runner use these environments, here and in its workers, a backend for each."""
    backend, state = cache(make), Path(state).absolute()

    def env(working_dir: Path | None = None, host_dir: Path | None = None) -> GptmeExecutionEnv:
        return GptmeExecutionEnv(backend(), working_dir or host_dir, state, **keys)

    names = ("SimpleExecutionEnv", "DockerExecutionEnv", "OpenShellExecutionEnv")
    pool = partial(ProcessPoolExecutor, initializer=partial(use_in_gptme, make, state, **keys))
    vars(host).update({**dict.fromkeys(names, env), "ProcessPoolExecutor": pool})


def run_gptme_check(
    test: types.EvalSpec, workspace: Path, backend: Backend, state: Path = DIR, **keys: Any
) -> types.EvalResult:
    """Judge a workspace. UNRESOLVED is `error`, a deadline `timeout`: neither has case results."""
    if test.get("check_log"):
        raise SpecError("check_log", "a workspace has no conversation", "no such key")
    made: list[types.ResultContext] = []

    def ask(case: Callable[[types.ResultContext], bool], evidence: Evidence) -> bool:
        made[:] = made or [context(evidence)]
        return bool(case(made[0]))

    cases = {name: partial(ask, case) for name, case in test["expect"].items()}
    keys |= {"name": test["name"], "expect": Expect(timed_out=False, predicates=cases)}
    env = GptmeExecutionEnv(backend, workspace, state, **keys)
    env.upload({k: v for k, v in test["files"].items() if k in test.get("restore_files", ())})
    *_, run = env.drive(test["run"])
    unknown, judge_s = run.verdict is Verdict.UNRESOLVED, run.timings.get("score", 0.0)
    late = run.outcome is not None and run.outcome.kind is OutcomeKind.DEADLINE_EXCEEDED
    status: types.Status = "error" if unknown else "timeout" if late else "success"
    found = [each for each in run.expectations if each.name in cases and status == "success"]
    scored = [types.CaseResult(f.name, f.passed is True, judge_s / len(found)) for f in found]
    times = {"gen": 0.0, "run": sum(run.timings.values()) - judge_s, "eval": judge_s}
    out, err = ((run.as_json()[name] or {"text": ""})["text"] for name in ("stdout", "stderr"))
    err, place = err + story(run) * unknown, Path(workspace)
    return types.EvalResult(test["name"], status, scored, times, "", "", out, err, place, place)
