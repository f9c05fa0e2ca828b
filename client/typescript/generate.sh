#!/usr/bin/env bash
# Generates the TypeScript code from proto/ into OUT (default: this directory).
# Needs npm, and proto/requirements.txt for PYTHON.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "${1:-$here}" && cd "${1:-$here}" && pwd)/src/gen
python=${PYTHON:-python3}

cd "$here"
[ -x node_modules/.bin/protoc-gen-es ] || npm ci --no-audit --no-fund --loglevel=error
# google.rpc.Status and its details: what a failed call carries.
common=$("$python" -c 'import google.rpc, os; print(os.path.abspath(google.rpc.__path__[0] + "/../.."))')

rm -rf "$out"
mkdir -p "$out"
cd ../../proto
"$python" -m grpc_tools.protoc -I . -I "$common" \
  --plugin=protoc-gen-es="$here/node_modules/.bin/protoc-gen-es" \
  --es_out="$out" --es_opt=target=ts,import_extension=js \
  moorage/v1/*.proto google/rpc/status.proto google/rpc/error_details.proto

cd "$out"
{
  echo '/** How calls are retried, in gRPC'"'"'s own format: client/moorage/service_config.json. */'
  printf 'export const serviceConfig = %s;\n' "$(cat "$here/../moorage/service_config.json")"
} > service_config.ts
for module in moorage/v1/*.ts; do
  echo "export * from \"./${module%.ts}.js\";"
done > index.ts
