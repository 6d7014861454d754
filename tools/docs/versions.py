"""Lists the versions of the documentation that lie beside each other in a site, for the menu in its header.

Usage: versions.py FOLDER, which has a folder for each version. It writes versions.json, which the pages of all versions
read, and index.html, which leads to the newest.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_VERSION = re.compile(r"\d+\.\d+\.\d+")
_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Poseidon</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<a href="{newest}/index.html">Poseidon {newest}</a>
"""


def main() -> None:
    """Writes both files."""
    site = Path(sys.argv[1])
    found = [folder.name for folder in site.iterdir() if folder.is_dir() and _VERSION.fullmatch(folder.name)]
    found.sort(key=lambda name: tuple(map(int, name.split("."))), reverse=True)
    listed = [{"version": name, "title": name, "aliases": ["latest"] * (name == found[0])} for name in found]
    (site / "versions.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    (site / "index.html").write_text(_PAGE.format(newest=found[0]), encoding="utf-8")


if __name__ == "__main__":
    main()
