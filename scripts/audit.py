"""Look the pinned packages up in a database of known vulnerabilities, and report packages that were not found.

Without an argument, pip-audit queries PyPI. On its own, pip-audit hides unknown packages in the cells of a table, and
ends with a traceback without a network; its exit code is then 0 or that of a finding. Here, a vulnerability exits with
1. An unreachable database does not fail the build, but is reported last, in capitals, since nothing was audited.

Without a network, ``make audit OSV=all.zip`` reads a downloaded database: OSV's export for PyPI
(https://google.github.io/osv.dev/data/#data-dumps), whose records follow https://ossf.github.io/osv-schema.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"


def verdict(packages: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Summarise the known vulnerabilities in lines; returns the lines and the exit code."""
    holes = [
        f"{package['name']} {package['version']}: {hole['id']}"
        for package in packages
        for hole in package.get("vulns", ())
    ]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        return ["NOT AUDITED: no database of vulnerabilities could be reached"], 0
    lines = [f"audited: {len(packages) - len(unknown)} of {len(packages)} packages, {len(holes)} known holes", *holes]
    if unknown:
        lines.append(f"NOT AUDITED, in no database: {', '.join(unknown)}")
    return lines, int(bool(holes))


def by_pip_audit() -> list[dict[str, Any]]:
    """Look the pinned packages up with pip-audit; an empty list if it fails."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", "-r", str(PINS), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return list(json.loads(done.stdout)["dependencies"])
    except json.JSONDecodeError:
        print(f"pip-audit: {(done.stderr.splitlines() or ['no word'])[-1]}")
        return []


def by_records(records: Iterable[dict[str, Any]], pins: dict[str, str]) -> list[dict[str, Any]]:
    """Look the pinned packages, names and versions, up in OSV records."""
    packages = {name: {"name": name, "version": version, "vulns": []} for name, version in pins.items()}
    for record in records:
        if record.get("withdrawn"):
            continue
        for affected in record.get("affected", ()):
            name = canonicalize_name(affected.get("package", {}).get("name", ""))
            if name in pins and affects(affected, pins[name]):
                packages[name]["vulns"].append({"id": record["id"]})
    return list(packages.values())


def affects(affected: dict[str, Any], version: str) -> bool:
    """Return whether an OSV entry lists a version, or has a range that includes it."""
    if version in affected.get("versions", ()):
        return True
    ranges = [item["events"] for item in affected.get("ranges", ()) if item["type"] == "ECOSYSTEM"]
    return any(_within(events, Version(version)) for events in ranges)


def _within(events: list[dict[str, str]], version: Version) -> bool:
    inside = False
    pairs = (pair for event in events for pair in event.items())
    for event, text in sorted(pairs, key=lambda pair: _version(pair[1])):
        limit = _version(text)
        if event == "introduced" and version >= limit:
            inside = True
        elif (event == "fixed" and version >= limit) or (event == "last_affected" and version > limit):
            inside = False
    return inside


def _version(text: str) -> Version:
    """Parse a version; an invalid one, such as 2.6.0-cu124 in PYSEC-2025-189, is reduced to its leading numbers."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version((re.findall(r"\d+(?:\.\d+)*", text) or ["0"])[0])


def pinned() -> dict[str, str]:
    """Read the names and versions of the constraints file."""
    lines = (line.partition("#")[0].strip() for line in PINS.read_text().splitlines())
    pins = [Requirement(line) for line in lines if line]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


def main(argv: list[str]) -> int:
    if argv:
        try:
            with zipfile.ZipFile(argv[0]) as archive:
                records = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith(".json")]
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            sys.exit(f"{argv[0]}: {error}")
        # An old database misses recent vulnerabilities, so its date is printed.
        newest = max((record["modified"] for record in records), default="never")
        print(f"{len(records)} records, the newest of {newest[:10]}")
        packages = by_records(records, pinned()) if records else []
    else:
        packages = by_pip_audit()
    lines, code = verdict(packages)
    print(*lines, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
