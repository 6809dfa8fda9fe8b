"""Time the op, or a step of decoding, against torch's own full causal attention, and show its peak memory."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from . import interrupted, make_way
from .options import split_list, split_numbers

if TYPE_CHECKING:
    from ..benchmark.sweep import Case, Rows
    from ..benchmark.workloads import Direction

# What changes no measurement, and so may differ between a run and the one that resumes it.
_NOT_CONFIG = ("command", "command_line", "output", "resume", "budget", "plot", "predictions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--patterns",
        default="swa,sliding,block,prefix-sliding,prefix-block,union",
        help="comma-separated; also moba, gated",
    )
    parser.add_argument("--lengths", default="2048,8192,32768", help="tokens, comma-separated")
    parser.add_argument("--heads", type=int, default=8, help="query and key/value heads")
    parser.add_argument("--head-dim", default="64", help="of q, k and v, comma-separated")
    parser.add_argument("--tokens", type=int, default=0, help="in a batch: as many rows as this holds, at least one")
    parser.add_argument("--window", type=int, default=256, help="of every pattern")
    parser.add_argument(
        "--passes", default="forward", help="forward, backward (both passes), decode (one step); comma-separated"
    )
    parser.add_argument(
        "--full",
        default="auto",
        help="full attention's kernels: auto, flash, cudnn, efficient, flex; the fastest counts",
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="run all as CUDA graphs, as decoding is on such a device: no host in between",
    )
    parser.add_argument(
        "--draw",
        default="once",
        help="permutations: once, as in evaluation, where what was sorted may be kept; always, as in training",
    )
    parser.add_argument("--memory", action="store_true", help="also measure peak memory (Linux, or a CUDA device)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that the medians are taken over")
    parser.add_argument("--device", default="cpu", help="where to run, as torch names it")
    parser.add_argument("--dtype", default="float32", help="float64, float32, bfloat16 or float16")
    parser.add_argument("--backend", help="of the op; by default the fastest that can")
    parser.add_argument("--budget", type=float, help="seconds; the largest cases are left out where it would not do")
    parser.add_argument("--resume", action="store_true", help="leave out what the output file holds already")
    parser.add_argument("--predictions", type=Path, help="JSON file of `sattn predict`, shown beside the measurements")
    parser.add_argument("--plot", type=Path, help="PNG file to write; needs matplotlib")
    parser.add_argument("--output", type=Path, default=Path("results/bench/record.json"), help="JSON file to write")


def run(args: argparse.Namespace) -> int:
    """Check against the oracle, measure, print a line a measurement; the record is saved after each case.

    The exit code is 1 where a case failed.
    """
    from ..benchmark.ceilings import measure_ceilings
    from ..benchmark.report import by_case, case_line, panels
    from ..benchmark.sweep import cases, sweep
    from ..benchmark.targets import against_targets
    from ..benchmark.workloads import Workload
    from ..plots import plot_panels
    from ..records import Environment, Record

    begin = time.monotonic()
    lengths, head_dims = split_numbers("lengths", args.lengths), split_numbers("head_dim", args.head_dim)
    _check(args, lengths, head_dims)
    config = {key: value for key, value in vars(args).items() if key not in _NOT_CONFIG}
    results: dict[str, Any] = {"speed": [], "decode": [], "memory": [], "full": []}
    if args.resume and args.output.exists():
        results = _unfinished(args.output, config)
    predictions = {}
    if args.predictions:
        predictions = by_case(_predicted(args.predictions), planned_ahead=args.draw == "once")

    make_way("output", args.output)
    if args.plot:
        make_way("plot", args.plot)
    record = Record(args.command_line, config, Environment.current(), results)
    shape = {"heads": args.heads, "window": args.window, "device": args.device, "dtype": args.dtype}
    for head_dim in head_dims:
        _pass_the_gate(args, Workload(length=lengths[0], head_dim=head_dim, **shape))
    if args.device.startswith("cuda"):
        results["ceilings"] = measure_ceilings(args.device)
        found = results["ceilings"]
        print(
            f"ceilings of this card: {found['flops'] / 1e12:.0f} TFLOP/s, {found['bytes'] / 1e9:.0f} GB/s", flush=True
        )

    def measure(case: Case) -> tuple[Rows, float]:
        workload = Workload(length=case.length, head_dim=case.head_dim, batch=case.batch, **shape)
        return _measure(args, case, workload, predictions)

    passes = cast("tuple[Direction, ...]", split_list(args.passes))
    todo = cases(passes, lengths, head_dims, tokens=args.tokens)
    left = None if args.budget is None else args.budget - (time.monotonic() - begin)
    try:
        sweep(todo, measure, results, save=lambda: record.save(args.output), budget=left)
    except KeyboardInterrupt:
        args.command_line += "" if args.resume else " --resume"
        return interrupted(args)
    if args.device.startswith("cuda") and results["speed"]:
        print(f"\n{against_targets(results, predictions.values())}")
    without = [outcome for outcome in results["cases"] if outcome["seconds"] is None]
    for outcome in without:
        print(case_line(outcome), file=sys.stderr)
    print(f"\nWritten: {args.output}")
    if args.plot and find_spec("matplotlib") is None:
        print(f"{args.plot} is not drawn: matplotlib is not installed", file=sys.stderr)
    elif args.plot and (drawn := panels(results, predictions)):
        plot_panels(drawn, "tokens", args.plot)
        print(f"Written: {args.plot}")
    return 1 if any(outcome["reason"].startswith("failed") for outcome in without) else 0


def _check(args: argparse.Namespace, lengths: tuple[int, ...], head_dims: tuple[int, ...]) -> None:
    from ..benchmark.full_attention import FULL_KERNELS
    from ..benchmark.workloads import DIRECTIONS, METHODS
    from ..ops.validation import check_choice, check_count, check_device, check_distinct, check_real

    for option, values, choices in (
        ("patterns", split_list(args.patterns), METHODS),
        ("passes", split_list(args.passes), DIRECTIONS),
        ("full", split_list(args.full), FULL_KERNELS),
    ):
        check_distinct(option, values)
        for value in values:
            check_choice(option, value, choices)
    if "decode" in split_list(args.passes):
        if args.memory:
            raise ValueError("memory is measured of forward and backward, not of decode: run them apart")
        if "moba" in split_list(args.patterns) and args.device.startswith("cuda"):
            raise ValueError(
                "patterns must do without 'moba' for decode on a CUDA device: its choices are read on the host"
            )
    check_choice("dtype", args.dtype, ("float64", "float32", "bfloat16", "float16"))
    check_choice("draw", args.draw, ("once", "always"))
    if args.draw == "always" and (args.replay or "decode" in split_list(args.passes)):
        raise ValueError("draw must be 'once' for decode and with --replay, where a permutation is kept; got 'always'")
    check_device(args.device)
    if not args.device.startswith(("cpu", "cuda")):
        raise ValueError(f"device must be the CPU or a CUDA device, no other can be timed, got {args.device!r}")
    if args.memory and args.device.startswith("cpu") and sys.platform != "linux":
        raise ValueError("memory on the CPU is told by Linux alone: leave --memory out")
    for name, values in (("lengths", lengths), ("head_dim", head_dims)):
        check_distinct(name, values)
        for value in values:
            check_count(name, value, minimum=1)
    for name in ("heads", "window", "repeats"):
        check_count(name, getattr(args, name), minimum=1)
    check_count("tokens", args.tokens, minimum=0)
    if args.replay and not args.device.startswith("cuda"):
        raise ValueError(f"replay needs a CUDA device, got {args.device!r}")
    if args.budget is not None:
        check_real("budget", args.budget, minimum=0.0)


def _predicted(path: Path) -> list[dict[str, Any]]:
    """The predictions of a record; ValueError where it has none."""
    from ..records import Record

    results = Record.load(path).results if path.is_file() else {}
    if "predictions" not in results:
        raise ValueError(f"predictions must be a file that `sattn predict` wrote, got {str(path)!r}")
    return results["predictions"]


def _unfinished(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The results so far of a run with the same config; ValueError where it had another."""
    from ..records import Record

    found = Record.load(path)
    for name, value in config.items():
        if found.config.get(name) != value:
            raise ValueError(f"{name} must be {found.config.get(name)!r} to resume {path}, got {value!r}")
    return found.results


def _pass_the_gate(args: argparse.Namespace, like: Any) -> None:  # noqa: ANN401 - a Workload, imported late
    from ..benchmark.oracle import check_against_oracle, check_decoding_against_oracle

    names, passes = split_list(args.patterns), split_list(args.passes)
    if "decode" in passes:
        check_decoding_against_oracle(names, like, args.backend)
    if {"forward", "backward"} & set(passes):
        check_against_oracle(names, like, args.backend)
    print(f"agrees with the oracle: {', '.join(names)}", file=sys.stderr)


def _measure(args: argparse.Namespace, case: Case, workload: Any, predictions: Any) -> tuple[Rows, float]:  # noqa: ANN401
    """The rows of a case, printed, and the seconds of steady running that they took."""
    from ..benchmark.memory import measure_memory
    from ..benchmark.report import full_line, memory_line, speed_line
    from ..benchmark.speed import measure_speed

    names, fulls = split_list(args.patterns), split_list(args.full)
    options = {
        "repeats": args.repeats,
        "backend": args.backend,
        "full_kernels": fulls,
        "replay": args.replay,
        "draw": args.draw,
    }
    timings, of_full = measure_speed(names, workload, case.direction, **options)
    rows: Rows = {"decode" if case.direction == "decode" else "speed": [asdict(x) for x in timings]}
    rows["full"] = [asdict(x) for x in of_full]
    for row in rows["full"] if len(fulls) > 1 else ():
        print(full_line(row), flush=True)
    for timing in timings:
        print(speed_line(asdict(timing), case.direction, predictions), flush=True)
    if args.memory:
        for name in ("full", *names):
            memory = measure_memory(
                name, workload, backward=case.direction == "backward", backend=args.backend,
                full_kernel=timings[0].full_kernel,
            )  # fmt: skip
            rows.setdefault("memory", []).append(asdict(memory))
            print(memory_line(asdict(memory)), flush=True)
    steady = sum(x.seconds for x in timings) + sum(x.seconds or 0.0 for x in of_full)
    return rows, steady * (args.repeats + 1)
