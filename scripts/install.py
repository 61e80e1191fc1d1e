"""Install this checkout with some extras into the running environment, with short messages.

Usage: install.py EXTRAS. The versions of constraints.txt are installed if they are available. A Python for which the
pinned torch has no build gets the newest torch that pip finds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pip_install(extras: str, *, constrained: bool) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if constrained:
        command += ["--constraint", str(ROOT / "constraints.txt")]
    return subprocess.run([*command, "--editable", f"{ROOT}[{extras}]"], capture_output=True, text=True, check=False)


def main() -> int:
    extras = sys.argv[1]
    result = pip_install(extras, constrained=True)
    if result.returncode:
        print("the pinned versions are not available here; installing the newest compatible ones", flush=True)
        result = pip_install(extras, constrained=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        print(f"installation failed: {lines[-1]}", file=sys.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
