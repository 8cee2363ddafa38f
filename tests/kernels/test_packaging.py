"The kernels' folder reaches the installed package, under the package's name only."

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOW = "import llm_from_scratch.kernels.attention as found; print(found.__file__)"


def run(*command, **options) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | options.pop("env", {})
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, **options)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


@pytest.mark.slow
def test_a_clone_that_is_not_installed_finds_them(tmp_path):
    assert run(sys.executable, "-c", SHOW, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}) == str(ROOT / "kernels" / "attention.py")


@pytest.mark.slow
def test_an_installed_wheel_holds_them(tmp_path):
    clone, wheels, target = tmp_path / "clone", tmp_path / "wheels", tmp_path / "installed"
    run("git", "clone", "--quiet", str(ROOT), str(clone))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(clone))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *map(str, wheels.glob("*.whl")))
    assert run(sys.executable, "-c", SHOW, cwd=tmp_path, env={"PYTHONPATH": str(target)}) == str(target / "llm_from_scratch" / "kernels" / "attention.py")
    assert not (target / "kernels").exists()
