"""The testing kit: faults, a simulated world, an explorer, mutants, and conformance of backends.

A shipped product, for people who write backends or embed the runner. Nothing of the library but the
commands `verify`, `conform` and `diagram --heat` imports it, none of it needs pytest, and
Hypothesis is loaded only by the modules that use it.
"""
