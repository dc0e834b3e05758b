"""Runs every benchmark that needs no accelerator and writes the results.

    python benchmarks/run.py [--quick] [NAME ...]

Names: streaming, residency, budget, real_time, host_cost, enabling, distributed. Exits with 1 when a gate fails.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import budget
import distributed
import enabling
import host_cost
import real_time
import residency
import streaming
from bench.report import Result
from bench.subjects import quieten

BENCHMARKS = {
    "enabling": enabling.run,
    "host_cost": host_cost.run,
    "streaming": streaming.run,
    "residency": residency.run,
    "budget": budget.run,
    "distributed": distributed.run,
    "real_time": real_time.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="which; all by default")
    parser.add_argument("--quick", action="store_true", help="a reduced grid; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the models are small: more threads would wait for each other
    quieten()
    failed = []
    for name in arguments.names or BENCHMARKS:
        began = time.perf_counter()
        result: Result = BENCHMARKS[name](quick=arguments.quick)
        if not arguments.quick:
            result.write()
        print(f"{name} ({time.perf_counter() - began:.0f} s)")
        for gate in result.gates:
            print(f"  {gate}")
        failed += [f"{name}: {gate}" for gate in result.gates if not gate.holds]
    if failed:
        print(f"{len(failed)} gates fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
