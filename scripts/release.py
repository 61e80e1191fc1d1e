"""Build the wheel and the sdist, check them, and try each in a fresh environment.

``python scripts/release.py [FOLDER]`` works in a checkout and in an unpacked zip archive of one. Two builds of the same
files are equal byte for byte: all times in them are SOURCE_DATE_EPOCH, by default the day of the release. The script
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
    """Read the version from each file that states it; the changelog states that of the newest release."""
    patterns = {
        "ringprof/_version.py": r'__version__ = "(.+)"',
        "CITATION.cff": r"version: (.+)",
        "CHANGELOG.md": r"## \[(\d.*)\] - \d{4}-\d\d-\d\d",
    }
    versions = {}
    for name, pattern in patterns.items():
        match = re.search(f"^{pattern}$", (ROOT / name).read_text("utf-8"), re.MULTILINE)
        versions[name] = match[1] if match else "none"
    return versions


def build(folder: Path) -> tuple[Path, Path]:
    """Build an sdist, and a wheel from that sdist."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(release_time()))
    make = (sys.executable, "-m", "build", "--outdir", folder.resolve())
    output_of(ROOT, *make, "--sdist", ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    normalise(sdist, int(os.environ["SOURCE_DATE_EPOCH"]))
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(sdist) as archive:
            archive.extractall(temporary)
        output_of(ROOT, *make, "--wheel", Path(temporary, sdist.name.removesuffix(".tar.gz")))
    (wheel,) = folder.glob("*.whl")
    return wheel, sdist


def release_time() -> int:
    """Return the first second, UTC, of the day of the newest release in the changelog."""
    day = re.search(r"^## \[\d.*\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if day is None:
        raise SystemExit("CHANGELOG.md names no day of a release")
    return int(datetime.fromisoformat(f"{day[1]}T00:00:00+00:00").timestamp())


def normalise(sdist: Path, time: int) -> None:
    """Rewrite an sdist so that all builders get the same bytes: set times, owners, permissions and the file order."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, time
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=time))


def contents(path: Path) -> set[str]:
    """List the files of a wheel, or of an sdist relative to its top folder."""
    if path.suffix == ".whl":
        return set(zipfile.ZipFile(path).namelist())
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def metadata(wheel: Path) -> Metadata:
    """Parse the metadata of a wheel by the rules of package indexes; raises an ExceptionGroup of the violations."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)


def try_out(package: Path, folder: Path) -> None:
    """Install a package with its dependencies into a fresh environment, and run it outside the checkout."""
    venv.create(folder, with_pip=True)
    own, away = folder / "bin" / "python", folder / "away"
    away.mkdir()
    output_of(away, own, "-m", "pip", "--disable-pip-version-check", "install", package.resolve())
    run, other = (ROOT / "traces" / f"h200x4-{name}" for name in ("zigzag-65536", "burst-262144"))
    for arguments in (
        ["--version"], ["report", run], ["compare", run, other], ["plot", "steps", run, "-o", "steps.svg"],
        ["export", run, "-o", "merged.json.gz"],
    ):  # fmt: skip
        output_of(away, folder / "bin" / "ringprof", *arguments)
    program = "import importlib.util as u, ringprof; print(ringprof.__file__); print(u.find_spec('torch'))"
    location, torch = output_of(away, own, "-c", program).splitlines()
    if not location.startswith(str(folder)) or torch != "None":
        raise SystemExit(f"{package.name}: {location} was used, torch: {torch}")


def output_of(folder: Path, *command: str | Path) -> str:
    """Run a command and return its output; exits with its error message if it fails."""
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
    package_metadata = metadata(packages[0])
    print(f"{package_metadata.name} {package_metadata.version}, {package_metadata.license_expression}")
    for package in packages:
        with tempfile.TemporaryDirectory() as temporary:
            try_out(package, Path(temporary).resolve())
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        print(f"{digest}  {package.name}: {len(contents(package))} files, installs and works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
