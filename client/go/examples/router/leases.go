package main

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	moorv1 "moorage.dev/gen/moorage/v1"
)

const (
	leaseTTL = 30 * time.Second
	// renewEvery leaves room for two renewals that fail.
	renewEvery = leaseTTL / 3
	// heartbeatItems is the most that one Heartbeat may carry.
	heartbeatItems = 1000
)

// session is what a router keeps of a session that is inside.
type session struct {
	id   string
	lost context.CancelCauseFunc

	mu       sync.Mutex
	progress *moorv1.SessionProgress
}

func (s *session) token() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.progress.GetLeaseToken()
}

func (s *session) renew(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress.LeaseToken = token
}

// begin notes that a turn is under way.
func (s *session) begin(number uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress.Phase, s.progress.Turn = moorv1.Phase_PHASE_RUNNING, proto.Uint32(number)
	s.progress.CachedTokens = nil
}

// finish notes what a turn used: what came from the cache tells the policy whether the pool is too full.
func (s *session) finish(report Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress.Phase = moorv1.Phase_PHASE_TOOL_WAIT
	s.progress.ContextTokens = proto.Uint64(report.Prompt + report.Output)
	s.progress.CachedTokens = proto.Uint64(report.Cached)
	s.progress.OutputTokens = proto.Uint64(s.progress.GetOutputTokens() + report.Output)
}

func (s *session) snapshot() *moorv1.SessionProgress {
	s.mu.Lock()
	defer s.mu.Unlock()
	return proto.CloneOf(s.progress)
}

// leases reports the progress of all sessions that are inside, which renews their leases.
type leases struct {
	scheduler moorv1.SchedulerServiceClient
	pool      string
	logf      func(format string, arguments ...any)

	mu     sync.Mutex
	inside map[string]*session
}

func newLeases(scheduler moorv1.SchedulerServiceClient, pool string, logf func(string, ...any)) *leases {
	return &leases{scheduler: scheduler, pool: pool, logf: logf, inside: map[string]*session{}}
}

func (l *leases) add(id, token string, lost context.CancelCauseFunc) *session {
	s := &session{id: id, lost: lost, progress: &moorv1.SessionProgress{SessionId: id, LeaseToken: token}}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inside[id] = s
	return s
}

func (l *leases) remove(s *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.inside, s.id)
}

// keep renews until ctx ends.
func (l *leases) keep(ctx context.Context) {
	for sleep(ctx, renewEvery) == nil {
		l.renew(ctx)
	}
}

// renew sends one Heartbeat for as many sessions as it takes. One that fails is made up for by the next.
func (l *leases) renew(ctx context.Context) {
	l.mu.Lock()
	all := slices.Collect(maps.Values(l.inside))
	l.mu.Unlock()
	for some := range slices.Chunk(all, heartbeatItems) {
		request := &moorv1.HeartbeatRequest{Pool: l.pool}
		for _, s := range some {
			request.Sessions = append(request.Sessions, s.snapshot())
		}
		answer, err := call(ctx, l.scheduler.Heartbeat, request)
		if err != nil {
			l.logf("leases not renewed: %s", describe(err))
			continue
		}
		for n, ack := range answer.GetSessions() {
			// A token that was replaced while the heartbeat was under way says nothing about the new one.
			if !ack.GetKnown() && some[n].token() == request.GetSessions()[n].GetLeaseToken() {
				l.logf("%s: lost its lease: %s", ack.GetSessionId(), ack.GetReason())
				some[n].lost(ErrLeaseLost)
			}
		}
	}
}
