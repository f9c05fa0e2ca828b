// Streams: of events from the server named by MOORAGE_SERVER, and both ways with a server of the test's own.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { test } from "node:test";

import { create, fromBinary, toBinary, type DescMethodBiDiStreaming, type DescService } from "@bufbuild/protobuf";
import { Server, ServerCredentials, status, type ServerDuplexStream, type ServiceError } from "@grpc/grpc-js";
import {
  connect,
  createClient,
  HeartbeatRequestSchema,
  HeartbeatResponseSchema,
  InspectorService,
  MoorageError,
  SchedulerService,
  type HeartbeatRequest,
  type HeartbeatResponse,
} from "moorage";

test("events are read until the signal", { timeout: 60_000 }, async () => {
  const connection = connect();
  const pool = `stream-${randomUUID()}`;
  const scheduler = createClient(SchedulerService, connection);
  await scheduler.heartbeat({ pool, instances: [{ instanceId: "engine-a", sequence: 1n }] });

  const stop = new AbortController();
  const events = createClient(InspectorService, connection).watchEvents(
    { pool, resumeToken: "0" },
    { signal: stop.signal },
  );
  const kinds: string[] = [];
  const reading = (async () => {
    for await (const { kind } of events) {
      kinds.push(kind);
      stop.abort();
    }
  })();

  await assert.rejects(reading, { code: status.CANCELLED });
  assert.equal(kinds[0], "register");
  connection.close();
});

test("a stream that fails tells why", async () => {
  const connection = connect();
  const events = createClient(InspectorService, connection).watchEvents({ pool: `stream-${randomUUID()}` });
  const [failure] = (await once(events, "error")) as [ServiceError];

  assert.equal(MoorageError.from(failure).reason, "POOL_UNKNOWN");
  connection.close();
});

test("requests and answers go both ways, until the caller's end", async () => {
  const server = new Server();
  server.register<HeartbeatRequest, HeartbeatResponse>(
    "/moorage.v1.SchedulerService/Heartbeat",
    (call: ServerDuplexStream<HeartbeatRequest, HeartbeatResponse>) => {
      call.on("data", ({ pool }: HeartbeatRequest) =>
        call.write(create(HeartbeatResponseSchema, { sessions: [{ sessionId: pool }] })),
      );
      call.on("end", () => call.end());
    },
    (answer) => Buffer.from(toBinary(HeartbeatResponseSchema, answer)),
    (bytes) => fromBinary(HeartbeatRequestSchema, bytes),
    "bidi",
  );
  const port = await new Promise<number>((resolve, reject) =>
    server.bindAsync("127.0.0.1:0", ServerCredentials.createInsecure(), (error, bound) =>
      error ? reject(error) : resolve(bound),
    ),
  );
  const connection = connect(`127.0.0.1:${port}`);
  const both = { ...SchedulerService.method.heartbeat, methodKind: "bidi_streaming" };
  const service = { ...SchedulerService, methods: [both], method: { heartbeat: both } } as unknown as DescService & {
    method: { heartbeat: DescMethodBiDiStreaming<typeof HeartbeatRequestSchema, typeof HeartbeatResponseSchema> };
  };

  const stream = createClient(service, connection).heartbeat({ timeoutMs: 60_000 });
  stream.write({ pool: "a" });
  stream.write({ pool: "b" });
  stream.end();
  const answers: string[] = [];
  for await (const { sessions } of stream) answers.push(...sessions.map(({ sessionId }) => sessionId));

  assert.deepEqual(answers, ["a", "b"]);
  connection.close();
  server.forceShutdown();
});
