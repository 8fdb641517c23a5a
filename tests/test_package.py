"""`import marigold_uq` is quick, and everything public is found when it is first used."""

import subprocess
import sys

import pytest

import marigold_uq


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, marigold_uq; print(*[m for m in ('torch', 'numpy', 'diffusers', 'scipy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


@pytest.mark.parametrize("name", marigold_uq.__all__)
def test_every_public_name_is_found(name: str) -> None:
    assert getattr(marigold_uq, name) is not None
    assert name in dir(marigold_uq)


@pytest.mark.parametrize(
    "name", ["alignment", "calibration", "distributions", "metrics", "schedulers", "scores", "uncertainty"]
)
def test_submodules_are_found_without_importing_them(name: str) -> None:
    assert getattr(marigold_uq, name).__name__ == f"marigold_uq.{name}"
    assert name in dir(marigold_uq)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'depht'"):
        marigold_uq.depht  # noqa: B018


NO_NETWORK = """
import pkgutil, socket
from importlib import import_module

def refuse(*arguments, **options):
    raise AssertionError("the network was used")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import marigold_uq

for place in pkgutil.walk_packages(marigold_uq.__path__, "marigold_uq."):
    try:
        import_module(place.name)
    except ImportError as error:  # of an extra that is not installed
        assert "marigold_uq" not in (error.name or ""), error
"""


def test_importing_every_module_uses_no_network() -> None:
    run = subprocess.run([sys.executable, "-c", NO_NETWORK], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
