// Generates src/gen from ../../proto and the shared service config. With --check nothing is written: the exit code is 1
// where what is committed is not what would be generated.

import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

process.chdir(new URL("..", import.meta.url).pathname);
const committed = "src/gen";

function generate(out) {
  const { status, error } = spawnSync("buf", ["generate", "--output", out], { stdio: "inherit" });
  if (error) throw error;
  if (status !== 0) process.exit(status ?? 1);
  const config = JSON.parse(readFileSync("../moorage/service_config.json", "utf8"));
  writeFileSync(
    join(out, "service_config.ts"),
    `/** How calls are retried, in gRPC's own format: client/moorage/service_config.json. */\n` +
      `export const serviceConfig = ${JSON.stringify(config, null, 2)};\n`,
  );
  const modules = readdirSync(join(out, "moorage/v1")).sort();
  writeFileSync(
    join(out, "index.ts"),
    modules.map((name) => `export * from "./moorage/v1/${name.replace(/\.ts$/, ".js")}";\n`).join(""),
  );
}

function contents(folder) {
  const files = readdirSync(folder, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile());
  const paths = files.map((file) => join(file.parentPath, file.name));
  return new Map(paths.map((path) => [path.slice(folder.length), readFileSync(path, "utf8")]));
}

if (process.argv.includes("--check")) {
  const fresh = mkdtempSync(join(tmpdir(), "moorage-gen-"));
  try {
    generate(fresh);
    const [wanted, found] = [contents(fresh), contents(committed)];
    const stale = [...new Set([...wanted.keys(), ...found.keys()])].filter((path) => wanted.get(path) !== found.get(path));
    if (stale.length > 0) {
      console.error(`error: ${stale.map((path) => committed + path).join(", ")} stale: run \`npm run generate\``);
      process.exitCode = 1;
    }
  } finally {
    rmSync(fresh, { recursive: true });
  }
} else {
  rmSync(committed, { recursive: true, force: true });
  generate(committed);
}
