// A router's loop: rollouts are admitted, placed turn by turn, kept alive, and released however they end.
//
// MOORAGE_SERVER names the server. MOORAGE_POOL names a pool with engines; without it the example brings a pool and a
// stand-in for an engine of its own.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { durationFromMs, durationMs } from "@bufbuild/protobuf/wkt";
import {
  connect,
  createClient,
  Decision,
  HoldReason,
  MoorageError,
  Outcome,
  Phase,
  SchedulerService,
  type Hold,
  type PlaceResponse,
} from "moorage";

import { startEngine } from "./engine.js";
import { Leases, type Living } from "./leases.js";

/** Short, so that the example is told why it waits; the limit is 10 minutes. */
const MAX_WAIT_MS = 1_000;
const TIMEOUT_MS = 10_000;
const LEASE_MS = 3_000;
const MAX_CONTEXT_TOKENS = 512n;

class Rejected extends Error {}

interface Rollout {
  sessionId: string;
  /** Tokens of the first prompt. */
  promptTokens: bigint;
  maxContextTokens?: bigint;
  turns: number;
  /** What the environment does after a turn. */
  tool: (turn: number, signal: AbortSignal) => Promise<void>;
  /** The caller's: it may give up at any time. */
  signal?: AbortSignal;
}

const connection = connect();
const scheduler = createClient(SchedulerService, connection);
const pool = process.env["MOORAGE_POOL"] || `example-${randomUUID()}`;
const leases = new Leases(scheduler, pool);

/** One rollout, from its admission to its release. */
async function run(rollout: Rollout): Promise<void> {
  const { sessionId } = rollout;
  let session: Living | undefined;
  let outcome = Outcome.FAILED;
  try {
    session = await admit(rollout);
    leases.add(session);
    const signal = AbortSignal.any([session.lost.signal, ...(rollout.signal ? [rollout.signal] : [])]);
    for (let turn = 0; turn < rollout.turns; turn += 1) await takeTurn(session, turn, rollout, signal);
    outcome = Outcome.COMPLETED;
  } catch (error) {
    if (rollout.signal?.aborted) outcome = Outcome.ABORTED;
    explain(sessionId, error);
  } finally {
    if (session) leases.discard(session);
    await release(sessionId, session, outcome);
  }
}

/** Waits for the session's turn, for as long as it takes. */
async function admit({
  sessionId,
  promptTokens,
  maxContextTokens = MAX_CONTEXT_TOKENS,
  signal,
}: Rollout): Promise<Living> {
  const options = { timeoutMs: MAX_WAIT_MS + TIMEOUT_MS, ...(signal && { signal }) };
  for (;;) {
    const { decision, placement, lease, hold } = await scheduler.admit(
      {
        pool,
        requestId: randomUUID(),
        sessionId,
        workloadClass: "agentic",
        promptTokens,
        maxContextTokens,
        maxWait: durationFromMs(MAX_WAIT_MS),
        leaseTtl: durationFromMs(LEASE_MS),
      },
      options,
    );
    if (decision === Decision.PLACE && lease) {
      say(sessionId, `admitted on ${placement?.instanceId}`);
      return {
        sessionId,
        lease,
        phase: Phase.RUNNING,
        turn: 0,
        contextTokens: promptTokens,
        lost: new AbortController(),
      };
    }
    if (decision === Decision.REJECT) throw new Rejected(describe(hold));
    say(sessionId, `held: ${describe(hold)}`);
    await pause(hold, signal);
  }
}

async function takeTurn(session: Living, turn: number, rollout: Rollout, signal: AbortSignal): Promise<void> {
  const { placement, moved } = await place(session, turn, signal);
  say(session.sessionId, `turn ${turn} on ${placement?.endpoint}${moved ? ", moved: its KV there is cold" : ""}`);
  Object.assign(session, { phase: Phase.RUNNING, turn });
  await generate(signal);
  Object.assign(session, { phase: Phase.TOOL_WAIT, contextTokens: session.contextTokens + 64n });
  await rollout.tool(turn, signal);
}

/** Where the next request goes. Waits while the session's home is gone and nothing else can take it. */
async function place(session: Living, turn: number, signal: AbortSignal): Promise<PlaceResponse> {
  for (;;) {
    const answer = await scheduler.place(
      {
        pool,
        requestId: randomUUID(),
        sessionId: session.sessionId,
        leaseToken: session.lease.token,
        turn,
        promptTokens: session.contextTokens,
        maxWait: durationFromMs(MAX_WAIT_MS),
      },
      { timeoutMs: MAX_WAIT_MS + TIMEOUT_MS, signal },
    );
    if (answer.lease) session.lease = answer.lease;
    if (answer.decision === Decision.PLACE) return answer;
    say(session.sessionId, `held: ${describe(answer.hold)}`);
    await pause(answer.hold, signal);
  }
}

/** Ends the session; one that never got in leaves the queue. Never cancelled: what is not released blocks others. */
async function release(sessionId: string, session: Living | undefined, outcome: Outcome): Promise<void> {
  try {
    const { released, residency } = await scheduler.release(
      {
        pool,
        requestId: randomUUID(),
        sessionId,
        leaseToken: session?.lease.token ?? "",
        outcome,
        ...(session && { usage: { contextTokens: session.contextTokens } }),
      },
      { timeoutMs: TIMEOUT_MS },
    );
    const cost = residency ? `, ${residency.blockSeconds.toFixed(1)} block-seconds` : "";
    say(sessionId, `${Outcome[outcome]}: ${released ? `released${cost}` : "nothing to release"}`);
  } catch (error) {
    // Its lease ends it.
    explain(sessionId, error);
  }
}

/** Your engine's call. */
async function generate(signal: AbortSignal): Promise<void> {
  await sleep(300, undefined, { signal });
}

async function pause(hold: Hold | undefined, signal: AbortSignal | undefined): Promise<void> {
  const retryAfter = hold?.retryAfter ? durationMs(hold.retryAfter) : 1_000;
  await sleep(retryAfter, undefined, signal && { signal });
}

function describe(hold: Hold | undefined): string {
  if (!hold) return "no reason";
  return `${HoldReason[hold.reason] ?? hold.reason}, ${hold.ahead} ahead (${hold.detail})`;
}

function explain(sessionId: string, error: unknown): void {
  if (!(error instanceof MoorageError)) {
    say(sessionId, String(error));
    return;
  }
  say(sessionId, `failed: ${error.message}`);
  for (const { field, description } of error.fieldViolations) say(sessionId, `  ${field}: ${description}`);
  for (const [name, value] of Object.entries(error.metadata)) say(sessionId, `  ${name} = ${value}`);
  if (error.retryAfterMs !== undefined) say(sessionId, `  try again after ${error.retryAfterMs} ms`);
}

function say(sessionId: string, what: string): void {
  console.log(`${sessionId}: ${what}`);
}

/** Rollouts that end in every way there is, at once. */
async function main(): Promise<void> {
  const stop = new AbortController();
  const engine = process.env["MOORAGE_POOL"] ? undefined : await startEngine(scheduler, pool, stop.signal);

  const giveUp = new AbortController();
  const tool = (_turn: number, signal: AbortSignal) => sleep(400, undefined, { signal });
  const broken = () => Promise.reject(new Error("the tool broke"));
  const impatient = async (turn: number, signal: AbortSignal) => {
    if (turn === 1) giveUp.abort(new Error("the caller gave up"));
    await tool(turn, signal);
  };
  await Promise.all([
    run({ sessionId: "steady", promptTokens: 160n, turns: 3, tool }),
    run({ sessionId: "second", promptTokens: 160n, turns: 2, tool }),
    run({ sessionId: "third", promptTokens: 160n, turns: 1, tool }),
    run({ sessionId: "broken", promptTokens: 160n, turns: 2, tool: broken }),
    run({ sessionId: "impatient", promptTokens: 160n, turns: 3, tool: impatient, signal: giveUp.signal }),
    run({ sessionId: "hasty", promptTokens: 160n, turns: 1, tool, signal: AbortSignal.timeout(500) }),
    run({ sessionId: "giant", promptTokens: 1_000_000n, maxContextTokens: 1_000_000n, turns: 1, tool }),
    run({ sessionId: "wrong", promptTokens: 2n ** 50n, turns: 1, tool }),
  ]);
  console.log(`${leases.renewals} renewals`);

  stop.abort();
  await engine?.stopped;
  connection.close();
}

await main();
