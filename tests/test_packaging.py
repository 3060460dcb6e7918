"""Wheel and sdist hold what a user needs, and the package works from the wheel in another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvq import __version__

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.long
COMPOSE = "import kvq; from kvq.config import compose; print(compose(['method=nsn']).method.name, kvq.__file__)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    tool, out = tmp_path_factory.mktemp("hatchling"), tmp_path_factory.mktemp("built")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tool), "hatchling>=1.27"]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        pytest.skip("hatchling cannot be installed here: no package index")
    environment = os.environ | {"PYTHONPATH": str(tool)}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return out


def test_the_package_works_from_its_wheel(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"kvq_harness-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    for own in (ROOT / "kvq").rglob("*"):
        if own.is_file() and "__pycache__" not in own.parts:
            assert str(own.relative_to(ROOT)) in names
    assert {"kvq/conf/method/nsn.yaml", "kvq/py.typed", "kvq/reference/paper_results.csv"} <= names
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {COMPOSE}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["nsn", str(tmp_path / "kvq" / "__init__.py")]


def test_the_sdist_has_what_builds_and_tests_it(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "run.py", "conf/method/nsn.yaml"} <= names
    assert {"tests/test_packaging.py", "requirements/smollm2_135m.txt", "experiments/docs/findings.py"} <= names
