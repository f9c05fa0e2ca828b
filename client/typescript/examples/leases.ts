// Renews the leases of all living sessions in the background, and tells the server how far they got.

import { durationMs } from "@bufbuild/protobuf/wkt";
import { MoorageError, Phase, SchedulerService, type Client, type Lease } from "moorage";

const TIMEOUT_MS = 5_000;
const MAX_ITEMS = 1_000;

/** A session that was admitted, as its rollout and the renewal share it. */
export interface Living {
  readonly sessionId: string;
  lease: Lease;
  phase: Phase.RUNNING | Phase.TOOL_WAIT;
  turn: number;
  contextTokens: bigint;
  /** Aborted when the lease is lost: the session's KV is no longer its own. */
  readonly lost: AbortController;
}

export class Leases {
  readonly #scheduler: Client<typeof SchedulerService>;
  readonly #pool: string;
  readonly #living = new Set<Living>();
  #timer: NodeJS.Timeout | undefined;
  #dueAt = Infinity;
  /** Renewals that the server confirmed. */
  renewals = 0;

  constructor(scheduler: Client<typeof SchedulerService>, pool: string) {
    this.#scheduler = scheduler;
    this.#pool = pool;
  }

  add(session: Living): void {
    this.#living.add(session);
    this.#wakeIn(renewalPause(session));
  }

  discard(session: Living): void {
    this.#living.delete(session);
    if (this.#living.size === 0) this.#sleep();
  }

  #wakeIn(milliseconds: number): void {
    const dueAt = performance.now() + milliseconds;
    if (dueAt >= this.#dueAt) return;
    this.#sleep();
    this.#dueAt = dueAt;
    this.#timer = setTimeout(() => void this.#renew(), milliseconds);
  }

  #sleep(): void {
    clearTimeout(this.#timer);
    this.#dueAt = Infinity;
  }

  async #renew(): Promise<void> {
    this.#sleep();
    const living = [...this.#living];
    for (let start = 0; start < living.length; start += MAX_ITEMS) {
      await this.#beat(living.slice(start, start + MAX_ITEMS)).catch((error: unknown) => {
        if (!(error instanceof MoorageError)) throw error;
        console.error(`heartbeat failed, trying again: ${error.message}`);
      });
    }
    if (this.#living.size > 0) this.#wakeIn(Math.min(...[...this.#living].map(renewalPause)));
  }

  async #beat(sessions: Living[]): Promise<void> {
    const sent = sessions.map(({ sessionId, lease, phase, turn, contextTokens }) => ({
      sessionId,
      leaseToken: lease.token,
      phase,
      turn,
      contextTokens,
    }));
    const answer = await this.#scheduler.heartbeat({ pool: this.#pool, sessions: sent }, { timeoutMs: TIMEOUT_MS });
    for (const [index, { known, lease }] of answer.sessions.entries()) {
      const session = sessions[index]!;
      // A move has rotated the token meanwhile: this word is about the old one.
      if (session.lease.token !== sent[index]!.leaseToken) continue;
      if (known && lease) {
        session.lease = lease;
        this.renewals += 1;
      } else if (this.#living.has(session)) {
        session.lost.abort(new Error(`${session.sessionId} lost its lease`));
      }
    }
  }
}

/** Milliseconds, a third of the lease: two heartbeats may fail before it runs out. */
function renewalPause({ lease }: Living): number {
  return (lease.ttl ? durationMs(lease.ttl) : 60_000) / 3;
}
