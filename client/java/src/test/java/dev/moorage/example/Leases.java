package dev.moorage.example;

import dev.moorage.Failure;
import dev.moorage.v1.HeartbeatRequest;
import dev.moorage.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;
import dev.moorage.v1.SessionAck;
import dev.moorage.v1.SessionProgress;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/** Renews the leases of all living sessions in the background, and tells the server how far they got. */
final class Leases {
    private static final Duration TIMEOUT = Duration.ofSeconds(5);
    private static final int MAX_ITEMS = 1_000;

    private final SchedulerServiceBlockingStub scheduler;
    private final String pool;
    private final Set<Session> living = ConcurrentHashMap.newKeySet();
    private final AtomicInteger renewals = new AtomicInteger();

    /** Begins to renew, every third of a lease: two heartbeats may fail before it runs out. */
    Leases(SchedulerServiceBlockingStub scheduler, String pool, Duration lease, ScheduledExecutorService timer) {
        this.scheduler = scheduler;
        this.pool = pool;
        long pauseMs = lease.toMillis() / 3;
        timer.scheduleWithFixedDelay(this::renew, pauseMs, pauseMs, TimeUnit.MILLISECONDS);
    }

    void add(Session session) {
        living.add(session);
    }

    void discard(Session session) {
        living.remove(session);
    }

    /** Renewals that the server confirmed. */
    int renewals() {
        return renewals.get();
    }

    private void renew() {
        List<Session> sessions = List.copyOf(living);
        for (int start = 0; start < sessions.size(); start += MAX_ITEMS) {
            try {
                beat(sessions.subList(start, Math.min(start + MAX_ITEMS, sessions.size())));
            } catch (StatusRuntimeException error) {
                System.err.println("heartbeat failed, trying again: " + Failure.of(error));
            }
        }
    }

    private void beat(List<Session> sessions) {
        List<SessionProgress> sent = sessions.stream().map(Session::progress).toList();
        HeartbeatRequest request = HeartbeatRequest.newBuilder().setPool(pool).addAllSessions(sent).build();
        List<SessionAck> acks = scheduler.withDeadlineAfter(TIMEOUT).heartbeat(request).getSessionsList();
        for (int index = 0; index < acks.size(); index++) {
            Session session = sessions.get(index);
            // A move may have rotated the token meanwhile: then this word is about the old one.
            boolean isCurrent = session.token().equals(sent.get(index).getLeaseToken());
            if (acks.get(index).getKnown()) {
                renewals.incrementAndGet();
            } else if (isCurrent && living.contains(session)) {
                session.lose();
            }
        }
    }
}
