#!/bin/sh
# Build the wheel with the Python $1, install it with its dependencies into a new environment outside the checkout, and
# use it there: `tidemark doctor` takes a store through everything that a repository asks of one.
set -eu
# The checkout is to be found by nobody, pip included.
unset PYTHONPATH

python=$(realpath --no-symlinks "$1")
cd "$(dirname "$0")/.."
checkout=$PWD

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT

# From a copy: a build leaves files behind that the next one would pack again.
mkdir "$elsewhere/source" "$elsewhere/store"
cp -R pyproject.toml README.md LICENSE blobstore engine index "$elsewhere/source"
"$python" -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir "$elsewhere/dist" "$elsewhere/source"
"$python" -m venv --without-pip "$elsewhere/venv"
"$python" -m pip --disable-pip-version-check --python "$elsewhere/venv/bin/python" install --quiet \
    --constraint "$checkout/constraints.txt" "$(echo "$elsewhere"/dist/tidemark-*.whl)[s3]"

cd "$elsewhere"
venv/bin/tidemark --version
venv/bin/python -c 'import blobstore.s3.store, engine, engine.spark, index; print(engine.__file__)'
venv/bin/tidemark doctor "file://$elsewhere/store"
