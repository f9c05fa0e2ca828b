// Stands in for inference engines and their collector: one small engine that reports that it lives.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { durationMs, timestampNow } from "@bufbuild/protobuf/wkt";
import { SchedulerService, type Client } from "moorage";

const TIMEOUT_MS = 5_000;

/** Reports an engine with room for 96 blocks of 16 tokens, until the signal. Resolves once one is taken. */
export async function startEngine(
  scheduler: Client<typeof SchedulerService>,
  pool: string,
  stop: AbortSignal,
): Promise<{ stopped: Promise<void> }> {
  const incarnation = randomUUID();
  let sequence = 0n;

  async function report(): Promise<number> {
    sequence += 1n;
    const snapshot = {
      instanceId: "engine-a",
      endpoint: "http://127.0.0.1:8000",
      incarnation,
      sequence,
      observedTime: timestampNow(),
      blockSize: 16n,
      totalBlocks: 96n,
    };
    const { nextInterval } = await scheduler.heartbeat({ pool, instances: [snapshot] }, { timeoutMs: TIMEOUT_MS });
    return nextInterval ? durationMs(nextInterval) : 1_000;
  }

  async function keepReporting(pause: number): Promise<void> {
    while (!stop.aborted) {
      await sleep(pause, undefined, { signal: stop }).catch(() => {});
      if (!stop.aborted) pause = await report();
    }
  }

  return { stopped: keepReporting(await report()) };
}
