import * as grpc from "@grpc/grpc-js";

import { serviceConfig } from "./gen/service_config.js";

const MAX_MESSAGE_BYTES = 4 * 1024 * 1024;

/**
 * A connection to the control plane, for `createClient`. Connects with the first call; `close()` ends it.
 *
 * Calls that fail UNAVAILABLE, or CANCELLED though nobody here cancelled them, are tried up to five times within their
 * deadline, after the time that the server asks for (grpc-retry-pushback-ms). Give mutations a `requestId`: it is the
 * same in every try, so that none takes effect twice.
 *
 * @param address HOST:PORT; by default the variable MOORAGE_SERVER, else 127.0.0.1:50061.
 * @param credentials by default plain text.
 * @param options of the channel; they win over those set here.
 */
export function connect(
  address = process.env["MOORAGE_SERVER"] || "127.0.0.1:50061",
  credentials: grpc.ChannelCredentials = grpc.credentials.createInsecure(),
  options: grpc.ChannelOptions = {},
): grpc.Client {
  return new grpc.Client(address, credentials, {
    "grpc.primary_user_agent": "moorage-typescript",
    "grpc.service_config": JSON.stringify(serviceConfig),
    // grpc-js would let a TXT record of the server's name replace it.
    "grpc.service_config_disable_resolution": 1,
    // A call larger than this buffer is not retried: hold the largest message.
    "grpc.per_rpc_retry_buffer_size": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    // The server permits a ping every 30 s. Without calls there is nothing to keep alive.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 0,
    // A server that came back must be found within the time that retries take.
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 1_000,
    // Restarted pods have new addresses; gRPC would ask for them every 30 s at most.
    "grpc.dns_min_time_between_resolutions_ms": 1_000,
    ...options,
  });
}
