"""How fast the simulated world is, and whether a million random steps in it break anything.

    python benchmarks/simulate.py                   # a short profile
    python benchmarks/simulate.py --steps 1000000   # the million

A step is a fact that a runner recorded. Stories are told from consecutive seeds, three runs
interleaved in each, with faults and crashes at random; the first story that breaks a property is
printed with the line that tells it again, and ends the benchmark with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time

from orchestrator.core.machine import replay
from orchestrator.testing.explore import SCENARIOS, tell, wander


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="facts to record, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first story")
    options = parser.parse_args()

    runs = steps = 0
    seed = options.seed
    before = time.perf_counter()
    while steps < options.steps:
        world = wander(seed)
        if world.problems:
            print("\n".join(world.log))
            print(f"{world.problems[0]}: again: orchestrator verify --seed {seed}")
            return 1
        steps += len(world.edges)
        runs += len(world.journal.run_ids())
        seed += 1
    taken_s = time.perf_counter() - before
    print(f"random stories: {steps} steps in {runs} whole runs of {seed - options.seed} worlds")
    rate = f"{runs / taken_s:,.0f} whole runs and {steps / taken_s:,.0f} steps a second"
    print(f"  nothing broken; {rate}")

    plain, before = 2_000, time.perf_counter()
    for _ in range(plain):
        world = tell(SCENARIOS[0])
    taken_s = time.perf_counter() - before
    print(f"runs without faults: {plain / taken_s:,.0f} whole runs a second")

    (facts,) = world.journal.facts.values()
    before = time.perf_counter()
    for _ in range(plain):
        replay("run-1", facts)
    taken_s = time.perf_counter() - before
    print(f"pure core: {taken_s / plain / len(facts) * 1e6:.1f} us a fact")
    return 0


if __name__ == "__main__":
    sys.exit(main())
