"""helm, from the virtual environment or the path."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.unit.helm.chart import Helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    """`make test` fetches it; without it the chart is untested, which CI does not put up with."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which("helm", path=path)
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("helm is not installed: the chart must be tested")
        pytest.skip("helm is not installed")
    return Helm(program)
