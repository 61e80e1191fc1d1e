"""Look the pinned packages up in a database of known holes, and say loudly which could not be looked up.

Without an argument pip-audit asks PyPI. It says in a table's cells what it did not find, or ends in a traceback without
a network; its exit code is then 0 or that of a finding. A hole exits with 1 here. A database that cannot be reached
fails nobody's build, but is said last, in capitals: it is no audit.

Where there is no network, ``make audit OSV=all.zip`` reads a database that was brought along: OSV's export for PyPI
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
    """What is known of each package, in lines, and the exit code."""
    holes = [f"{one['name']} {one['version']}: {hole['id']}" for one in packages for hole in one.get("vulns", ())]
    unknown = [one["name"] for one in packages if "skip_reason" in one]
    if len(unknown) == len(packages):
        return ["NOT AUDITED: no database of vulnerabilities could be reached"], 0
    lines = [f"audited: {len(packages) - len(unknown)} of {len(packages)} packages, {len(holes)} known holes", *holes]
    if unknown:
        lines.append(f"NOT AUDITED, in no database: {', '.join(unknown)}")
    return lines, int(bool(holes))


def by_pip_audit() -> list[dict[str, Any]]:
    """The pinned packages as pip-audit finds them; none where it cannot."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", "-r", str(PINS), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return list(json.loads(done.stdout)["dependencies"])
    except json.JSONDecodeError:
        print(f"pip-audit: {(done.stderr.splitlines() or ['no word'])[-1]}")
        return []


def by_records(records: Iterable[dict[str, Any]], pins: dict[str, str]) -> list[dict[str, Any]]:
    """The pinned packages, names and versions, with the records of OSV that affect them."""
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
    """Whether a version is listed, or within a range from one event to the next."""
    if version in affected.get("versions", ()):
        return True
    ranges = [one["events"] for one in affected.get("ranges", ()) if one["type"] == "ECOSYSTEM"]
    return any(_within(events, Version(version)) for events in ranges)


def _within(events: list[dict[str, str]], version: Version) -> bool:
    inside = False
    for event, text in sorted((pair for one in events for pair in one.items()), key=lambda pair: _order(pair[1])):
        if event == "introduced" and version >= _order(text):
            inside = True
        elif (event == "fixed" and version >= _order(text)) or (event == "last_affected" and version > _order(text)):
            inside = False
    return inside


def _order(text: str) -> Version:
    """Some have versions that are none by today's rules, as PYSEC-2025-189 2.6.0-cu124: their numbers count."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version((re.findall(r"\d+(?:\.\d+)*", text) or ["0"])[0])


def pinned() -> dict[str, str]:
    """Names and versions of the constraints."""
    lines = (line.partition("#")[0].strip() for line in PINS.read_text().splitlines())
    pins = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): next(iter(one.specifier)).version for one in pins}


def main(argv: list[str]) -> int:
    if argv:
        try:
            with zipfile.ZipFile(argv[0]) as archive:
                records = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith(".json")]
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            sys.exit(f"{argv[0]}: {error}")
        # A database of another year audits little.
        print(
            f"{len(records)} records, the newest of {max((one['modified'] for one in records), default='never')[:10]}"
        )
        packages = by_records(records, pinned()) if records else []
    else:
        packages = by_pip_audit()
    lines, code = verdict(packages)
    print(*lines, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
