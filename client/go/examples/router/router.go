package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	moorv1 "moorage.dev/gen/moorage/v1"
)

const (
	// maxWait is how long one Admit or Place may stay open: shorter than any proxy between here and there cuts off.
	maxWait = 30 * time.Second
	// answerTime is added to it for the deadline of a call.
	answerTime = 10 * time.Second
)

// ErrRejected is returned for a session that can never enter: it is too large, too stale, or its class is refused.
var ErrRejected = errors.New("rejected")

// ErrLeaseLost is the cause of a session's end when its lease ran out, or an operator evicted it.
var ErrLeaseLost = errors.New("lease lost")

// Sample is what a router knows of a session before it begins.
type Sample struct {
	ID, Class, Group string
	PromptTokens     uint64
	MaxContextTokens uint64
}

// Report is what a turn used, in tokens, and whether the session is complete.
type Report struct {
	Prompt, Cached, Output uint64
	Done                   bool
}

// Turn sends one request of a session to the engine where it was placed. It must end when ctx does.
type Turn func(ctx context.Context, number uint32, at *moorv1.Placement) (Report, error)

// Router takes sessions through their lives. Its methods may be called from any goroutine.
type Router struct {
	scheduler moorv1.SchedulerServiceClient
	pool      string
	leases    *leases
	logf      func(format string, arguments ...any)
}

// NewRouter returns a router for one pool. Leases are renewed until ctx ends.
func NewRouter(
	ctx context.Context, scheduler moorv1.SchedulerServiceClient, pool string, logf func(string, ...any),
) *Router {
	r := &Router{scheduler, pool, newLeases(scheduler, pool, logf), logf}
	go r.leases.keep(ctx)
	return r
}

// Run admits a session, places its turns until one of them is the last, and releases it, however it ended.
func (r *Router) Run(ctx context.Context, sample Sample, turn Turn) (err error) {
	admitted, err := r.admit(ctx, sample)
	if err != nil {
		return err
	}
	ctx, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	s := r.leases.add(sample.ID, admitted.GetLease().GetToken(), lost)
	var used Report
	defer func() {
		r.leases.remove(s)
		r.release(ctx, s, used, err)
	}()
	prompt := sample.PromptTokens
	for number := uint32(0); ; number++ {
		at, err := r.place(ctx, s, number, prompt)
		if err != nil {
			return err
		}
		s.begin(number)
		report, err := turn(ctx, number, at)
		if err != nil {
			// The cause says more than "context canceled".
			return errors.Join(err, context.Cause(ctx))
		}
		s.finish(report)
		used.Prompt, used.Cached, used.Output = used.Prompt+report.Prompt, used.Cached+report.Cached, used.Output+report.Output
		if report.Done {
			return nil
		}
		prompt = report.Prompt + report.Output
	}
}

// admit returns once the session is inside. A session that is held waits in the pool's queue, by max_wait; one that
// asks again in time keeps its rank.
func (r *Router) admit(ctx context.Context, sample Sample) (*moorv1.AdmitResponse, error) {
	for {
		answer, err := call(ctx, r.scheduler.Admit, &moorv1.AdmitRequest{
			Pool:             r.pool,
			RequestId:        uuid.NewString(),
			SessionId:        sample.ID,
			WorkloadClass:    sample.Class,
			GroupId:          sample.Group,
			PromptTokens:     proto.Uint64(sample.PromptTokens),
			MaxContextTokens: proto.Uint64(sample.MaxContextTokens),
			MaxWait:          durationpb.New(maxWait),
			LeaseTtl:         durationpb.New(leaseTTL),
		})
		if err != nil {
			return nil, fmt.Errorf("admit %s: %w", sample.ID, err)
		}
		hold := answer.GetHold()
		switch answer.GetDecision() {
		case moorv1.Decision_DECISION_PLACE:
			r.logf("%s: admitted as %s, home is %s", sample.ID, answer.GetWorkloadClass(), name(answer.GetPlacement()))
			return answer, nil
		case moorv1.Decision_DECISION_REJECT:
			return nil, fmt.Errorf("admit %s: %w: %s, %s", sample.ID, ErrRejected, hold.GetReason(), hold.GetDetail())
		}
		r.logf("%s: held, %s: %s", sample.ID, hold.GetReason(), hold.GetDetail())
		if err := sleep(ctx, hold.GetRetryAfter().AsDuration()); err != nil {
			// Whoever does not come back leaves the queue; a held session has no token.
			r.release(ctx, &session{id: sample.ID}, Report{}, err)
			return nil, fmt.Errorf("admit %s: %w", sample.ID, err)
		}
	}
}

// place returns where a turn goes: at once while the session's home lives. After a move the lease has another token.
func (r *Router) place(ctx context.Context, s *session, number uint32, prompt uint64) (*moorv1.Placement, error) {
	for {
		answer, err := call(ctx, r.scheduler.Place, &moorv1.PlaceRequest{
			Pool:         r.pool,
			RequestId:    uuid.NewString(),
			SessionId:    s.id,
			LeaseToken:   s.token(),
			Turn:         proto.Uint32(number),
			PromptTokens: proto.Uint64(prompt),
			MaxWait:      durationpb.New(maxWait),
		})
		if err != nil {
			return nil, fmt.Errorf("place %s: %w", s.id, err)
		}
		if answer.GetDecision() == moorv1.Decision_DECISION_PLACE {
			s.renew(answer.GetLease().GetToken())
			if answer.GetMoved() {
				r.logf("%s: moved to %s, its cache there is cold", s.id, name(answer.GetPlacement()))
			}
			r.logf("%s: turn %d goes to %s", s.id, number, answer.GetPlacement().GetEndpoint())
			return answer.GetPlacement(), nil
		}
		hold := answer.GetHold()
		r.logf("%s: turn %d held, %s: %s", s.id, number, hold.GetReason(), hold.GetDetail())
		if err := sleep(ctx, hold.GetRetryAfter().AsDuration()); err != nil {
			return nil, fmt.Errorf("place %s: %w", s.id, err)
		}
	}
}

// release ends a session by what its run ended with. It is made even where ctx is over: that may be why it is made.
func (r *Router) release(ctx context.Context, s *session, used Report, end error) {
	outcome := moorv1.Outcome_OUTCOME_COMPLETED
	if end != nil && ctx.Err() != nil {
		outcome = moorv1.Outcome_OUTCOME_ABORTED
	} else if end != nil {
		outcome = moorv1.Outcome_OUTCOME_FAILED
	}
	request := &moorv1.ReleaseRequest{
		Pool: r.pool, RequestId: uuid.NewString(), SessionId: s.id, LeaseToken: s.token(), Outcome: outcome,
	}
	if end == nil {
		request.Usage = &moorv1.Usage{
			PromptTokens: proto.Uint64(used.Prompt),
			CachedTokens: proto.Uint64(used.Cached),
			OutputTokens: proto.Uint64(used.Output),
		}
	}
	answer, err := call(context.WithoutCancel(ctx), r.scheduler.Release, request)
	if err != nil {
		// Its lease ends by itself.
		r.logf("%s: not released: %s", s.id, describe(err))
		return
	}
	r.logf("%s: released as %s: %t, after %s", s.id, outcome, answer.GetReleased(),
		answer.GetResidency().GetDuration().AsDuration().Round(time.Millisecond))
}

func name(p *moorv1.Placement) string {
	return fmt.Sprintf("%s/%d", p.GetInstanceId(), p.GetDpRank())
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
