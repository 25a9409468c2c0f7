"""How Sphinx builds the documentation."""

import re
from pathlib import Path

project = "multiback"
# Read rather than imported, so that the documentation builds without torch.
_source = Path(__file__).parent.parent / "src" / "multiback" / "_version.py"
release = re.findall(r'__version__ = "(.+)"', _source.read_text(encoding="utf-8"))[0]

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
# Headings three deep can be linked to, also from the README.
myst_heading_anchors = 3

html_theme = "furo"
html_title = "multiback"
