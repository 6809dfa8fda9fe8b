"""Put every record, table and plot of a folder on one self-contained HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import make_way


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("folder", type=Path, help="searched for records with all its subfolders")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="HTML file to write")


def run(args: argparse.Namespace) -> int:
    """Write the page, and name on standard error what it cannot show."""
    from ..records import write_text
    from ..reports.collect import collect
    from ..reports.page import render

    make_way("output", args.output)
    findings = collect(args.folder, leave_out=args.output)
    page = render(findings)
    faults = findings.faults | dict.fromkeys(findings.foreign, "is JSON but no record")
    for name, reason in sorted(faults.items()):
        print(f"sattn report: {name}: {reason}", file=sys.stderr)
    write_text(args.output, page)
    print(f"Written: {args.output}, {sum(entry.record is not None for entry in findings.entries)} records")
    return 0
