"""`python -m orchestrator.testing.openshell_gateway --root DIR`: serves until interrupted."""

from __future__ import annotations

import argparse
from pathlib import Path

from attrs import fields

from .options import Options


def main() -> None:
    """Read the options, serve, print the endpoint."""
    parser = argparse.ArgumentParser(description="A simulated OpenShell gateway on 127.0.0.1.")
    for each in fields(Options):
        flag = "--" + each.name.replace("_", "-")
        if each.name == "root":
            parser.add_argument(flag, type=Path, required=True)
        elif isinstance(each.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(each.default), default=each.default)
    for flag in ("--control", "--lifeline"):
        parser.add_argument(flag, type=int, help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    control, lifeline = given.pop("control"), given.pop("lifeline")
    from .server import run  # noqa: PLC0415 - help needs no gRPC

    run(Options(**given), control, lifeline)


if __name__ == "__main__":
    main()
