"""Contents of an installation, cost of importing, and completeness of the package."""

from __future__ import annotations

import configparser
import io
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import ringprof
from tests.paths import ROOT, tracked_files


def test_every_subpackage_is_listed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    # A recursive search does not follow the link to strategies/.
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "ringprof").rglob("__init__.py")}
    folders |= {"ringprof" / path.parent.relative_to(ROOT) for path in (ROOT / "strategies").rglob("__init__.py")}
    assert listed == {".".join(folder.parts) for folder in folders}


def test_the_lowest_python_is_the_same_everywhere() -> None:
    """Python 3.10 reached its end of life in October 2026; the newest classifier is the newest Python of the matrix."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert config["options"]["python_requires"] == ">=3.11"
    assert (tools["ruff"]["target-version"], tools["mypy"]["python_version"]) == ("py311", "3.11")
    assert runpy.run_path(str(ROOT / "scripts" / "check_python.py"))["NEEDED"] == (3, 11)
    matrix = runpy.run_path(str(ROOT / "scripts" / "every_python.py"))["MATRIX"]
    classified = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    assert classified == sorted({row.python for row in matrix}) == ["3.11", "3.12", "3.13"]


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
def test_startup_imports_neither_torch_nor_matplotlib_nor_pandas(program: str) -> None:
    check = "; import sys; print(sorted({'torch', 'matplotlib', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program + check], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_second_copy_of_the_strategies_cannot_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import strategies"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "import ringprof.strategies" in done.stderr


def stated_version(name: str, pattern: str) -> str:
    match = re.search(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE)
    assert match, name
    return match[1]


def test_version_can_be_cited() -> None:
    released = stated_version("CHANGELOG.md", r"^## \[(\d.*)\] - ")
    assert stated_version("CITATION.cff", "^version: (.*)$") == released == ringprof.__version__
    day = stated_version("CHANGELOG.md", rf"^## \[{re.escape(released)}\] - (.*)$")
    assert stated_version("CITATION.cff", "^date-released: (.*)$") == day
    assert stated_version("CITATION.cff", "^license: (.*)$") == stated_version(
        "setup.cfg", "^license_expression = (.*)$"
    )


RELEASE = runpy.run_path(str(ROOT / "scripts" / "release.py"))


def test_sdist_does_not_depend_on_builder_or_time(tmp_path: Path) -> None:
    """Normalise two archives of the same files with different times, owners, groups, permissions and order."""
    archives = []
    for number, names in enumerate((["a.py", "b.py", "run.sh"], ["run.sh", "b.py", "a.py"])):
        archives.append(tmp_path / f"{number}.tar.gz")
        with tarfile.open(archives[-1], "w:gz") as archive:
            for name in names:
                member = tarfile.TarInfo(f"x-1/{name}")
                member.size, member.mtime, member.uid, member.uname = 4, 1000.5 + number, number, f"user{number}"
                member.mode = (0o775 if name == "run.sh" else 0o664) & ~(0o022 * number)
                archive.addfile(member, io.BytesIO(name[:4].encode()))
        RELEASE["normalise"](archives[-1], 1_700_000_000)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as archive:
        members = archive.getmembers()
        assert [archive.extractfile(member).read() for member in members] == [b"a.py", b"b.py", b"run."]  # type: ignore[union-attr]
    assert [(member.name, member.mode, member.mtime, member.uid, member.uname) for member in members] == [
        ("x-1/a.py", 0o644, 1_700_000_000, 0, ""),
        ("x-1/b.py", 0o644, 1_700_000_000, 0, ""),
        ("x-1/run.sh", 0o755, 1_700_000_000, 0, ""),
    ]


def copied_checkout(source: Path) -> Path:
    """Copy the tracked files without the link, as in an unpacked zip archive."""
    for name in tracked_files():
        if not (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run ``make release`` in a copy of the checkout; returns the folder and the output."""
    source = copied_checkout(tmp_path_factory.mktemp("a zip archive"))
    folder = tmp_path_factory.mktemp("release")
    command = [sys.executable, str(source / "scripts" / "release.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.long
def test_a_release_is_checked_and_works_in_fresh_environments(released: tuple[Path, str]) -> None:
    lines = released[1].splitlines()
    assert lines[0] == f"ringprof {ringprof.__version__}, Apache-2.0"
    assert [line.endswith("installs and works") for line in lines[1:]] == [True, True]


@pytest.mark.long
def test_rebuilding_the_same_files_is_reproducible(released: tuple[Path, str], tmp_path: Path) -> None:
    """Build again in another folder, from files with other times and permissions."""
    source = copied_checkout(tmp_path / "elsewhere")
    for path in source.rglob("*.py"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
        path.chmod(0o664)
    program = "import runpy, sys; from pathlib import Path; runpy.run_path(sys.argv[1])['build'](Path(sys.argv[2]))"
    (tmp_path / "again").mkdir()
    command = [sys.executable, "-c", program, str(source / "scripts" / "release.py"), str(tmp_path / "again")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (released[0], tmp_path / "again")
    )
    assert len(first) == 2 and first == second


@pytest.mark.long
def test_release_contains_exactly_the_expected_files(released: tuple[Path, str]) -> None:
    (wheel,), (sdist,) = released[0].glob("*.whl"), released[0].glob("*.tar.gz")
    package = {name for name in tracked_files() if name.startswith("ringprof/") and not (ROOT / name).is_symlink()}
    strategies = {name for name in tracked_files() if name.startswith("strategies/")}
    info = f"ringprof-{ringprof.__version__}.dist-info"
    written = {"licenses/LICENSE", "METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "RECORD"}
    installed = package | {f"ringprof/{name}" for name in strategies}
    assert set(zipfile.ZipFile(wheel).namelist()) == installed | {f"{info}/{name}" for name in written}
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    texts = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "MANIFEST.in", "pyproject.toml", "setup.cfg"}
    generated = {"PKG-INFO"} | {name for name in members if name.startswith("ringprof.egg-info/")}
    assert members == package | strategies | texts | generated


@pytest.mark.long
def test_installed_strategies_ignore_a_folder_named_strategies(released: tuple[Path, str], tmp_path: Path) -> None:
    """Check that ``ringprof.strategies`` does not import the user's own folder strategies/."""
    (wheel,) = released[0].glob("*.whl")
    site, hostile = tmp_path / "site", tmp_path / "work"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    (hostile / "strategies").mkdir(parents=True)
    (hostile / "strategies" / "__init__.py").write_text("raise AssertionError('the user's own folder was imported')")
    program = "import ringprof.strategies as s; print(s.__file__, *s.names())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=hostile, env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site)) and "zigzag" in done.stdout
