"""Say which build of torch pip is about to install, and how much there is to download.

It informs and never blocks: whatever goes wrong, it says that the build could not be found out, and exits with 0.

Usage: torch_build.py REQUIREMENT CONSTRAINTS
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, url2pathname, urlopen

MIB = 2**20
GIB = 2**30
PIP_SECONDS = 90
HEAD_SECONDS = 10
# Packages that only builds for an accelerator ask for.
ACCELERATOR = re.compile(r"(nvidia-|cuda-|triton|pytorch-triton|rocm|intel-|dpcpp-)", re.IGNORECASE)
KINDS = {"cpu": "CPU", "cu": "CUDA", "rocm": "ROCm", "xpu": "XPU"}


@dataclass(frozen=True)
class Wheel:
    """A package that pip would install."""

    name: str
    version: str
    url: str
    requires: tuple[str, ...]

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine already."""
        return urlsplit(self.url).scheme == "file"


def planned(requirement: str, constraints: str, *options: str) -> list[Wheel]:
    """The packages that pip would install for a requirement, in the environment of this Python."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--report", "-", *options, "--constraint", constraints, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PIP_SECONDS)
    return [
        Wheel(
            name=item["metadata"]["name"],
            version=item["metadata"]["version"],
            url=item["download_info"]["url"],
            requires=tuple(item["metadata"].get("requires_dist", ())),
        )
        for item in json.loads(done.stdout)["install"]
    ]


def size(wheel: Wheel) -> int | None:
    """The bytes of a wheel's file, or None where its server does not say."""
    try:
        if wheel.is_local:
            return Path(url2pathname(urlsplit(wheel.url).path)).stat().st_size
        with urlopen(Request(wheel.url, method="HEAD"), timeout=HEAD_SECONDS) as answer:
            return int(answer.headers["Content-Length"])
    except Exception:  # a size is worth no failure, whatever a server or a proxy answers
        return None


def total(wheels: Iterable[Wheel]) -> int | None:
    """The bytes of several wheels together, or None if one of them is unknown."""
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(size, wheels))
    known = [s for s in sizes if s is not None]
    return sum(known) if len(known) == len(sizes) else None


def in_words(count: int | None) -> str:
    """Bytes in the unit that a person compares with a disk or a connection."""
    if count is None:
        return "size unknown"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def kind(torch: Wheel) -> str:
    """What a build of torch runs on: its local version says it, or else what it requires."""
    local = re.match(r"[^+]+\+([a-z]+)", torch.version)
    if local:
        return KINDS.get(local[1], local[1])
    wanted = " ".join(torch.requires).lower()
    if "rocm" in wanted:
        return "ROCm"
    return "CUDA" if "nvidia-" in wanted or "cuda-" in wanted else "CPU"


def description(requirement: str, constraints: str) -> str:
    """One or two lines about the torch that pip would install."""
    torch = next((w for w in planned(requirement, constraints, "--no-deps") if w.name.lower() == "torch"), None)
    if torch is None:
        return f"torch {version('torch')} is already installed."
    build = kind(torch)
    place = "from a file on this machine" if torch.is_local else "to download unless pip has it cached"
    line = f"torch {torch.version} ({build} build), {in_words(size(torch))} {place}"
    if any(ACCELERATOR.match(r) for r in torch.requires):
        wheels = [w for w in planned(requirement, constraints) if ACCELERATOR.match(w.name)]
        if wheels:
            line += f", and {len(wheels)} {build} packages with it, {in_words(total(wheels))}"
    return f'{line}.\nAnother build: make TORCH="torch==..." bench (the head of constraints.txt says how to choose).'


def main() -> int:
    """Print the description, or that there is none."""
    try:
        requirement, constraints = sys.argv[1:]
        print(description(requirement, constraints), flush=True)
    except Exception:  # the install that follows gives the reason, if it matters to it
        print("Which build of torch pip will take could not be found out beforehand.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
