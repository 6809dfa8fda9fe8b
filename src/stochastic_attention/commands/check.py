"""Compare the op with its oracle on a device: every pattern, output and gradients, odd lengths, decoding."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .options import split_list, split_numbers

if TYPE_CHECKING:
    from ..benchmark.oracle import Check

_RED, _PLAIN = "\033[31m", "\033[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--device", default="cpu", help="where to run, as torch names it")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of q, k and v, comma-separated")
    parser.add_argument(
        "--head-dims", default="64,128", help="of q, k and v, comma-separated; float32 is checked at the first alone"
    )
    parser.add_argument("--lengths", default="1,129,1301", help="tokens, comma-separated")
    parser.add_argument("--window", type=int, default=256, help="of every pattern")
    parser.add_argument("--backend", help="of the op; by default the fastest that can")
    parser.add_argument("--workers", type=int, default=1, help="processes: on a GPU, compiling takes most of the time")


def run(args: argparse.Namespace) -> int:
    """Run the checks, print a line each, and end with 1 where any failed."""
    import multiprocessing

    from ..benchmark.oracle import Check
    from ..benchmark.workloads import PATTERNS
    from ..ops.backends import backend_names
    from ..ops.validation import check_choice, check_count, check_device, check_distinct

    dtypes, head_dims = split_list(args.dtypes), split_numbers("head_dims", args.head_dims)
    lengths = split_numbers("lengths", args.lengths)
    for name, values in (("dtypes", dtypes), ("head_dims", head_dims), ("lengths", lengths)):
        check_distinct(name, values)
    for dtype in dtypes:
        check_choice("dtypes", dtype, ("float64", "float32", "bfloat16", "float16"))
    for name, numbers in (("head_dims", head_dims), ("lengths", lengths)):
        for number in numbers:
            check_count(name, number, minimum=1)
    check_count("window", args.window, minimum=1)
    check_count("workers", args.workers, minimum=1)
    check_device(args.device)
    if args.backend is not None:
        check_choice("backend", args.backend, backend_names())

    shared = {"window": args.window, "lengths": lengths, "device": args.device, "backend": args.backend}
    checks = [
        Check(name, dtype, head_dim, capped=False, **shared)
        for dtype in dtypes
        for head_dim in (head_dims[:1] if dtype in ("float32", "float64") else head_dims)
        for name in PATTERNS
    ]
    checks += [Check("union", dtype, head_dims[0], capped=True, **shared) for dtype in dtypes]
    if args.workers == 1:
        return _report(checks, map(Check.failures, checks))
    with multiprocessing.get_context("spawn").Pool(min(args.workers, len(checks))) as pool:
        return _report(checks, pool.imap(Check.failures, checks))


def _report(checks: Sequence[Check], results: Iterable[list[str]]) -> int:
    failed = 0
    for check, failures in zip(checks, results, strict=True):
        label = f"{check.pattern:<15} {check.dtype:<9} D={check.head_dim:<4} {'softcap, sinks' if check.capped else ''}"
        print(f"{label:<50} {'WRONG' if failures else 'agrees with the oracle'}", flush=True)
        for failure in failures:
            print(f"{_RED}  {failure}{_PLAIN}", file=sys.stderr)
        failed += bool(failures)
    if failed:
        print(f"{_RED}WRONG: {failed} of {len(checks)} checks failed. Nothing may be timed.{_PLAIN}", file=sys.stderr)
    return 1 if failed else 0
