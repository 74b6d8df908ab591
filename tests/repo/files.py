"""The files of the repository, as git sees them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

VENDORED = {"LICENSE", "gateway/tokens/data/cl100k_base.tiktoken"}
"""Kept byte for byte as their publishers made them."""


def repository_files() -> list[str]:
    """Paths of tracked and of new, not ignored files, relative to the root and with slashes."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=30,
    )
    names = listing.stdout.decode().split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def text_of(name: str) -> str:
    return (ROOT / name).read_bytes().decode("utf-8")
