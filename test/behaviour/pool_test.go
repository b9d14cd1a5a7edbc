package behaviour

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// pooled is a block of tenants that have two requests of their own, and three of a pool.
const pooled = "limit tenant {\nkey {header.Tenant}\nsize 2\ndrip_rate 10s\nborrow spare\n}\n" +
	"limit spare {\nkey all\nsize 3\ndrip_rate 4s\npool\n}\n"

// TestBorrow guards what a client sees of a pool: its own limit, with nothing remaining
// while it borrows, and that there is room again as soon as it has some of its own or of
// the pool.
func TestBorrow(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit {\nheaders x-ratelimit ratelimit-11\n"+pooled+"}\n"+
		`respond "borrowed={http.rate_limit.borrowed} limit={http.rate_limit.limit}"`+
		"\nhandle_errors {\nrespond `borrowed={http.rate_limit.borrowed} limit={http.rate_limit.limit}`\n}")
	a, b := []string{"Tenant: a"}, []string{"Tenant: b"}
	const (
		own, borrowed, denied = "borrowed= limit=tenant", "borrowed=tenant limit=tenant", "borrowed= limit=tenant"
		fields                = `limit=2 remaining=%d clear=%d.000 %spolicy="tenant";q=2;w=20 ratelimit="tenant";r=%[1]d;t=%[4]d`
	)
	passes := func(remaining, clear, t int) string {
		return "200 " + fmt.Sprintf(fields, remaining, clear, "", t)
	}
	denies := func(clear, wait int) string {
		return "429 " + fmt.Sprintf(fields, 0, clear, fmt.Sprintf("reset=%d.000 retry-after=%[1]d ", wait), wait)
	}
	s.Run(
		sitetest.Step{Header: a, Want: passes(1, 10, 10), Text: own},
		sitetest.Step{Header: a, Want: passes(0, 20, 10), Text: own},
		sitetest.Step{Header: a, Want: passes(0, 20, 10), Text: borrowed},
		sitetest.Step{Header: a, Want: passes(0, 20, 10), Text: borrowed},
		sitetest.Step{Header: b, Want: passes(1, 10, 10), Text: own}, // who has nobody else's
		sitetest.Step{Header: b, Want: passes(0, 20, 10), Text: own},
		sitetest.Step{Header: b, Want: passes(0, 20, 10), Text: borrowed},
		sitetest.Step{Header: a, Want: denies(20, 4), Text: denied},
		sitetest.Step{After: 4 * time.Second, Header: a, Want: passes(0, 16, 6), Text: borrowed},
		sitetest.Step{Header: b, Want: denies(16, 4), Text: denied},
		sitetest.Step{After: 6 * time.Second, Header: b, Want: passes(0, 20, 10), Text: own},
	)
}

// TestBorrowOnManyInstances guards that parallel requests on several instances get all of
// what each tenant has of its own, all of the pool, and no more.
func TestBorrowOnManyInstances(t *testing.T) {
	const own, spare, tenants = 5, 12, 3
	site := fmt.Sprintf("rate_limit {\nlimit tenant {\nkey {header.Tenant}\nsize %d\ndrip_rate 1h\nborrow spare\n}\n"+
		"limit spare {\nkey all\nsize %d\ndrip_rate 1h\npool\n}\n}\nheader >Borrowed {http.rate_limit.borrowed}\nrespond ok", own, spare)
	eachNode(t, site, func(t *testing.T, urls []string) {
		var passed, borrowed [tenants]atomic.Int64
		redistest.Together(t, 24, func(i int) {
			tenant := i % tenants
			for range 5 {
				switch status, h := sitetest.Ask(t.Context(), urls[i%len(urls)], "Tenant", fmt.Sprint(tenant)); {
				case status == 200 && h.Get("Borrowed") == "tenant":
					borrowed[tenant].Add(1)
				case status == 200:
					passed[tenant].Add(1)
				case status != 429:
					t.Errorf("got %d", status)
				}
			}
		})
		all := int64(0)
		for i := range tenants {
			if n := passed[i].Load(); n != own {
				t.Errorf("tenant %d got %d of its own, want %d", i, n, own)
			}
			all += borrowed[i].Load()
		}
		if all != spare {
			t.Errorf("%d were borrowed, want %d", all, spare)
		}
	})
}

// TestBorrowWhileThereIsRoom guards a pool of requests in progress: a tenant has more than
// its own rate only while few requests are, whatever becomes of them.
func TestBorrowWhileThereIsRoom(t *testing.T) {
	const size = 4
	var running, most atomic.Int64
	upstream := sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/leave" { // it goes on here when Caddy's request has ended
			time.Sleep(10 * time.Millisecond)
			return
		}
		n := running.Add(1)
		for last := most.Load(); n > last && !most.CompareAndSwap(last, n); last = most.Load() {
		}
		time.Sleep(10 * time.Millisecond)
		running.Add(-1)
		if r.URL.Path == "/abort" {
			panic(http.ErrAbortHandler)
		}
	})
	site := fmt.Sprintf("rate_limit {\nlimit tenant {\nkey {header.Tenant}\nsize 1\ndrip_rate 1h\nborrow spare\n}\n"+
		"limit spare {\nkey all\nconcurrency %d\npool\n}\n}\nreverse_proxy %s", size, upstream)
	eachNode(t, site, func(t *testing.T, urls []string) {
		for _, tenant := range []string{"a", "b"} {
			if status, _ := sitetest.Ask(t.Context(), urls[0], "Tenant", tenant); status != 200 { // its own
				t.Fatalf("got %d", status)
			}
		}
		most.Store(0)
		var passed, denied atomic.Int64
		redistest.Together(t, 24, func(i int) {
			for n := range 10 {
				path := []string{"/", "/", "/abort", "/leave"}[n%4]
				ctx, cancel := context.WithCancel(t.Context())
				if path == "/leave" {
					time.AfterFunc(5*time.Millisecond, cancel)
				}
				switch status, h := sitetest.Ask(ctx, urls[i%len(urls)]+path, "Tenant", []string{"a", "b"}[i%2]); status {
				case 429:
					denied.Add(1)
					if h.Get("Retry-After") != "1" || h.Get("X-RateLimit-Limit") != "1" {
						t.Errorf("denied with %v", fieldstest.In(h))
					}
				default:
					passed.Add(1)
				}
				cancel()
			}
		})
		if n := most.Load(); n > size || n < 2 || passed.Load() < size || denied.Load() < size {
			t.Errorf("%d borrowed at once, want at most %d; %d passed, %d did not", n, size, passed.Load(), denied.Load())
		}
		sitetest.Eventually(t, "all may borrow again", func() bool {
			status := 0
			for range size {
				status, _ = sitetest.Ask(t.Context(), urls[0]+"/", "Tenant", "a")
			}
			return status == 200
		})
	})
}

// TestBorrowWith guards pools together with what else limits and a block may have. Of each
// case, requests are sent in turn, of which the status is wanted, what borrowed and, after
// all, what is in the pool.
func TestBorrowWith(t *testing.T) {
	t.Parallel()
	const (
		own   = "limit own {\nsize 1\ndrip_rate 1h\nborrow spare\n}\n"
		spare = "limit spare {\nkey all\nsize 2\ndrip_rate 1h\npool\n}\n"
		last  = "limit last {\nsize 2\ndrip_rate 1h\n}\n"
	)
	with := func(limit, options string) string { // which replace those of the same name
		for option := range strings.SplitSeq(options, "\n") {
			name, _, _ := strings.Cut(option, " ")
			if before, after, found := strings.Cut(limit, "\n"+name+" "); found && !strings.HasPrefix(options, "limit") {
				_, after, _ = strings.Cut(after, "\n")
				limit = before + "\n" + after
			}
		}
		return strings.Replace(limit, "{\n", "{\n"+options+"\n", 1)
	}
	for name, tc := range map[string]struct {
		limits string
		want   string
		level  int64 // of the pool
	}{
		"nothing else":                  {own + spare, "200 200/own 200/own 429", 2},
		"pool first":                    {spare + own, "200 200/own 200/own 429", 2},
		"another denies":                {own + spare + last, "200 200/own 429", 1},
		"another denies, each":          {"accounting each\n" + own + last + spare, "200 200/own 429 429", 1},
		"another denies, first":         {last + own + spare, "200 200/own 429", 1},
		"cost":                          {with(own, "size 5\ncost 2") + with(spare, "size 5"), "200 200 200/own 200/own 429", 4},
		"cost of its own":               {with(own, "size 5\ncost 2") + with(spare, "size 5\ncost 1"), "200 200 200/own 200/own 200/own 200/own 200/own 429", 5},
		"cost beyond the size":          {with(own, "size 2\ncost {query.cost}") + with(spare, "size 5"), "?cost=3 200/own ?cost=3 429 ?cost=2 200 200/own", 5},
		"cost beyond both":              {with(own, "size 2\ncost {query.cost}") + with(spare, "size 5"), "?cost=6 429 ?cost=5 200/own", 5},
		"pool does not match":           {own + with(spare, "match path /x"), "200 429 /x 200/own", 1},
		"pool that is off":              {own + with(spare, "factor 0"), "200 429", -1},
		"borrower that is off":          {with(own, "factor 0") + spare + with(last, "size 3"), "200 200 200 429", 0},
		"limits within":                 {with(own, "limit within {\nsize 2\ndrip_rate 1h\n}") + spare, "200 200/own 429", 1},
		"two that borrow":               {own + strings.Replace(with(own, "size 2"), "own", "own2", 1) + spare, "200 200/own 200/own 429", 2},
		"two pools":                     {own + spare + with(strings.NewReplacer("own", "own2", "spare", "spare2").Replace(own), "size 2") + strings.Replace(spare, "spare", "spare2", 1), "200 200/own 200/own 429", 2},
		"counted responses":             {with(own, "count status 2xx") + spare, "200 200/own 200/own 429", 2},
		"counted responses in the pool": {own + with(spare, "count status 2xx"), "200 200/own /fail 500/own 200/own 429", 2},
		"actual cost":                   {with(own, "actual_cost {http.response.header.Cost}") + with(spare, "size 9\nactual_cost {http.response.header.Cost}"), "200 200/own 200/own 200/own 429", 9},
		"soft":                          {with(own, "soft 1") + spare, "200 200 200/own 200/own 429", 2},
		"dry run":                       {"dry_run\n" + own + spare, "200 200 200 200 200", 2},
		"dry runs beside":               {own + spare + with(last, "dry_run"), "200 200/own 200/own 429", 2},
		"a ban beside":                  {own + spare + with(last, "ban 1h"), "200 200/own 429 429", 1},
		"min_interval":                  {"limit own {\nmax 2\nduration 1h\nmin_interval 1h\nborrow spare\n}\n" + spare, "200 429 429", 0},
		"sliding log":                   {"limit own {\nalgorithm sliding_log\nsize 1\nwindow 1h\nborrow spare\n}\n" + spare, "200 200/own 200/own 429", 2},
		"warm up":                       {"limit own {\nalgorithm warm_up\nrate 1/h\nwarm_up 9h\nborrow spare\n}\n" + spare, "200 200/own 200/own 429", 2},
		"pool that is a fixed window":   {own + "limit spare {\nkey all\nalgorithm fixed_window\nsize 2\nwindow 24h\nwindow_start first\npool\n}\n", "200 200/own 200/own 429", 2},
		"equal keys":                    {own + strings.Replace(spare, "key all", "key {client_ip}", 1), "200 200/own 200/own 429", 2},
		"networks that share when full": {with(own, "when_full share") + with(spare, "when_full share"), "200 200/own 200/own 429", 2},
	} {
		for _, redis := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, redis %t", name, redis), func(t *testing.T) {
				c := sitetest.Config{Site: "rate_limit {\n" + tc.limits + "}\nheader >X-Borrowed {http.rate_limit.borrowed}\nheader Cost 3\nrespond /fail 500\nrespond ok"}
				if redis {
					c.Global = sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)
				}
				s := sitetest.StartConfig(t, c)
				path, key := "/", "all"
				if strings.Contains(tc.limits, "key {client_ip}") {
					key = "127.0.0.1"
				}
				for i, want := range strings.Fields(tc.want) {
					if strings.HasPrefix(want, "/") || strings.HasPrefix(want, "?") {
						path = "/" + strings.TrimPrefix(want, "/")
						continue
					}
					a := s.Get(path)
					if path == "/fail" {
						path = "/"
					}
					got := fmt.Sprint(a.StatusCode)
					if borrowed := a.Header.Get("X-Borrowed"); borrowed != "" {
						got += "/" + borrowed
					}
					if got != want {
						t.Errorf("word %d of %q: got %s", i+1, tc.want, got)
					}
				}
				if tc.level < 0 {
					return
				}
				sitetest.Eventually(t, "what was borrowed", func() bool { l := levelInStore(t, s, "spare", key); return l.Units == tc.level && l.Held == 0 })
			})
		}
	}
}

// levelInStore returns the level of the bucket with the given key of a limit, in Redis if
// there is one.
func levelInStore(t *testing.T, s *sitetest.Site, limit, key string) (l limiter.Level) {
	t.Helper()
	b, app := s.BucketAt(limit), s.Process.Newest()
	at := limiter.Bucket{Name: b.Name, Key: key, Limit: b.Stored(time.Now()), Cost: 1}
	var err error
	if app.Redis != nil {
		l, err = app.Redis.Peek(t.Context(), at)
	} else {
		l, err = app.Memory.Peek(context.Background(), at)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestBorrowIsObserved guards what operators see of pools: the field of the access log,
// metrics of what was borrowed, and numbers in which a pool counts for nothing else.
func TestBorrowIsObserved(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit {\nlog\n" + pooled + "}\nrespond ok"})
	for i := range 6 {
		s.Get("/", "Tenant: a")
		borrowed := s.LastAccess()["rate_limit"].(map[string]any)["borrowed"]
		if want := i >= 2 && i < 5; (borrowed == "tenant") != want {
			t.Errorf("request %d: the access log has %v", i, borrowed)
		}
	}
	wantSamples(t, collected(t, s.Process), map[string]string{
		`borrowed_total{limit="tenant"}`:                                "3",
		`borrowed_total{limit="spare"}`:                                 "",
		`decisions_total{by="memory",limit="tenant",result="admitted"}`: "5",
		`decisions_total{by="memory",limit="tenant",result="denied"}`:   "1",
		`decisions_total{by="memory",limit="spare",result="admitted"}`:  "3",
		`decisions_total{by="memory",limit="spare",result="denied"}`:    "0",
		`units_total{limit="tenant"}`:                                   "2",
		`units_total{limit="spare"}`:                                    "3",
	})
	sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit": "tenant", "key": "a"}`), `{"limit": "tenant", "level": 2, "remaining": 0}`)
	sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit": "spare", "key": "all"}`), `{"limit": "spare", "level": 3, "remaining": 0}`)
	sitetest.WantJSON(t, a.Ask("POST", "reset", `{"limit": "spare", "key": "all"}`), `{"limit": "spare", "level": 3}`)
	if got := s.Get("/", "Tenant: a").StatusCode; got != 200 {
		t.Errorf("got %d from a pool that was emptied", got)
	}
	sitetest.WantJSON(t, a.Ask("GET", "limits", ""), `{"limits": [{"name": "tenant", "borrow": "spare"}, {"name": "spare", "pool": true}]}`)
}

// TestBorrowOnReload guards that a reload keeps what was borrowed, and that a limit can
// become a pool and cease to be one.
func TestBorrowOnReload(t *testing.T) {
	c := sitetest.Config{Site: "rate_limit {\n" + pooled + "}\nrespond ok"}
	s := sitetest.StartConfig(t, c)
	statuses := func(n int) (got string) {
		for range n {
			got += fmt.Sprint(s.Get("/", "Tenant: a").StatusCode, " ")
		}
		return got
	}
	load := func(change ...string) {
		t.Helper()
		s.Reload(sitetest.Config{Site: strings.NewReplacer(change...).Replace(c.Site)})
	}
	if got := statuses(4); got != "200 200 200 200 " {
		t.Errorf("got %s", got)
	}
	load("size 3", "size 4")
	if got := statuses(3); got != "200 200 429 " {
		t.Errorf("got %s of a larger pool", got)
	}
	load("borrow spare\n", "", "\npool", "")
	s.Clock.Advance(10 * time.Second) // after which all have one of their own
	if got := statuses(2); got != "200 429 " {
		t.Errorf("got %s without a pool", got)
	}
	load()
	if got := statuses(1); got != "429 " { // which that request has filled
		t.Errorf("got %s", got)
	}
	s.Clock.Advance(4 * time.Second)
	if got := statuses(2); got != "200 429 " {
		t.Errorf("got %s", got)
	}
}

// TestExplainPools guards that explain shows which limits may borrow, and from which, whatever
// order they stand in, and a pool only where a limit borrows from it.
func TestExplainPools(t *testing.T) {
	t.Parallel()
	file := sitetest.ConfigFile(t, ":8080 {\nrate_limit {\n"+
		"limit spare {\nkey all\nsize 9\ndrip_rate 1s\npool\n}\n"+
		"limit tenant {\nmatch header X-Tenant *\nkey {header.X-Tenant}\nsize 5\ndrip_rate 1s\ncost 2\nborrow spare\nlimit within {\nsize 3\ndrip_rate 1s\n}\n}\n"+
		"limit last {\nsize 7\ndrip_rate 1s\n}\n}\n}")
	sitetest.RunCommand(t, "explain", "--config", file, "-H", "X-Tenant: a", "http://localhost:8080/").Want(t, 0, `GET http://localhost:8080/ from 192.0.2.1, handled by srv0

LIMIT          KEY        COST  ALGORITHM     SIZE  RATE OR WINDOW  OPTIONS
spare          all           2  leaky_bucket     9  1 each 1s       pool
tenant         a             2  leaky_bucket     5  1 each 1s       borrow spare
tenant/within  a             1  leaky_bucket     3  1 each 1s
last           192.0.2.1     1  leaky_bucket     7  1 each 1s
`)
	sitetest.RunCommand(t, "explain", "--config", file, "http://localhost:8080/").Want(t, 0, `GET http://localhost:8080/ from 192.0.2.1, handled by srv0

LIMIT  KEY        COST  ALGORITHM     SIZE  RATE OR WINDOW
last   192.0.2.1     1  leaky_bucket     7  1 each 1s

NOT APPLIED    REASON
spare          no limit that the request meets borrows from it
tenant         its matcher does not match: header {"X-Tenant":["*"]}
tenant/within  its matcher does not match: header {"X-Tenant":["*"]}
`)
}
