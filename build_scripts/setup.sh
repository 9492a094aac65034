#!/usr/bin/env bash
# Make .venv: pinned dependencies and this package, editable. Repeatable. `make setup` skips it when up to date.
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) are honoured.
set -euo pipefail
cd "$(dirname "$0")/.."

new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3; do
        if "$name" -c "$new_enough" >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    echo "setup: Python 3.11 or newer is needed; found none of python3.11, python3.12, python3.13, python3" >&2
    return 1
}

# An environment left half-made, or by another Python, is made anew.
if ! .venv/bin/python -c "import pip; $new_enough" >/dev/null 2>&1; then
    python=$(find_python)
    echo "setup: making .venv with $python"
    "$python" -m venv --clear .venv || {
        echo "setup: $python cannot make a virtual environment; install its venv module (Debian: python3-venv)" >&2
        exit 1
    }
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input install --constraint constraints.txt)

# A build of torch that is already here stays, whether it carries CUDA or not.
torch=$(sed -n 's/^torch==//p' constraints.txt)
installed="from importlib.metadata import version; assert version('torch').split('+')[0] == '$torch'"
if ! .venv/bin/python -c "$installed" >/dev/null 2>&1; then
    echo "setup: looking for torch $torch+cpu"
    "${pip[@]}" "torch==$torch+cpu" ||
        echo "setup: note: no CPU build of torch $torch is offered here; taking the plain one, which carries CUDA"
fi
"${pip[@]}" --editable '.[server,test,lint]'
