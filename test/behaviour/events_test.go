package behaviour

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

func init() { caddy.RegisterModule(new(subscriber)) }

// subscriber is an event handler of the tests. In a Caddyfile it is written as
// `test_subscriber <id>`.
type subscriber struct {
	ID string `json:"id"`
}

// heard is what subscribers have heard since the test began, and what they do.
var heard struct {
	sync.Mutex
	events []heardEvent
	handle func(caddy.Event) error // may be nil
}

// heardEvent is an event that a subscriber has heard.
type heardEvent struct {
	subscriber, name, origin string
	data                     map[string]any
}

// CaddyModule returns the Caddy module information.
func (*subscriber) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.test_subscriber", New: func() caddy.Module { return new(subscriber) }}
}

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (s *subscriber) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.Args(&s.ID) {
		return d.ArgErr()
	}
	return nil
}

// Handle implements caddyevents.Handler.
func (s *subscriber) Handle(_ context.Context, e caddy.Event) error {
	heard.Lock()
	origin := ""
	if e.Origin() != nil {
		origin = string(e.Origin().CaddyModule().ID)
	}
	heard.events = append(heard.events, heardEvent{s.ID, e.Name(), origin, e.Data})
	handle := heard.handle
	heard.Unlock()
	if handle != nil {
		return handle(e)
	}
	return nil
}

// clockedProcess returns a process that counts by a clock which only moves when move is
// called, which has it look at the counters. patience is how long an event waits for the
// handlers of the one before; 0 for the default.
func clockedProcess(patience time.Duration) (p *state.Process, move func(time.Duration)) {
	var now atomic.Int64
	p = sitetest.NewProcess(telemetry.Options{
		Now: func() time.Time { return time.Unix(0, now.Load()) }, Every: time.Hour, Patience: patience,
	})
	return p, func(d time.Duration) {
		now.Add(int64(d))
		p.Look()
	}
}

// subscribe sets what subscribers have heard and do back to nothing, until the test ends.
func subscribe(t *testing.T) {
	t.Helper()
	handleEvents(nil)
	heard.Lock()
	heard.events = nil
	heard.Unlock()
	t.Cleanup(func() { handleEvents(nil) })
}

// handleEvents sets what subscribers do besides hearing.
func handleEvents(handle func(caddy.Event) error) {
	heard.Lock()
	heard.handle = handle
	heard.Unlock()
}

// heardEvents returns the events of a name that have been heard so far.
func heardEvents(name string) (found []heardEvent) {
	heard.Lock()
	defer heard.Unlock()
	for _, e := range heard.events {
		if e.name == name {
			found = append(found, e)
		}
	}
	return found
}

// waitForEvents waits until n events of a name have been heard, and returns them.
func waitForEvents(t *testing.T, name string, n int) (found []heardEvent) {
	t.Helper()
	sitetest.Eventually(t, fmt.Sprintf("%d events %s", n, name), func() bool {
		found = heardEvents(name)
		return len(found) >= n
	})
	return found
}

// listening returns global options by which a subscriber hears all events of this
// module.
func listening(id string, more ...string) string {
	return "events {\non " + strings.Join([]string{
		telemetry.EventExceeded, telemetry.EventWouldDeny, telemetry.EventShed, telemetry.EventRedisLost, telemetry.EventRedisBack, telemetry.EventMemoryFull,
	}, " test_subscriber "+id+"\non ") + " test_subscriber " + id + "\n}\n" + strings.Join(more, "\n")
}

// flood sends n requests from each of so many goroutines, and returns how many were
// denied.
func flood(t testing.TB, s *sitetest.Site, goroutines, n int) (denied uint64) {
	t.Helper()
	var count atomic.Uint64
	var senders sync.WaitGroup
	for range goroutines {
		senders.Go(func() {
			for range n {
				res, err := s.Client.Get(s.URL("/"))
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
				if res.StatusCode == http.StatusTooManyRequests {
					count.Add(1)
				}
			}
		})
	}
	senders.Wait()
	s.Requests.Add(int64(goroutines * n))
	return count.Load()
}

const oneRequest = "rate_limit api {\nkey all\nsize 1\ndrip_rate 1m\n}\nrespond admitted"

// TestExceededEvents guards that the first denial of a limit emits an event at the next
// look, and that however many follow emit one in ten seconds, whose counts add up to all
// denials; and that a limit which has been quiet starts over.
func TestExceededEvents(t *testing.T) {
	subscribe(t)
	p, move := clockedProcess(0)
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Global: listening("a"), Site: oneRequest})
	s.Get("/")
	if got := s.Get("/"); got.StatusCode != http.StatusTooManyRequests {
		t.Fatalf("got %s", got)
	}
	move(time.Second)
	first := waitForEvents(t, telemetry.EventExceeded, 1)[0]
	if got := fmt.Sprint(first); got != "{a rate_limit_exceeded rate_limit map[count:1 limit:api wait:60]}" {
		t.Errorf("the first event is %s", got)
	}
	denied := uint64(1)
	for range 10 {
		if n := len(heardEvents(telemetry.EventExceeded)); n != 1 {
			t.Fatalf("%d events within ten seconds, want 1", n)
		}
		denied += flood(t, s, 64, 3)
		move(time.Second)
	}
	waitForEvents(t, telemetry.EventExceeded, 2)
	denied += flood(t, s, 64, 3)
	move(10 * time.Second)
	last := waitForEvents(t, telemetry.EventExceeded, 3)[2]
	if got, want := totalDenials(), denied; got != want || last.data["wait"] != 60.0 {
		t.Errorf("events tell of %d denials, want %d; the last is %v", got, want, last)
	}

	move(10 * time.Second)
	move(10 * time.Second)
	s.Get("/")
	move(time.Second)
	waitForEvents(t, telemetry.EventExceeded, 4)
	if got, want := totalDenials(), denied+1; got != want || len(heardEvents(telemetry.EventExceeded)) != 4 {
		t.Errorf("after a quiet time events tell of %d denials, want %d: %v", got, want, heardEvents(telemetry.EventExceeded))
	}
}

// totalDenials returns of how many denials the events so far have told.
func totalDenials() (sum uint64) {
	for _, e := range heardEvents(telemetry.EventExceeded) {
		sum += e.data["count"].(uint64)
	}
	return sum
}

// TestEventsOfLimits guards that each limit has events of its own, by its path, and
// that one that will never admit a request has no wait.
func TestEventsOfLimits(t *testing.T) {
	subscribe(t)
	p, move := clockedProcess(0)
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Global: listening("a"), Site: `
		rate_limit api {
			key all
			size 1
			drip_rate 1m
			limit dear {
				size 2
				cost {query.cost}
			}
		}
		respond admitted
	`})
	s.Get("/?cost=1")
	s.Get("/?cost=9")
	move(time.Second)
	var got []string
	for _, e := range waitForEvents(t, telemetry.EventExceeded, 2) {
		got = append(got, fmt.Sprint(e.data))
	}
	slices.Sort(got)
	want := []string{"map[count:1 limit:api wait:60]", "map[count:1 limit:api/dear wait:<nil>]"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestEventsOfDryRuns guards that what a dry run would have denied emits an event of its own,
// and not the one of denials, which a handler may act on.
func TestEventsOfDryRuns(t *testing.T) {
	subscribe(t)
	p, move := clockedProcess(0)
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Global: listening("a"), Site: `
		rate_limit {
			limit real {
				key all
				size 2
				drip_rate 1h
			}
			limit candidate {
				key all
				size 1
				drip_rate 1m
				dry_run
			}
		}
		respond admitted
	`})
	for range 4 { // of which the dry run would deny three, and the other one denies two
		s.Get("/")
	}
	move(time.Second)
	got := fmt.Sprint(waitForEvents(t, telemetry.EventWouldDeny, 1), waitForEvents(t, telemetry.EventExceeded, 1))
	want := "[{a rate_limit_would_deny rate_limit map[count:3 limit:candidate wait:60]}] " +
		"[{a rate_limit_exceeded rate_limit map[count:2 limit:real wait:3600]}]"
	if got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	move(time.Second)
	s.Get("/")
	move(time.Second)
	if n := len(heardEvents(telemetry.EventWouldDeny)); n != 1 {
		t.Errorf("%d events within ten seconds, want 1", n)
	}
	move(10 * time.Second)
	if e := waitForEvents(t, telemetry.EventWouldDeny, 2)[1]; e.data["count"] != uint64(1) {
		t.Errorf("the next event is %v", e)
	}
}

// TestEventsOfReloads guards that events go to the handlers of the config that runs:
// the new one after a reload, the old one after a failed reload. Denials before
// anyone listened are not told.
func TestEventsOfReloads(t *testing.T) {
	subscribe(t)
	p, move := clockedProcess(0)
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Global: listening("a"), Site: oneRequest})
	s.Get("/")
	denials := 0
	hears := func(id string) {
		t.Helper()
		s.Get("/")
		denials++
		move(time.Second)
		got := waitForEvents(t, telemetry.EventExceeded, denials)
		if e := got[len(got)-1]; len(got) != denials || e.subscriber != id || e.data["count"] != uint64(1) {
			t.Errorf("got %d events, the last %v; want %d, the last for %q", len(got), e, denials, id)
		}
		move(20 * time.Second)
		move(20 * time.Second)
	}
	hears("a")
	s.Reload(sitetest.Config{Process: p, Global: listening("b"), Site: oneRequest})
	hears("b")

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for range 3 {
		err := s.Load(sitetest.Config{
			Global: listening("c"), Site: oneRequest,
			Sites: "http://" + taken.Addr().String() + " {\n" + oneRequest + "\n}",
		})
		if err == nil {
			t.Fatal("a config with an address that is in use was loaded")
		}
		hears("b")
	}
	s.Reload(sitetest.Config{Process: p, Global: listening("d"), Site: oneRequest})
	hears("d")
}

// TestRedisEvents guards that the loss and the return of Redis emit an event each,
// also to a config that was loaded after the store had been opened.
func TestRedisEvents(t *testing.T) {
	subscribe(t)
	redis := redistest.Start(t)
	global := sitetest.RedisGlobal(redis.Addr)
	s := sitetest.StartConfig(t, sitetest.Config{Global: listening("a") + global, Site: oneRequest})
	s.Reload(sitetest.Config{Global: listening("b") + global, Site: oneRequest})
	redis.Kill()
	sitetest.Eventually(t, "the event", func() bool {
		s.Get("/")
		return len(heardEvents(telemetry.EventRedisLost)) > 0
	})
	lost := heardEvents(telemetry.EventRedisLost)
	if e := lost[0]; len(lost) != 1 || e.subscriber != "b" || e.origin != "rate_limit" ||
		e.data["server"] != redis.Addr || e.data["reason"] == "" || len(e.data) != 2 {
		t.Errorf("got %v", lost)
	}
	redis.Restart(t)
	sitetest.Eventually(t, "the event", func() bool {
		s.Get("/") // probes
		return len(heardEvents(telemetry.EventRedisBack)) > 0
	})
	back := heardEvents(telemetry.EventRedisBack)
	if e := back[0]; len(back) != 1 || e.subscriber != "b" || e.data["server"] != redis.Addr || e.data["down"].(float64) <= 0 {
		t.Errorf("got %v", back)
	}
}

// TestMemoryFullEvents guards that a full limit emits an event, with the bound that
// it has reached.
func TestMemoryFullEvents(t *testing.T) {
	for name, tc := range map[string]struct{ option, want string }{
		"forget": {"max_keys 2", "map[forgotten:1 limit:api max_keys:2 shared:0]"},
		"share":  {"max_keys 2\nwhen_full share", "map[forgotten:0 limit:api max_keys:2 shared:1]"},
	} {
		t.Run(name, func(t *testing.T) {
			subscribe(t)
			p, move := clockedProcess(0)
			s := sitetest.StartConfig(t, sitetest.Config{
				Process: p,
				Global:  listening("a"),
				Site:    "rate_limit api {\nkey {query.k}\nsize 9\ndrip_rate 1h\n" + tc.option + "\n}\nrespond admitted",
			})
			for k := range 3 {
				s.Get(fmt.Sprint("/?k=", k))
			}
			move(time.Minute)
			if got := fmt.Sprint(waitForEvents(t, telemetry.EventMemoryFull, 1)[0].data); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

// startBlocked starts a site whose event handlers do not return before release is
// called, which waits until they do, and which are not waited for. move moves the clock of events.
func startBlocked(t *testing.T) (s *sitetest.Site, move func(time.Duration), release func()) {
	t.Helper()
	subscribe(t)
	p, move := clockedProcess(time.Millisecond)
	s = sitetest.StartConfig(t, sitetest.Config{Process: p, Global: listening("a"), Site: oneRequest})
	var handling atomic.Int32
	released := make(chan struct{})
	handleEvents(func(caddy.Event) error {
		handling.Add(1)
		defer handling.Add(-1)
		<-released
		return nil
	})
	return s, move, func() {
		close(released)
		sitetest.Eventually(t, "handlers return", func() bool { return handling.Load() == 0 })
	}
}

// TestBlockedEventHandler guards that a handler that never returns delays neither
// requests nor reloads, and other events not for long; that events beyond those
// that may wait are dropped and this is logged; and that no denial is lost.
func TestBlockedEventHandler(t *testing.T) {
	s, move, release := startBlocked(t)
	s.Get("/")
	s.Get("/")
	move(time.Second) // its event blocks
	waitForEvents(t, telemetry.EventExceeded, 1)
	for n := range telemetry.MaxStuckEvents - 1 {
		s.Process.Redis(nil, limiter.Event{Kind: limiter.EventDown, Server: fmt.Sprint(n), Reason: "refused"})
	}
	waitForEvents(t, telemetry.EventRedisLost, telemetry.MaxStuckEvents-1)
	denied := 1 + flood(t, s, 8, 8)
	move(20 * time.Second)
	for n := range 2*telemetry.MaxWaitingEvents + 1 {
		s.Process.Redis(nil, limiter.Event{Kind: limiter.EventDown, Server: fmt.Sprint("late ", n), Reason: "refused"})
	}
	s.Reload(sitetest.Config{Global: listening("b"), Site: oneRequest})
	denied += flood(t, s, 8, 8)
	sitetest.Eventually(t, "a line that tells of dropped events", func() bool {
		return strings.Contains(fmt.Sprint(s.Log("warn", "rate_limit")), slowHandlers)
	})
	if n := len(heardEvents(telemetry.EventRedisLost)) + len(heardEvents(telemetry.EventExceeded)); n != telemetry.MaxStuckEvents {
		t.Errorf("%d events while %d are stuck", n, telemetry.MaxStuckEvents)
	}
	release()
	move(20 * time.Second)
	waitForEvents(t, telemetry.EventExceeded, 2)
	if got := totalDenials(); got != denied {
		t.Errorf("events tell of %d denials, want %d", got, denied)
	}
}

// slowHandlers is what is logged of handlers that do not return.
const slowHandlers = "event handlers are too slow: events are delayed or dropped"

// TestBlockedExceededHandlers guards that it is logged, once, that the handlers of
// telemetry.EventExceeded hang, although none of these events is dropped.
func TestBlockedExceededHandlers(t *testing.T) {
	s, move, release := startBlocked(t)
	s.Get("/")
	for n := range telemetry.MaxStuckEvents {
		if logged := s.Log("warn", "rate_limit"); len(logged) > 0 {
			t.Fatalf("logged %v while %d handlers hang", logged, n)
		}
		s.Get("/")
		move(20 * time.Second)
		waitForEvents(t, telemetry.EventExceeded, n+1)
	}
	for range 3 {
		s.Get("/")
		move(20 * time.Second)
	}
	sitetest.Eventually(t, "a line that tells of handlers that hang", func() bool { return len(s.Log("warn", "rate_limit")) > 0 })
	if got := s.Log("warn", "rate_limit"); len(got) != 1 || got[0]["msg"] != slowHandlers || got[0]["dropped"] != 0.0 {
		t.Errorf("logged %v", got)
	}
	release()
	move(20 * time.Second)
	waitForEvents(t, telemetry.EventExceeded, telemetry.MaxStuckEvents+1)
	if got := totalDenials(); got != telemetry.MaxStuckEvents+3 {
		t.Errorf("events tell of %d denials, want %d", got, telemetry.MaxStuckEvents+3)
	}
}

// TestFailingEventHandlers guards that a handler that panics or aborts an event
// changes nothing: Caddy runs on, and the next event comes.
func TestFailingEventHandlers(t *testing.T) {
	subscribe(t)
	s := sitetest.StartConfig(t, sitetest.Config{Global: listening("a"), Site: oneRequest})
	for n, handle := range []func(caddy.Event) error{
		func(caddy.Event) error { panic("at the handler") },
		func(caddy.Event) error { return caddy.ErrEventAborted },
		nil,
	} {
		handleEvents(handle)
		s.Process.Redis(nil, limiter.Event{Kind: limiter.EventDown, Server: fmt.Sprint(n), Reason: "refused"})
		waitForEvents(t, telemetry.EventRedisLost, n+1)
		s.Get("/")
	}
	got := slices.DeleteFunc(s.Log("error", "rate_limit"), func(e sitetest.Entry) bool { return e["event"] == nil })
	if len(got) != 1 || got[0]["event"] != telemetry.EventRedisLost || got[0]["panic"] != "at the handler" {
		t.Errorf("got %v, want one line that tells of the panic", got)
	}
}

// TestEventsShowNoSecrets guards that Caddy's log of events at DEBUG, which shows
// their handlers, does not show what is secret in the options of the app, whose
// handler it is.
func TestEventsShowNoSecrets(t *testing.T) {
	subscribe(t)
	s := sitetest.StartConfig(t, sitetest.Config{Global: listening("a") + sitetest.RedisGlobal("127.0.0.1:1", "password hunter2"), Site: oneRequest})
	s.Get("/")
	handlers := 0
	for _, e := range s.Log("debug", "events") {
		if e["msg"] == "invoking subscribed handler" && e["name"] == "started" {
			handlers++
		}
		if strings.Contains(e.Text(), "hunter2") {
			t.Errorf("the log has %v", e)
		}
	}
	if handlers == 0 {
		t.Error("the log does not show the handler of the event that the config has started")
	}
}

// TestEventsBeforeStart guards that events wait until the whole config has started,
// and that those beyond what may wait are dropped.
func TestEventsBeforeStart(t *testing.T) {
	subscribe(t)
	p, _ := clockedProcess(0)
	app := provisionApp(t, p, `{}`)
	if err := app.Compiled().Events.On(telemetry.EventRedisLost, &subscriber{ID: "a"}); err != nil {
		t.Fatal(err)
	}
	if err := app.Start(); err != nil {
		t.Fatal(err)
	}
	for n := range telemetry.MaxWaitingEvents + 3 {
		p.Redis(nil, limiter.Event{Kind: limiter.EventDown, Server: fmt.Sprint(n), Reason: "refused"})
	}
	if got := heardEvents(telemetry.EventRedisLost); len(got) > 0 {
		t.Fatalf("before the start: %v", got)
	}
	app.Compiled().Events.Emit(app.Compiled().Context, "started", nil)
	got := waitForEvents(t, telemetry.EventRedisLost, telemetry.MaxWaitingEvents)
	for n, e := range got {
		if e.data["server"] != fmt.Sprint(n) {
			t.Errorf("event %d is %v", n, e)
		}
	}
	if n := len(heardEvents(telemetry.EventRedisLost)); n != telemetry.MaxWaitingEvents {
		t.Errorf("%d events are heard, want %d", n, telemetry.MaxWaitingEvents)
	}
}

// TestDenialsWithoutListeners guards that denials before somebody listens, or after, are
// not told.
func TestDenialsWithoutListeners(t *testing.T) {
	subscribe(t)
	p, move := clockedProcess(0)
	quiet := provisionApp(t, p, `{}`) // logs at INFO, so that not even the log listens
	if err := quiet.Start(); err != nil {
		t.Fatal(err)
	}
	quiet.Compiled().Events.Emit(quiet.Compiled().Context, "started", nil)
	refs := p.Counters.NewRefs()
	defer refs.Release()
	c := refs.Get("api")
	deny := func() {
		d := limiter.Decision{Denied: true, RetryAfter: time.Second}
		c.Count(0, new(limiter.Bucket), &d, false, true, false)
	}
	deny()
	move(time.Minute)
	deny()
	loud := provisionApp(t, p, `{}`)
	if err := loud.Compiled().Events.On(telemetry.EventExceeded, &subscriber{ID: "a"}); err != nil {
		t.Fatal(err)
	}
	if err := loud.Start(); err != nil {
		t.Fatal(err)
	}
	loud.Compiled().Events.Emit(loud.Compiled().Context, "started", nil)
	move(time.Minute)
	deny()
	move(time.Minute)
	if got := fmt.Sprint(waitForEvents(t, telemetry.EventExceeded, 1)[0].data); got != "map[count:1 limit:api wait:1]" {
		t.Errorf("got %s", got)
	}
	cleanUp(t, loud)
	deny()
	move(time.Minute)
	if n := len(heardEvents(telemetry.EventExceeded)); n != 1 {
		t.Errorf("%d events, want 1: the config that listened has ended", n)
	}
}
