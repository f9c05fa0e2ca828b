package dev.moorage;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.protobuf.util.Durations;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * What the server says of a call that failed. Lack of capacity is never a failure: it is an answer, DECISION_HOLD.
 *
 * @param code the gRPC status
 * @param message what happened, for people
 * @param reason stable upper-case reason, such as "LEASE_STALE"; empty where the failure did not come from moorage
 * @param metadata the values behind the reason
 * @param fieldViolations the refused fields of the request, and what is wrong with each
 * @param retryAfter when a retry may help; empty where nobody said
 */
public record Failure(
        Status.Code code,
        String message,
        Optional<String> reason,
        Map<String, String> metadata,
        List<BadRequest.FieldViolation> fieldViolations,
        Optional<Duration> retryAfter) {
    private static final String DOMAIN = "moorage.v1";

    /** Reads what came with the error of a stub. */
    public static Failure of(StatusRuntimeException error) {
        return of(error.getStatus().getCode(), error.getStatus().getDescription(), details(error));
    }

    /** From the parts of a google.rpc.Status. */
    public static Failure of(Status.Code code, String message, List<Any> details) {
        Optional<ErrorInfo> info = unpack(details, ErrorInfo.class);
        return new Failure(
                code,
                message == null ? "" : message,
                info.filter(found -> found.getDomain().equals(DOMAIN)).map(ErrorInfo::getReason),
                info.map(ErrorInfo::getMetadataMap).orElse(Map.of()),
                unpack(details, BadRequest.class).map(BadRequest::getFieldViolationsList).orElse(List.of()),
                unpack(details, RetryInfo.class)
                        .map(found -> Duration.ofNanos(Durations.toNanos(found.getRetryDelay()))));
    }

    private static List<Any> details(StatusRuntimeException error) {
        try {
            com.google.rpc.Status status = StatusProto.fromThrowable(error);
            return status == null ? List.of() : status.getDetailsList();
        } catch (IllegalArgumentException rubbish) {
            // A proxy's rubbish must not hide the failure itself.
            return List.of();
        }
    }

    private static <T extends Message> Optional<T> unpack(List<Any> details, Class<T> type) {
        for (Any detail : details) {
            try {
                if (detail.is(type)) {
                    return Optional.of(detail.unpack(type));
                }
            } catch (InvalidProtocolBufferException rubbish) {
                // As above.
                return Optional.empty();
            }
        }
        return Optional.empty();
    }
}
