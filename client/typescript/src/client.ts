import {
  create,
  fromBinary,
  toBinary,
  type DescMessage,
  type DescMethod,
  type DescMethodBiDiStreaming,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type DescService,
  type MessageInitShape,
  type MessageShape,
} from "@bufbuild/protobuf";
import * as grpc from "@grpc/grpc-js";

import { MoorageError } from "./error.js";

/** Options of one call. */
export interface CallOptions {
  /** Milliseconds after which the call fails DEADLINE_EXCEEDED, retries included; without it, never. */
  timeoutMs?: number;
  /** Cancels the call, which then fails with the signal's reason. A cancelled Admit leaves nothing behind. */
  signal?: AbortSignal;
  /** Headers, such as `authorization`. */
  metadata?: grpc.Metadata;
}

/**
 * One method per rpc of a service. Requests are messages, or plain objects with some of their fields.
 *
 * Unary calls are promises that fail with `MoorageError`. Streams are those of grpc-js: iterate them with `for await`,
 * end them with `cancel()`; their failure is a `ServiceError`, for `MoorageError.from`.
 */
export type Client<S extends DescService> = {
  [K in keyof S["method"]]: S["method"][K] extends DescMethodUnary<infer I, infer O>
    ? (request: MessageInitShape<I>, options?: CallOptions) => Promise<MessageShape<O>>
    : S["method"][K] extends DescMethodServerStreaming<infer I, infer O>
      ? (
          request: MessageInitShape<I>,
          options?: CallOptions,
        ) => AsyncIterable<MessageShape<O>> & grpc.ClientReadableStream<MessageShape<O>>
      : S["method"][K] extends DescMethodBiDiStreaming<infer I, infer O>
        ? (
            options?: CallOptions,
          ) => AsyncIterable<MessageShape<O>> & grpc.ClientDuplexStream<MessageInitShape<I>, MessageShape<O>>
        : never;
};

/**
 * A client of one service over a connection, which others may share.
 *
 * @example
 * const scheduler = createClient(SchedulerService, connect("127.0.0.1:50061"));
 * const { decision, placement } = await scheduler.admit({ sessionId: "s-1", promptTokens: 1200n });
 */
export function createClient<S extends DescService>(service: S, connection: grpc.Client): Client<S> {
  return Object.fromEntries(
    service.methods.map((method) => [method.localName, bind(method, connection)]),
  ) as unknown as Client<S>;
}

function bind(method: DescMethod, connection: grpc.Client): unknown {
  const path = `/${method.parent.typeName}/${method.name}`;
  const pack = (request: MessageInitShape<DescMessage>) =>
    Buffer.from(toBinary(method.input, create(method.input, request)));
  const unpack = (bytes: Buffer) => fromBinary(method.output, bytes);
  switch (method.methodKind) {
    case "unary":
      return (request: MessageInitShape<DescMessage>, options: CallOptions = {}) =>
        new Promise((resolve, reject) => {
          options.signal?.throwIfAborted();
          const call = connection.makeUnaryRequest(
            path,
            pack,
            unpack,
            request,
            ...passOn(options),
            (error, response) => {
              release();
              if (!error) resolve(response);
              else if (options.signal?.aborted) reject(options.signal.reason);
              else reject(MoorageError.from(error));
            },
          );
          const release = cancelOn(options.signal, call);
        });
    case "server_streaming":
      return (request: MessageInitShape<DescMessage>, options: CallOptions = {}) => {
        const call = connection.makeServerStreamRequest(path, pack, unpack, request, ...passOn(options));
        call.once("close", cancelOn(options.signal, call));
        return call;
      };
    case "bidi_streaming":
      return (options: CallOptions = {}) => {
        const call = connection.makeBidiStreamRequest(path, pack, unpack, ...passOn(options));
        call.once("close", cancelOn(options.signal, call));
        return call;
      };
    case "client_streaming":
      throw new TypeError(`${path}: no rpc of moorage streams requests alone`);
  }
}

function passOn({ timeoutMs, metadata }: CallOptions): [grpc.Metadata, grpc.CallOptions] {
  return [metadata ?? new grpc.Metadata(), timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs }];
}

/** Cancels the call with the signal. What it returns lets go of the signal, which may outlive many calls. */
function cancelOn(signal: AbortSignal | undefined, call: { cancel(): void }): () => void {
  if (!signal) return () => {};
  const cancel = () => call.cancel();
  if (signal.aborted) cancel();
  else signal.addEventListener("abort", cancel, { once: true });
  return () => signal.removeEventListener("abort", cancel);
}
