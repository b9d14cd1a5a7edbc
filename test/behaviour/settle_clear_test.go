package behaviour

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestClear guards which responses empty the bucket of their key: what the next request finds, on
// whichever instance it is, in the process and with Redis. Limits and keys beside it keep what they have,
// and so does the bucket of requests that do not say whose it is.
func TestClear(t *testing.T) {
	t.Parallel()
	const field = "key {http.rate_limit.field.user}\n"
	rows := []struct{ name, options, sends, want string }{ // users, with the status of the response, and ! if it clears
		{"a login", "rate 5/h\ncount status 401 403\nclear status 2xx", "a401 a403 a401 a401 !a200 a401 a401 a401 a401 a401 a401", "401 403 401 401 200 401 401 401 401 401 429"},
		{"the last guess", "rate 2/h\ncount status 401\nclear status 2xx", "a401 !a200 a401 !a200 a401 a401 a200", "401 200 401 200 401 401 429"},
		{"other statuses", "rate 2/h\ncount status 401\nclear status 303", "a401 a200 a401 a200", "401 200 401 429"},
		{"all but some", "rate 2/h\ncount status 401\nclear not status 4xx", "a401 !a303 a401 a404 a401 a404", "401 303 401 404 401 429"},
		{"all responses count", "rate 3/h\nclear status 2xx", "a401 a404 !a200 a401 a401 a401 a200", "401 404 200 401 401 401 429"},
		{"those that count clear too", "rate 2/h\ncount status 2xx 401\nclear status 2xx", "a401 !a200 !a200 !a200 a401 a401 a200", "401 200 200 200 401 401 429"},
		{"a field", "rate 2/h\ncount status 401\nclear header X-In yes", "a401 a+200 a401 a+200", "401 200 401 429"},
		{"a field that is there", "rate 2/h\ncount status 401\nclear {\nheader X-In *\nstatus 2xx\n}", "a401 a200 !a+200 a401 a401 a+200", "401 200 200 401 401 429"},
		{"other keys", "rate 2/h\ncount status 401\nclear status 2xx", "a401 b401 !b200 b401 b401 b401 a401 a401", "401 401 200 401 401 429 401 429"},
		{"unclear", "rate 2/h\ncount status 401\nclear status 2xx", "?401 ?200 ?401 ?200", "401 200 401 429"},
		{"missing", "rate 2/h\ncount status 401\nclear status 2xx", "-401 -200 -401 -200", "401 200 401 429"},
		{"the address, if it is the key", "key {client_ip}\nrate 2/h\ncount status 401\nclear status 2xx", "-401 !-200 -401 -401 -200", "401 200 401 401 429"},
		{"missing beside another", "key {http.rate_limit.field.user},{client_ip}\nrate 2/h\ncount status 401\nclear status 2xx", "-401 -200 -401 -200 a401 !a200 a401 a401 a401", "401 200 401 429 401 200 401 401 429"},
		{"a limit around it", "rate 3/h\ncount status 401\nlimit in {\nrate 2/h\ncount status 401\nclear status 2xx\n}", "a401 !a200 a401 a401 a200", "401 200 401 401 429"},
		{"a limit within", "rate 2/h\ncount status 401\nclear status 2xx\nlimit in {\nkey all\nrate 3/h\ncount status 401\n}", "a401 !a200 a401 a401 a401", "401 200 401 401 429"},
		{"denied requests count", "rate 2/h\ncount status 401\ncount_denied\nclear status 2xx", "a401 !a200 a401 a401 a200", "401 200 401 401 429"},
		{"several units", "rate 6/h\ncost 2\nactual_cost {query.cost}\ncount status 401\nclear status 2xx", "a401 !a200 a401 a401 a200", "401 200 401 401 429"},
		{"a token bucket", "algorithm token_bucket\nrate 2/h\ncount status 401\nclear status 2xx", "a401 !a200 a401 a401 a200", "401 200 401 401 429"},
		{"a window", "algorithm fixed_window\nwindow_start first\nsize 2\nwindow 1h\ncount status 401\nclear status 2xx", "a401 !a200 a401 a401 a200", "401 200 401 401 429"},
		{"a sliding window", "algorithm sliding_window\nsize 2\nwindow 240h\ncount status 401\nclear status 2xx", "a401 !a200 a401 a401 a200", "401 200 401 401 429"},
		{"a log", "algorithm sliding_log\nsize 2\nwindow 1h\ncount status 401\nclear status 2xx", "a401 !a200 a401 a401 a200", "401 200 401 401 429"},
		{"few keys", "rate 2/h\ncount status 401\nclear status 2xx\nmax_keys 100\nwhen_full share", "a401 !a200 a401 a401 a200", "401 200 401 401 429"},
	}
	var site strings.Builder
	for i, row := range rows {
		key := field
		if strings.HasPrefix(row.options, "key ") {
			key = ""
		}
		fmt.Fprintf(&site, "rate_limit /%d {\nlimit l%[1]d {\n%s%s\n}\n}\n", i, key, row.options)
	}
	site.WriteString("rate_limit /sync sync {\nkey all\nrate 1000000/h\n}\n@in query in=yes\nheader @in X-In there\nrespond x {query.s}\n")
	eachNode(t, site.String(), func(t *testing.T, urls []string) {
		for i, row := range rows {
			var got []string
			node := 0
			for sent := range strings.FieldsSeq(row.sends) {
				sent, clears := strings.CutPrefix(sent, "!")
				user, status := sent[:len(sent)-3], sent[len(sent)-3:]
				query := map[string]string{"?": "user=a&user=b&", "-": ""}
				q, special := query[user]
				if !special {
					q = "user=" + user + "&"
				}
				answer, _ := sitetest.Ask(t.Context(), fmt.Sprintf("%s/%d?%scost=3&s=%s", urls[node%len(urls)], i, strings.Replace(q, "+", "&in=yes", 1), status))
				got = append(got, fmt.Sprint(answer))
				if !clears { // other instances see a moment later what is charged or given back
					_, _ = sitetest.Ask(t.Context(), urls[node%len(urls)]+"/sync")
				}
				node++
			}
			if got := strings.Join(got, " "); got != row.want {
				t.Errorf("%s: %s:\n got %s\nwant %s", row.name, row.sends, got, row.want)
			}
		}
	})
}

// TestClearBesideOthers guards that a login which succeeds, beside requests in progress on other
// instances, leaves these their units, and that they are charged when they end; and that a ban stays.
func TestClearBesideOthers(t *testing.T) {
	t.Parallel()
	arrived, goOn := make(chan string), map[string]chan struct{}{"1": make(chan struct{}), "2": make(chan struct{}), "3": make(chan struct{})}
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if c := goOn[r.URL.Query().Get("wait")]; c != nil {
			arrived <- r.URL.Query().Get("wait")
			<-c
		}
		switch r.URL.Query().Get("s") {
		case "200":
			w.WriteHeader(http.StatusOK)
		default:
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	site := "rate_limit /in {\nlimit in {\nkey {query.user}\nrate 4/h\ncount status 401\nclear status 2xx\n}\n}\n" +
		"rate_limit /ban {\nlimit ban {\nkey {query.user}\nrate 2/h\nactual_cost {query.cost}\ncount status 401\nclear status 2xx\nban 1h\n}\n}\n" +
		"reverse_proxy " + upstream
	eachNode(t, site, func(t *testing.T, urls []string) {
		ask := func(node int, query string) int {
			status, _ := sitetest.Ask(t.Context(), urls[node%len(urls)]+query)
			return status
		}
		begin := func(node int, query string) chan int {
			ended := make(chan int, 1)
			go func() { ended <- ask(node, query) }()
			<-arrived
			return ended
		}
		end := func(name string, ended chan int) int {
			goOn[name] <- struct{}{}
			return <-ended
		}
		want := func(what string, got, want int) {
			t.Helper()
			if got != want {
				t.Errorf("%s got %d, want %d", what, got, want)
			}
		}
		wrong, right := begin(0, "/in?user=a&s=401&wait=1"), begin(1, "/in?user=a&s=200&wait=2")
		for range 2 {
			want("a guess", ask(2, "/in?user=a&s=401"), 401)
		}
		want("one more than there is room for", ask(2, "/in?user=a&s=401"), 429)
		want("the login", end("2", right), 200)
		for i := range 3 {
			want("a guess after it", ask(i, "/in?user=a&s=401"), 401)
		}
		want("one more than fits beside the one in progress", ask(0, "/in?user=a&s=401"), 429)
		want("that one", end("1", wrong), 401)
		redistest.WaitFor(t, sitetest.Patience, func() error { // which is charged
			if got := ask(1, "/in?user=a&s=401"); got != 429 {
				return fmt.Errorf("got %d", got)
			}
			return nil
		})

		right = begin(0, "/ban?user=a&s=200&wait=3")
		want("a guess that fills the bucket", ask(1, "/ban?user=a&s=401&cost=2"), 401)
		want("the one that begins a ban", ask(1, "/ban?user=a&s=401"), 429)
		want("the login", end("3", right), 200)
		want("one after it", ask(0, "/ban?user=a&s=200"), 429)
	})
}

// TestClearByTrailer guards that clear sees fields of trailers as count does.
func TestClearByTrailer(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site: "rate_limit {\nlimit in {\nkey all\nrate 9/h\ncount header Grpc-Status 16\nclear header Grpc-Status 0\n}\n" +
			"limit status {\nkey all\nrate 9/h\ncount status 2xx\nclear header Grpc-Status 0\n}\n}\nreverse_proxy " + newGRPC(t),
	})
	s.UseHTTP2()
	for _, c := range []struct {
		query      string
		in, status int64
	}{
		{"grpc=16&message=x", 1, 1}, {"grpc=16", 2, 2}, {"grpc=5&message=x", 2, 3}, {"grpc=0&message=x", 0, 0},
		{"grpc=16", 1, 1}, {"grpc=0", 0, 0}, {"grpc=16&message=x", 1, 1}, {"grpc=0&message=broken", 2, 2},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL("/?"+c.query), http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		if c.query != "grpc=0&message=broken" {
			s.Do(req)
		} else {
			_, _ = sitetest.Ask(t.Context(), s.URL("/?"+c.query))
		}
		if in, status := level(t, s, "in"), level(t, s, "status"); in.Units != c.in || status.Units != c.status {
			t.Errorf("%s: %d and %d units, want %d and %d", c.query, in.Units, status.Units, c.in, c.status)
		}
	}
}
