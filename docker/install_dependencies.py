"""Installs what services need, without Quartet itself: install_dependencies.py EXTRA... (extras of pyproject.toml)"""

import subprocess
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
command = [sys.executable, "-m", "pip", "--python", "/opt/quartet/bin/python", "install", "-c", "constraints.txt"]
command += project["dependencies"]
for extra in sys.argv[1:]:
    command += project["optional-dependencies"][extra]
sys.exit(subprocess.call(command))
