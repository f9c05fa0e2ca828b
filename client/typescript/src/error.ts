import { fromBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { anyUnpack, durationMs, type Any } from "@bufbuild/protobuf/wkt";
import { status, type ServiceError } from "@grpc/grpc-js";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";

const DOMAIN = "moorage.v1";

/** A call that failed. Lack of capacity is never an error: it is an answer, `Decision.HOLD`. */
export class MoorageError extends Error {
  override readonly name = "MoorageError";
  /** The gRPC status. */
  readonly code: status;
  /** Stable upper-case reason, such as "LEASE_STALE"; undefined where the failure did not come from moorage. */
  readonly reason: string | undefined;
  /** The values behind the reason. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The refused fields of the request, and what is wrong with each. */
  readonly fieldViolations: readonly { readonly field: string; readonly description: string }[];
  /** Milliseconds after which a retry may help; undefined where nobody said. */
  readonly retryAfterMs: number | undefined;

  /** @param details of the google.rpc.Status that came with the failure. */
  constructor(code: status, message: string, details: readonly Any[] = [], options?: ErrorOptions) {
    const info = unpack(details, ErrorInfoSchema);
    const reason = info?.domain === DOMAIN ? info.reason : undefined;
    super(`${message} [${reason ?? status[code]}]`, options);
    this.code = code;
    this.reason = reason;
    this.metadata = info?.metadata ?? {};
    this.fieldViolations = unpack(details, BadRequestSchema)?.fieldViolations ?? [];
    const delay = unpack(details, RetryInfoSchema)?.retryDelay;
    this.retryAfterMs = delay && durationMs(delay);
  }

  /** The error for what grpc-js says of a failed call. */
  static from(error: ServiceError): MoorageError {
    return new MoorageError(error.code, error.details, detailsOf(error), { cause: error });
  }
}

function detailsOf(error: ServiceError): Any[] {
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!(packed instanceof Uint8Array)) return [];
  try {
    return fromBinary(StatusSchema, packed).details;
  } catch {
    // A proxy's rubbish must not hide the failure itself.
    return [];
  }
}

function unpack<T extends DescMessage>(details: readonly Any[], schema: T): MessageShape<T> | undefined {
  for (const detail of details) {
    try {
      const message = anyUnpack(detail, schema);
      if (message) return message;
    } catch {
      // As above.
    }
  }
  return undefined;
}
