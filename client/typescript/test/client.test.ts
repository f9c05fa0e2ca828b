// What client and connection do by themselves, against a server of the test's own.

import assert from "node:assert/strict";
import { once } from "node:events";
import { afterEach, beforeEach, test } from "node:test";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { anyPack, durationFromMs } from "@bufbuild/protobuf/wkt";
import {
  Metadata,
  Server,
  ServerCredentials,
  status,
  type Client as Connection,
  type sendUnaryData,
  type ServerUnaryCall,
} from "@grpc/grpc-js";
import {
  AdmitRequestSchema,
  AdmitResponseSchema,
  connect,
  createClient,
  Decision,
  MoorageError,
  SchedulerService,
  type AdmitRequest,
} from "moorage";

import { ErrorInfoSchema, RetryInfoSchema } from "#gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "#gen/google/rpc/status_pb.js";

const PUSHBACK_MS = 700;

/** An Admit that arrived: its request, when, and what became of it. */
interface Arrival {
  request: AdmitRequest;
  at: number;
  cancelled: Promise<unknown>;
}

let server: Server;
let connection: Connection;
let arrivals: Arrival[];
let failures: { code: status; metadata: Metadata }[];
/** While true, calls are not answered. */
let silent: boolean;

beforeEach(async () => {
  arrivals = [];
  failures = [];
  silent = false;
  server = new Server();
  server.register<AdmitRequest, object>(
    "/moorage.v1.SchedulerService/Admit",
    (call: ServerUnaryCall<AdmitRequest, object>, callback: sendUnaryData<object>) => {
      arrivals.push({ request: call.request, at: performance.now(), cancelled: once(call, "cancelled") });
      if (silent) return;
      const failure = failures.shift();
      if (failure) callback({ ...failure, details: "as told" });
      else callback(null, { decision: Decision.PLACE, placement: { policyVersion: 2n ** 62n + 1n } });
    },
    (answer) => Buffer.from(toBinary(AdmitResponseSchema, create(AdmitResponseSchema, answer))),
    (bytes) => fromBinary(AdmitRequestSchema, bytes),
    "unary",
  );
  const port = await new Promise<number>((resolve, reject) =>
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) =>
      error ? reject(error) : resolve(bound),
    ),
  );
  connection = connect(`127.0.0.1:${port}`);
});

afterEach(() => {
  connection.close();
  server.forceShutdown();
});

function failWith(code: status, pushbackMs?: number): { code: status; metadata: Metadata } {
  const metadata = new Metadata();
  const details = [
    anyPack(ErrorInfoSchema, create(ErrorInfoSchema, { domain: "moorage.v1", reason: "STORE_UNAVAILABLE" })),
    anyPack(RetryInfoSchema, create(RetryInfoSchema, { retryDelay: durationFromMs(250) })),
  ];
  const packed = toBinary(StatusSchema, create(StatusSchema, { code, message: "as told", details }));
  metadata.set("grpc-status-details-bin", Buffer.from(packed));
  if (pushbackMs !== undefined) metadata.set("grpc-retry-pushback-ms", String(pushbackMs));
  return { code, metadata };
}

test("UNAVAILABLE is tried again after the server's pushback, with the same request_id", async () => {
  failures = [failWith(status.UNAVAILABLE, PUSHBACK_MS), failWith(status.UNAVAILABLE, PUSHBACK_MS)];
  const answer = await createClient(SchedulerService, connection).admit({ sessionId: "s", requestId: "r" });

  assert.equal(answer.decision, Decision.PLACE);
  assert.deepEqual(
    arrivals.map(({ request }) => request.requestId),
    ["r", "r", "r"],
  );
  // The service config alone would wait 0.2 s, then 0.4 s, each 20 % more at most.
  const gaps = arrivals.slice(1).map(({ at }, index) => at - arrivals[index]!.at);
  assert(
    gaps.every((gap) => gap >= PUSHBACK_MS - 5),
    `tried again after ${gaps} ms`,
  );
});

test("CANCELLED by the server is tried again; so is UNAVAILABLE without pushback, five times in all", async () => {
  failures = [failWith(status.CANCELLED), ...Array.from({ length: 5 }, () => failWith(status.UNAVAILABLE))];
  const admission = createClient(SchedulerService, connection).admit({ sessionId: "s" });

  await assert.rejects(admission, { name: "MoorageError", code: status.UNAVAILABLE });
  assert.equal(arrivals.length, 5);
});

test("a negative pushback, and every other code, ends the tries", async () => {
  const { admit } = createClient(SchedulerService, connection);
  failures = [failWith(status.UNAVAILABLE, -1), failWith(status.ABORTED)];

  await assert.rejects(admit({ sessionId: "s" }), { code: status.UNAVAILABLE });
  await assert.rejects(admit({ sessionId: "s" }), { code: status.ABORTED });
  assert.equal(arrivals.length, 2);
});

test("a failure tells its reason and when to come back", async () => {
  failures = [failWith(status.ABORTED)];
  const error: unknown = await createClient(SchedulerService, connection)
    .admit({ sessionId: "s" })
    .catch((error: unknown) => error);

  assert(error instanceof MoorageError);
  assert.equal(error.message, "as told [STORE_UNAVAILABLE]");
  assert.equal(error.retryAfterMs, 250);
  assert.deepEqual(error.fieldViolations, []);
});

test("details that are rubbish do not hide the failure", async () => {
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from("rubbish"));
  failures = [{ code: status.ABORTED, metadata }];

  const admission = createClient(SchedulerService, connection).admit({ sessionId: "s" });
  await assert.rejects(admission, { code: status.ABORTED, message: "as told [ABORTED]", reason: undefined });
});

test("64 bits arrive whole", async () => {
  const { admit } = createClient(SchedulerService, connection);
  const answer = await admit({ sessionId: "s", prefixHashes: [2n ** 64n - 1n], policyVersion: -(2n ** 63n) });

  assert.equal(answer.placement?.policyVersion, 2n ** 62n + 1n);
  assert.deepEqual(arrivals[0]?.request.prefixHashes, [2n ** 64n - 1n]);
  assert.equal(arrivals[0]?.request.policyVersion, -(2n ** 63n));
});

test("a signal cancels the call at the server, and its reason is the failure", async () => {
  silent = true;
  const { admit } = createClient(SchedulerService, connection);
  const giveUp = new AbortController();
  const admission = admit({ sessionId: "s" }, { signal: giveUp.signal });
  while (arrivals.length === 0) await new Promise(setImmediate);
  giveUp.abort(new Error("enough"));

  await assert.rejects(admission, { message: "enough" });
  await arrivals[0]?.cancelled;
  await assert.rejects(admit({ sessionId: "s" }, { signal: giveUp.signal }), { message: "enough" });
  assert.equal(arrivals.length, 1);
});

test("a call without an answer ends after its timeout", async () => {
  silent = true;
  const admission = createClient(SchedulerService, connection).admit({ sessionId: "s" }, { timeoutMs: 100 });
  await assert.rejects(admission, { code: status.DEADLINE_EXCEEDED });
});
