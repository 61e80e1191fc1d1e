"""Look the pinned packages up in a database of known holes, and say loudly which could not be looked up.

pip-audit says in a table's cells what it did not find, or ends in a traceback without a network; its exit code is then
0 or that of a finding. A hole exits with 1 here. A database that cannot be reached fails nobody's build, but is said
last, in capitals: it is no audit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def verdict(packages: list[dict[str, Any]]) -> tuple[list[str], int]:
    """What pip-audit found out of each package, in lines, and the exit code."""
    holes = [f"{one['name']} {one['version']}: {hole['id']}" for one in packages for hole in one.get("vulns", ())]
    unknown = [one["name"] for one in packages if "skip_reason" in one]
    if len(unknown) == len(packages):
        return ["NOT AUDITED: no database of vulnerabilities could be reached"], 0
    lines = [f"audited: {len(packages) - len(unknown)} of {len(packages)} packages, {len(holes)} known holes", *holes]
    if unknown:
        lines.append(f"NOT AUDITED, in no database: {', '.join(unknown)}")
    return lines, int(bool(holes))


def main() -> int:
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", "-r", str(ROOT / "constraints.txt"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except json.JSONDecodeError:
        print(f"pip-audit: {(done.stderr.splitlines() or ['no word'])[-1]}")
        packages = []
    lines, code = verdict(packages)
    print(*lines, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
