#!/usr/bin/env bash
# Generates the Rust code from proto/ into OUT (default: this directory). Needs cargo.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "${1:-$here}" && cd "${1:-$here}" && pwd)
cd "$here"
cargo run -q --locked -p codegen -- "$out"
