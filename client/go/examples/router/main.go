// Command router shows how a router uses moorage: it admits sessions, places each of their turns, renews their leases
// in the background, and releases them on success, failure and interruption. What an engine would do is made up.
//
//	go run ./examples/router -server 127.0.0.1:50061 -sessions 4 -turns 3
package main

import (
	"cmp"
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	moorv1 "moorage.dev/gen/moorage/v1"
)

func main() {
	server := flag.String("server", cmp.Or(os.Getenv("MOORAGE_SERVER"), "127.0.0.1:50061"), "HOST:PORT of moorage")
	pool := flag.String("pool", "default", "pool of engines")
	sessions := flag.Int("sessions", 4, "sessions at once")
	turns := flag.Uint("turns", 3, "turns of each session")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if failed := play(ctx, *server, *pool, *sessions, uint32(*turns), log.Printf); failed > 0 {
		log.Fatalf("%d of %d sessions failed", failed, *sessions)
	}
}

// play runs some sessions at once and returns how many failed.
func play(
	ctx context.Context, server, pool string, sessions int, turns uint32, logf func(string, ...any),
) (failed int32) {
	connection, err := Dial(server)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	router := NewRouter(ctx, moorv1.NewSchedulerServiceClient(connection), pool, logf)

	run, group := uuid.NewString()[:8], sync.WaitGroup{}
	for n := range sessions {
		group.Add(1)
		go func() {
			defer group.Done()
			sample := Sample{
				ID: run + "-" + strconv.Itoa(n), Class: "agentic", Group: run, PromptTokens: 1000, MaxContextTokens: 8192,
			}
			if err := router.Run(ctx, sample, pretend(sample.PromptTokens, turns)); err != nil {
				logf("%s: %s", sample.ID, describe(err))
				atomic.AddInt32(&failed, 1)
			}
		}()
	}
	group.Wait()
	return failed
}

// pretend stands for the engine: each turn takes a moment, finds the turns before it in the cache, and adds tokens.
func pretend(prompt uint64, turns uint32) Turn {
	cached := uint64(0)
	return func(ctx context.Context, number uint32, _ *moorv1.Placement) (Report, error) {
		if err := sleep(ctx, 200*time.Millisecond); err != nil {
			return Report{}, err
		}
		report := Report{Prompt: prompt, Cached: cached, Output: 100, Done: number+1 >= turns}
		cached = prompt + report.Output
		prompt = cached
		return report, nil
	}
}
