"""Time the op, or a step of decoding, against torch's own full causal attention, and show its peak memory."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from .options import split_list, split_numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--patterns", default="swa,sliding,block,prefix-sliding,prefix-block,union", help="comma-separated"
    )
    parser.add_argument("--lengths", default="2048,8192,32768", help="tokens, comma-separated")
    parser.add_argument("--heads", type=int, default=8, help="query and key/value heads")
    parser.add_argument("--head-dim", type=int, default=64, help="of q, k and v")
    parser.add_argument("--window", type=int, default=256, help="of every pattern")
    parser.add_argument(
        "--passes", default="forward", help="forward, backward (both passes), decode (one step); comma-separated"
    )
    parser.add_argument("--memory", action="store_true", help="also measure peak memory (Linux, or a CUDA device)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that the medians are taken over")
    parser.add_argument("--device", default="cpu", help="where to run, as torch names it")
    parser.add_argument("--dtype", default="float32", help="float64, float32, bfloat16 or float16")
    parser.add_argument("--backend", help="of the op; by default the fastest that can")
    parser.add_argument("--output", type=Path, default=Path("results/bench/record.json"), help="JSON file to write")


def run(args: argparse.Namespace) -> int:
    """Check against the oracle, measure, print a line a measurement, and save the record."""
    from ..benchmark import (
        PATTERNS,
        Workload,
        check_against_oracle,
        check_decoding_against_oracle,
        measure_decoding,
        measure_memory,
        measure_speed,
    )
    from ..ops.validation import check_choice, check_count, check_device
    from ..records import Environment, Record

    names, passes = split_list(args.patterns), split_list(args.passes)
    for name in names:
        check_choice("patterns", name, PATTERNS)
    for which in passes:
        check_choice("passes", which, ("forward", "backward", "decode"))
    if args.memory and "decode" in passes:
        raise ValueError("memory is measured of forward and backward, not of decode: run them apart")
    check_choice("dtype", args.dtype, ("float64", "float32", "bfloat16", "float16"))
    check_device(args.device)
    lengths = split_numbers("lengths", args.lengths)
    for length in lengths:
        check_count("lengths", length, minimum=1)
    for name in ("heads", "head_dim", "window", "repeats"):
        check_count(name, getattr(args, name), minimum=1)

    results: dict[str, list[dict[str, object]]] = {"speed": [], "decode": [], "memory": []}
    shape = {"heads": args.heads, "head_dim": args.head_dim, "window": args.window}
    for length in lengths:
        workload = Workload(length=length, device=args.device, dtype=args.dtype, **shape)
        if length == lengths[0]:
            if "decode" in passes:
                check_decoding_against_oracle(names, workload, args.backend)
            if {"forward", "backward"} & set(passes):
                check_against_oracle(names, workload, args.backend)
            print(f"agrees with the oracle: {', '.join(names)}", file=sys.stderr)
        for which in passes:
            backward = which == "backward"
            label = "forward+backward" if backward else which
            options = {"repeats": args.repeats, "backend": args.backend}
            if which == "decode":
                timings = measure_decoding(names, workload, **options)
            else:
                timings = measure_speed(names, workload, backward=backward, **options)
            for timing in timings:
                results["decode" if which == "decode" else "speed"].append(asdict(timing))
                print(
                    f"{length:>7} {label:<17} {timing.pattern:<15} {timing.seconds * 1e3:>9.2f} ms"
                    f"   full {timing.full_seconds * 1e3:>9.2f} ms   {timing.speedup:>6.2f}x of {timing.limit:.1f}x",
                    flush=True,
                )
            for name in names if args.memory else ():
                memory = measure_memory(name, workload, backward=backward, backend=args.backend)
                results["memory"].append(asdict(memory))
                print(f"{length:>7} {label:<17} {name:<15} {memory.extra_bytes / 2**20:>9.1f} MiB above the inputs")

    config = {key: value for key, value in vars(args).items() if key not in ("command", "command_line", "output")}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    Record(args.command_line, config, Environment.current(), results).save(args.output)
    print(f"\nWritten: {args.output}")
    return 0
