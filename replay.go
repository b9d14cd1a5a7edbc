package ratelimit

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/dustin/go-humanize"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/accesslog"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// replay decides the requests of access logs by the limits of one config, on the
// clock of the logs. It is the real thing: the matchers, keys and numbers of the
// config, and the store that decides in a Caddy without Redis.
type replay struct {
	config *dryConfig
	store  *limiter.Memory
	roomy  *roomyStore   // of the sizes that keys need
	now    time.Duration // on the store's clock
	limits []*replayedLimit
	of     map[*policy]*replayedLimit
	host   string // of requests whose log does not tell

	runs    map[*dryServer]*reusedRun
	servers map[replayedSite]*dryServer // nil if no site has the host

	// The request that is being replayed.
	entry   *accesslog.Entry
	at      int64
	url     url.URL
	values  []string
	met     []metLimit
	refused bool

	taken                      int64
	requests, admitted, denied int64 // that any limit applied to
	undecided                  int64 // that a matcher or a value rejected
	hostless                   int64 // whose log does not tell the host
	addressless                int64 // whose log does not tell the client's address
	unserved                   int64 // for hosts that no site of the config has
	otherHosts                 []string

	readsHeaders bool     // whether anything but a key does
	headers      [3]int64 // requests whose log has these accesslog.Headers
}

// replayedSite is what decides which server handles a request.
type replayedSite struct {
	host string
	tls  bool
}

// metLimit is a limit that the request has met.
type metLimit struct {
	limit  *replayedLimit
	denied bool // by this limit
}

// maxReplayedKeys is the most keys of which a replay keeps statistics.
const maxReplayedKeys = 1_000_000

// newReplay returns a replay by the limits of config.
func newReplay(config *dryConfig, opt replayOptions) *replay {
	p := &replay{
		config:  config,
		of:      make(map[*policy]*replayedLimit),
		host:    opt.host,
		runs:    make(map[*dryServer]*reusedRun),
		servers: make(map[replayedSite]*dryServer),
	}
	if p.host == "" {
		p.host = config.onlyHost()
	}
	p.store = limiter.NewMemory(func() time.Duration { return p.now })
	p.store.SetMaxKeys(config.app.maxKeys)
	p.roomy = newRoomyStore(func() time.Duration { return p.now }, maxReplayedKeys)
	for _, s := range config.servers {
		p.runs[s] = s.newReusedRun(p.visit)
		p.readsHeaders = p.readsHeaders || s.readsHeaders()
		for _, h := range s.handlers {
			p.addLimits(h.limits.Limits, opt)
		}
	}
	for _, l := range p.limits {
		l.keys.most = max(maxReplayedKeys/len(p.limits), 1)
	}
	return p
}

// onlyHost returns the host of a config that has a single one, or "".
func (d *dryConfig) onlyHost() string {
	var hosts []string
	for _, s := range d.servers {
		hosts = append(hosts, s.hosts...)
	}
	slices.Sort(hosts)
	if hosts = slices.Compact(hosts); len(hosts) != 1 || strings.Contains(hosts[0], "*") {
		return ""
	}
	return hosts[0]
}

// addLimits adds limits and those nested in them. Limits that share their buckets
// are one.
func (p *replay) addLimits(limits []*Limit, opt replayOptions) {
	for _, l := range limits {
		for _, b := range l.buckets {
			if b.off || p.of[b.policy] != nil {
				continue
			}
			i := slices.IndexFunc(p.limits, func(known *replayedLimit) bool { return known.bucket == b.name })
			if i < 0 {
				i = len(p.limits)
				p.limits = append(p.limits, newReplayedLimit(b, opt))
			}
			p.of[b.policy] = p.limits[i]
		}
		p.addLimits(l.Limits, opt)
	}
}

// take replays a request, as if it arrived at the given time, in nanoseconds since
// 1970. Times must not go back.
func (p *replay) take(e *accesslog.Entry, at int64) {
	p.now = max(time.Duration(at), time.Hour) // windows may be aligned to the clock
	p.entry, p.at, p.met, p.refused = e, at, p.met[:0], false
	p.taken++
	run := p.prepare()
	if run == nil {
		return
	}
	p.headers[e.Headers]++
	if e.ClientIP == "" {
		p.addressless++
	}
	run.run.now = time.Unix(0, at)
	if err := run.serve(e.ClientIP, e.UserID, e.ClientIP != e.RemoteIP); err != nil {
		p.refused = true // a matcher failed, and the request with it
	}
	p.count()
}

// prepare makes the request, and returns the run of the server that handles it, or
// nil if no site has its host.
func (p *replay) prepare() *reusedRun {
	e := p.entry
	host, secure := e.Host, e.TLS
	if host == "" {
		host = p.host
		p.hostless++
	}
	server, known := p.servers[replayedSite{host, secure}]
	if !known {
		if server, _ = p.config.serverOf(host, secure); e.Host == "" && server != nil && server.tls != secure {
			server, _ = p.config.serverOf(host, server.tls) // the log does not tell of TLS either
		}
		if server != nil && !server.hasSite(host) {
			server = nil
		}
		if len(p.servers) == 10_000 {
			clear(p.servers) // clients choose the hosts that they ask for
		}
		p.servers[replayedSite{strings.Clone(host), secure}] = server
	}
	if server == nil {
		p.addOtherHost(host)
		return nil
	}
	run := p.runs[server]
	r := run.request
	p.url = e.URL
	r.Method, r.URL, r.RequestURI, r.Host, r.Proto = e.Method, &p.url, e.URI, host, e.Proto
	if r.ProtoMajor, r.ProtoMinor = 1, 1; strings.HasPrefix(e.Proto, "HTTP/") {
		r.ProtoMajor, r.ProtoMinor, _ = http.ParseHTTPVersion(e.Proto)
	}
	if r.RemoteAddr = e.RemoteIP; e.RemoteIP != "" && e.RemoteIP != "@" { // as on a unix socket
		r.RemoteAddr = net.JoinHostPort(e.RemoteIP, cmp.Or(e.RemotePort, "0"))
	}
	if r.TLS = nil; secure || e.Host == "" && server.tls {
		r.TLS = &tlsOfReplay
	}
	p.values = e.HeaderTo(r.Header, p.values)
	return run
}

// hasSite reports whether a site of s has the host, as its matchers decide.
func (s *dryServer) hasSite(host string) bool {
	r := &http.Request{Host: host}
	r = r.WithContext(context.WithValue(context.Background(), caddy.ReplacerCtxKey, caddy.NewReplacer()))
	return len(s.hosts) == 0 || slices.ContainsFunc(s.hosts, func(site string) bool {
		m := caddyhttp.MatchHost{site}
		if err := m.Provision(caddy.Context{}); err != nil {
			return false // Caddy would not have loaded it
		}
		matches, _ := m.MatchWithError(r) // there are no errors
		return matches
	})
}

// addOtherHost counts a request for a host that no site has. If the log does not tell
// the host, that is counted already.
func (p *replay) addOtherHost(host string) {
	if host == "" {
		return
	}
	p.unserved++
	const shown = 3
	if len(p.otherHosts) < shown && !slices.Contains(p.otherHosts, host) {
		p.otherHosts = append(p.otherHosts, strings.Clone(host[:min(len(host), maxText)]))
	}
}

// headersRead matches what reads header fields in routes in JSON: the matchers, their
// functions in expressions, and placeholders. keysOfLimits matches the keys of limits.
var (
	headersRead  = regexp.MustCompile(`"header(_regexp)?":|\bheader(_regexp)?\(|\{(http\.request\.)?(header|cookie)\.`)
	keysOfLimits = regexp.MustCompile(`"key":"[^"]*"`)
)

// readsHeaders reports whether anything on the way to the limits of s reads header
// fields, besides their keys.
func (s *dryServer) readsHeaders() bool {
	return headersRead.Match(keysOfLimits.ReplaceAll(marshal([]any{s.routes, s.named}), nil))
}

// tlsOfReplay is what is known of the TLS connections of logs.
var tlsOfReplay = tls.ConnectionState{HandshakeComplete: true, Version: tls.VersionTLS13}

// visit implements visitLimits.
func (p *replay) visit(h *Handler, eval *evaluation, err error) bool {
	if err != nil {
		p.refused = true
		return false
	}
	if len(p.entry.Redacted) > 0 || p.entry.Headers != accesslog.AllHeaders {
		p.dropWithheld(eval)
		if len(eval.buckets) == 0 {
			return true
		}
	}
	take := func() error {
		eval.decisions, err = p.store.Take(context.Background(), limiter.Request{
			Buckets:    eval.buckets,
			Accounting: h.accounting.inStore(),
		}, eval.decisions[:0])
		return err
	}
	if eval.ask(h.accounting, take) != nil {
		p.refused = true
		return false
	}
	levels, err := p.roomy.fill(eval.buckets)
	if err != nil {
		p.refused = true
		return false
	}
	denied := false
	for i := range eval.decisions {
		l, b := p.of[eval.policies[i]], &eval.buckets[i]
		d := eval.decisions[i].Denied
		denied = denied || d
		l.keys.add(b, p.now, levels[i], d)
		if b.Name != l.bucket && p.entry.ClientIP != "" {
			l.keyless++
		}
		p.met = append(p.met, metLimit{l, d})
	}
	return !denied
}

// dropWithheld removes the buckets whose key the log does not tell.
func (p *replay) dropWithheld(eval *evaluation) {
	for i := len(eval.buckets) - 1; i >= 0; i-- {
		l := p.of[eval.policies[i]]
		if !slices.ContainsFunc(l.headers, p.entry.Withholds) {
			continue
		}
		if p.entry.Headers == accesslog.AllHeaders {
			l.redacted++
		} else {
			l.headerless++
		}
		eval.buckets = slices.Delete(eval.buckets, i, i+1)
		eval.policies = slices.Delete(eval.policies, i, i+1)
	}
}

// count counts what became of the request.
func (p *replay) count() {
	denied := slices.ContainsFunc(p.met, func(m metLimit) bool { return m.denied })
	switch {
	case p.refused: // by what is behind the limits that it has met
		p.undecided++
	case len(p.met) == 0:
	case denied:
		p.requests++
		p.denied++
	default:
		p.requests++
		p.admitted++
	}
	for i := range p.met {
		m := &p.met[i]
		m.limit.count(p.at, p.entry.URL.Path, m.denied, !denied && !p.refused)
	}
}

// replayOptions are those of a replay that concern what it counts.
type replayOptions struct {
	showKeys bool
	location *time.Location // for hours
	host     string         // of requests whose log does not tell
}

// headersIn returns the header fields that a key is made from, which logs may redact or
// not have.
func headersIn(k *key) (names []string) {
	for _, part := range k.parts {
		if !part.placeholder {
			continue
		}
		name := part.header
		if strings.HasPrefix(part.text, "http.request.cookie.") {
			name = "Cookie"
		}
		if name != "" {
			names = append(names, name)
		}
	}
	return names
}

// unusual returns what to know about the numbers of l, one sentence each.
func (p *replay) unusual(l *replayedLimit) (text []string) {
	if l.redacted > 0 {
		text = append(text, fmt.Sprintf("%s requests were left out, because the log redacts %s, which the key needs: "+
			"to replay this limit, log requests with log_credentials.", humanize.Comma(l.redacted), strings.Join(l.headers, ", ")))
	}
	if l.headerless > 0 {
		text = append(text, fmt.Sprintf("%s requests were left out, because the log does not have %s, which the key needs: "+
			"to replay this limit, log requests in Caddy's JSON with their header fields.", humanize.Comma(l.headerless), strings.Join(l.headers, ", ")))
	}
	if l.keyless > 0 && l.keyless == l.requests && l.redacted+l.headerless == 0 {
		text = append(text, fmt.Sprintf("No request had a value for the key %s, so clients were told apart by their addresses. "+
			"If the log leaves out what the key is made of, these numbers mean nothing.", l.key))
	}
	if l.factorVaries {
		text = append(text, "The sizes are those after the division by factor, which depends on the request.")
	}
	if l.keys.folded > 0 {
		text = append(text, fmt.Sprintf("There were more keys than the %d whose statistics are kept. "+
			"Those that came back after a while count as new ones.", l.keys.most))
	}
	for _, u := range p.store.Limits() {
		if u.Name != l.bucket {
			continue
		}
		if u.Forgotten > 0 {
			text = append(text, fmt.Sprintf("max_keys, %d, was too small: %d buckets were forgotten for those of new keys.", u.MaxKeys, u.Forgotten))
		}
		if u.Shared > 0 {
			text = append(text, fmt.Sprintf("max_keys, %d, was too small: %d requests were decided by a bucket that keys share.", u.MaxKeys, u.Shared))
		}
	}
	return text
}
