#!/bin/sh
# Take every kind of checkpoint through a loss with several releases of PySpark at once (tests/spark/checkpoint/
# test_matrix.py): with that of the Python $1, and with each release that follows, in an environment of its own, which
# is made here. A release before 4.1 only writes and resumes: engine.spark, which nothing of it imports, needs 4.1.
set -eu

python=$(realpath --no-symlinks "$1")
shift
cd "$(dirname "$0")/.."
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

make_environment() {  # make_environment DIRECTORY RELEASE
    if test -e "$1/.installed" && test "$1/.installed" -nt pyproject.toml && test "$1/.installed" -nt constraints.txt; then
        return
    fi
    sh scripts/make_venv.sh "$1"
    grep -v '^pyspark==' constraints.txt > "$logs/constraints.txt"
    "$1/bin/python" -m pip install --disable-pip-version-check --quiet --editable '.[dev]' "pyspark==$2" \
        numpy pandas pyarrow --constraint "$logs/constraints.txt"
    touch "$1/.installed"
}

start() {  # start NAME PYTHON OPTION
    PYSPARK_PYTHON=$2 PYSPARK_DRIVER_PYTHON=$2 "$2" -m pytest tests/spark/checkpoint/test_matrix.py \
        -m "soak or not soak" -p no:cacheprovider --timeout 1800 $3 > "$logs/$1" 2>&1 &
    running="$running $!:$1"
}

for release in "$@"; do
    make_environment ".venv-spark-$release" "$release"
done
running=
start installed "$python" ""
for release in "$@"; do
    # An older PySpark leaves sockets to the garbage collector, which is a warning.
    start "$release" "$PWD/.venv-spark-$release/bin/python" -Wdefault
done
status=0
for each in $running; do
    wait "${each%%:*}" || status=1
    echo "matrix: PySpark ${each##*:}"
    tail -n 60 "$logs/${each##*:}"
done
exit "$status"
