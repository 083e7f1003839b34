"""Shared setup: one intra-op thread (the same kernels everywhere), Hypothesis profiles, the golden-file flag."""

import os
import signal
import threading

import pytest
import torch
from hypothesis import HealthCheck, settings

collect_ignore = ["on_devices"]  # a process of its own for each: test_on_devices.py

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden files with what is generated now"
    )


def pytest_collection_modifyitems(items):
    """Slow tests begin first: with several processes, the short ones are left for whoever has nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def one_thread_and_no_leftovers():
    # a shell lets what it starts in the background ignore SIGINT; some tests interrupt themselves
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("fxsplit")]
    assert torch.is_grad_enabled()


@pytest.fixture
def golden(request):
    """Compare text with a file in tests/golden; ``pytest --update-golden`` rewrites it."""

    def check(name: str, text: str) -> None:
        path = request.config.rootpath / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --update-golden and review it"
        assert text == path.read_text(encoding="utf-8")

    return check
