#!/usr/bin/env bash
# Build build/libtrtllm_hisparse_plugins.so. Repeatable; only what changed is compiled again.
# ARCH: compute capabilities, separated by commas (default 80,90,100,120); one is quick.
# CUDACXX: nvcc, where it is neither on PATH nor in /usr/local/cuda.
# TENSORRT_ROOT: a TensorRT installation, whose headers are used; else the system's, else those of a small PyPI package.
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc=${CUDACXX:-$(command -v nvcc || true)}
[ -n "$nvcc" ] || nvcc=/usr/local/cuda/bin/nvcc
if [ ! -x "$nvcc" ]; then
    echo "plugins: no nvcc: none in CUDACXX, on PATH or in /usr/local/cuda; CUDA 12.8 or newer is needed" >&2
    exit 1
fi
for tool in cmake c++; do
    command -v "$tool" >/dev/null || { echo "plugins: no $tool on PATH" >&2; exit 1; }
done

# The PyPI package carries TensorRT 10.14's headers; nothing else of it is used.
headers=build/tensorrt_headers
system_headers=$(printf '#include <NvInferRuntime.h>\n' | c++ -E -x c++ -I/usr/local/cuda/include - >/dev/null 2>&1 && echo yes || true)
if [ -z "${TENSORRT_ROOT:-}" ] && [ -z "$system_headers" ]; then
    if [ ! -e "$headers/include/NvInferRuntime.h" ]; then
        python=python3
        [ ! -x .venv/bin/python ] || python=.venv/bin/python
        rm -rf "$headers"
        mkdir -p "$headers"
        "$python" -m pip --disable-pip-version-check --no-input download --quiet --no-deps --dest "$headers" kernel-lens==2.0.1
        "$python" -m zipfile -e "$headers"/kernel_lens-*.whl "$headers/wheel"
        mv "$headers/wheel/kernel_lens/include/tensorrt" "$headers/include"
        rm -rf "$headers/wheel" "$headers"/kernel_lens-*.whl
    fi
    export TENSORRT_ROOT=$PWD/$headers
fi

architectures=${ARCH:-80,90,100,120}
generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
[ ! -e build/plugins/CMakeCache.txt ] || generator=()  # a tree keeps the generator it has
cmake -S plugins -B build/plugins "${generator[@]}" -DCMAKE_CUDA_COMPILER="$nvcc" \
    -DHISPARSE_ARCHITECTURES="${architectures//,/;}"
cmake --build build/plugins --parallel "$(nproc)"
# In one step, so that a process that is loading the library never sees half of it.
cp build/plugins/libtrtllm_hisparse_plugins.so build/.plugins.new
mv build/.plugins.new build/libtrtllm_hisparse_plugins.so
echo "plugins: build/libtrtllm_hisparse_plugins.so for $architectures"
