"""What an installation holds, what importing costs, and that nothing is left out of the package."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ringprof
from tests.paths import ROOT


def test_every_subpackage_is_listed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    # The link to strategies/ is no folder to a search for all levels.
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "ringprof").rglob("__init__.py")}
    assert listed == {".".join(folder.parts) for folder in folders} | {"ringprof.strategies"}


def test_the_public_names_exist_and_are_sorted() -> None:
    assert sorted(ringprof.__all__) == ringprof.__all__
    for name in set(ringprof.__all__) - {"capture"}:
        assert getattr(ringprof, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = ringprof.lod


@pytest.mark.parametrize(
    "program",
    [
        "import ringprof",
        "from ringprof.cli import run; run(['--help'])",
        "from ringprof.cli import run; run(['record', '--help'])",
        "from ringprof.cli import run; assert run(['report', 'nowhere.json']) == 2",
    ],
)
def test_starting_loads_neither_torch_nor_matplotlib_nor_pandas(program: str) -> None:
    check = "; import sys; print(sorted({'torch', 'matplotlib', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program + check], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_second_copy_of_the_strategies_cannot_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import strategies"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "import ringprof.strategies" in done.stderr


@pytest.mark.long
def test_a_wheel_holds_the_strategies_under_ringprof_and_installs(tmp_path: Path) -> None:
    """From a copy without the link, as a zip archive leaves it; beside a folder strategies/ of the user's own."""
    source = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if not (ROOT / name).is_symlink() and (ROOT / name).exists():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(source)], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"ringprof", f"ringprof-{ringprof.__version__}.dist-info"}
    on_disk = {f"ringprof/strategies/{path.name}" for path in (ROOT / "strategies").glob("*.py")}
    assert on_disk <= set(names)
    site, hostile = tmp_path / "site", tmp_path / "work"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    (hostile / "strategies").mkdir(parents=True)
    (hostile / "strategies" / "__init__.py").write_text("raise AssertionError('the user\\'s own folder was imported')")
    program = "import ringprof.strategies as s; print(s.__file__, *s.names())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=hostile, env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site)) and "zigzag" in done.stdout
