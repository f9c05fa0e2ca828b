package main

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	moorv1 "moorage.dev/gen/moorage/v1"
)

var sample = Sample{ID: "s", Class: "agentic", PromptTokens: 160, MaxContextTokens: 640}

// world is a router and a pool of its own on the server under test, with one engine that takes one session at a time.
type world struct {
	*Router
	inspector moorv1.InspectorServiceClient
	operator  moorv1.OperatorServiceClient
}

func newWorld(t *testing.T) world {
	t.Helper()
	address := os.Getenv("MOORAGE_SERVER")
	if address == "" {
		t.Skip("MOORAGE_SERVER names no server")
	}
	connection := dial(t, address)
	pool := "router-" + uuid.NewString()
	scheduler := moorv1.NewSchedulerServiceClient(connection)
	w := world{
		NewRouter(t.Context(), scheduler, pool, t.Logf),
		moorv1.NewInspectorServiceClient(connection),
		moorv1.NewOperatorServiceClient(connection),
	}
	config := &moorv1.PoolConfig{
		Policy: proto.String("static"), StaticCap: proto.Uint32(1),
		HeartbeatInterval: durationpb.New(20 * time.Second), GoneAfter: durationpb.New(120 * time.Second),
	}
	if _, err := w.operator.ConfigurePool(t.Context(), &moorv1.ConfigurePoolRequest{Pool: pool, Config: config}); err != nil {
		t.Fatal(describe(err))
	}
	engine := &moorv1.InstanceSnapshot{
		InstanceId: "engine", Endpoint: "http://engine:8000", Incarnation: "1", Sequence: 1,
		BlockSize: proto.Uint64(16), TotalBlocks: proto.Uint64(1000), UsedBlocks: proto.Uint64(0),
	}
	beat := &moorv1.HeartbeatRequest{Pool: pool, Instances: []*moorv1.InstanceSnapshot{engine}}
	if _, err := scheduler.Heartbeat(t.Context(), beat); err != nil {
		t.Fatal(describe(err))
	}
	return w
}

func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	connection, err := Dial(address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

func (w world) state(t *testing.T) *moorv1.GetPoolResponse {
	t.Helper()
	state, err := w.inspector.GetPool(t.Context(), &moorv1.GetPoolRequest{Pool: w.pool})
	if err != nil {
		t.Fatal(describe(err))
	}
	return state
}

// ended fails where anything is left inside or in the queue, or not as many sessions ended as they should.
func (w world) ended(t *testing.T, released, completed uint64) {
	t.Helper()
	state := w.state(t)
	if state.GetActiveSessions() != 0 || state.GetHeldSessions() != 0 {
		t.Errorf("left behind: %d active, %d held", state.GetActiveSessions(), state.GetHeldSessions())
	}
	if got := state.GetReleasedByClass()["agentic"]; got != released {
		t.Errorf("%d sessions released, not %d", got, released)
	}
	if got := state.GetCompletedByClass()["agentic"]; got != completed {
		t.Errorf("%d sessions completed, not %d", got, completed)
	}
}

func TestSessionsTakeTheirTurns(t *testing.T) {
	w := newWorld(t)
	group, inside := sync.WaitGroup{}, sync.Mutex{}
	for _, id := range []string{"a", "b", "c"} {
		one := sample
		one.ID = id
		work := pretend(one.PromptTokens, 2)
		group.Add(1)
		go func() {
			defer group.Done()
			err := w.Run(t.Context(), one, func(ctx context.Context, n uint32, at *moorv1.Placement) (Report, error) {
				if !inside.TryLock() {
					t.Error("two sessions inside, the engine takes one")
				} else {
					defer inside.Unlock()
				}
				if at.GetEndpoint() != "http://engine:8000" {
					t.Errorf("placed on %s", at.GetEndpoint())
				}
				return work(ctx, n, at)
			})
			if err != nil {
				t.Error(describe(err))
			}
		}()
	}
	group.Wait()
	w.ended(t, 3, 3)
}

func TestPlay(t *testing.T) {
	w := newWorld(t)
	if failed := play(t.Context(), os.Getenv("MOORAGE_SERVER"), w.pool, 3, 2, t.Logf); failed > 0 {
		t.Errorf("%d sessions failed", failed)
	}
	w.ended(t, 3, 3)
}

func TestFailureReleases(t *testing.T) {
	w, broken := newWorld(t), errors.New("engine broke")
	err := w.Run(t.Context(), sample, func(context.Context, uint32, *moorv1.Placement) (Report, error) {
		return Report{}, broken
	})
	if !errors.Is(err, broken) {
		t.Errorf("not the turn's error: %v", err)
	}
	w.ended(t, 1, 0)
}

func TestInterruptionReleases(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	err := w.Run(ctx, sample, func(ctx context.Context, n uint32, at *moorv1.Placement) (Report, error) {
		cancel()
		return pretend(160, 2)(ctx, n, at)
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("not cancelled: %v", err)
	}
	w.ended(t, 1, 0)
}

func TestInterruptedWaitLeavesTheQueue(t *testing.T) {
	w := newWorld(t)
	err := w.Run(t.Context(), sample, func(context.Context, uint32, *moorv1.Placement) (Report, error) {
		waiting, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		second := sample
		second.ID = "second"
		if err := w.Run(waiting, second, nil); err == nil || waiting.Err() == nil {
			t.Errorf("not the end of its time: %v", err)
		}
		return Report{Done: true}, nil
	})
	if err != nil {
		t.Error(describe(err))
	}
	for until := time.Now().Add(10 * time.Second); w.state(t).GetHeldSessions() > 0 && time.Now().Before(until); {
		time.Sleep(50 * time.Millisecond)
	}
	w.ended(t, 1, 1)
}

func TestLeasesAreRenewed(t *testing.T) {
	w := newWorld(t)
	err := w.Run(t.Context(), sample, func(ctx context.Context, _ uint32, _ *moorv1.Placement) (Report, error) {
		before := w.lease(t)
		time.Sleep(10 * time.Millisecond)
		w.leases.renew(ctx)
		if after := w.lease(t); !after.After(before) {
			t.Errorf("the lease ends at %s, as before", after)
		}
		return Report{Done: true}, nil
	})
	if err != nil {
		t.Error(describe(err))
	}
}

func (w world) lease(t *testing.T) time.Time {
	t.Helper()
	answer, err := w.inspector.GetSession(t.Context(), &moorv1.GetSessionRequest{Pool: w.pool, SessionId: sample.ID})
	if err != nil {
		t.Fatal(describe(err))
	}
	return answer.GetSession().GetLease().GetExpireTime().AsTime()
}

func TestLostLeaseEndsTheTurn(t *testing.T) {
	w := newWorld(t)
	err := w.Run(t.Context(), sample, func(ctx context.Context, _ uint32, _ *moorv1.Placement) (Report, error) {
		evict := &moorv1.EvictSessionRequest{Pool: w.pool, SessionId: sample.ID, Reason: "test"}
		if _, err := w.operator.EvictSession(ctx, evict); err != nil {
			t.Error(describe(err))
		}
		w.leases.renew(ctx)
		return Report{}, ctx.Err()
	})
	if !errors.Is(err, ErrLeaseLost) {
		t.Errorf("the lease was lost, the error is %v", err)
	}
}

func TestErrorsAreTold(t *testing.T) {
	w := newWorld(t)
	err := w.Run(t.Context(), Sample{}, nil)
	for _, part := range []string{"InvalidArgument", "reason INVALID_FIELD", "field session_id must be 1 to 256 bytes"} {
		if told := describe(err); !strings.Contains(told, part) {
			t.Errorf("%q is missing in: %s", part, told)
		}
	}
	huge := sample
	huge.PromptTokens, huge.MaxContextTokens = 1<<40, 1<<40
	if err := w.Run(t.Context(), huge, nil); !errors.Is(err, ErrRejected) || !strings.Contains(describe(err), "TOO_LARGE") {
		t.Errorf("not rejected as too large: %v", err)
	}
}

// flaky is a server that can not answer once, and says when it may.
type flaky struct {
	moorv1.UnimplementedSchedulerServiceServer
	asked []time.Time
}

func (f *flaky) Admit(ctx context.Context, _ *moorv1.AdmitRequest) (*moorv1.AdmitResponse, error) {
	f.asked = append(f.asked, time.Now())
	if len(f.asked) == 1 {
		_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", "700"))
		return nil, status.Error(codes.Unavailable, "the store is unreachable")
	}
	return &moorv1.AdmitResponse{Decision: moorv1.Decision_DECISION_PLACE}, nil
}

func TestRetriesWaitAsLongAsTheServerAsks(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server, service := grpc.NewServer(), &flaky{}
	moorv1.RegisterSchedulerServiceServer(server, service)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	router := NewRouter(t.Context(), moorv1.NewSchedulerServiceClient(dial(t, listener.Addr().String())), "p", t.Logf)
	if _, err := router.admit(t.Context(), sample); err != nil {
		t.Fatal(describe(err))
	}
	if len(service.asked) != 2 {
		t.Fatalf("asked %d times, not twice", len(service.asked))
	}
	// Without a word of the server it would have been at most 0.24 s.
	if waited := service.asked[1].Sub(service.asked[0]); waited < 690*time.Millisecond {
		t.Errorf("asked again after %s, the server said 700ms", waited)
	}
}
