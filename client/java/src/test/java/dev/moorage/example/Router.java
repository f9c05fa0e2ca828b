package dev.moorage.example;

import com.google.protobuf.Duration;
import com.google.protobuf.util.Durations;
import dev.moorage.Channels;
import dev.moorage.Failure;
import dev.moorage.v1.AdmitRequest;
import dev.moorage.v1.AdmitResponse;
import dev.moorage.v1.Decision;
import dev.moorage.v1.Hold;
import dev.moorage.v1.Outcome;
import dev.moorage.v1.PlaceRequest;
import dev.moorage.v1.PlaceResponse;
import dev.moorage.v1.ReleaseRequest;
import dev.moorage.v1.ReleaseResponse;
import dev.moorage.v1.SchedulerServiceGrpc;
import dev.moorage.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;
import dev.moorage.v1.Usage;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.UUID;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/**
 * A router's loop: rollouts are admitted, placed turn by turn, kept alive, and released however they end.
 *
 * <p>MOORAGE_SERVER names the server. MOORAGE_POOL names a pool with engines; without it the example brings a pool and
 * a stand-in for an engine of its own.
 */
public final class Router {
    /** Short, so that the example is told why it waits; the limit is 10 minutes. */
    private static final Duration MAX_WAIT = Durations.fromSeconds(1);
    private static final Duration LEASE = Durations.fromSeconds(3);
    private static final java.time.Duration TIMEOUT = java.time.Duration.ofSeconds(10);
    private static final long MAX_CONTEXT_TOKENS = 512;
    private static final long OUTPUT_TOKENS = 64;

    private final SchedulerServiceBlockingStub scheduler;
    private final String pool;
    private final Leases leases;
    private final PrintStream out;

    /** What the environment does after a turn. */
    @FunctionalInterface
    interface Tool {
        void run(Session session, int turn) throws Exception;
    }

    /** What a rollout asks for. */
    record Rollout(String sessionId, long promptTokens, int turns, Tool tool) {}

    Router(SchedulerServiceBlockingStub scheduler, String pool, Leases leases, PrintStream out) {
        this.scheduler = scheduler;
        this.pool = pool;
        this.leases = leases;
        this.out = out;
    }

    public static void main(String[] args) throws InterruptedException, ExecutionException {
        demonstrate(System.out, Optional.ofNullable(System.getenv("MOORAGE_POOL")));
    }

    /** Plays rollouts that end in every way there is, at once. */
    static void demonstrate(PrintStream out, Optional<String> ownPool) throws InterruptedException, ExecutionException {
        ManagedChannel channel = Channels.newBuilder().build();
        ScheduledExecutorService timer = Executors.newScheduledThreadPool(2);
        ExecutorService threads = Executors.newCachedThreadPool();
        try {
            SchedulerServiceBlockingStub scheduler = SchedulerServiceGrpc.newBlockingStub(channel);
            String pool = ownPool.orElse("example-" + UUID.randomUUID());
            if (ownPool.isEmpty()) {
                Engine.start(scheduler, pool, timer);
            }
            Leases leases = new Leases(scheduler, pool, java.time.Duration.ofMillis(Durations.toMillis(LEASE)), timer);
            Router router = new Router(scheduler, pool, leases, out);

            List<Future<?>> running = new ArrayList<>();
            for (Rollout rollout : rollouts()) {
                Session session = new Session(rollout.sessionId(), rollout.promptTokens());
                running.add(threads.submit(() -> router.run(rollout, session)));
                if (rollout.sessionId().equals("hasty")) {
                    timer.schedule(session::giveUp, 500, TimeUnit.MILLISECONDS);
                }
            }
            for (Future<?> rollout : running) {
                rollout.get();
            }
            out.println(leases.renewals() + " renewals");
        } finally {
            threads.shutdownNow();
            timer.shutdownNow();
            timer.awaitTermination(5, TimeUnit.SECONDS);
            channel.shutdownNow();
        }
    }

    private static List<Rollout> rollouts() {
        Tool tool = (session, turn) -> pause(Durations.fromMillis(400));
        Tool broken = (session, turn) -> {
            throw new IllegalStateException("the tool broke");
        };
        Tool impatient = (session, turn) -> {
            if (turn == 1) {
                session.giveUp();
            }
            tool.run(session, turn);
        };
        return List.of(
                new Rollout("steady", 160, 3, tool),
                new Rollout("second", 160, 2, tool),
                new Rollout("third", 160, 1, tool),
                new Rollout("broken", 160, 2, broken),
                new Rollout("impatient", 160, 3, impatient),
                new Rollout("hasty", 160, 1, tool),
                new Rollout("giant", 1_000_000, 1, tool),
                new Rollout("wrong", 1L << 50, 1, tool));
    }

    /** One rollout, from its admission to its release. */
    private void run(Rollout rollout, Session session) {
        Outcome outcome = Outcome.OUTCOME_FAILED;
        try {
            session.life.call(() -> {
                live(rollout, session);
                return null;
            });
            outcome = Outcome.OUTCOME_COMPLETED;
        } catch (Exception error) {
            if (session.isGivenUp()) {
                outcome = Outcome.OUTCOME_ABORTED;
            }
            explain(session, error);
        } finally {
            leases.discard(session);
            release(session, outcome);
            session.life.cancel(null);
        }
    }

    private void live(Rollout rollout, Session session) throws Exception {
        admit(session);
        leases.add(session);
        for (int turn = 0; turn < rollout.turns(); turn++) {
            PlaceResponse answer = place(session, turn);
            String moved = answer.getMoved() ? ", moved: its KV there is cold" : "";
            say(session, "turn " + turn + " on " + answer.getPlacement().getEndpoint() + moved);
            session.beginTurn(turn);
            generate();
            session.endTurn(OUTPUT_TOKENS);
            rollout.tool().run(session, turn);
        }
    }

    /** Waits for the session's turn, for as long as it takes. */
    private void admit(Session session) throws InterruptedException {
        while (true) {
            AdmitResponse answer = patient().admit(AdmitRequest.newBuilder()
                    .setPool(pool)
                    .setRequestId(UUID.randomUUID().toString())
                    .setSessionId(session.id)
                    .setWorkloadClass("agentic")
                    .setPromptTokens(session.contextTokens())
                    .setMaxContextTokens(Math.max(MAX_CONTEXT_TOKENS, session.contextTokens()))
                    .setMaxWait(MAX_WAIT)
                    .setLeaseTtl(LEASE)
                    .build());
            if (answer.getDecision() == Decision.DECISION_PLACE) {
                session.setToken(answer.getLease().getToken());
                say(session, "admitted on " + answer.getPlacement().getInstanceId());
                return;
            }
            if (answer.getDecision() == Decision.DECISION_REJECT) {
                throw new IllegalArgumentException(describe(answer.getHold()));
            }
            say(session, "held: " + describe(answer.getHold()));
            pause(answer.getHold().getRetryAfter());
        }
    }

    /** Where the next request goes. Waits while the session's home is gone and nothing else can take it. */
    private PlaceResponse place(Session session, int turn) throws InterruptedException {
        while (true) {
            PlaceResponse answer = patient().place(PlaceRequest.newBuilder()
                    .setPool(pool)
                    .setRequestId(UUID.randomUUID().toString())
                    .setSessionId(session.id)
                    .setLeaseToken(session.token())
                    .setTurn(turn)
                    .setPromptTokens(session.contextTokens())
                    .setMaxWait(MAX_WAIT)
                    .build());
            if (answer.hasLease()) {
                session.setToken(answer.getLease().getToken());
            }
            if (answer.getDecision() == Decision.DECISION_PLACE) {
                return answer;
            }
            say(session, "held: " + describe(answer.getHold()));
            pause(answer.getHold().getRetryAfter());
        }
    }

    /** Ends the session, outside of its life: what is not released blocks others. One that waits leaves the queue. */
    private void release(Session session, Outcome outcome) {
        ReleaseRequest.Builder request = ReleaseRequest.newBuilder()
                .setPool(pool)
                .setRequestId(UUID.randomUUID().toString())
                .setSessionId(session.id)
                .setLeaseToken(session.token())
                .setOutcome(outcome);
        if (!session.token().isEmpty()) {
            request.setUsage(Usage.newBuilder().setContextTokens(session.contextTokens()));
        }
        try {
            ReleaseResponse answer = scheduler.withDeadlineAfter(TIMEOUT).release(request.build());
            String ended = !answer.getReleased() ? "nothing to release"
                    : String.format("released, %.1f block-seconds", answer.getResidency().getBlockSeconds());
            say(session, outcome.name().replace("OUTCOME_", "") + ": " + ended);
        } catch (StatusRuntimeException error) {
            // Its lease ends it.
            explain(session, error);
        }
    }

    /** Your engine's call. */
    private static void generate() throws InterruptedException {
        pause(Durations.fromMillis(300));
    }

    private SchedulerServiceBlockingStub patient() {
        return scheduler.withDeadlineAfter(TIMEOUT.plusMillis(Durations.toMillis(MAX_WAIT)));
    }

    /** Sleeps, unless the session's life ends first. */
    private static void pause(Duration duration) throws InterruptedException {
        Context life = Context.current();
        CountDownLatch ended = new CountDownLatch(1);
        Context.CancellationListener listener = context -> ended.countDown();
        life.addListener(listener, Runnable::run);
        try {
            if (ended.await(Durations.toMillis(duration), TimeUnit.MILLISECONDS)) {
                throw new IllegalStateException(life.cancellationCause().getMessage());
            }
        } finally {
            life.removeListener(listener);
        }
    }

    private static String describe(Hold hold) {
        String reason = hold.getReason().name().replace("HOLD_REASON_", "");
        return reason + ", " + hold.getAhead() + " ahead (" + hold.getDetail() + ")";
    }

    private void explain(Session session, Exception error) {
        if (!(error instanceof StatusRuntimeException failed)) {
            say(session, error.toString());
            return;
        }
        Failure failure = Failure.of(failed);
        say(session, "failed: " + failure.message() + " [" + failure.reason().orElse(failure.code().name()) + "]");
        failure.fieldViolations()
                .forEach(found -> say(session, "  " + found.getField() + ": " + found.getDescription()));
        failure.metadata().forEach((name, value) -> say(session, "  " + name + " = " + value));
        failure.retryAfter().ifPresent(delay -> say(session, "  try again after " + delay.toMillis() + " ms"));
    }

    private void say(Session session, String what) {
        out.println(session.id + ": " + what);
    }
}
