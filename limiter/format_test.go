package limiter

import (
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

var recordFormat = flag.Bool("record", false, "write testdata/format.txt from what this version stores")

// formatStep is a call in the record of the format.
type formatStep struct {
	name string
	what byte
	cost int64
	tell bool                 // whether the node knows a level, and has units in flight
	held func(held *heldCost) // what of it is held; nil if nothing
}

// formatSteps are calls that, one after the other, store all that is stored of a bucket.
var formatSteps = []formatStep{
	{"charge", byte(AccountingAtomic), 3, false, nil},
	{"charge beside what the node knows", byte(AccountingEach), 1, true, nil},
	{"hold", byte(AccountingAtomic), 2, false, func(*heldCost) {}},
	{"settle", whatSettle, 2, false, func(h *heldCost) { h.receipt, h.ended, h.charged = formatStart+2e6, 1, 1 }},
	{"renew", whatRenew, 1, false, func(h *heldCost) {
		h.number, h.before, h.beforeCharged = 2, accountName{number: 1, receipt: formatStart + 2e6}, 1
	}},
	{"lease", whatLease, 2, false, nil},
	{"report", whatReport, 1, false, nil},
	{"peek", whatPeek, 1, false, nil},
}

// formatStart is the time of the first of them; a second passes between two.
const formatStart = 2_000_000_000_000_000

// TestFormat guards that what is stored in Redis stays what it is, byte by byte, and what the
// script gets and replies: two versions on one Redis go on with each other's buckets. Each
// call finds the value that was recorded, not the one that this version has made.
//
// If a stored value has changed so that the last release does not read it, or this version does
// not read what that has stored, change format in keys.go and docs/upgrading.md. In any case,
// record it again: go test -run TestFormat ./limiter -record
func TestFormat(t *testing.T) {
	const path = "testdata/format.txt"
	recorded, err := os.ReadFile(path)
	if err != nil && !*recordFormat {
		t.Fatal(err)
	}
	want := strings.Split(strings.TrimSpace(string(recorded)), "\n\n")
	server := redistest.Start(t)
	v := newClockedRedis(t, server, "rl:")
	var all []string
	for _, shape := range []struct {
		name  string
		limit Limit
	}{
		{"leaky bucket", Limit{Size: 20, DripInterval: 7 * time.Second, DripSize: 2}},
		{"fixed window", FixedWindow(20, time.Hour)},
		{"window of the clock", ClockWindow(20, time.Hour, time.Unix(1000, 0))},
		{"sliding window", SlidingWindow(20, time.Hour)},
		{"sliding log", SlidingLog(20, time.Hour)},
		{"warm-up", WarmingUp(20, 10*time.Second, time.Minute)},
		{"ban", BanAfter(3, time.Minute, time.Hour)},
	} {
		stored := ""
		for i, step := range formatSteps {
			if shape.name == "ban" && i > 0 && (step.held != nil || step.what == whatLease) {
				continue // bans hold nothing
			}
			q := v.keys.query(Request{Buckets: []Bucket{{Name: "api", Key: "192.0.2.1", Limit: shape.limit, Cost: step.cost}}}, step.what)
			p := &q.buckets[0]
			q.ahead, q.least = 1, 0
			if step.tell {
				p.local = localLevel{Ahead: bucket.Ahead{Clear: 5e6}, inFlight: 1, dirty: own}
			}
			if step.held != nil {
				p.held = &heldCost{charge: step.cost, process: 5, accountName: accountName{number: 1}}
				step.held(p.held)
			}
			arg := string(q.appendGroup(nil))
			v.at(t, formatStart+int64(i)*1e6)
			redistest.Done(t, server.Client().Set(t.Context(), p.key, stored, 0))
			if stored == "" {
				server.Client().Del(t.Context(), p.key)
			}
			reply, err := server.Client().Eval(t.Context(), v.source, []string{p.key}, arg).Int64Slice()
			if err != nil {
				t.Fatalf("%s, %s: %v", shape.name, step.name, err)
			}
			stored = server.Client().Get(t.Context(), p.key).Val()
			got := fmt.Sprintf("%s, %s\nkey %s\ncall %x\nreply %v\nvalue %x", shape.name, step.name, p.key, arg, reply, stored)
			all = append(all, got)
			if *recordFormat {
				continue
			}
			if len(all) > len(want) {
				t.Fatalf("only %d calls are recorded", len(want))
			}
			was := want[len(all)-1]
			if got != was {
				t.Errorf("got\n%s\nwant\n%s", got, was)
			}
			_, value, _ := strings.Cut(was, "value ")
			before, err := hex.DecodeString(value)
			if err != nil {
				t.Fatal(err)
			}
			stored = string(before)
		}
	}
	switch {
	case !*recordFormat && len(all) < len(want):
		t.Errorf("%d calls are recorded, and %d made", len(want), len(all))
	case *recordFormat:
		filetest.Write(t, path, []byte(strings.Join(all, "\n\n")+"\n"))
	}
}
