// Runs the example against the server named by MOORAGE_SERVER, in a pool of its own.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const ENDS = {
  steady: "COMPLETED: released",
  second: "COMPLETED: released",
  third: "COMPLETED: released",
  broken: "FAILED: released",
  impatient: "ABORTED: released",
  hasty: "ABORTED: ",
  giant: "FAILED: nothing to release",
  wrong: "FAILED: nothing to release",
};

test("the example ends every rollout as it should", async () => {
  const { MOORAGE_POOL: _, ...env } = process.env;
  const router = fileURLToPath(new URL("../examples/router.js", import.meta.url));
  const { stdout } = await promisify(execFile)(process.execPath, [router], { env, timeout: 120_000 });

  const lines = stdout.trimEnd().split("\n");
  for (const [sessionId, end] of Object.entries(ENDS)) {
    const last = lines.filter((line) => line.startsWith(`${sessionId}: `)).at(-1);
    assert(last?.startsWith(`${sessionId}: ${end}`), `${sessionId} ended with ${last}`);
  }
  assert.match(stdout, /^giant: Error: TOO_LARGE/m);
  assert.match(stdout, /^wrong: {3}prompt_tokens: must be at most 2\^40/m);
  assert.match(stdout, /^wrong: failed: .*\[INVALID_FIELD\]$/m);
  assert.match(stdout, /^\w+: held: /m);
  assert.match(lines.at(-1) ?? "", /^[1-9][0-9]* renewals$/);
});
