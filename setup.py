"""The one thing of the package that is computed: its description, from README.md."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description() -> str:
    """README.md, whose links lead to the sources: an index has no files beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = project["urls"]["Source"]
    text = (ROOT / "README.md").read_text()
    # Pictures first: an index shows what it is sent, not a page about it.
    text = re.sub(r"(!\[[^]]*\])\((?!https?:|#)", rf"\1({source}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\])\((?!https?:|#)", rf"\1({source}/blob/main/", text)


if __name__ == "__main__":
    setup(
        long_description=description(),
        long_description_content_type="text/markdown",
    )
