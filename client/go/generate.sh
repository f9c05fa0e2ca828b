#!/usr/bin/env bash
# Generates the Go code from proto/ into OUT (default: this directory). Needs go, and proto/requirements.txt for PYTHON.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "${1:-$here}" && cd "${1:-$here}" && pwd)
cd "$here/../../proto"

plugins=$(mktemp -d)
trap 'rm -rf "$plugins"' EXIT
# Of the releases that go.mod asks for, so that what they generate builds there and on everything newer.
GOBIN=$plugins go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11
GOBIN=$plugins go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.1

rm -f "$out"/moorage/v1/*.pb.go
PATH="$plugins:$PATH" "${PYTHON:-python3}" -m grpc_tools.protoc -I . \
  --go_out="$out" --go_opt=module=moorage.dev/gen \
  --go-grpc_out="$out" --go-grpc_opt=module=moorage.dev/gen \
  moorage/v1/*.proto
# Packages can embed only what lies in them.
cp ../client/moorage/service_config.json "$out/moorage/v1/"
