"""What every test shares: captures of real engines, hypothesis' pace, and reruns where real processes are started."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.postgres import (  # noqa: F401 - fixtures
    empty_url,
    postgres_empty_url,
    postgres_server,
    postgres_template,
    postgres_url,
    store_url,
)

# Who starts this in the background may have it ignore Ctrl-C; what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    import hypothesis
except ImportError:  # a folder of tests may be run without it
    pass
else:
    # the same examples each time, so that a change is judged by what it changed; `make fuzz` looks for new ones
    hypothesis.settings.register_profile("same", deadline=None, print_blob=True, derandomize=True)
    hypothesis.settings.register_profile("new", deadline=None, print_blob=True, max_examples=1000)
    hypothesis.settings.load_profile(os.environ.get("BMOE_EXAMPLES", "same"))

HERE = Path(__file__).resolve().parent
REAL_PROCESSES = {"integration", "e2e", "faults"}
HOST_IS_HERE = find_spec("typer") is not None and find_spec("sqlalchemy") is not None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky(reruns): run again on failure (pytest-rerunfailures, where installed)")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules of the host's part where only the agent's base install is, as on a phone."""
    if HOST_IS_HERE or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if b"mark.agent" not in collection_path.read_bytes() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests of real processes two more tries.

    They start servers, agents and engines on a machine whose load nobody controls; a kernel that hands a process no
    time for seconds is not a fault of the code. A real fault fails three times.
    """
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if folder in REAL_PROCESSES and item.get_closest_marker("flaky") is None:
            item.add_marker(pytest.mark.flaky(reruns=2))


@pytest.fixture(scope="session")
def captures() -> Path:
    """The folder of real engines' output (BMOE_CAPTURES, else `captures` in a sibling folder), or a skip."""
    named = os.environ.get("BMOE_CAPTURES")
    places = [Path(named)] if named else sorted(HERE.parent.parent.glob("*/captures"))
    for place in places:
        if place.is_dir():
            return place
    pytest.skip("no captures of real engines here: set BMOE_CAPTURES to a folder of them")
