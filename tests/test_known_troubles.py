"""tests/known_troubles.toml: faults reported to others, and the tests here that cover their kind."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KNOWN = tomllib.loads((HERE / "known_troubles.toml").read_text(encoding="utf-8"))
TROUBLES = KNOWN["trouble"]


@cache
def functions_of(path: str) -> frozenset[str]:
    """The test functions of a file, those in a class with its name before them."""
    found = []
    for node in ast.parse((HERE.parent / path).read_text(encoding="utf-8")).body:
        members = [(f"{node.name}::", inner) for inner in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        found += [
            prefix + x.name for prefix, x in members if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")
        ]
    return frozenset(found)


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble["reports"][0])
class TestEachTrouble:
    def test_has_tests_that_exist_or_waits_for_its_subject(self, trouble):
        tests = trouble.get("tests", [])
        missing = [test for test in tests if test.partition("::")[2] not in functions_of(test.partition("::")[0])]
        assert missing == []
        assert tests or trouble["later"]
        assert len(set(tests)) == len(tests)

    def test_names_reports_that_can_be_found_and_says_what_went_wrong(self, trouble):
        assert trouble.keys() <= {"reports", "fault", "tests", "later"}
        assert trouble["fault"].endswith(".")
        for report in trouble["reports"]:
            project, number = re.fullmatch(r"([\w./-]+)#(\d+)", report).groups()
            assert int(number) > 0
            assert project in KNOWN["projects"] or re.fullmatch(r"[\w.-]+/[\w.-]+", project)


def test_no_report_stands_twice():
    reports = [report for trouble in TROUBLES for report in trouble["reports"]]
    assert len(set(reports)) == len(reports)


def test_a_test_that_is_not_there_is_noticed():
    assert "test_no_report_stands_twice" in functions_of("tests/test_known_troubles.py")
    assert "test_gone" not in functions_of("tests/test_known_troubles.py")
