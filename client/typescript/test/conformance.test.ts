// Plays proto/conformance/cases.json, which all languages play, against the server named by MOORAGE_SERVER.

import assert from "node:assert/strict";
import { randomBytes, randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { after, describe, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { fromJson, toJson, type JsonObject, type JsonValue, type Message } from "@bufbuild/protobuf";
import { status, type Client as Connection } from "@grpc/grpc-js";
import { connect, createClient, InspectorService, MoorageError, OperatorService, SchedulerService } from "moorage";

interface Expectation {
  code?: string;
  response?: JsonObject;
  present?: string[];
  absent?: string[];
  reason?: string;
  field?: string;
  retry_info?: boolean;
}

interface Step {
  call: string;
  request: JsonObject;
  expect?: Expectation;
  save?: Record<string, string>;
  within?: number;
}

interface Case {
  name: string;
  why: string;
  server?: string;
  steps: Step[];
}

type Unary = (request: Message, options: { timeoutMs: number }) => Promise<Message>;

const TIMEOUT_MS = 30_000;
const SERVICES = { SchedulerService, InspectorService, OperatorService };
const DEFAULTS: unknown[] = [false, 0, "0", ""];

class Player {
  readonly #connection: Connection;
  readonly #variables: Record<string, string> = { pool: `conformance-${randomBytes(6).toString("hex")}` };

  constructor(connection: Connection) {
    this.#connection = connection;
  }

  async play(steps: Step[]): Promise<void> {
    for (const [index, step] of steps.entries()) {
      const problems = await this.#play(step);
      assert.deepEqual(problems, [], `step ${index + 1}, ${step.call}`);
    }
  }

  async #play(step: Step): Promise<string[]> {
    const until = performance.now() + (step.within ?? 0) * 1000;
    for (;;) {
      const { error, response } = await this.#call(step.call, this.#filled(step.request));
      const problems = compare(this.#filled(step.expect ?? {}), error, response);
      if (problems.length === 0) {
        for (const [name, path] of Object.entries(step.save ?? {})) this.#variables[name] = String(at(response, path));
      }
      if (problems.length === 0 || performance.now() >= until) return problems;
      await sleep(100);
    }
  }

  async #call(call: string, request: JsonObject): Promise<{ error?: MoorageError; response: JsonValue }> {
    const [serviceName, methodName] = call.split("/");
    const service = SERVICES[serviceName as keyof typeof SERVICES];
    const method = service.methods.find(({ name }) => name === methodName);
    assert(method, `${call} is no method`);
    const client = createClient(service, this.#connection) as unknown as Record<string, Unary>;
    try {
      const answer = await client[method.localName]!(fromJson(method.input, request), { timeoutMs: TIMEOUT_MS });
      return { response: toJson(method.output, answer) };
    } catch (error) {
      if (error instanceof MoorageError) return { error, response: {} };
      throw error;
    }
  }

  /** The value with all variables replaced. */
  #filled<T>(value: T): T {
    const replace = (item: unknown): unknown => {
      if (typeof item === "string") return item.replace(/\$\{(\w+)\}/g, (_, name: string) => this.#variable(name));
      if (Array.isArray(item)) return item.map(replace);
      if (item === null || typeof item !== "object") return item;
      return Object.fromEntries(Object.entries(item).map(([key, child]) => [key, replace(child)]));
    };
    return replace(value) as T;
  }

  #variable(name: string): string {
    if (name === "uuid") return randomUUID();
    if (name.startsWith("uuid_")) this.#variables[name] ??= randomUUID();
    const value = this.#variables[name];
    assert(value !== undefined, `nothing was saved as ${name}`);
    return value;
  }
}

/** What is not as expected. */
function compare(expected: Expectation, error: MoorageError | undefined, response: JsonValue): string[] {
  const problems: string[] = [];
  const code = error ? status[error.code] : "OK";
  if (code !== (expected.code ?? "OK")) problems.push(`code is ${code}, not ${expected.code ?? "OK"}`);
  if (expected.reason !== undefined && error?.reason !== expected.reason) {
    problems.push(`reason is ${error?.reason}, not ${expected.reason}`);
  }
  const fields = error?.fieldViolations.map(({ field }) => field) ?? [];
  if (expected.field !== undefined && !fields.includes(expected.field)) {
    problems.push(`${expected.field} is not among the violated fields [${fields}]`);
  }
  if (expected.retry_info && !(error?.retryAfterMs! > 0)) problems.push("no RetryInfo with a delay");
  problems.push(...mismatches("response", expected.response ?? {}, response));
  for (const path of expected.present ?? []) if (at(response, path) === undefined) problems.push(`${path} is missing`);
  for (const path of expected.absent ?? []) if (at(response, path) !== undefined) problems.push(`${path} is there`);
  if (problems.length > 0) problems.push(`answer: ${error ?? JSON.stringify(response)}`);
  return problems;
}

/** Where `actual` does not hold what is wanted of it. */
function mismatches(path: string, wanted: JsonValue, actual: JsonValue | undefined): string[] {
  if (Array.isArray(wanted) && Array.isArray(actual) && wanted.length === actual.length) {
    return wanted.flatMap((item, index) => mismatches(`${path}.${index}`, item, actual[index]));
  }
  if (isObject(wanted) && isObject(actual)) {
    return Object.entries(wanted).flatMap(([key, value]) => mismatches(`${path}.${key}`, value, actual[key]));
  }
  if (wanted === actual || (actual === undefined && DEFAULTS.includes(wanted))) return [];
  return [`${path} is ${JSON.stringify(actual)}, not ${JSON.stringify(wanted)}`];
}

function isObject(value: JsonValue | undefined): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The value at a path such as "sessions.0.lease.token", undefined where there is none. */
function at(value: JsonValue | undefined, path: string): JsonValue | undefined {
  return path.split(".").reduce<JsonValue | undefined>((inner, name) => {
    if (Array.isArray(inner)) return inner[Number(name)];
    return isObject(inner) ? inner[name] : undefined;
  }, value);
}

assert(process.env["MOORAGE_SERVER"], "MOORAGE_SERVER names no server");
const path = process.env["MOORAGE_CONFORMANCE"] ?? new URL("../../../../proto/conformance/cases.json", import.meta.url);
const cases = (JSON.parse(readFileSync(path, "utf8")) as Case[]).filter(
  ({ server }) => server === undefined || process.env[server],
);

describe("conformance", { concurrency: 8 }, () => {
  const connections = new Map<string, Connection>();
  after(() => connections.forEach((connection) => connection.close()));

  for (const { name, server = "MOORAGE_SERVER", steps } of cases) {
    // Without retries, so that a case sees every failure.
    const connection = connections.get(server) ?? connect(process.env[server], undefined, { "grpc.enable_retries": 0 });
    connections.set(server, connection);
    test(name, () => new Player(connection).play(steps));
  }
});
