#!/usr/bin/env bash
# Generates the Python stubs from proto/ into OUT (default: client/). Needs proto/requirements.txt in the active environment.
set -euo pipefail
cd "$(dirname "$0")"
out=${1:-../client}
python=${PYTHON:-python3}
PATH="$(dirname "$(command -v "$python")"):$PATH" "$python" -m grpc_tools.protoc -I . \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  moorage/v1/*.proto
