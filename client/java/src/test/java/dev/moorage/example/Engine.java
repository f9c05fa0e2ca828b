package dev.moorage.example;

import com.google.protobuf.util.Durations;
import com.google.protobuf.util.Timestamps;
import dev.moorage.v1.HeartbeatRequest;
import dev.moorage.v1.InstanceSnapshot;
import dev.moorage.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;
import java.time.Duration;
import java.util.UUID;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/** Stands in for inference engines and their collector: one small engine that reports that it lives. */
final class Engine {
    /** The first call is the program's first: it also loads classes and connects, for seconds on a busy machine. */
    private static final Duration TIMEOUT = Duration.ofSeconds(20);

    private final SchedulerServiceBlockingStub scheduler;
    private final String pool;
    private final String incarnation = UUID.randomUUID().toString();
    private long sequence;

    private Engine(SchedulerServiceBlockingStub scheduler, String pool) {
        this.scheduler = scheduler;
        this.pool = pool;
    }

    /** Reports an engine with room for 96 blocks of 16 tokens, until the timer ends. Returns once one is taken. */
    static void start(SchedulerServiceBlockingStub scheduler, String pool, ScheduledExecutorService timer) {
        Engine engine = new Engine(scheduler, pool);
        long intervalMs = engine.report();
        timer.scheduleWithFixedDelay(engine::report, intervalMs, intervalMs, TimeUnit.MILLISECONDS);
    }

    /** Returns the interval that the server wants, in milliseconds. */
    private long report() {
        sequence++;
        InstanceSnapshot snapshot = InstanceSnapshot.newBuilder()
                .setInstanceId("engine-a")
                .setEndpoint("http://127.0.0.1:8000")
                .setIncarnation(incarnation)
                .setSequence(sequence)
                .setObservedTime(Timestamps.now())
                .setBlockSize(16)
                .setTotalBlocks(96)
                .build();
        HeartbeatRequest request = HeartbeatRequest.newBuilder().setPool(pool).addInstances(snapshot).build();
        return Durations.toMillis(scheduler.withDeadlineAfter(TIMEOUT).heartbeat(request).getNextInterval());
    }
}
