"""Print the requirements of an extra of pyproject.toml, one a line.

Installing `.[test]` would compile the native runtime a second time.
"""

import sys
import tomllib
from pathlib import Path

pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
print("\n".join(pyproject["project"]["optional-dependencies"][sys.argv[1]]))
