"""Makes the real server of the end-to-end tests importable from here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
