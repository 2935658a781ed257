#!/bin/sh
# Runs the tests of the engines of other projects, each in a virtual environment of its own.
#
#   tests/engines/run.sh FOLDER PYTHON [deepspeed] [horovod] [xla] [ray] [pytest's arguments]
#
# FOLDER keeps the environments. Horovod is built from its sources with C++17, which torch 2 needs,
# and without optimisation, which its tests don't: a quarter to half of an hour.
set -e
folder=$1 python=$2
shift 2
engines=
while :; do
    case $1 in
    deepspeed | horovod | xla | ray) engines="$engines $1" ;;
    *) break ;;
    esac
    shift
done
constraints=$folder/constraints.txt
mkdir -p "$folder"
grep -v '^setuptools' requirements/constraints.txt > "$constraints"

environment() {
    bin=$folder/$1/bin
    [ -x "$bin/python" ] || "$python" -m venv "$folder/$1"
    "$bin/python" -m pip install -qq 'setuptools<81' wheel
    "$bin/python" -m pip install -qq -c "$constraints" torch pytest pytest-timeout
    "$bin/python" -m pip install -qq -c "$constraints" -e .
}

install_deepspeed() {
    "$bin/python" -c 'import deepspeed' 2>/dev/null && return
    "$bin/python" -m pip install -qq ninja
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "$bin/python" -m pip install -qq -c "$constraints" \
        --no-build-isolation deepspeed==0.19.8
}

install_horovod() {
    "$bin/python" -c 'import horovod' 2>/dev/null && return
    "$bin/python" -m pip install -qq cloudpickle psutil pyyaml
    export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 CFLAGS=-O0 CXXFLAGS=-O0
    "$bin/python" -m pip download -qq --no-deps --no-binary :all: --no-build-isolation \
        -d "$folder/sources" horovod==0.28.1
    tar -xzf "$folder/sources/horovod-0.28.1.tar.gz" -C "$folder/sources"
    sources=$folder/sources/horovod-0.28.1
    sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
        "$sources/CMakeLists.txt" "$sources/horovod/torch/CMakeLists.txt"
    "$bin/python" -m pip install -qq --no-build-isolation --no-deps "$sources"
}

install_xla() {
    "$bin/python" -c 'import torch_tpu' 2>/dev/null && return
    "$bin/python" -m pip install -qq -c "$constraints" torch_tpu==0.2.0
}

install_ray() {
    "$bin/python" -c 'import ray' 2>/dev/null && return
    "$bin/python" -m pip install -qq -c "$constraints" 'ray[train]'
}

failed=0
for engine in ${engines:-deepspeed horovod xla ray}; do
    echo "[engines] $engine"
    environment "$engine"
    "install_$engine"
    OMP_NUM_THREADS=1 "$bin/python" -m pytest "tests/engines/test_$engine.py" "$@" || failed=1
done
exit $failed
