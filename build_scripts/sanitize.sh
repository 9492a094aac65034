#!/usr/bin/env bash
# compute-sanitizer over a small set of the kernels' tests: out-of-bounds accesses and races. Needs a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
tests=(tests/test_cuda_resolver.py tests/test_cuda_attention.py tests/test_cuda_index.py tests/test_cuda_copy.py)
small='sizes and (1-1-1-1 or 2-3-33 or 3-4-2048) or promotion and 1 or never_read or float64 and 3-8-33'
small+=' or visible_nan or exact_values and 8 or take_the_lowest or several_members or ds_mla or in_pages'
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" -k "$small"
done
