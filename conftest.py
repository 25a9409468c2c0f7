"""Runs the Python examples of README, docs and docstrings, and checks the commands that they show."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser

_pages = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"], excludes=["CHANGELOG.md", "CONTRIBUTING.md"])
_docstrings = Sybil(parsers=[DocTestParser()], patterns=["*.py"], path="src")

pytest_collect_file = (_pages + _docstrings).pytest()
