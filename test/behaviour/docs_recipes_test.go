package behaviour

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/doctest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// recipe is a section of a document.
type recipe struct {
	t      *testing.T
	blocks []doctest.Block
}

// recipes returns the sections of a document by their headings.
func recipes(t *testing.T, doc string) map[string]recipe {
	t.Helper()
	text := filetest.Read(t, doc)
	blocks := doctest.Blocks(t, doc)
	all := make(map[string]recipe)
	for _, section := range strings.Split("\n"+string(text), "\n## ")[1:] {
		heading, body, _ := strings.Cut(section, "\n")
		n := len(doctest.Fenced.FindAllString(body, -1))
		all[heading] = recipe{t, blocks[:n]}
		blocks = blocks[n:]
	}
	if len(blocks) > 0 {
		t.Fatalf("%s: code in front of the first heading", blocks[0].Place)
	}
	return all
}

// wholeSite matches a site with its address.
var wholeSite = regexp.MustCompile(`(?s)^[\w.]*:\d+ \{\n(.*)\}\n$`)

// config returns what the nth block of Caddyfile configures. For each pair of replacements
// the first, which has to be there, is written for the second: addresses mostly.
func (r recipe) config(n int, replacements ...string) (c sitetest.Config) {
	r.t.Helper()
	var code string
	for _, b := range r.blocks {
		if b.Language != "caddyfile" {
			continue
		}
		if n--; n == 0 {
			code = b.Code
		}
	}
	for i := 0; i < len(replacements); i += 2 {
		if !strings.Contains(code, replacements[i]) {
			r.t.Fatalf("the recipe has no %q:\n%s", replacements[i], code)
		}
		code = strings.ReplaceAll(code, replacements[i], replacements[i+1])
	}
	c.Site = code
	if strings.HasPrefix(code, "{\n") {
		c.Global, c.Site, _ = strings.Cut(code[2:], "\n}\n\n")
	}
	if site := wholeSite.FindStringSubmatch(c.Site); site != nil {
		c.Site = site[1]
	}
	return c
}

// start runs the nth block of Caddyfile as config has it.
func (r recipe) start(n int, replacements ...string) *sitetest.Site {
	r.t.Helper()
	return sitetest.StartConfig(r.t, r.config(n, replacements...))
}

// want checks what a recipe did.
func (r recipe) want(what string, got, want any) {
	r.t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		r.t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// behind is an upstream that answers with what is asked of it: a status, in the query.
func behind(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	status := http.StatusOK
	_, _ = fmt.Sscan(r.URL.Query().Get("status"), &status)
	w.WriteHeader(status)
	fmt.Fprintf(w, "upstream %s %s %s", r.Method, r.URL.Path, body)
}

// TestRecipes guards docs/recipes.md and deploy/recipes.md: each recipe, as it is there, does what its text
// says.
func TestRecipes(t *testing.T) {
	t.Parallel()
	testRecipes(t, "docs/recipes.md", map[string]func(recipe){
		"Login protection":                      recipeLogin,
		"A limit by account":                    recipeAccount,
		"A login form, by account":              recipeForm,
		"A cost that the request says":          recipeSaidCost,
		"A client's own quota":                  recipeQuota,
		"Costs that only the upstream knows":    recipeCosts,
		"A language model behind Caddy":         recipeModel,
		"Websockets":                            recipeWebsockets,
		"More for one customer":                 recipeCustomer,
		"A sale":                                recipeSale,
		"An allow list":                         recipeAllowList,
		"Plans that change without a reload":    recipePlans,
		"Scanners":                              recipeScanners,
		"Logins of applications":                recipeApplications,
		"Errors that cost more":                 recipeWeights,
		"A challenge instead of a denial":       recipeChallenge,
		"gRPC":                                  recipeGRPC,
		"Scrapers":                              recipeScrapers,
		"JSON for denied requests":              recipeProblem,
		"A trap":                                recipeTrap,
		"CORS":                                  recipeCORS,
		"X-RateLimit-Retry-After":               recipeRetryAfter,
		"A queue for what is denied":            recipeQueue,
		"Wrong passwords close the whole site":  recipeWholeSite,
		"Limits that hold only when it is busy": recipeElastic,
		"No answer to denied requests":          recipeAbort,

		"Checkout before bots": recipeCheckout,
	})
	testRecipes(t, "deploy/recipes.md", map[string]func(recipe){
		"Sticky sessions":               recipeSticky,
		"Limits for other proxies":      recipeService,
		"Labels of containers":          recipeLabels,
		"Bans in the firewall":          recipeFirewall,
		"Limits that follow their file": recipeWatch,
	})
}

// TestPolicyExamples guards the examples of docs/policies.md that a reader would copy as they are.
func TestPolicyExamples(t *testing.T) {
	all := recipes(t, "docs/policies.md")
	for heading, test := range map[string]func(recipe){"dry_run": recipeCandidate, "borrow and pool": recipeTenants} {
		t.Run(heading, func(t *testing.T) { test(recipe{t, all[heading].blocks}) })
	}
}

// testRecipes runs the test of each section of a document, all of which have to have one.
func testRecipes(t *testing.T, doc string, tests map[string]func(recipe)) {
	t.Helper()
	all := recipes(t, doc)
	for heading := range all {
		if tests[heading] == nil {
			t.Errorf("no test has the recipe %q", heading)
		}
	}
	for heading, test := range tests {
		t.Run(heading, func(t *testing.T) {
			r, ok := all[heading]
			if !ok {
				t.Fatal("there is no such recipe")
			}
			r.t = t
			test(r)
		})
	}
}

// sub runs test as a part of r's, with a Caddy of its own.
func (r recipe) sub(name string, test func(recipe)) {
	r.t.Run(name, func(t *testing.T) { test(recipe{t, r.blocks}) })
}

func recipeLogin(r recipe) {
	r.sub("upstream", func(r recipe) {
		s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind))
		for range 10 {
			r.want("a right password", s.Send("POST", "/login").StatusCode, 200)
		}
		var answered atomic.Int64
		redistest.Together(r.t, 40, func(int) {
			res, err := http.Post(s.URL("/login?status=401"), "", nil)
			if err != nil {
				r.t.Error(err)
				return
			}
			res.Body.Close()
			if res.StatusCode == 401 {
				answered.Add(1)
			}
		})
		s.Requests.Add(40)
		r.want("parallel guesses that were answered", answered.Load(), 5)
		r.want("a right password after them", s.Send("POST", "/login").StatusCode, 429)
		r.want("other paths", s.Statuses(9, "GET", "/login?status=401"), "map[401:9]")
		for _, tc := range []struct {
			after time.Duration
			want  string // of a guess, and how long all that follows has to wait
		}{
			{10*time.Minute - time.Second, "429 1"}, {time.Second, "403 3600"},
			{time.Hour - time.Second, "429 1"}, {time.Second, "403 "}, {0, "403 "}, {0, "403 "}, {0, "403 "}, {0, "403 86400"},
			{24 * time.Hour, "403 "},
		} {
			s.Clock.Advance(tc.after)
			guess := s.Send("POST", "/login?status=403")
			if guess.StatusCode == 403 && !strings.HasSuffix(tc.want, " ") {
				guess.Header = s.Send("POST", "/login").Header
			}
			r.want(fmt.Sprint(tc), fmt.Sprint(guess.StatusCode, " ", guess.Header.Get("Retry-After")), tc.want)
		}
	})
	r.sub("basic_auth", func(r recipe) {
		const user, password = "Authorization: Basic YWxpY2U6c2VjcmV0", "alice $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG"
		const hash = "alice $2a$04$en50XSOSRK6koiBfio.FceBm05YZ6/aoY6lwR1hzV41PDo.aHhWyG" // of "secret", which takes less time
		slow := make(chan struct{})
		s := r.start(2, password, hash, "localhost:9000", sitetest.NewUpstream(r.t, func(_ http.ResponseWriter, req *http.Request) {
			if req.URL.Path == "/slow" {
				<-slow
			}
		}))
		r.want("without a password", s.Statuses(50, "GET", "/"), "map[401:50]")
		r.want("with the right one", s.Statuses(50, "GET", "/", user), "map[200:50]")
		var page sync.WaitGroup
		for range 20 {
			page.Go(func() {
				if status, _ := sitetest.Ask(r.t.Context(), s.URL("/slow"), "Authorization", strings.TrimPrefix(user, "Authorization: ")); status != 200 {
					r.t.Errorf("a part of a page got %d", status)
				}
			})
		}
		sitetest.Eventually(r.t, "a page takes all room", func() bool { return levelOf(r.t, s, "passwords", "127.0.0.1").Held == 20 })
		a := s.Get("/", user)
		r.want("one request more", fmt.Sprint(a.StatusCode, " ", a.Header.Get("Retry-After")), "429 1")
		close(slow)
		page.Wait()
		s.Requests.Add(20)
		r.want("after the page", s.Get("/", user).StatusCode, 200)
		r.want("guesses", s.Statuses(30, "GET", "/", "Authorization: Basic YWxpY2U6Z3Vlc3M="), "map[401:20 429:10]")
		r.want("the ban after them", s.Get("/", user).Header.Get("Retry-After"), "600")
	})
}

func recipeAccount(r recipe) {
	const password, cheap = "alice $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG", " $2a$04$en50XSOSRK6koiBfio.FceBm05YZ6/aoY6lwR1hzV41PDo.aHhWyG\n" // of "secret"
	const users = "alice" + cheap + "ALICE" + cheap + "bob" + cheap + "carol" + cheap + "dave" + cheap                                                              // Caddy takes as long for an unknown name as for an expensive hash
	const trusted = "servers {\ntrusted_proxies static 127.0.0.1/32\n}"
	redis := redistest.Start(r.t)
	for store, global := range map[string]string{"memory": trusted, "redis": sitetest.RedisGlobal(redis.Addr, sitetest.LongTimeout) + "\n" + trusted} {
		r.sub(store, func(r recipe) {
			c := r.config(1, password, users, "localhost:9000", sitetest.NewUpstream(r.t, behind))
			c.Global = global
			s := sitetest.StartConfig(r.t, c)
			from := func(address, credential string) []string {
				return []string{"X-Forwarded-For: " + address, "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(credential))}
			}
			r.want("a login at home", s.Get("/", from("198.51.100.1", "alice:secret")...).StatusCode, 200)
			for i := range 20 {
				guess := from(fmt.Sprint("203.0.113.", i), "alice:guess")
				if i%2 > 0 { // in other spellings
					guess = from(fmt.Sprint("203.0.113.", i), "ALICE:guess")
				}
				r.want(fmt.Sprint("guess ", i), s.Get("/", guess...).StatusCode, 401)
			}
			for i := range 5 {
				r.want("more guesses", s.Get("/", from(fmt.Sprint("203.0.113.", 100+i), "alice:guess")...).StatusCode, 429)
			}
			r.want("the right password from elsewhere", s.Get("/", from("203.0.113.200", "alice:secret")...).StatusCode, 429)
			r.want("another name", s.Get("/", from("203.0.113.1", "bob:guess")...).StatusCode, 401)
			r.want("no credential", s.Get("/", "X-Forwarded-For: 203.0.113.1").StatusCode, 401)
			for range 3 {
				r.want("the owner at home", s.Get("/", from("198.51.100.1", "alice:secret")...).StatusCode, 200)
				r.want("the owner in the office", s.Get("/", from("192.0.2.7", "alice:secret")...).StatusCode, 200)
			}
			for i := range 3 { // who hangs up is not known by that
				ctx, cancel := context.WithTimeout(r.t.Context(), time.Duration(i)*time.Millisecond)
				h := from("203.0.113.66", "carol:guess")
				_, _ = sitetest.Ask(ctx, s.URL("/"), "X-Forwarded-For", "203.0.113.66", "Authorization", strings.TrimPrefix(h[1], "Authorization: "))
				cancel()
			}
			r.want("guesses at home", s.Statuses(101, "GET", "/", from("198.51.100.1", "alice:guess")...), "map[401:100 429:1]")
			r.want("guesses for carol", s.Statuses(30, "GET", "/", from("203.0.113.66", "carol:guess")...)[:5], "map[4")
			r.want("carol's owner", s.Get("/", from("203.0.113.67", "carol:guess")...).StatusCode, 429)
			var together sync.WaitGroup
			var passed atomic.Int64
			for i := range 60 { // none is known because another one is in progress
				together.Go(func() {
					h := from(fmt.Sprint("203.0.113.", i%2), "dave:guess")
					if status, _ := sitetest.Ask(r.t.Context(), s.URL("/"), "X-Forwarded-For", strings.TrimPrefix(h[0], "X-Forwarded-For: "), "Authorization", strings.TrimPrefix(h[1], "Authorization: ")); status == 401 {
						passed.Add(1)
					}
				})
			}
			together.Wait()
			r.want("parallel guesses", passed.Load() <= 20, true)
		})
	}
	r.sub("upstream that checks passwords", func(r recipe) {
		c := r.config(1, "basic_auth {\n\t"+password+"\n}\n", "", "localhost:9000", sitetest.NewUpstream(r.t, passwords))
		c.Global = trusted
		wantUnknownAfterHangUp(r, sitetest.StartConfig(r.t, c), func(guess int) *http.Request {
			req := loginFrom(guess, "")
			req.SetBasicAuth("alice", "guess")
			return req
		})
	})
}

// passwords is an upstream that knows one password, and is slow where it is told to be.
func passwords(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("X-Slow") != "" {
		time.Sleep(20 * time.Millisecond)
	}
	if _, password, _ := r.BasicAuth(); password != "right" && r.FormValue("password") != "right" {
		w.WriteHeader(http.StatusUnauthorized)
	}
}

// loginFrom returns a request of a form from an address of its own.
func loginFrom(n int, form string) *http.Request {
	req, _ := http.NewRequest(http.MethodPost, "/login", strings.NewReader(form))
	req.Header.Set("Content-Type", formType)
	req.Header.Set("X-Forwarded-For", fmt.Sprintf("203.0.%d.%d", n/250, n%250+1))
	return req
}

// sendTo sends a request to s, and returns the status, or 0 if its client hangs up.
func sendTo(ctx context.Context, s *sitetest.Site, req *http.Request) int {
	req = req.WithContext(ctx)
	req.URL.Scheme, req.URL.Host = "http", s.Addr
	res, err := s.Client.Do(req)
	if err != nil {
		return 0
	}
	res.Body.Close()
	return res.StatusCode
}

// wantUnknownAfterHangUp has clients hang up before a guess is answered. Nobody may be known by that: there
// are no more than the 20 answers of the limit by account.
func wantUnknownAfterHangUp(r recipe, s *sitetest.Site, guess func(n int) *http.Request) {
	for range 3 {
		ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Millisecond)
		req := guess(0)
		req.Header.Set("X-Slow", "1")
		r.want("the answer to who hangs up", sendTo(ctx, s, req), 0)
		cancel()
	}
	counts := make(map[int]int)
	for range 40 {
		counts[sendTo(r.t.Context(), s, guess(0))]++
	}
	r.want("too many guesses after hanging up: "+fmt.Sprint(counts), counts[401] <= 20 && counts[401]+counts[429] == 40, true)
}

func recipeForm(r recipe) {
	const trusted = "servers {\ntrusted_proxies static 127.0.0.1/32\n}"
	redis := redistest.Start(r.t)
	for store, global := range map[string]string{"memory": trusted, "redis": sitetest.RedisGlobal(redis.Addr, sitetest.LongTimeout) + "\n" + trusted} {
		r.sub(store, func(r recipe) {
			c := r.config(1, "localhost:9000", sitetest.NewUpstream(r.t, passwords))
			c.Global = global
			attackForm(r, sitetest.StartConfig(r.t, c))
		})
	}
}

// attackForm is the attack on "A login form, by account", and its owner.
func attackForm(r recipe, s *sitetest.Site) {
	n := 0
	login := func(form, device string) int {
		n++
		req := loginFrom(n, form)
		if device != "" {
			req.AddCookie(&http.Cookie{Name: "device", Value: device})
		}
		return sendTo(r.t.Context(), s, req)
	}
	guesses := func(times int, form, device string) string {
		counts := make(map[int]int)
		for range times {
			counts[login(form, device)]++
		}
		return fmt.Sprint(counts)
	}
	r.want("a login", login("email=alice&password=right", "phone"), 200)
	r.want("guesses from many addresses", guesses(60, "email=alice&password=x", ""), "map[401:20 429:40]")
	r.want("with cookies that are made up", guesses(5, "email=alice&password=x", "madeup"), "map[429:5]")
	r.want("in other spellings", guesses(5, "email=+ALICE+&password=x", ""), "map[429:5]")
	r.want("an unclear login of the attacker's", login("email=x&email=mallory&password=right", "u"), 200)
	r.want("unclear guesses with that cookie", guesses(60, "email=x&email=alice&password=x", "u"), "map[401:20 429:40]")
	r.want("unclear guesses", guesses(5, "email=y&email=alice&password=x", ""), "map[429:5]")
	r.want("the owner's typing error", login("email=alice&password=x", "phone"), 401)
	r.want("the owner", guesses(3, "email=alice&password=right", "phone"), "map[200:3]")
	r.want("the owner in a new browser", login("email=alice&password=right", ""), 429)
	r.want("another account", login("email=bob&password=x", ""), 401)
	r.want("a login of the attacker's", login("email=mallory&password=right", "d"), 200)
	r.want("guesses with that cookie", guesses(5, "email=alice&password=x", "d"), "map[429:5]")
	wantUnknownAfterHangUp(r, s, func(int) *http.Request {
		req := loginFrom(0, "email=carol&password=x")
		req.AddCookie(&http.Cookie{Name: "device", Value: "e"})
		return req
	})
	var together sync.WaitGroup
	var passed atomic.Int64
	for i := range 60 {
		together.Go(func() {
			if sendTo(r.t.Context(), s, loginFrom(1000+i, "email=dave&password=x")) == 401 {
				passed.Add(1)
			}
		})
	}
	together.Wait()
	r.want("parallel guesses", passed.Load(), 20)
}

func recipeSaidCost(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`)
	}))
	for body, want := range map[string]int{
		`{"max_tokens":59000}`:                200,
		`{"max_tokens":61000}`:                429,
		`{"max_completion_tokens":61000}`:     429,
		`{}`:                                  200,
		`{"max_tokens":0}`:                    200,
		`{"max_tokens":-5}`:                   200,
		`{"max_tokens":1e9}`:                  200,
		`{"max_tokens":1,"max_tokens":61000}`: 200, // like one that says nothing
	} {
		if status, _ := submit(r.t, s, "/", jsonType, body, "Authorization: Bearer a"); status != want {
			r.t.Errorf("%s: got %d, want %d", body, status, want)
		}
	}
	r.want("2000 for what says nothing", s.Send("POST", "/", "Authorization: Bearer b").Header.Get("X-RateLimit-Remaining"), 58000)
}

func recipeQuota(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind), "size 1000", "size 3")
	quota := func(key string) string {
		a := s.Get("/quota", "X-Api-Key: "+key)
		var got struct{ Limit, Remaining, Reset int64 }
		if err := json.Unmarshal([]byte(a.Text), &got); err != nil {
			r.t.Errorf("%v in %q", err, a.Text)
		}
		if until := time.Until(time.Unix(got.Reset, 0)); key == "a" && (until <= 0 || until > 24*time.Hour+time.Second) {
			r.t.Errorf("%q: resets in %v", a.Text, until)
		}
		return fmt.Sprint(a.StatusCode, " ", a.Header.Get("Content-Type"), " ", got.Remaining, "/", got.Limit)
	}
	const ok = "200 application/json "
	r.want("nobody has asked", quota("b"), ok+"3/3")
	r.want("a request", s.Get("/", "X-Api-Key: a").StatusCode, 200)
	for range 5 {
		r.want("after one", quota("a"), ok+"2/3")
	}
	r.want("all", s.Statuses(4, "GET", "/", "X-Api-Key: a"), "map[200:2 429:2]")
	for range 5 {
		r.want("spent", quota("a"), ok+"0/3")
	}
	r.want("another", quota("b"), ok+"3/3")
	r.want("another way to write it", s.Get("/QUOTA", "X-Api-Key: a").StatusCode, 429)
}

func recipeModel(r recipe) {
	next, arrived := make(chan struct{}), make(chan struct{}, 9)
	upstream := sitetest.NewUpstream(r.t, func(w http.ResponseWriter, r *http.Request) {
		in, out := 1000, 200
		_, _ = fmt.Sscan(r.URL.Query().Get("in"), &in)
		usage := fmt.Sprintf(`"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, in, out, in+out)
		if r.URL.Query().Get("stream") == "" {
			fmt.Fprintf(w, `{"choices":[],%s}`, usage)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_ = http.NewResponseController(w).Flush()
		arrived <- struct{}{}
		<-next
		fmt.Fprintf(w, "data: {\"choices\":[],%s}\n\ndata: [DONE]\n\n", usage)
	})
	s := r.start(1, "https://api.openai.com", upstream)
	const path, alice = "/v1/chat/completions", "Authorization: Bearer alice"
	charged := func() string {
		logged, _ := s.LastAccess()["rate_limit"].(map[string]any)
		return fmt.Sprint(logged["units"])
	}
	r.want("a request", s.Send("POST", path, alice).StatusCode, 200)
	r.want("charged", charged(), "map[budget:270 day:1200 minute:1200]")
	r.want("a list of models", s.Get("/v1/models", alice).StatusCode, 200)
	r.want("charged for a list", charged(), "<nil>")
	var running sync.WaitGroup
	for range 3 {
		running.Go(func() { s.Send("POST", path+"?stream=1", alice) })
		<-arrived
	}
	r.want("a fourth stream", s.Send("POST", path, alice).StatusCode, 429)
	close(next)
	running.Wait()
	r.want("charged for a stream", charged(), "map[budget:270 day:1200 minute:1200]")
	r.want("a large one", s.Send("POST", path+"?in=60000", alice).StatusCode, 200)
	r.want("charged for it", charged(), "map[budget:9120 day:60200 minute:60200]")
	r.want("in debt", s.Send("POST", path, alice).StatusCode, 429)
	r.want("another key", s.Send("POST", path, "Authorization: Bearer bob").StatusCode, 200)
	s.Clock.Advance(time.Minute)
	r.want("a minute later", s.Send("POST", path, alice).StatusCode, 200)
}

func recipeCosts(r recipe) {
	upstream := func(w http.ResponseWriter, r *http.Request) {
		tokens := r.URL.Query().Get("tokens")
		switch r.URL.Path {
		case "/trailer":
			w.Header().Set("Trailer", "X-Tokens")
			fmt.Fprint(w, "stream")
			_ = http.NewResponseController(w).Flush()
			fallthrough
		case "/":
			w.Header().Set("X-Tokens", tokens)
		}
	}
	charged := func(r recipe, s *sitetest.Site, path string) string {
		a := s.Get(path, "X-Api-Key: alice")
		sitetest.Eventually(r.t, "nothing is held", func() bool { return levelOf(r.t, s, "tokens", "alice").Held == 0 })
		return fmt.Sprint(a.StatusCode, " ", levelOf(r.t, s, "tokens", "alice").Units)
	}
	r.sub("header", func(r recipe) {
		s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, upstream))
		for _, tc := range [][2]string{
			{"/?tokens=1200", "200 1200"},
			{"/?tokens=30", "200 1230"},
			{"/none", "200 3230"},
			{"/?tokens=60000", "200 63230"}, // the excess
			{"/?tokens=1", "429 63230"},
		} {
			r.want(tc[0], charged(r, s, tc[0]), tc[1])
		}
		s.Clock.Advance(6 * time.Minute)
		r.want("the field that the client sees", s.Get("/?tokens=1", "X-Api-Key: bob").Header["X-Tokens"], []string(nil))
		r.want("six minutes later", charged(r, s, "/?tokens=1"), "200 57231")
	})
	r.sub("trailer", func(r recipe) {
		s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, upstream),
			"{http.reverse_proxy.header.X-Tokens}", "{http.response.header.X-Tokens}", "header_down -X-Tokens", "")
		r.want("a field", charged(r, s, "/?tokens=1200"), "200 1200")
		r.want("a trailer", charged(r, s, "/trailer?tokens=34"), "200 1234")
	})
	for name, replacements := range map[string][]string{
		"other capitals": {"header.X-Tokens}", "header.x-tokens}"},
		"header_down":    {"{http.reverse_proxy.header.X-Tokens}", "{http.response.header.X-Tokens}"},
		"header": {"{http.reverse_proxy.header.X-Tokens}", "{http.response.header.X-Tokens}",
			"header_down -X-Tokens\n}", "}\nheader -X-Tokens"},
	} {
		r.sub("the estimate with "+name, func(r recipe) {
			s := r.start(1, append(replacements, "localhost:9000", sitetest.NewUpstream(r.t, upstream))...)
			r.want("a field", charged(r, s, "/?tokens=1"), "200 2000")
		})
	}
	r.sub("bytes", func(r recipe) {
		s := r.start(1, "{http.reverse_proxy.header.X-Tokens}", "bytes", "localhost:9000", sitetest.NewUpstream(r.t, upstream))
		r.want("a stream", charged(r, s, "/trailer"), "200 6")
	})
}

func recipeScanners(r recipe) {
	var arrived atomic.Int64
	upstream := sitetest.NewUpstream(r.t, func(w http.ResponseWriter, req *http.Request) {
		for arrived.Add(1); req.URL.Path == "/page" && arrived.Load() < 50; {
			time.Sleep(time.Millisecond)
		}
		behind(w, req)
	})
	s := r.start(1, "localhost:9000", upstream)
	redistest.Together(r.t, 50, func(int) {
		status, _ := sitetest.Ask(r.t.Context(), s.URL("/page"))
		r.want("a page in parallel", status, 200)
	})
	r.want("paths that do not exist", s.Statuses(20, "GET", "/x?status=404"), "map[404:20]")
	r.want("what comes then", s.Statuses(3, "GET", "/"), "map[429:3]")
}

// recipeApplications sends what the programs' own clients send, to stand-ins that answer as the
// programs do.
func recipeApplications(r recipe) {
	const password = "Authorization: Basic YWxpY2U6Z3Vlc3M="
	for _, tc := range []struct {
		host, method, path string
		header             []string
		wrong, right       string // what the stand-in answers: a status and a Location
		guesses            string
		steps              string // of ten right ones
	}{
		{"vault", "POST", "/identity/connect/token", nil, "400", "200", "map[400:10 429:2]", "map[200:10]"},
		{"cloud", "POST", "/login", nil, "303 /login?user=alice&direct=1", "303 /apps/dashboard/", "map[303:10 429:2]", "map[303:10]"},
		{"cloud", "POST", "/index.php/login", nil, "303 http://cloud/index.php/login?user=alice", "303 /login/challenge/totp", "map[303:10 429:2]", "map[303:10]"},
		{"cloud", "PROPFIND", "/remote.php/dav/files/alice/", []string{password}, "401", "207", "map[401:12]", "map[207:10]"},
		{"media", "POST", "/users/authenticatebyname", nil, "401", "200", "map[401:10 429:2]", "map[200:10]"},
		{"git", "POST", "/user/login", nil, "200", "303 /", "map[200:10 429:2]", "map[303:10]"},
		{"git", "GET", "/alice/x.git/info/refs", []string{password}, "401", "200", "map[401:12]", "map[200:10]"},
		{"home", "POST", "/auth/login_flow/1f", nil, "200", "200", "map[429:12]", "map[200:10]"},
		{"blog", "POST", "/wp-login.php", nil, "200", "302 /wp-admin/", "map[200:5 429:7]", "map[302:10]"},
	} {
		r.sub(tc.host+tc.path, func(r recipe) {
			var answer atomic.Value
			upstream := sitetest.NewUpstream(r.t, func(w http.ResponseWriter, _ *http.Request) {
				status, location, redirects := strings.Cut(answer.Load().(string), " ")
				if redirects {
					w.Header().Set("Location", location)
				}
				n, _ := strconv.Atoi(status)
				w.WriteHeader(n)
			})
			s := sitetest.StartConfig(r.t, siteAt(r, tc.host+".example.com", upstream))
			s.Client.CheckRedirect = noRedirects
			answer.Store(tc.right)
			r.want("the right password", s.Statuses(10, tc.method, tc.path, tc.header...), tc.steps)
			answer.Store(tc.wrong)
			r.want("wrong ones", s.Statuses(12, tc.method, tc.path, tc.header...), tc.guesses)
			if tc.header != nil {
				r.want("clients that have sent no password yet", s.Statuses(60, tc.method, tc.path), "map[401:60]")
				r.want("more wrong ones", s.Statuses(39, tc.method, tc.path, tc.header...), "map[401:38 429:1]")
			}
			answer.Store("200")
			r.want("the rest of the site", s.Statuses(20, "GET", "/"), "map[200:20]")
		})
	}
}

// noRedirects makes a client show redirects instead of following them.
func noRedirects(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// siteAt returns the site with an address, of a recipe that has several.
func siteAt(r recipe, address, upstream string) sitetest.Config {
	r.t.Helper()
	_, rest, found := strings.Cut(r.config(1).Site, address+" {\n")
	site, _, _ := strings.Cut(rest, "\n}\n")
	if !found {
		r.t.Fatalf("there is no site %s", address)
	}
	return sitetest.Config{Site: regexp.MustCompile(`localhost:\d+`).ReplaceAllLiteralString(site, upstream)}
}

func recipeWeights(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind), "reverse_proxy 127", "respond /own 401\nreverse_proxy 127")
	for query, want := range map[string]string{
		"status=401": "map[401:15 429:5]", "status=403": "map[403:15 429:5]", "status=404": "map[404:60 429:5]",
		"": "map[200:300 429:5]", "status=500": "map[429:5 500:300]",
	} {
		n := 0
		for _, count := range regexp.MustCompile(`:(\d+)`).FindAllStringSubmatch(want, -1) {
			times, _ := strconv.Atoi(count[1])
			n += times
		}
		r.want(query, s.Statuses(n, "GET", "/?"+query), want)
		s.Clock.Advance(time.Hour)
	}
	r.want("what Caddy responds itself", s.Statuses(20, "GET", "/own"), "map[401:20]")
	r.want("its units", levelOf(r.t, s, "site", "127.0.0.1").Units, 20)
}

func recipeChallenge(r recipe) {
	const solved = "Cookie: solved=1"
	anubis := sitetest.NewUpstream(r.t, func(w http.ResponseWriter, req *http.Request) {
		switch c, _ := req.Cookie("solved"); {
		case req.URL.Path != "/.within.website/x/cmd/anubis/api/check":
			fmt.Fprint(w, "challenge for ", req.URL.Query().Get("redir"))
		case c == nil:
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	r.sub("above the limit", func(r recipe) {
		s := r.start(1, "localhost:8923", anubis, "localhost:9000", sitetest.NewUpstream(r.t, behind))
		s.Client.CheckRedirect = noRedirects
		r.want("within the limit", s.Statuses(100, "GET", "/"), "map[200:100]")
		a := s.Get("/page?a=1&b=2")
		r.want("above it", fmt.Sprint(a.StatusCode, " ", a.Header.Get("Location")), "302 /.within.website/?redir=%2Fpage%3Fa%3D1%26b%3D2")
		r.want("the challenge", s.Get(a.Header.Get("Location")).Text, "challenge for /page?a=1&b=2")
		r.want("after it", s.Statuses(998, "GET", "/", solved), "map[200:998]")
		r.want("beyond soft", s.Statuses(3, "GET", "/", solved), "map[429:3]")
		s.Clock.Advance(110 * time.Second)
		r.want("within the limit again", s.Get("/").StatusCode, 200)
	})
	r.sub("under load", func(r recipe) {
		upstream, arrived, release := blocking(r.t)
		c := r.config(1, "localhost:8923", anubis, "localhost:9000", upstream, "size 100", "size 10",
			"vars {http.rate_limit.over} site", "vars {http.rate_limit.over} site\nexpression {http.rate_limit.dry_run} == \"upstream\"")
		c.Site = strings.Replace(c.Site, "@challenged {", r.config(2, "concurrency auto", "concurrency auto {\nmax 4\n}").Site+"@challenged {", 1)
		s := sitetest.StartConfig(r.t, c)
		s.Client.CheckRedirect = noRedirects
		r.want("above the limit while the upstream is idle", s.Statuses(20, "GET", "/"), "map[200:20]")
		var slow sync.WaitGroup
		for range 4 {
			slow.Go(func() { s.Get("/slow", solved) })
			<-arrived
		}
		r.want("above it while it is busy", s.Statuses(5, "GET", "/"), "map[302:5]")
		r.want("who has solved it", s.Statuses(5, "GET", "/", solved), "map[200:5]")
		release()
		slow.Wait()
		s.Clock.Advance(time.Hour)
		r.want("within the limit", s.Get("/").StatusCode, 200)
	})
}

func recipeGRPC(r recipe) {
	c := r.config(1, "h2c://localhost:9000", newGRPC(r.t))
	c.Global = "servers {\nprotocols h1 h2c\n}"
	s := sitetest.StartConfig(r.t, c)
	s.UseHTTP2()
	// call makes a call on the one connection, and returns its status.
	call := func(query string) string {
		a := s.Send("POST", "/service/Method?"+query, "Content-Type: application/grpc", "Te: trailers")
		return fmt.Sprint(a.StatusCode, " ", a.Header.Get("Grpc-Status")+a.Trailer.Get("Grpc-Status"))
	}
	redistest.Together(r.t, 50, func(int) { r.want("good calls in parallel", call("grpc=0&message=m"), "200 0") })
	for i := range 10 {
		r.want(fmt.Sprint("rejected call ", 2*i), call("grpc=8&message=m"), "200 8")
		r.want(fmt.Sprint("rejected call ", 2*i+1), call("grpc=16"), "200 16")
	}
	denied := s.Send("POST", "/?grpc=0", "Content-Type: application/grpc")
	r.want("the call after them", fmt.Sprint(denied.StatusCode, " ", denied.Header["Grpc-Status"], " ", denied.Header["Grpc-Message"], " ", denied.Text),
		"200 [8] [Too many rejected calls. Retry after 30 s.] ")
	r.want("what is not gRPC", s.Get("/?grpc=0").Header["Grpc-Status"], []string{"0"})
}

func recipeTenants(r recipe) {
	busy, release := make(chan bool, 2), make(chan bool)
	upstream := sitetest.NewUpstream(r.t, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/slow" {
			busy <- true
			<-release
		}
		fmt.Fprint(w, req.Header.Get("X-Borrowed"))
	})
	s := r.start(1, "localhost:9000", upstream, "concurrency 200", "concurrency 2", "rate 100/s", "rate 100/s\n\t\tsize 100")
	const a, b = "X-Tenant: a", "X-Tenant: b"
	r.want("a tenant's own share", s.Get("/", a).Text, "")
	r.want("the rest of it, and more", s.Statuses(110, "GET", "/", a), "map[200:110]")
	r.want("what is borrowed", s.Get("/", a).Text, "tenant")
	var slow sync.WaitGroup
	for range 2 {
		slow.Go(func() { s.Get("/slow", a) })
		<-busy
	}
	r.want("more than is spare", s.Get("/", a).StatusCode, 429)
	r.want("another tenant", s.Get("/", b).StatusCode, 200)
	close(release)
	slow.Wait()
	sitetest.Eventually(r.t, "what was spare", func() bool { return s.Get("/", a).StatusCode == 200 })
}

func recipeCustomer(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind))
	r.want("the customer", s.Statuses(201, "GET", "/", "X-Api-Key: key-of-acme"), "map[200:200 429:1]")
	r.want("another one", s.Statuses(21, "GET", "/", "X-Api-Key: b"), "map[200:20 429:1]")
}

func recipeCheckout(r recipe) {
	upstream, arrived, release := blocking(r.t)
	s := r.start(1, "localhost:9000", upstream, "concurrency auto {", "concurrency auto {\nmax 4")
	var slow sync.WaitGroup
	for range 3 {
		slow.Go(func() { s.Get("/slow") })
		<-arrived
	}
	bot := s.Get("/", "User-Agent: Somebot/1.0")
	r.want("a bot while most places are taken", bot.StatusCode, 503)
	r.want("its page", strings.HasPrefix(bot.Text, "<h1>We are busy</h1>Please try again in "+bot.Header.Get("Retry-After")+" seconds."), true)
	r.want("another client", s.Get("/").StatusCode, 200)
	slow.Go(func() { s.Get("/slow") })
	<-arrived
	s.Get("/checkout/pay")
	r.want("shed by class", loadOf(s, "upstream").Shed, [...]uint64{1, 0, 1})
	release()
	slow.Wait()
}

func recipeWebsockets(r recipe) {
	upstream := newWebSocket(r.t)
	open := func(r recipe, s *sitetest.Site) (net.Conn, *bufio.Reader, int) {
		conn, err := net.Dial("tcp", s.Addr)
		if err != nil {
			r.t.Fatal(err)
		}
		r.t.Cleanup(func() { conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(sitetest.Patience))
		fmt.Fprintf(conn, "GET /socket HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", s.Addr)
		in := bufio.NewReader(conn)
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			r.t.Fatal(err)
		}
		return conn, in, res.StatusCode
	}
	r.sub("as it is", func(r recipe) {
		c := r.config(1, "localhost:9000", upstream)
		s := sitetest.StartConfig(r.t, c)
		var conns []net.Conn
		var first *bufio.Reader
		for i := range 20 {
			if i >= 10 {
				if i == 10 {
					_, _, status := open(r, s)
					r.want("the eleventh at once", status, 429)
				}
				s.Clock.Advance(6 * time.Second)
			}
			conn, in, status := open(r, s)
			r.want("opening one", status, 101)
			if conns = append(conns, conn); i == 0 {
				first = in
			}
		}
		s.Clock.Advance(time.Hour)
		_, _, status := open(r, s)
		r.want("one more than may be open", status, 429)

		if err := s.Load(c); err != nil {
			r.t.Fatal(err)
		}
		fmt.Fprintln(conns[0], "after a reload")
		if echo, err := first.ReadString('\n'); echo != "after a reload\n" {
			r.t.Errorf("after a reload a connection has %q, %v", echo, err)
		}
		_, _, status = open(r, s)
		r.want("one more after a reload", status, 429)
		conns[0].Close()
		sitetest.Eventually(r.t, "a closed connection makes room", func() bool {
			s.Clock.Advance(6 * time.Second)
			_, _, status := open(r, s)
			return status == 101
		})
	})
	r.sub("without stream_close_delay", func(r recipe) {
		if racetest.Enabled {
			r.t.Skip("Caddy counts what such a connection has written while it closes it: a race of its own")
		}
		c := r.config(1, "localhost:9000", upstream, "stream_close_delay 1h", "")
		s := sitetest.StartConfig(r.t, c)
		conn, in, _ := open(r, s)
		fmt.Fprintln(conn, "before a reload") // Caddy knows of a connection only some time after the 101
		if echo, err := in.ReadString('\n'); echo != "before a reload\n" {
			r.t.Fatalf("before a reload a connection has %q, %v", echo, err)
		}
		if err := s.Load(c); err != nil {
			r.t.Fatal(err)
		}
		if text, err := in.ReadString('\n'); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			r.t.Errorf("after a reload the connection is open: %q, %v", text, err)
		}
	})
}

func recipeCandidate(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind))
	r.want("requests", s.Statuses(120, "GET", "/"), "map[200:100 429:20]") // 50 of 120 have room in both
	noted := 0
	for _, e := range s.Entries() {
		if limits, ok := e["rate_limit"].(map[string]any); ok && limits["dry_run"] == "candidate" {
			noted++
		}
	}
	r.want("denials of the candidate in the log", noted, 70)
	r.want("in the metrics", collected(r.t, s.Process)[`decisions_total{by="memory",limit="candidate",result="would_deny"}`], 70)
}

func recipeSale(r recipe) {
	var mu sync.Mutex
	var passed []time.Time
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, func(http.ResponseWriter, *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		passed = append(passed, time.Now())
	}), "max_delay 15s", "max_delay 500ms") // so that the queue is full after ten
	from := func(i int) (int, string) {
		dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(i))}}
		client := http.Client{Timeout: sitetest.Patience, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dialer.DialContext}}
		res, err := client.Get(s.URL("/checkout"))
		if err != nil {
			r.t.Error(err)
			return 0, ""
		}
		res.Body.Close()
		return res.StatusCode, res.Header.Get("Retry-After")
	}
	start := time.Now()
	var denied atomic.Int64
	redistest.Together(r.t, 40, func(i int) {
		status, wait := from(i + 1)
		if status == 429 {
			denied.Add(1)
			r.want("the wait of a denied buyer", wait, 1)
		}
	})
	r.want("buyers that were denied", denied.Load(), 10)
	slices.SortFunc(passed, time.Time.Compare)
	r.want("buyers that passed", len(passed), 30)
	for i, at := range passed {
		if earliest := start.Add(time.Duration(i-19) * 50 * time.Millisecond); at.Before(earliest) {
			r.t.Errorf("buyer %d passed %v too early", i+1, earliest.Sub(at))
		}
	}

	// Who clicks again and again takes no more places.
	s.Clock.Advance(time.Hour)
	r.want("clicks of one buyer", s.Statuses(30, "GET", "/checkout"), "map[200:2 429:28]")
	r.want("places taken", level(r.t, s, "checkout").Units, 2)
}

func recipeAllowList(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind), "192.0.2.7", "127.0.0.2")
	r.want("another address", s.Statuses(20, "GET", "/"), "map[200:10 429:10]")
	r.want("a path that is exempt", s.Get("/health"), "200")
	r.want("an address that a client makes up", s.Get("/", "X-Forwarded-For: 127.0.0.2").StatusCode, 429)
	s.From("127.0.0.2")
	r.want("an address in the list", s.Statuses(20, "GET", "/"), "map[200:20]")
	r.want("its fields", s.Get("/"), "200")
	r.want("buckets", s.Process.Newest().Memory.Len(), 1)
}

func recipePlans(r recipe) {
	var plan atomic.Value
	var asked atomic.Int64
	auth := sitetest.NewUpstream(r.t, func(w http.ResponseWriter, req *http.Request) {
		asked.Add(1)
		switch user := req.Header.Get("Authorization"); {
		case req.URL.Path != "/auth":
			r.t.Errorf("asked for %s", req.URL)
		case user == "":
			w.WriteHeader(http.StatusUnauthorized)
		default:
			w.Header().Set("X-User", user)
			if p := plan.Load().(string); p != "" {
				w.Header().Set("X-Plan", p)
			}
		}
	})
	upstream := sitetest.NewUpstream(r.t, func(w http.ResponseWriter, req *http.Request) {
		fmt.Fprint(w, req.Header["X-User"], " ", req.Header["X-Plan"])
	})
	plan.Store("")
	r.sub("in front", func(r recipe) {
		s := r.start(1, "localhost:9001", auth, "localhost:9000", upstream)
		r.want("without a login", s.Statuses(110, "GET", "/"), "map[401:100 429:10]")
		r.want("how often the server was asked", asked.Load(), 100)
	})
	s := r.start(1, "localhost:9001", auth, "localhost:9000", upstream, "rate 20/s\n\tsize 100", "rate 20/s\n\tsize 100000")
	ask := func(header ...string) sitetest.Answer {
		return s.Get("/", append(header, "Authorization: alice")...)
	}
	r.want("without a plan, whatever the client claims", ask("X-Plan: pro", "X-User: eve").Text, "[alice] []")
	for _, tc := range []struct {
		plan             string
		limit, remaining int
	}{
		{"", 100, 98}, {"team", 1000, 997}, {"pro", 10000, 9996}, {"other", 100, 95}, {"", 100, 94},
	} {
		plan.Store(tc.plan)
		h := ask().Header
		r.want("plan "+tc.plan, h.Get("X-RateLimit-Limit")+" "+h.Get("X-RateLimit-Remaining"), fmt.Sprint(tc.limit, tc.remaining))
	}
	r.want("the rest of the plan", s.Statuses(100, "GET", "/", "Authorization: alice"), "map[200:94 429:6]")
	plan.Store("team")
	r.want("a larger plan", ask().StatusCode, 200)
	r.want("another user", s.Get("/", "Authorization: bob").Header.Get("X-RateLimit-Remaining"), "999")
}

func recipeScrapers(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind), "198.51.100.0/24", "127.0.9.0/24")
	all := func(n, of int, network string, path string, header ...string) string {
		counts := make(map[int]int)
		for i := range n {
			if i%of == 0 {
				s.From(fmt.Sprintf(network, i/of+1))
			}
			counts[s.Get(path, header...).StatusCode]++
		}
		return fmt.Sprint(counts)
	}
	r.want("one address", all(100, 100, "127.0.1.%d", "/"), "map[200:60 429:40]")
	r.want("a network", all(900, 50, "127.0.2.%d", "/"), "map[200:600 429:300]")
	r.want("a listed network", all(100, 10, "127.0.9.%d", "/"), "map[200:60 429:40]")
	r.want("a search from anywhere", all(250, 1, "127.0.%d.1", "/search"), "map[200:200 429:50]")
	r.want("with a login", all(5, 1, "127.1.%d.1", "/search", "Authorization: x"), "map[200:5]")
	r.want("another page", all(5, 1, "127.1.%d.1", "/"), "map[200:5]")
}

func recipeProblem(r recipe) {
	arrived, out := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(out) })
	r.t.Cleanup(release)
	upstream := sitetest.NewUpstream(r.t, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/slow" {
			arrived <- struct{}{}
			<-out
		}
		behind(w, req)
	})
	s := r.start(1, "localhost:9000", upstream, "concurrency auto", "concurrency auto {\nmax 4\n}")
	problem := func(what string, status int, kind, title, limit, wait string) {
		r.t.Helper()
		a := s.Get("/")
		r.want(what+": status and type", fmt.Sprint(a.StatusCode, " ", a.Header.Get("Content-Type")), fmt.Sprint(status, " application/problem+json"))
		var got map[string]any
		if err := json.Unmarshal([]byte(a.Text), &got); err != nil {
			r.t.Fatalf("%s: %v: %s", what, err, a.Text)
		}
		if !regexp.MustCompile("^rate limit " + limit + " exceeded: retry after " + wait + " s$").MatchString(fmt.Sprint(got["detail"])) {
			r.t.Errorf("%s: got detail %v", what, got["detail"])
		}
		delete(got, "detail")
		r.want(what, got, map[string]any{
			"type": "https://iana.org/assignments/http-problem-types#" + kind, "title": title, "status": status, "violated-policies": []any{limit},
		})
	}
	var slow sync.WaitGroup
	for range 4 {
		slow.Go(func() { s.Get("/slow") })
		<-arrived
	}
	problem("an upstream that can do no more", 503, "temporary-reduced-capacity", "Too busy", "upstream", "[1-9]")
	release()
	slow.Wait()
	s.Clock.Advance(time.Minute)
	a := s.Get("/?status=429")
	r.want("the upstream's own", fmt.Sprint(a.StatusCode, " ", a.Header.Get("Content-Type") == "application/problem+json"), "429 false")
	r.want("the policy", a.Header.Get("RateLimit-Policy"), `"api";q=10;w=10`)
	s.Statuses(9, "GET", "/")
	for range 4 {
		problem("a quota that is used up", 429, "quota-exceeded", "Too many requests", "api", "1")
	}
	for range 2 {
		problem("a ban", 429, "abnormal-usage-detected", "Banned for a while", "api", "600")
	}
}

func recipeTrap(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind))
	r.want("other pages", s.Statuses(5, "GET", "/"), "map[200:5]")
	r.want("the trap", s.Statuses(1, "GET", "/.env"), "map[404:1]")
	r.want("the whole site then", s.Statuses(3, "GET", "/")+s.Statuses(3, "GET", "/x?status=404"), "map[429:3]map[429:3]")
	s.From("127.0.0.2")
	r.want("another address", s.Statuses(3, "GET", "/"), "map[200:3]")
	s.From("127.0.0.1")
	s.Clock.Advance(23 * time.Hour)
	r.want("a day less an hour later", s.Statuses(1, "GET", "/"), "map[429:1]")
	s.Clock.Advance(time.Hour)
	r.want("a day later", s.Statuses(3, "GET", "/"), "map[200:3]")
}

func recipeCORS(r recipe) {
	for name, errors := range map[string]string{"": "", " with error routes": "handle_errors {\nrespond {err.message}\n}\n"} {
		r.sub("denials"+name, func(r recipe) {
			c := r.config(1, "localhost:9000", sitetest.NewUpstream(r.t, behind))
			c.Site += errors
			s := sitetest.StartConfig(r.t, c)
			preflight := []string{"Origin: https://app.example.com", "Access-Control-Request-Method: POST"}
			r.want("preflights", s.Statuses(200, "OPTIONS", "/", preflight...), "map[204:200]")
			a := s.Send("OPTIONS", "/", preflight...)
			r.want("what a preflight allows", a.Header.Get("Access-Control-Allow-Methods")+" "+a.Header.Get("Access-Control-Allow-Origin"),
				"GET, POST https://app.example.com")
			r.want("requests", s.Statuses(120, "POST", "/", "X-Api-Key: k"), "map[200:100 429:20]")
			r.want("other OPTIONS", s.Send("OPTIONS", "/", "X-Api-Key: k").StatusCode, 429)
			a = s.Send("POST", "/", "X-Api-Key: k")
			r.want("the origin on a denial", a.Header["Access-Control-Allow-Origin"], []string{"https://app.example.com"})
			for name := range strings.SplitSeq(a.Header.Get("Access-Control-Expose-Headers"), ", ") {
				if a.Header.Get(name) == "" {
					r.t.Errorf("a denial exposes %s and has none", name)
				}
			}
		})
	}
}

func recipeRetryAfter(r recipe) {
	const name = "X-RateLimit-Retry-After"
	upstream := sitetest.NewUpstream(r.t, behind)
	r.sub("on denials", func(r recipe) {
		s := r.start(1, "localhost:9000", upstream)
		r.want("admitted", s.Get("/").Header.Get(name), "")
		s.Statuses(9, "GET", "/")
		a := s.Get("/")
		r.want("denied", a.Status+" "+a.Header.Get(name)+" "+a.Header.Get("Retry-After")+" "+a.Text, "429 Too Many Requests 1 1 Too many requests")
	})
	r.sub("on all", func(r recipe) {
		c := r.config(1, "localhost:9000", upstream)
		before, _, _ := strings.Cut(c.Site, "handle_errors")
		c.Site = "header >" + name + " {http.rate_limit.retry_after}\n" + before
		s := sitetest.StartConfig(r.t, c)
		r.want("admitted", s.Get("/").Header.Get(name), "0")
		s.Statuses(9, "GET", "/")
		r.want("denied", s.Get("/").Header.Get(name), "1")
	})
}

func recipeSticky(r recipe) {
	const clients, size = 40, 10 // so many that some use each instance
	node := r.config(2, "10.0.0.10", "127.0.0.1", "localhost:9000", sitetest.NewUpstream(r.t, behind))
	var addrs []string
	var kill []func()
	for range 3 {
		addr, stop := sitetest.StartKillable(r.t, node)
		addrs, kill = append(addrs, addr), append(kill, stop)
	}
	balancer := func(n int) sitetest.Config {
		c := r.config(1, "10.0.0.1:8080 10.0.0.2:8080 10.0.0.3:8080", strings.Join(addrs[:n], " "))
		c.Site += "\nheader X-Node {http.reverse_proxy.upstream.hostport}"
		c.Site = strings.Replace(c.Site, "header X-Node", "header >X-Node", 1)
		return c
	}
	s := sitetest.StartConfig(r.t, balancer(2))
	// round returns where each client goes, and how many of its requests pass.
	round := func() (nodes []string, passed []int) {
		for i := range clients {
			s.From(fmt.Sprintf("127.0.3.%d", i+1))
			node, n := "", 0
			for range size + 1 {
				a := s.Get("/")
				if a.StatusCode == 200 {
					n++
				}
				if node != "" && node != a.Header.Get("X-Node") {
					r.t.Errorf("client %d was sent to two instances", i)
				}
				node = a.Header.Get("X-Node")
			}
			nodes, passed = append(nodes, node), append(passed, n)
		}
		return nodes, passed
	}
	nodes, passed := round()
	for i, n := range passed {
		r.want(fmt.Sprint("admitted of client ", i), n, size)
	}
	check := func(what string, moved func(before, after string) bool) {
		before := nodes
		var n int
		nodes, passed = round()
		for i := range nodes {
			want := 0
			if before[i] != nodes[i] {
				want = size
				n++
			}
			if !moved(before[i], nodes[i]) {
				r.t.Errorf("%s: client %d went from %s to %s", what, i, before[i], nodes[i])
			}
			r.want(fmt.Sprint(what, ": admitted of client ", i), passed[i], want)
		}
		if n == 0 || n == clients {
			r.t.Errorf("%s: %d of %d clients moved", what, n, clients)
		}
	}
	if err := s.Load(balancer(3)); err != nil {
		r.t.Fatal(err)
	}
	check("another instance", func(before, after string) bool { return after == before || after == addrs[2] })
	kill[0]()
	check("an instance less", func(before, after string) bool { return (after == before) == (before != addrs[0]) })
}

func recipeService(r recipe) {
	service := func(r recipe, option string) string {
		c := r.config(1, "10.0.0.10", "127.0.0.1", "\t\tsize ", option+"\t\tsize ")
		return sitetest.StartProcess(r.t, c)
	}
	r.sub("forward_auth", func(r recipe) {
		s := r.start(2, "10.0.0.9:9100", service(r, ""), "localhost:9000", sitetest.NewUpstream(r.t, behind))
		r.want("searches", s.Statuses(7, "POST", "/search?q=x", "X-Api-Key: a"), "map[200:5 429:2]")
		denied := s.Send("POST", "/search", "X-Api-Key: a")
		r.want("what clients see", denied.Header.Get("X-RateLimit-Limit")+" "+denied.Header.Get("Retry-After")+" "+denied.Text, "5 1 "+sitetest.PlainDenial)
		r.want("other pages", s.Send("POST", "/other", "X-Api-Key: a").Text, "upstream POST /other ")
	})
	r.sub("auth_request", func(r recipe) {
		// What nginx does: 2xx passes, 401 and 403 deny, all else is an error.
		addr := service(r, "\t\tstatus 403\n")
		i := slices.IndexFunc(r.blocks, func(b doctest.Block) bool { return b.Language == "nginx" })
		for _, part := range []string{"proxy_pass http://10.0.0.9:9100/;", "$upstream_http_retry_after", "X-Forwarded-For $remote_addr",
			"X-Forwarded-Uri $request_uri", "error_page 403 ="} {
			if i < 0 || !strings.Contains(r.blocks[i].Code, part) {
				r.t.Errorf("the example for nginx has no %s", part)
			}
		}
		counts := make(map[string]int)
		for range 7 {
			req, err := http.NewRequest("GET", "http://"+addr+"/", nil)
			if err != nil {
				r.t.Fatal(err)
			}
			req.Header = http.Header{"X-Forwarded-For": {"192.0.2.1"}, "X-Forwarded-Uri": {"/search?q=x"}}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				r.t.Fatal(err)
			}
			res.Body.Close()
			counts[fmt.Sprint(res.StatusCode, " ", res.Header.Get("Retry-After"))]++
		}
		r.want("decisions", counts, "map[204 :5 403 1:2]")
	})
}

func recipeQueue(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind), "localhost:9001", sitetest.NewUpstream(r.t, func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		w.Header().Set("Location", "/jobs/1")
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprint(w, "queued ", len(body))
	}), "size 1000\n", "size 20\n")
	counts := make(map[string]int)
	order := strings.Repeat("x", 100_000)
	for range 40 {
		req, err := http.NewRequest("POST", s.URL("/orders"), strings.NewReader(order))
		if err != nil {
			r.t.Fatal(err)
		}
		req.Header.Set("X-Api-Key", "alice")
		res, err := s.Client.Do(req)
		if err != nil {
			r.t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		s.Requests.Add(1)
		h := res.Header
		counts[fmt.Sprintf("%d %.8s %s retry=%s limit=%s", res.StatusCode, body, h.Get("Location"), h.Get("Retry-After"), h.Get("X-RateLimit-Limit"))]++
	}
	r.want("orders", counts, map[string]int{
		"200 upstream  retry= limit=10": 10, "202 queued 1 /jobs/1 retry= limit=": 20, "429 Too many  retry=1 limit=10": 10,
	})
	r.want("other requests", s.Statuses(50, "GET", "/orders", "X-Api-Key: alice"), "map[200:50]")
	r.want("denials in the metrics", collected(r.t, s.Process)[`decisions_total{by="memory",limit="orders",result="denied"}`], 30)
}

func recipeWholeSite(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind))
	r.want("pages", s.Statuses(20, "GET", "/?status=401"), "map[401:20]")
	r.want("right passwords", s.Statuses(20, "POST", "/login"), "map[200:20]")
	r.want("wrong passwords", s.Statuses(7, "POST", "/login/?status=401"), "map[401:5 429:2]")
	r.want("a page after them", s.Get("/").StatusCode, 429)
	s.From("127.0.0.2")
	r.want("a page for another address", s.Get("/").StatusCode, 200)
	s.From("127.0.0.1")
	s.Clock.Advance(10 * time.Minute)
	r.want("ten minutes later", s.Statuses(3, "GET", "/")+s.Statuses(2, "POST", "/login?status=401"), "map[200:3]map[401:1 429:1]")
}

func recipeElastic(r recipe) {
	upstream, arrived, release := blocking(r.t)
	s := r.start(1, "localhost:9000", upstream, "concurrency auto {", "concurrency auto {\nmax 4")
	const greedy, polite = "X-Tenant: greedy", "X-Tenant: polite"
	r.want("above the limit while the upstream is idle", s.Statuses(700, "GET", "/", greedy), "map[200:700]")
	var slow sync.WaitGroup
	for range 3 {
		slow.Go(func() { s.Send("GET", "/slow", polite) })
		<-arrived
	}
	r.want("above the limit while it is busy", s.Statuses(5, "GET", "/", greedy), "map[503:5]")
	r.want("within it", s.Statuses(5, "GET", "/", polite), "map[200:5]")
	release()
	slow.Wait()
	s.Clock.Advance(2 * time.Minute)
	r.want("two minutes later", s.Get("/", greedy).StatusCode, 200)
	r.want("units of the other", levelOf(r.t, s, "tenant", "greedy").Units, 1)
}

func recipeAbort(r recipe) {
	s := r.start(1, "localhost:9000", sitetest.NewUpstream(r.t, behind))
	r.want("within the limit", s.Statuses(100, "GET", "/"), "map[200:100]")
	s.From("127.0.0.1") // on a connection of its own, as a client may retry on one that it had
	res, err := s.Client.Get(s.URL("/"))
	if err == nil {
		res.Body.Close()
	}
	s.Requests.Add(1)
	r.want("an answer", errors.Is(err, io.EOF), true)
	r.want("denials in the metrics", collected(r.t, s.Process)[`decisions_total{by="memory",limit="flood",result="denied"}`], 1)
}

func recipeFirewall(r recipe) {
	dir := sitetest.TempDir(r.t)
	script, nft, called := filepath.Join(dir, "ban"), filepath.Join(dir, "nft"), filepath.Join(dir, "called")
	for file, text := range map[string]string{
		script: strings.Replace(r.blocks[1].Code, "exec nft ", "exec "+nft+" ", 1),
		nft:    "#!/bin/sh\necho \"$@\" >>" + called + "\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o700); err != nil {
			r.t.Fatal(err)
		}
	}
	s := r.start(1, "/usr/local/bin/ban", script, "localhost:9000", sitetest.NewUpstream(r.t, behind))
	r.want("requests", s.Statuses(102, "GET", "/"), "map[200:100 429:2]")
	var got []byte
	sitetest.Eventually(r.t, "the command runs", func() bool {
		got, _ = os.ReadFile(called)
		return bytes.HasSuffix(got, []byte("\n"))
	})
	r.want("how it is called", string(got), "add element inet filter banned4 { 127.0.0.1 timeout 600s }\n")
	for _, set := range []string{"set banned4 {", "set banned6 {", "ip saddr @banned4 drop", "ip6 saddr @banned6 drop"} {
		r.want(set, strings.Contains(r.blocks[2].Code, set), true)
	}
}

func recipeLabels(r recipe) {
	// What caddy-docker-proxy makes of labels.
	type block struct {
		name, value string
		within      []*block
	}
	root, labels := new(block), false
	for line := range strings.Lines(r.blocks[0].Code) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if !labels {
			labels = key == "labels:"
			continue
		}
		at := root
		for name := range strings.SplitSeq(key, ".") {
			i := slices.IndexFunc(at.within, func(b *block) bool { return b.name == name })
			if i < 0 {
				i, at.within = len(at.within), append(at.within, &block{name: name})
			}
			at = at.within[i]
		}
		at.value = strings.Trim(value, `"`)
	}
	var text strings.Builder
	var write func(b *block)
	write = func(b *block) {
		fmt.Fprint(&text, b.name, " ", b.value)
		if len(b.within) > 0 {
			fmt.Fprint(&text, " {\n")
			for _, w := range b.within {
				write(w)
			}
			fmt.Fprint(&text, "}")
		}
		fmt.Fprint(&text, "\n")
	}
	site := root.within[0]
	r.want("the site", site.name+" "+site.value, "caddy app.example.com")
	for _, b := range site.within {
		write(b)
	}
	upstream := strings.TrimPrefix(sitetest.NewUpstream(r.t, behind), "http://")
	s := sitetest.StartConfig(r.t, sitetest.Config{Site: strings.Replace(text.String(), "{{upstreams 9000}}", upstream, 1)})
	r.want("logins", s.Statuses(7, "GET", "/login"), "map[200:5 429:2]")
	r.want("other pages", s.Statuses(100, "GET", "/"), "map[200:95 429:5]")
}

// watchCommand is the command that recipeWatch runs.
const watchCommand = "caddy run --config Caddyfile --watch"

func recipeWatch(r recipe) {
	r.want("the command", r.blocks[0].Code, watchCommand+"\n")
	dir := sitetest.TempDir(r.t)
	addr, log := redistest.FreeAddr(r.t), filepath.Join(dir, "log")
	file, imported := filepath.Join(dir, "Caddyfile"), filepath.Join(dir, "limit")
	write := func(path, text string) {
		r.t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			r.t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			r.t.Fatal(err)
		}
	}
	site := func(version string) string {
		return string(sitetest.Config{Site: "header Version " + version + "\nrate_limit api {\nimport " + imported + "\n}\nrespond ok"}.Caddyfile(addr, log))
	}
	write(imported, "size 3\ndrip_rate 1h\n")
	write(file, site("1"))
	p := sitetest.RunCaddy(r.t, nil, file, "--watch")
	admitted := 0
	ask := func() (limit, version string) {
		res, err := http.Get("http://" + addr + "/")
		if err != nil {
			return "", ""
		}
		res.Body.Close()
		if res.StatusCode == 200 {
			admitted++
		}
		return res.Header.Get("X-RateLimit-Limit"), res.Header.Get("Version")
	}
	serves := func(limit, version string) {
		r.t.Helper()
		sitetest.Eventually(r.t, "the limit "+limit+" and version "+version, func() bool {
			if err := p.Running(); err != nil {
				r.t.Fatal(err)
			}
			l, v := ask()
			return l == limit && v == version
		})
	}
	logged := func(message string) (n int) {
		for _, e := range sitetest.ReadEntries(r.t, log) {
			if e["msg"] == message {
				n++
			}
		}
		return n
	}
	serves("3", "1")
	for range 5 {
		ask()
	}
	r.want("admitted by a limit of 3", admitted, 3)
	sitetest.Eventually(r.t, "the file is watched", func() bool { return logged("watching config file for changes") == 1 })
	write(imported, "size 5\ndrip_rate 1h\n")
	serves("5", "1")
	write(file, site("2"))
	serves("5", "2")
	for range 5 {
		ask()
	}
	r.want("admitted by a limit of 5 in place of it", admitted, 5)

	write(imported, "size {env.RATELIMIT_TEST_MISSING}\n")
	sitetest.Eventually(r.t, "a configuration can't be loaded", func() bool { return logged("applying latest config") == 1 })
	serves("5", "2")
	write(imported, "size 6\ndrip_rate 1h\n")
	serves("6", "2")

	write(file, "{\n")
	sitetest.Eventually(r.t, "the file can't be read", func() bool { return logged("unable to load latest config") == 1 })
	write(file, site("3"))
	time.Sleep(2500 * time.Millisecond) // Caddy would look twice
	serves("6", "2")
	r.want("lines about the file", logged("unable to load latest config"), 1)
}
