package dev.moorage.example;

import dev.moorage.v1.Phase;
import dev.moorage.v1.SessionProgress;
import io.grpc.Context;
import java.util.concurrent.CancellationException;

/** A session as its rollout and the renewal of leases share it. */
final class Session {
    final String id;
    /** Calls and pauses in it end when it is cancelled: by the caller, or because the lease is lost. */
    final Context.CancellableContext life = Context.ROOT.withCancellation();

    private String token = "";
    private Phase phase = Phase.PHASE_RUNNING;
    private int turn;
    private long contextTokens;

    Session(String id, long promptTokens) {
        this.id = id;
        this.contextTokens = promptTokens;
    }

    /** The caller gives up. */
    void giveUp() {
        life.cancel(new CancellationException("the caller gave up"));
    }

    /** The session's KV is no longer its own. */
    void lose() {
        life.cancel(new IllegalStateException("the lease is lost"));
    }

    boolean isGivenUp() {
        return life.isCancelled() && life.cancellationCause() instanceof CancellationException;
    }

    synchronized String token() {
        return token;
    }

    synchronized void setToken(String newToken) {
        token = newToken;
    }

    synchronized long contextTokens() {
        return contextTokens;
    }

    synchronized void beginTurn(int number) {
        phase = Phase.PHASE_RUNNING;
        turn = number;
    }

    synchronized void endTurn(long outputTokens) {
        phase = Phase.PHASE_TOOL_WAIT;
        contextTokens += outputTokens;
    }

    synchronized SessionProgress progress() {
        return SessionProgress.newBuilder()
                .setSessionId(id)
                .setLeaseToken(token)
                .setPhase(phase)
                .setTurn(turn)
                .setContextTokens(contextTokens)
                .build();
    }
}
