#!/bin/sh
# Makes all golden values of tests/oracle again; with --check compares them with those in the repository.
set -eu
python=$1
shift
model=$("$python" -m shoal.cli pull smollm2-135m)
for script in tests/oracle/make_*.py; do
    echo "oracle: $script"
    case $script in
        */make_llama.py) "$python" "$script" "$@" ;; # writes its own tiny models
        *) "$python" "$script" "$model" "$@" ;;
    esac
done
