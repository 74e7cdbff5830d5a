#!/bin/sh
# Build the wheel with the Python $1, and install it outside the checkout into two new environments: without extras, as
# on a machine for cron, where the commands have to work and nothing of Spark may be; and with the extra `spark`.
set -eu
# The checkout is to be found by nobody, pip included.
unset PYTHONPATH

python=$(realpath --no-symlinks "$1")
cd "$(dirname "$0")/.."
checkout=$PWD

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT

# From a copy: a build leaves files behind that the next one would pack again.
mkdir "$elsewhere/source" "$elsewhere/state" "$elsewhere/store"
cp -R pyproject.toml README.md LICENSE blobstore engine index tidemark "$elsewhere/source"
"$python" -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir "$elsewhere/dist" "$elsewhere/source"
wheel=$(echo "$elsewhere"/dist/tidemark-*.whl)

install() {  # install ENVIRONMENT REQUIREMENT
    "$python" -m venv --without-pip "$elsewhere/$1"
    "$python" -m pip --disable-pip-version-check --python "$elsewhere/$1/bin/python" install --quiet \
        --constraint "$checkout/constraints.txt" "$2"
}

install bare "$wheel"
cd "$elsewhere"
du -sh bare
export PATH="$elsewhere/bare/bin:$PATH" TIDEMARK_REPOSITORY="file://$elsewhere/store" TIDEMARK_JOB=job
tidemark --version
python -c 'import blobstore.s3.store, tidemark; print(tidemark.Repository, tidemark.__file__)'
python -c 'import time, subprocess; t = time.time(); subprocess.run(["tidemark", "--version"], stdout=-3); print(f"starts in {time.time() - t:.2f} s")'
for package in numpy pandas pyarrow pyspark; do
    test ! -e "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/$package"
done
tidemark doctor "$TIDEMARK_REPOSITORY"
head -c 1000000 /dev/urandom > state/file
tidemark init
tidemark backup state
tidemark restore restored
cmp state/file restored/file
tidemark collect --keep-last 1
if tidemark collect --keep-last 1 --on-spark 2> refused; then exit 1; fi
grep -F "pip install '.[spark]'" refused

install with-spark "$wheel[spark]"
with-spark/bin/python -c 'import tidemark.spark; print(tidemark.spark.StatefulJob)'
