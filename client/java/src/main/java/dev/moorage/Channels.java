package dev.moorage;

import com.google.gson.Gson;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannelBuilder;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * Channels to the control plane.
 *
 * <p>Calls that fail UNAVAILABLE, or CANCELLED though nobody here cancelled them, are tried up to five times within
 * their deadline, after the time that the server asks for (grpc-retry-pushback-ms). Give mutations a
 * {@code request_id}: it is the same in every try, so that none takes effect twice.
 */
public final class Channels {
    private static final int MAX_MESSAGE_BYTES = 4 * 1024 * 1024;

    private Channels() {}

    /** A channel in plain text to the server named by the variable MOORAGE_SERVER, else to 127.0.0.1:50061. */
    public static ManagedChannelBuilder<?> newBuilder() {
        String named = System.getenv("MOORAGE_SERVER");
        String target = named == null || named.isEmpty() ? "127.0.0.1:50061" : named;
        return newBuilder(target, InsecureChannelCredentials.create());
    }

    /** A channel to {@code target}, HOST:PORT. What the caller sets on the builder wins. */
    public static ManagedChannelBuilder<?> newBuilder(String target, ChannelCredentials credentials) {
        return Grpc.newChannelBuilder(target, credentials)
                .userAgent("moorage-java")
                .defaultServiceConfig(serviceConfig())
                // A call larger than this buffer is not retried: hold the largest message.
                .perRpcBufferLimit(MAX_MESSAGE_BYTES)
                // The server permits a ping every 30 s. Without calls there is nothing to keep alive.
                .keepAliveTime(60, TimeUnit.SECONDS)
                .keepAliveTimeout(20, TimeUnit.SECONDS);
    }

    /** How calls are retried, in gRPC's own format: client/moorage/service_config.json. */
    @SuppressWarnings("unchecked")
    public static Map<String, ?> serviceConfig() {
        try (InputStream json = Channels.class.getResourceAsStream("service_config.json")) {
            return new Gson().fromJson(new InputStreamReader(json, StandardCharsets.UTF_8), Map.class);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }
}
