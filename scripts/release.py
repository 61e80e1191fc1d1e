"""Build the wheel and the sdist, check them, and try each in a fresh environment.

``python scripts/release.py [FOLDER]`` works in a checkout and in what a zip archive leaves of one. Two builds of the
same files are equal byte for byte: all times in them are SOURCE_DATE_EPOCH, by default the day of the release. It
publishes nothing.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from datetime import datetime
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent


def stated_versions() -> dict[str, str]:
    """The version, from each file that states it; in the changelog, that of the newest release."""
    patterns = {
        "ringprof/_version.py": r'__version__ = "(.+)"',
        "CITATION.cff": r"version: (.+)",
        "CHANGELOG.md": r"## \[(\d.*)\] - \d{4}-\d\d-\d\d",
    }
    found = {}
    for name, pattern in patterns.items():
        stated = re.search(f"^{pattern}$", (ROOT / name).read_text("utf-8"), re.MULTILINE)
        found[name] = stated[1] if stated else "none"
    return found


def build(folder: Path) -> tuple[Path, Path]:
    """An sdist, and a wheel made from that sdist."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(release_time()))
    make = (sys.executable, "-m", "build", "--outdir", folder.resolve())
    told(ROOT, *make, "--sdist", ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    normalise(sdist, int(os.environ["SOURCE_DATE_EPOCH"]))
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(sdist) as archive:
            archive.extractall(temporary)
        told(ROOT, *make, "--wheel", Path(temporary, sdist.name.removesuffix(".tar.gz")))
    (wheel,) = folder.glob("*.whl")
    return wheel, sdist


def release_time() -> int:
    """Return the first second, UTC, of the day of the newest release in the changelog."""
    day = re.search(r"^## \[\d.*\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if day is None:
        raise SystemExit("CHANGELOG.md names no day of a release")
    return int(datetime.fromisoformat(f"{day[1]}T00:00:00+00:00").timestamp())


def normalise(sdist: Path, time: int) -> None:
    """Rewrite an sdist without what differs between builders: times, owners, permissions, the order of its files."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, time
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=time))


def contents(path: Path) -> set[str]:
    """The files of a wheel, or those of an sdist below its own folder."""
    if path.suffix == ".whl":
        return set(zipfile.ZipFile(path).namelist())
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def metadata(wheel: Path) -> Metadata:
    """By the rules of the core metadata that package indexes apply; an ExceptionGroup names what breaks them."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)


def try_out(package: Path, folder: Path) -> None:
    """Install into a fresh environment with what it depends on, and use it away from the checkout."""
    venv.create(folder, with_pip=True)
    own, away = folder / "bin" / "python", folder / "away"
    away.mkdir()
    told(away, own, "-m", "pip", "--disable-pip-version-check", "install", package.resolve())
    run, other = (ROOT / "traces" / f"h200x4-{name}" for name in ("zigzag-65536", "burst-262144"))
    for arguments in (
        ["--version"], ["report", run], ["compare", run, other], ["plot", "steps", run, "-o", "steps.svg"],
        ["export", run, "-o", "merged.json.gz"],
    ):  # fmt: skip
        told(away, folder / "bin" / "ringprof", *arguments)
    program = "import importlib.util as u, ringprof; print(ringprof.__file__); print(u.find_spec('torch'))"
    place, torch = told(away, own, "-c", program).splitlines()
    if not place.startswith(str(folder)) or torch != "None":
        raise SystemExit(f"{package.name}: {place} was used, torch: {torch}")


def told(folder: Path, *command: str | Path) -> str:
    """What a command prints; its complaint ends the release."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    folder.mkdir(exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder} holds files; move or delete them first", file=sys.stderr)
        return 2
    versions = stated_versions()
    if len(set(versions.values())) > 1:
        print(f"versions differ: {versions}", file=sys.stderr)
        return 2
    packages = build(folder)
    found = metadata(packages[0])
    print(f"{found.name} {found.version}, {found.license_expression}")
    for package in packages:
        with tempfile.TemporaryDirectory() as temporary:
            try_out(package, Path(temporary).resolve())
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        print(f"{digest}  {package.name}: {len(contents(package))} files, installs and works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
