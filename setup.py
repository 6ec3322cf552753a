"""Say where the files of the package `maxpipe.configs` are; everything else is in pyproject.toml.

The repository has the configurations at its root, an installed maxpipe has them as package data.
An editable installation reads them at the root and is a line in a .pth file: setuptools would make
a finder for other places, which a folder `maxpipe` in the working directory takes precedence over.
"""

import sys

from setuptools import find_packages, setup

is_editable = "editable_wheel" in sys.argv

setup(
    packages=find_packages(include=["maxpipe*"]) + ["maxpipe.configs"] * (not is_editable),
    package_dir={"": "."} | ({} if is_editable else {"maxpipe.configs": "configs"}),
    package_data={
        "maxpipe": ["py.typed", "**/*.css", "**/*.js", "comparison/uplot/*"],
        "maxpipe.configs": ["*.yml", "*/*.yml"],
    },
)
