"""Say where the files of the package `maxpipe.configs` are; everything else is in pyproject.toml.

The repository has the configurations at its root, an installed maxpipe has them as package data.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["maxpipe*"]), "maxpipe.configs"],
    package_dir={"maxpipe.configs": "configs"},
    package_data={"maxpipe": ["py.typed"], "maxpipe.configs": ["*.yml", "*/*.yml"]},
)
