"""A small folder of results."""

import pytest

from .files import png, write_record


@pytest.fixture
def results(tmp_path):
    """A folder with a record that has everything, one of several in its folder, and files alone."""
    folder = tmp_path / "results"
    write_record(
        folder / "new" / "record.json",
        "sattn invent --much 3",
        config={"much": 3, "nested": {"a": [1.5, None]}},
        results={
            "seconds": 1.25,
            "time": 1796062813.5,
            "rows": [{"method": "swa", "accuracy": {"value": 0.5, "stderr": 0.125, "n": 16}, "w": 64}],
        },
    )
    (folder / "new" / "plot.png").write_bytes(png())
    timing = {"pattern": "swa", "length": 2048, "backward": False}
    write_record(
        folder / "bench" / "cpu.json",
        "sattn bench --lengths 2048",
        config={"device": "cpu"},
        results={
            "speed": [{**timing, "seconds": 0.0125, "full_seconds": 0.05, "speedup": 4.0, "limit": 4.3}],
            "decode": [],
            "memory": [{**timing, "extra_bytes": 2**20}, {**timing, "pattern": "full", "extra_bytes": 2**22}],
            "cases": [{"length": 8192, "reason": "over the budget"}],
        },
    )
    (folder / "bench" / "cpu.txt").write_text("2048 forward swa\n", encoding="utf-8")
    (folder / "bench" / "machine.txt").write_text("two cores\n", encoding="utf-8")
    return folder
