"""Build the documentation as a site, with the reference of the Python API: ``python scripts/build_docs.py [FOLDER]``.

Exits with 1 on any warning, such as a broken link. Needs no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parent.parent
FIRST_PAGE = '<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">ringprof</a>\n'


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs"), "-d", str(folder) + ".cache"]
    code = build_main([*options, str(ROOT), str(folder)])
    (folder / "index.html").write_text(FIRST_PAGE, encoding="utf-8")
    print(f"open {folder}/index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
