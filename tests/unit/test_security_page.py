"""The page of threats names tests that exist, and every test of security is named on it."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "collector" / "SECURITY.md"
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def functions_in(path):
    """Names of the test functions in a file, at any level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def files():
    return {path.name: path for path in TESTS.rglob("test_*.py")}


def test_every_test_the_page_names_exists():
    named, here = NAMED.findall(PAGE.read_text(encoding="utf-8")), files()
    assert len(named) > 50
    missing = [f"{file}::{test}" for file, test in named if file not in here or test not in functions_in(here[file])]
    assert not missing


def test_every_threat_has_a_test():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    threats = [row for row in rows if not row.startswith("| threat |")]
    assert len(threats) > 20
    assert not [row.split("|")[1] for row in threats if not NAMED.search(row)]


def test_every_file_of_security_tests_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    own = {name for name in files() if name.startswith(("test_security_", "test_bad_input_"))} - {Path(__file__).name}
    assert len(own) >= 5
    assert not [name for name in own if name not in page]
