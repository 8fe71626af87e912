"""Installs what one service needs, without Quartet itself: install_dependencies.py SERVICE [EXTRA_INDEX]"""

import subprocess
import sys
import tomllib
from pathlib import Path

service, extra_index = sys.argv[1], "".join(sys.argv[2:])
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
command = ["/opt/quartet/bin/pip", "install", "-c", "constraints.txt", "--find-links", "/wheels"]
command += ["--extra-index-url", extra_index] if extra_index else []
command += [*project["dependencies"], *project["optional-dependencies"][service]]
sys.exit(subprocess.call(command))
