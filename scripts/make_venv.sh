#!/bin/sh
# Make the virtual environment $1 with the first Python on the PATH that is 3.11 or newer; leave one that works alone.
set -eu

venv=$1
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

if "$venv/bin/python" -c "$new_enough" 2>/dev/null && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

# 3.11 first: constraints.txt was resolved for it.
for python in python3.11 python3 python3.12 python3.13; do
    if "$python" -c "$new_enough" 2>/dev/null; then
        echo "make_venv: $("$python" --version) builds $venv"
        rm -rf "$venv"
        # Debian keeps ensurepip in a package of its own. Where it is missing, the machine's own pip can fill the environment.
        if "$python" -c 'import ensurepip' 2>/dev/null; then
            exec "$python" -m venv "$venv"
        elif "$python" -m pip --version >/dev/null 2>&1; then
            "$python" -m venv --without-pip "$venv"
            exec "$python" -m pip --python "$venv/bin/python" install --quiet pip
        fi
        echo "make_venv: $python has neither ensurepip nor pip; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    fi
done
echo "make_venv: no Python 3.11 or newer on the PATH" >&2
exit 1
