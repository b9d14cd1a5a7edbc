package behaviour

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestNewFamilies guards what the headers option may say.
func TestNewFamilies(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		words string
		want  outcome.Families
		err   string // what the error mentions
	}{
		{"", outcome.XRateLimit, ""},
		{"x-ratelimit", outcome.XRateLimit, ""},
		{"ratelimit-11", outcome.IETF, ""},
		{"x-ratelimit ratelimit-11", outcome.XRateLimit | outcome.IETF, ""},
		{"ratelimit-11 x-ratelimit", outcome.XRateLimit | outcome.IETF, ""},
		{"ratelimit-11 x-ratelimit ratelimit-11", 0, `headers: duplicate "ratelimit-11"`},
		{"off", 0, ""},
		{"off ratelimit-11", 0, `headers: "off ratelimit-11" is not valid; use x-ratelimit`},
		{"ratelimit-11 off", 0, `headers: "ratelimit-11 off" is not valid; use x-ratelimit`},
		{"github", outcome.XRateLimit | outcome.GitHub, ""},
		{"github github", 0, `headers: duplicate "github"`},
		{"x-ratelimit github", 0, `headers: x-ratelimit can't be combined with github; use one of them`},
		{"github x-ratelimit", 0, `headers: x-ratelimit can't be combined with github; use one of them`},
		{"github off", 0, `headers: "github off" is not valid; use x-ratelimit`},
		{"ratelimit", 0, `headers: "ratelimit" is not valid; use x-ratelimit`},
		{"X-RateLimit", 0, `headers: "X-RateLimit" is not valid; use x-ratelimit`},
		{"ratelimit-11 draft-7", 0, `headers: "draft-7" is not valid; use x-ratelimit`},
	} {
		got, err := compile.NewFamilies(strings.Fields(tc.words))
		switch {
		case tc.err == "" && err != nil:
			t.Errorf("headers %s: %v", tc.words, err)
		case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
			t.Errorf("headers %s: got error %v, want one with %q", tc.words, err, tc.err)
		case got != tc.want:
			t.Errorf("headers %s: got %b, want %b", tc.words, got, tc.want)
		}
	}
}

// Guards that each limit has one member in the lists, and each member a name of
// its own, however many blocks without a name, as in JSON, a request passes, and if it
// passes one block twice.
func TestEachLimitIsListedOnce(t *testing.T) {
	t.Parallel()
	block := func(size int, headers string) string {
		return fmt.Sprintf("rate_limit {\nsize %d\n%s\n}\n", size, headers)
	}
	const one, both = "headers ratelimit-11", "headers x-ratelimit ratelimit-11"
	for _, tc := range []struct{ name, site, want string }{
		{
			"blocks without a name", "route {\n" + block(9, one) + block(8, one) + block(8, one+"\nkey all") +
				"respond admitted\n}",
			`200 policy="default";q=9;w=9, "default#2";q=8;w=8, "default#3";q=8;w=8 ` +
				`ratelimit="default";r=8;t=8, "default#2";r=7;t=7, "default#3";r=7;t=7`,
		},
		{
			"blocks without a name that are one limit", "route {\n" + block(9, one) + block(9, both) +
				"respond admitted\n}",
			`200 limit=9 remaining=7 clear=2.000 policy="default";q=9;w=9 ratelimit="default";r=7;t=7`,
		},
		{
			"one of them again behind another",
			"route {\n" + block(9, one) + block(8, one) + block(9, one) + block(7, one) + "respond admitted\n}",
			`200 policy="default#2";q=8;w=8, "default";q=9;w=9, "default#3";q=7;w=7 ` +
				`ratelimit="default#2";r=7;t=7, "default";r=7;t=7, "default#3";r=6;t=6`,
		},
		{
			"one of them without these fields", "route {\n" + block(9, "") + block(9, one) + "respond admitted\n}",
			`200 limit=9 remaining=8 clear=1.000 policy="default";q=9;w=9 ratelimit="default";r=7;t=7`,
		},
		{
			"a limit whose size changes on the way", `route {
				vars size 9
				rate_limit sized {
					size {vars.size}
					headers ratelimit-11
				}
				vars size 8
				rate_limit sized {
					size {vars.size}
					headers ratelimit-11
				}
				respond admitted
			}`,
			`200 policy="sized";q=9;w=9, "sized#2";q=8;w=8 ratelimit="sized";r=8;t=8, "sized#2";r=6;t=6`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Site: tc.site, Unnamed: true})
			s.Run(sitetest.Step{Want: tc.want})
		})
	}
	t.Run("a named route invoked twice", func(t *testing.T) {
		s := sitetest.StartConfig(t, sitetest.Config{
			Site:  "route {\ninvoke limited\ninvoke limited\nrespond admitted\n}",
			Sites: "&(limited) {\nrate_limit api {\nsize 9\nheaders ratelimit-11\n}\n}",
		})
		s.Run(
			sitetest.Step{Want: `200 policy="api";q=9;w=9 ratelimit="api";r=7;t=7`},
			sitetest.Step{Want: `200 policy="api";q=9;w=9 ratelimit="api";r=5;t=5`},
			sitetest.Step{Want: `200 policy="api";q=9;w=9 ratelimit="api";r=3;t=3`},
			sitetest.Step{Want: `200 policy="api";q=9;w=9 ratelimit="api";r=1;t=1`},
			sitetest.Step{Want: `429 retry-after=1 policy="api";q=9;w=9 ratelimit="api";r=0;t=1`},
		)
	})
}

// Guards that a limit's policy is the same in all responses, whatever a request costs, and has
// the quota units of the draft's registry, for bytes and requests in progress, but no other.
func TestPolicyOfUnits(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		route /cheap {
			rate_limit api {
				size 9
				headers ratelimit-11
			}
			rate_limit {
				size 9
				headers ratelimit-11
			}
			rate_limit each {
				max 9
				duration 9s
				min_interval 1s
				cost {header.X-Cost}
				headers ratelimit-11
			}
		}
		rate_limit /bytes {
			limit down {
				size 1000
				drip_rate 1s
				actual_cost bytes
			}
			limit up {
				max 1000
				duration 1000s
				min_interval 1s
				cost body
			}
			limit tokens {
				size 9
				cost body
				actual_cost {query.tokens}
			}
			limit open {
				concurrency 5
			}
			headers ratelimit-11
		}
		rate_limit /costly api {
			size 9
			cost 2
			headers ratelimit-11
		}
		respond admitted
	`)
	const policies = `policy="api";q=9;w=9, "default";q=9;w=9, "each";q=9;w=9, "each/min_interval";q=1;w=1 `
	s.Run(
		sitetest.Step{Path: "/cheap", Header: []string{"X-Cost: 1"}, Want: `200 ` + policies +
			`ratelimit="api";r=8;t=8, "default";r=8;t=8, "each";r=8;t=8, "each/min_interval";r=0;t=1`},
		sitetest.Step{Path: "/costly", Want: `200 policy="api";q=9;w=9 ratelimit="api";r=6;t=6`},
		sitetest.Step{Path: "/bytes", Want: `200 policy="down";q=1000;qu="content-bytes";w=1000, "up";q=1000;qu="content-bytes";w=1000, ` +
			`"up/min_interval";q=1;w=1, "tokens";q=9;w=9, "open";q=5;qu="concurrent-requests" ` +
			`ratelimit="down";r=999;t=999, "up";r=999;t=999, "up/min_interval";r=0;t=1, "tokens";r=8;t=8, "open";r=4`},
		sitetest.Step{Path: "/cheap", After: time.Second, Header: []string{"X-Cost: 5"}, Want: `200 ` + policies +
			`ratelimit="api";r=6;t=6, "default";r=8;t=8, "each";r=4;t=4, "each/min_interval";r=0;t=1`},
	)
}

// upstreamFields are fields of ours as an upstream sends them.
var upstreamFields = map[string]string{
	"X-RateLimit-Limit":     "5000",
	"X-RateLimit-Remaining": "4999",
	"X-RateLimit-Clear":     "1.5",
	"X-RateLimit-Reset":     "1795259336", // on denial ours; else it would not go with the others
	"RateLimit-Policy":      `"up";q=5000;w=60`,
	"RateLimit":             `"up";r=4999;t=1`,
}

// Guards that an upstream's fields do not come behind the body where ours stand
// before it, announced or not: a client would take the last ones it sees. The
// draft forbids its fields there. Other trailers pass.
func TestUpstreamTrailers(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		prefix := http.TrailerPrefix
		if r.URL.Path == "/announced" {
			prefix = ""
			for name := range upstreamFields {
				w.Header().Add("Trailer", name)
			}
			w.Header().Add("Trailer", "X-Checksum")
		}
		switch r.URL.Path {
		case "/only-ours":
			w.Header().Set("Trailer", "X-RateLimit-Limit")
		case "/partly":
			w.Header().Set("Trailer", "X-Checksum, X-Absent")
		}
		io.WriteString(w, "upstream")
		http.NewResponseController(w).Flush()
		if r.URL.Path == "/only-ours" {
			w.Header().Set("X-RateLimit-Limit", "5000")
			return
		}
		for name, value := range upstreamFields {
			w.Header().Set(prefix+name, value)
		}
		w.Header().Set(prefix+"X-Checksum", "1")
	})
	const all = "limit=5000 remaining=4999 clear=1.5 reset=1795259336 policy=\"up\";q=5000;w=60 ratelimit=\"up\";r=4999;t=1"
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		for _, tc := range []struct{ name, block, want string }{
			{"both families", "rate_limit {\nsize 9\nheaders x-ratelimit ratelimit-11\n}", ""},
			{"one family", "rate_limit {\nsize 9\n}", `policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`},
			{"none", "rate_limit {\nsize 9\nheaders off\n}", all},
			{"two blocks", `
				rate_limit outer {
					size 9
				}
				encode gzip
				rate_limit inner {
					size 8
					headers ratelimit-11
				}`, ""},
		} {
			t.Run(protocol+" "+tc.name, func(t *testing.T) {
				s := sitetest.StartConfig(t, sitetest.Config{
					Global: "servers {\nprotocols h1 h2c\n}",
					Site:   "route {\n" + tc.block + "\nreverse_proxy " + upstream + "\n}",
				})
				if protocol == "HTTP/2.0" {
					s.UseHTTP2()
				}
				for _, path := range []string{"/announced", "/sudden", "/partly"} {
					a := s.Get(path)
					if a.Proto != protocol || a.Text != "upstream" {
						t.Errorf("%s: got %s, body %q", path, a.Proto, a.Text)
					}
					if got := fieldstest.In(a.Trailer); got != tc.want {
						t.Errorf("%s: got %s in trailers, want %s", path, got, tc.want)
					}
					if a.Trailer.Get("X-Checksum") != "1" {
						t.Errorf("%s: another trailer is lost: %v", path, a.Trailer)
					}
				}
				if a := s.Get("/only-ours"); tc.want == "" && len(a.Trailer) > 0 {
					t.Errorf("of our fields alone: %v is announced", a.Trailer)
				}
			})
		}
	}
}

// Guards that an informational response has one rate limit and not two: ours, like the final
// one that it announces.
func TestEarlyHintsHaveOneLimit(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		for name, value := range upstreamFields {
			w.Header().Set(name, value)
		}
		w.WriteHeader(http.StatusEarlyHints)
		if r.URL.Path == "/hints" {
			for name := range upstreamFields {
				w.Header().Del(name)
			}
		}
		io.WriteString(w, "upstream")
	})
	const (
		ours = `limit=9 remaining=8 clear=1.000 policy="default";q=9;w=9 ratelimit="default";r=8;t=8`
		hint = "103 </style.css>; rel=preload "
	)
	for _, path := range []string{"/", "/hints"} {
		t.Run(path, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\nsize 9\nheaders x-ratelimit ratelimit-11\n}\nreverse_proxy "+upstream)
			hints, final := s.GetWithHints(path)
			if want := []string{hint + ours, hint + ours}; !slices.Equal(hints, want) {
				t.Errorf("got hints\n %q\nwant\n %q", hints, want)
			}
			if got, want := final.String(), "200 "+ours; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

// Guards the remedy that the documentation gives where an error route proxies:
// of all fields only ours are left.
func TestErrorRouteThatProxies(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for name, value := range upstreamFields {
			w.Header().Set(name, value)
		}
		w.Header().Set("Retry-After", "120")
		w.Header().Set("X-Error-Page", "slow down")
		io.WriteString(w, "error page")
	})
	s := sitetest.Start(t, `
		rate_limit {
			size 1
			headers x-ratelimit ratelimit-11
		}
		respond admitted
		handle_errors {
			reverse_proxy `+upstream+` {
				`+remedy(t)+`
			}
		}
	`)
	s.Get("/")
	a := s.Get("/")
	const want = `200 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1 ` +
		`policy="default";q=1;w=1 ratelimit="default";r=0;t=1`
	if a.String() != want || a.Text != "error page" || a.Header.Get("X-Error-Page") != "slow down" {
		t.Errorf("got %s, body %q\nwant %s, the upstream's body", a, a.Text, want)
	}
}

// remedy returns the lines of the documentation by which a proxy in an error
// route removes an upstream's fields.
func remedy(t *testing.T) string {
	text := filetest.Read(t, "docs/directive.md")
	lines := regexp.MustCompile(`(?m)^\s*header_down -.*$`).FindAllString(string(text), -1)
	if len(lines) == 0 {
		t.Fatal("the documentation has no lines with header_down")
	}
	return strings.Join(lines, "\n")
}

// TestUpstreamFields guards that fields of ours which an upstream sends too do
// not stand twice in the response, and that nothing else of it is lost.
func TestUpstreamFields(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for name, value := range upstreamFields {
			w.Header().Set(name, value)
		}
		if r.URL.Path == "/busy" {
			w.Header().Set("Retry-After", "120")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		io.WriteString(w, "upstream")
	})
	site := `
		@limited not path /free
		rate_limit @limited {
			size 9
			headers %s
		}
		reverse_proxy ` + upstream

	t.Run("both families", func(t *testing.T) {
		s := sitetest.Start(t, fmt.Sprintf(site, "x-ratelimit ratelimit-11"))
		s.Run(
			sitetest.Step{Text: "upstream",
				Want: `200 limit=9 remaining=8 clear=1.000 policy="default";q=9;w=9 ratelimit="default";r=8;t=8`},
			// When the upstream wants clients to wait it is not for us to change.
			sitetest.Step{Path: "/busy", Text: "upstream", Want: `503 limit=9 remaining=7 clear=2.000 retry-after=120 ` +
				`policy="default";q=9;w=9 ratelimit="default";r=7;t=7`},
		)
	})
	t.Run("one family", func(t *testing.T) {
		s := sitetest.Start(t, fmt.Sprintf(site, "x-ratelimit"))
		s.Run(sitetest.Step{Want: `200 limit=9 remaining=8 clear=1.000 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
	t.Run("no limit applies", func(t *testing.T) {
		s := sitetest.Start(t, fmt.Sprintf(site, "x-ratelimit"))
		s.Run(sitetest.Step{Path: "/free", Want: `200 limit=5000 remaining=4999 clear=1.5 reset=1795259336 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
	t.Run("off", func(t *testing.T) {
		s := sitetest.Start(t, fmt.Sprintf(site, "off"))
		s.Run(sitetest.Step{Want: `200 limit=5000 remaining=4999 clear=1.5 reset=1795259336 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
}

// TestFamiliesAreWhole guards that of each family of fields a response has either ours
// or the upstream's and never some of both, over every version of HTTP and when the connection
// is upgraded too, that headers says whose they are, and that a denied request has ours.
func TestFamiliesAreWhole(t *testing.T) {
	const (
		ours   = "X-Ratelimit-Clear=60.000 X-Ratelimit-Limit=1 X-Ratelimit-Remaining=0"
		github = "X-Ratelimit-Limit=1 X-Ratelimit-Remaining=0 X-Ratelimit-Reset=in60s X-Ratelimit-Used=1"
		ietf   = `Ratelimit-Policy="api";q=1;w=60 Ratelimit="api";r=0;t=60`
		up     = "X-Ratelimit-Limit=60 X-Ratelimit-Reset=1795259336 X-Ratelimit-Resource=core X-Ratelimit-Used=1"
		upIETF = "Ratelimit-Limit=60 Ratelimit-Remaining=59"
	)
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		sent := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
		if sent != "ietf" && sent != "none" {
			h.Set("X-RateLimit-Limit", "60")
			h.Set("X-RateLimit-Used", "1")
			h.Set("X-RateLimit-Reset", "1795259336")
			h.Set("X-RateLimit-Resource", "core")
		}
		if sent != "x" && sent != "none" {
			h.Set("RateLimit-Limit", "60")
			h.Set("RateLimit-Remaining", "59")
		}
		if sent == "upgrade" {
			h.Set("Upgrade", "test")
			h.Set("Connection", "Upgrade")
			w.WriteHeader(http.StatusSwitchingProtocols)
		}
	})
	cases := []struct{ headers, sent, want, denied string }{
		{"x-ratelimit", "none", ours, ours + " X-Ratelimit-Reset=60.000"},
		{"x-ratelimit", "x", ours, ours + " X-Ratelimit-Reset=60.000"},
		{"x-ratelimit", "both", upIETF + " " + ours, ours + " X-Ratelimit-Reset=60.000"},
		{"x-ratelimit", "upgrade", upIETF + " " + ours, ours + " X-Ratelimit-Reset=60.000"},
		{"ratelimit-11", "both", ietf + " " + up, ietf},
		{"x-ratelimit ratelimit-11", "both", ietf + " " + ours, ietf + " " + ours + " X-Ratelimit-Reset=60.000"},
		{"off", "both", upIETF + " " + up, ""},
		{"off", "none", "", ""},
		{"github", "none", github, github},
		{"github", "x", github, github},
		{"github", "both", upIETF + " " + github, github},
		{"github", "upgrade", upIETF + " " + github, github},
		{"github ratelimit-11", "both", ietf + " " + github, ietf + " " + github},
	}
	var site strings.Builder
	for i, tc := range cases {
		fmt.Fprintf(&site, "rate_limit /%d/* api {\nkey {http.request.proto}{path}\nsize 1\ndrip_rate 1m\nheaders %s\n}\n", i, tc.headers)
	}
	s := startLeavingSite(t, site.String()+"reverse_proxy "+upstream)
	for version := 1; version <= 3; version++ {
		t.Run(fmt.Sprint("HTTP/", version), func(t *testing.T) {
			target, transport := s.URL(""), s.Client.Transport
			if version == 3 {
				sitetest.OverHTTP3(t)
			}
			if version > 1 {
				target, transport = s.streams(version)
			}
			for i, tc := range cases {
				if tc.sent == "upgrade" && version > 1 {
					continue
				}
				for _, want := range []struct{ fields, retryAfter string }{{tc.want, ""}, {tc.denied, "60"}} {
					r, err := http.NewRequest(http.MethodGet, fmt.Sprint(target, "/", i, "/", tc.sent), nil)
					if err != nil {
						t.Fatal(err)
					}
					if tc.sent == "upgrade" {
						r.Header.Set("Connection", "Upgrade")
						r.Header.Set("Upgrade", "test")
					}
					began := time.Now().Unix()
					res, err := transport.RoundTrip(r)
					if err != nil {
						t.Fatal(err)
					}
					res.Body.Close()
					got := familiesIn(res.Header, began, time.Now().Unix())
					if got != want.fields || res.Header.Get("Retry-After") != want.retryAfter || res.ProtoMajor != version {
						t.Errorf("headers %s, upstream %s: %s with Retry-After %q\ngot  %s\nwant %s",
							tc.headers, tc.sent, res.Proto, res.Header.Get("Retry-After"), got, want.fields)
					}
				}
			}
		})
	}
	// The page is the upstream's, but what it tells of a limit is not what the client ran into.
	t.Run("a page for a denial", func(t *testing.T) {
		const block = "rate_limit {\nkey all\nsize 1\nheaders ratelimit-11 x-ratelimit\n}\n"
		s := sitetest.Start(t, block+"respond admitted\nhandle_errors {\n"+strings.Replace(block, "size 1", "size 5", 1)+
			"reverse_proxy "+upstream+"\n}")
		s.Get("/")
		s.Run(sitetest.Step{Path: "/both", Want: `200 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1 ` +
			`policy="default";q=1;w=1, "default-2";q=5;w=5 ratelimit="default";r=0;t=1, "default-2";r=4`})
	})
}

// familiesIn returns all fields in h of the families that we set, sorted. A time a minute after
// the request, which was sent and answered at the given ones, is called in60s.
func familiesIn(h http.Header, began, ended int64) string {
	var fields []string
	for name, values := range h {
		if !strings.HasPrefix(name, "X-Ratelimit-") && !strings.HasPrefix(name, "Ratelimit") {
			continue
		}
		value := strings.Join(values, "|")
		if at := fieldstest.Number(value); name == "X-Ratelimit-Reset" && at >= began+60 && at <= ended+61 {
			value = "in60s"
		}
		fields = append(fields, name+"="+value)
	}
	slices.Sort(fields)
	return strings.Join(fields, " ")
}

// TestHeadersOption guards which fields each word brings, and that no setting
// hides from a denied client how long to wait.
func TestHeadersOption(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ headers, admitted, denied string }{
		{"", "200 limit=1 remaining=0 clear=1.000",
			"429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
		{"headers x-ratelimit", "200 limit=1 remaining=0 clear=1.000",
			"429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
		{"headers ratelimit-11", `200 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`,
			`429 retry-after=1 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`},
		{"headers ratelimit-11 x-ratelimit",
			`200 limit=1 remaining=0 clear=1.000 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`,
			`429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1 ` +
				`policy="default";q=1;w=1 ratelimit="default";r=0;t=1`},
		{"headers off", "200", "429 retry-after=1"},
	} {
		t.Run(tc.headers, func(t *testing.T) {
			s := sitetest.Start(t, `
				rate_limit {
					size 1
					`+tc.headers+`
				}
				respond "admitted"
			`)
			s.Run(sitetest.Step{Want: tc.admitted, Text: "admitted"}, sitetest.Step{Want: tc.denied})
		})
	}
}

// TestHeadersOfGitHub guards the fields that clients of GitHub's API read: none but those, the
// time within the seconds in which the request was answered, whatever writes the response.
func TestHeadersOfGitHub(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for name, value := range upstreamFields {
			w.Header().Set(name, value)
		}
		w.Header().Set("X-RateLimit-Used", "1")
	})
	const block, ietf = "rate_limit {\nheaders github\n", `policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`
	for _, tc := range []struct {
		name, site string
		reset      [2]int64 // seconds from now
		want       [2]string
	}{
		{"admitted and denied", block + "size 1\ndrip_rate 1m\n}\nrespond ok", [2]int64{60, 60},
			[2]string{"200 limit=1 remaining=0 used=1 reset=?", "429 limit=1 remaining=0 used=1 reset=? retry-after=60"}},
		{"an upstream with its own", block + "size 9\ndrip_rate 1m\n}\nreverse_proxy " + upstream, [2]int64{8 * 60, 7 * 60},
			[2]string{"200 limit=9 remaining=8 used=1 reset=? " + ietf, "200 limit=9 remaining=7 used=2 reset=? " + ietf}},
		{"an error route", block + "size 1\ndrip_rate 1m\n}\nrespond ok\nhandle_errors {\nrespond slow 503\n}", [2]int64{60, 60},
			[2]string{"200 limit=1 remaining=0 used=1 reset=?", "503 limit=1 remaining=0 used=1 reset=? retry-after=60"}},
		{"two blocks, the first decides", "route {\n" + block + "size 9\ndrip_rate 1m\n}\nrate_limit {\nsize 1\ndrip_rate 2m\n}\nrespond ok\n}",
			[2]int64{120, 120},
			[2]string{"200 limit=1 remaining=0 used=1 reset=?", "429 limit=1 remaining=0 used=1 reset=? retry-after=120"}},
		{"requests in progress", block + "key all\nconcurrency 5\n}\nrespond ok", [2]int64{0, 0},
			[2]string{"200 limit=5 remaining=4 used=1 reset=?", "200 limit=5 remaining=4 used=1 reset=?"}},
		{"sliding_log", block + "algorithm sliding_log\nsize 1\nwindow 1m\n}\nrespond ok", [2]int64{60, 60},
			[2]string{"200 limit=1 remaining=0 used=1 reset=?", "429 limit=1 remaining=0 used=1 reset=? retry-after=60"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.Start(t, tc.site)
			for i, want := range tc.want {
				began := time.Now().Unix()
				a := s.Get("/")
				reset := a.Header.Get("X-RateLimit-Reset")
				if got := strings.Replace(a.String(), "reset="+reset, "reset=?", 1); got != want {
					t.Errorf("response %d:\n got %s\nwant %s", i+1, got, want)
				}
				in := fieldstest.Number(reset) - tc.reset[i]
				if in < began || in > time.Now().Unix()+1 {
					t.Errorf("response %d: X-RateLimit-Reset is %s, %d s after the request, want %d", i+1, reset, in+tc.reset[i]-began, tc.reset[i])
				}
			}
		})
	}
}

// TestResetOfWindowsByTheClock guards that all fields and the placeholder tell when the present
// window ends, also of one in which nothing is counted yet: it has begun with the hour or the
// month, not with the request. Both stores tell what the calendar says.
func TestResetOfWindowsByTheClock(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	ends := map[string]func(time.Time) time.Time{
		"window 1h\nwindow_start clock":  func(t time.Time) time.Time { return t.Truncate(time.Hour).Add(time.Hour) },
		"window 24h\nwindow_start clock": func(t time.Time) time.Time { return t.Truncate(24 * time.Hour).Add(24 * time.Hour) },
		"period hour Europe/Berlin":      func(t time.Time) time.Time { return t.Truncate(time.Hour).Add(time.Hour) },
		"period day Europe/Berlin":       func(t time.Time) time.Time { return time.Date(t.Year(), t.Month(), t.Day()+1, 0, 0, 0, 0, berlin) },
		"period month Europe/Berlin":     func(t time.Time) time.Time { return time.Date(t.Year(), t.Month()+1, 1, 0, 0, 0, 0, berlin) },
	}
	var site strings.Builder
	var windows []string
	costs := []string{"cost {query.cost}", "count status 401\nhold off", "count status 401"}
	for window := range ends {
		for _, cost := range costs {
			fmt.Fprintf(&site, "rate_limit /%d {\nlimit l%[1]d {\nalgorithm fixed_window\nsize 10\n%s\n%s\n}\nheaders github ratelimit-11\n}\n", len(windows), window, cost)
			windows = append(windows, window)
		}
	}
	site.WriteString("@charged query status=401\nrespond @charged {http.rate_limit.reset_at} 401\nrespond {http.rate_limit.reset_at}")
	for store, global := range map[string]string{"memory": "", "redis": sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)} {
		t.Run(store, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Global: global, Site: site.String()})
			for i, window := range windows {
				for _, query := range []string{"cost=0", "cost=0", "cost=1&status=401", "cost=0"} {
					began := time.Now().In(berlin)
					s.Clock.Advance(time.Duration(began.UnixNano()) - s.Clock.Now())
					a := s.Get(fmt.Sprintf("/%d?%s", i, query))
					end, now := ends[window](began), time.Now()
					if !now.Before(end) {
						continue // it has ended meanwhile
					}
					_, left, _ := strings.Cut(a.Header.Get("RateLimit"), ";t=")
					in := end.Sub(now).Seconds()
					for name, late := range map[string]float64{
						"reset_at":          float64(fieldstest.Number(a.Text) - end.Unix()),
						"X-RateLimit-Reset": float64(fieldstest.Number(a.Header.Get("X-RateLimit-Reset")) - end.Unix()),
						"RateLimit's t":     float64(fieldstest.Number(left)) - in,
					} {
						if late < 0 || late > 1+now.Sub(began).Seconds() {
							t.Errorf("%s, %s, %s: %s is %v s behind the end of the window", window, costs[i%len(costs)], query, name, late)
						}
					}
				}
			}
		})
	}
}

// TestHeaderDirective guards that an administrator who configures a header directive has the
// last word on our fields: they are not restored when removed or replaced.
func TestHeaderDirective(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "5000")
	})
	for _, tc := range []struct{ name, routes, want string }{
		{"removed outside", `
			header -X-RateLimit-Limit
			rate_limit {
				size 2
			}
			respond "admitted"`, "200 remaining=1 clear=1.000"},
		{"all removed outside", `
			header -X-RateLimit-*
			rate_limit {
				size 2
			}
			reverse_proxy ` + upstream, "200"},
		{"replaced outside, when the response is written", `
			header >X-RateLimit-Limit mine
			rate_limit {
				size 2
			}
			reverse_proxy ` + upstream, "200 limit=mine remaining=1 clear=1.000"},
		{"removed inside", `
			rate_limit {
				size 2
			}
			header -X-RateLimit-Limit
			respond "admitted"`, "200 remaining=1 clear=1.000"},
		{"replaced inside", `
			rate_limit {
				size 2
			}
			header X-RateLimit-Limit mine
			respond "admitted"`, "200 limit=mine remaining=1 clear=1.000"},
		{"changed inside", `
			rate_limit {
				size 2
			}
			header X-RateLimit-Limit 2 two
			reverse_proxy ` + upstream, "200 limit=two remaining=1 clear=1.000"},
		// What stood there before is as an upstream's.
		{"set outside, at once", `
			header X-RateLimit-Limit mine
			rate_limit {
				size 2
			}
			respond "admitted"`, "200 limit=2 remaining=1 clear=1.000"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.Start(t, "route {"+tc.routes+"\n}")
			s.Run(sitetest.Step{Want: tc.want})
		})
	}
}
