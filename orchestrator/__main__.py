"""`python -m orchestrator`: the command line."""

from .cli import main

main()
