#!/bin/sh
# Says in one line what a fresh machine lacks before anything is built.
set -eu
python=${1:-python3}

fail() {
    echo "shoal: $1" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "$python is not installed (3.11 or newer is needed)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version 2>&1) is too old; 3.11 or newer is needed (make PYTHON=python3.x)"
command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler: install g++"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module: apt-get install python3-venv"
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[ -e "$header" ] || fail "the Python headers are missing: apt-get install python3-dev"
