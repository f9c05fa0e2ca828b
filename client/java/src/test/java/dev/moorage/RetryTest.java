package dev.moorage;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.protobuf.util.Durations;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.moorage.v1.AdmitRequest;
import dev.moorage.v1.AdmitResponse;
import dev.moorage.v1.Decision;
import dev.moorage.v1.SchedulerServiceGrpc;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.InsecureServerCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Optional;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** What a channel does with failures by itself, against a server of the test's own. */
@Timeout(60)
class RetryTest {
    private static final Metadata.Key<String> PUSHBACK =
            Metadata.Key.of("grpc-retry-pushback-ms", Metadata.ASCII_STRING_MARSHALLER);
    private static final Metadata.Key<byte[]> DETAILS =
            Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
    private static final int PUSHBACK_MS = 700;
    private static final AdmitRequest REQUEST =
            AdmitRequest.newBuilder().setSessionId("s").setRequestId("r").addPrefixHashes(-1).build();

    private final Failing service = new Failing();
    private Server server;
    private ManagedChannel channel;
    private SchedulerServiceGrpc.SchedulerServiceBlockingStub scheduler;

    @BeforeEach
    void start() throws IOException {
        server = Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
                .addService(service)
                .build()
                .start();
        channel = Channels.newBuilder("127.0.0.1:" + server.getPort(), InsecureChannelCredentials.create()).build();
        scheduler = SchedulerServiceGrpc.newBlockingStub(channel);
    }

    @AfterEach
    void stop() {
        channel.shutdownNow();
        server.shutdownNow();
    }

    @Test
    void unavailableIsTriedAgainAfterThePushback() {
        service.failures.add(failure(Status.Code.UNAVAILABLE, Optional.of(PUSHBACK_MS)));
        service.failures.add(failure(Status.Code.UNAVAILABLE, Optional.of(PUSHBACK_MS)));

        assertEquals(Decision.DECISION_PLACE, scheduler.admit(REQUEST).getDecision());
        assertEquals(Collections.nCopies(3, REQUEST), service.requests());
        // The service config alone would wait 0.2 s, then 0.4 s, each 20 % more at most.
        List<Long> gaps = service.gapsMs();
        assertTrue(gaps.stream().allMatch(gap -> gap >= PUSHBACK_MS - 5), "tried again after " + gaps);
    }

    @Test
    void cancelledByTheServerIsTriedAgainAndFiveTimesIsTheLimit() {
        service.failures.add(failure(Status.Code.CANCELLED, Optional.empty()));
        for (int count = 0; count < 5; count++) {
            service.failures.add(failure(Status.Code.UNAVAILABLE, Optional.empty()));
        }

        assertEquals(Status.Code.UNAVAILABLE, fail().code());
        assertEquals(5, service.requests().size());
    }

    @Test
    void negativePushbackAndOtherCodesEndTheTries() {
        service.failures.add(failure(Status.Code.UNAVAILABLE, Optional.of(-1)));
        service.failures.add(failure(Status.Code.ABORTED, Optional.empty()));

        assertEquals(Status.Code.UNAVAILABLE, fail().code());
        assertEquals(Status.Code.ABORTED, fail().code());
        assertEquals(2, service.requests().size());
    }

    @Test
    void failureTellsItsReasonAndWhenToComeBack() {
        service.failures.add(failure(Status.Code.ABORTED, Optional.empty()));

        Failure failure = fail();
        assertEquals("as told", failure.message());
        assertEquals(Optional.of("STORE_UNAVAILABLE"), failure.reason());
        assertEquals(Optional.of(Duration.ofMillis(250)), failure.retryAfter());
        assertEquals(List.of(), failure.fieldViolations());
    }

    @Test
    void rubbishInTheDetailsDoesNotHideTheFailure() {
        Metadata trailers = new Metadata();
        trailers.put(DETAILS, "rubbish".getBytes());
        service.failures.add(Status.ABORTED.withDescription("as told").asRuntimeException(trailers));

        assertEquals(Failure.of(Status.Code.ABORTED, "as told", List.of()), fail());
    }

    private Failure fail() {
        return Failure.of(assertThrows(StatusRuntimeException.class, () -> scheduler.admit(REQUEST)));
    }

    private static StatusRuntimeException failure(Status.Code code, Optional<Integer> pushbackMs) {
        Metadata trailers = new Metadata();
        pushbackMs.ifPresent(pushback -> trailers.put(PUSHBACK, pushback.toString()));
        ErrorInfo info = ErrorInfo.newBuilder().setDomain("moorage.v1").setReason("STORE_UNAVAILABLE").build();
        RetryInfo retry = RetryInfo.newBuilder().setRetryDelay(Durations.fromMillis(250)).build();
        return StatusProto.toStatusRuntimeException(
                com.google.rpc.Status.newBuilder()
                        .setCode(code.value())
                        .setMessage("as told")
                        .addDetails(Any.pack(info))
                        .addDetails(Any.pack(retry))
                        .build(),
                trailers);
    }

    /** Fails as told, then places. */
    private static final class Failing extends SchedulerServiceGrpc.SchedulerServiceImplBase {
        private record Arrival(AdmitRequest request, long atNanos) {}

        final Queue<StatusRuntimeException> failures = new ArrayDeque<>();
        private final Queue<Arrival> arrivals = new ConcurrentLinkedQueue<>();

        @Override
        public synchronized void admit(AdmitRequest request, StreamObserver<AdmitResponse> answer) {
            arrivals.add(new Arrival(request, System.nanoTime()));
            if (!failures.isEmpty()) {
                answer.onError(failures.remove());
                return;
            }
            answer.onNext(AdmitResponse.newBuilder().setDecision(Decision.DECISION_PLACE).build());
            answer.onCompleted();
        }

        List<AdmitRequest> requests() {
            return arrivals.stream().map(Arrival::request).toList();
        }

        List<Long> gapsMs() {
            List<Arrival> ordered = List.copyOf(arrivals);
            List<Long> gaps = new ArrayList<>();
            for (int index = 1; index < ordered.size(); index++) {
                long gap = ordered.get(index).atNanos() - ordered.get(index - 1).atNanos();
                gaps.add(TimeUnit.NANOSECONDS.toMillis(gap));
            }
            return gaps;
        }
    }
}
