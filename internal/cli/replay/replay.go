// Package replay is the command replay: it decides the requests of access logs by the
// limits of a config.
package replay

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/accesslog"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// replay decides the requests of access logs by the limits of one config, on the
// clock of the logs. It is the real thing: the matchers, keys and numbers of the
// config, and the store that decides in a Caddy without Redis.
type replay struct {
	config    *offline.Config
	store     *limiter.Memory
	roomy     *roomyStore   // of the sizes that keys need
	now       time.Duration // on the store's clock
	limits    []*replayedLimit
	following []*followingLimit
	paced     []string // the paths of limits with a speed
	of        map[*rule.Bucket]*replayedLimit
	host      string // of requests whose log does not say

	servers map[replayedSite]*offline.Server // nil if no site has the host

	// The request that is being replayed.
	entry   *accesslog.Entry
	at      int64
	met     []metLimit
	refused bool
	held    []heldUnits

	// How many of held are of handlers before the one that rejected the request, and how.
	rejected  int
	rejection settle.Response

	inProgress inProgress // what requests hold that have not ended

	taken                      int64
	requests, admitted, denied int64 // that any limit applied to
	undecided                  int64 // that a matcher or a value rejected
	hostless                   int64 // whose log does not say the host
	addressless                int64 // whose log does not say the client's address
	unserved                   int64 // for hosts that no site of the config has
	otherHosts                 []string

	readsBodies  bool     // whether any key has fields of bodies, which no log has
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
	dryRun bool // and that denies nothing
}

// maxReplayedKeys is the most keys of which a replay keeps statistics.
const maxReplayedKeys = 1_000_000

// newReplay returns a replay by the limits of config.
func newReplay(config *offline.Config, opt Options) *replay {
	p := &replay{
		config:  config,
		of:      make(map[*rule.Bucket]*replayedLimit),
		host:    opt.Host,
		servers: make(map[replayedSite]*offline.Server),
	}
	if p.host == "" {
		p.host = config.OnlyHost()
	}
	p.store = limiter.NewMemoryWithClock(func() time.Duration { return p.now })
	p.store.SetMaxKeys(config.MaxKeys)
	p.roomy = newRoomyStore(func() time.Duration { return p.now }, maxReplayedKeys)
	for _, s := range config.Servers {
		p.readsHeaders = p.readsHeaders || s.ReadsHeaders()
		p.addLimits(s.Limits(), opt)
	}
	for _, l := range p.limits {
		l.keys.most = max(maxReplayedKeys/len(p.limits), 1)
	}
	return p
}

// addLimits adds limits. Those that share their buckets are one.
func (p *replay) addLimits(limits []*offline.Limit, opt Options) {
	for _, l := range limits {
		if l.Limit.Load != nil {
			p.following = append(p.following, &followingLimit{path: l.Path, bucket: l.Bucket, latency: l.Limit.Load.Options.Latency})
			continue
		}
		if l.Limit.Pace != nil {
			if !slices.Contains(p.paced, l.Path) {
				p.paced = append(p.paced, l.Path)
			}
			continue
		}
		if l.Off || p.of[l.Bucket] != nil {
			continue
		}
		i := slices.IndexFunc(p.limits, func(known *replayedLimit) bool { return known.bucket == l.Name })
		if i < 0 {
			i = len(p.limits)
			p.limits = append(p.limits, newReplayedLimit(l, opt))
			p.readsBodies = p.readsBodies || len(p.limits[i].fields) > 0
		}
		p.of[l.Bucket] = p.limits[i]
	}
}

// take replays a request, as if it arrived at the given time, in nanoseconds since
// 1970. Times must not go back.
func (p *replay) take(e *accesslog.Entry, at int64) {
	p.goTo(max(time.Duration(at), time.Hour)) // windows may be aligned to the clock
	clear(p.held)
	p.entry, p.at, p.met, p.refused, p.held, p.rejected = e, at, p.met[:0], false, p.held[:0], 0
	p.taken++
	server, r := p.prepare()
	if server == nil {
		return
	}
	p.headers[e.Headers]++
	if e.ClientIP == "" {
		p.addressless++
	}
	run, err := server.Serve(offline.Request{Request: r, UserID: e.UserID, ClientIP: e.ClientIP, Proxied: e.ClientIP != e.RemoteIP}, p.visit)
	if err != nil {
		p.refused = true // a matcher failed, and the request with it
		p.reject(settle.Response{})
	}
	if len(p.held) > 0 {
		p.keep(run)
	}
	p.count()
}

// prepare returns the request and the server that handles it, or nil if no site has its host.
func (p *replay) prepare() (*offline.Server, *http.Request) {
	e := p.entry
	host, secure := e.Host, e.TLS
	if host == "" {
		host = p.host
		p.hostless++
	}
	server, known := p.servers[replayedSite{host, secure}]
	if !known {
		if server, _ = p.config.ServerOf(host, secure); e.Host == "" && server != nil && server.TLS != secure {
			server, _ = p.config.ServerOf(host, server.TLS) // the log does not say of TLS either
		}
		if server != nil && !server.HasSite(host) {
			server = nil
		}
		if len(p.servers) == 10_000 {
			clear(p.servers) // clients choose the hosts that they request
		}
		p.servers[replayedSite{strings.Clone(host), secure}] = server
	}
	if server == nil {
		p.addOtherHost(host)
		return nil, nil
	}
	at := e.URL
	r := &http.Request{
		Method: e.Method, URL: &at, RequestURI: e.URI, Host: host, Proto: e.Proto, ProtoMajor: 1, ProtoMinor: 1,
		Header: e.Header.Clone(), Body: http.NoBody, // other configs get the same header
	}
	if r.Header == nil {
		r.Header = make(http.Header)
	}
	if strings.HasPrefix(e.Proto, "HTTP/") {
		r.ProtoMajor, r.ProtoMinor, _ = http.ParseHTTPVersion(e.Proto)
	}
	if r.RemoteAddr = e.RemoteIP; e.RemoteIP != "" && e.RemoteIP != "@" { // as on a unix socket
		r.RemoteAddr = net.JoinHostPort(e.RemoteIP, cmp.Or(e.RemotePort, "0"))
	}
	if secure || e.Host == "" && server.TLS {
		r.TLS = &tlsState
	}
	return server, r
}

// addOtherHost counts a request for a host that no site has. If the log does not say
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

// tlsState is what is known of the TLS connections of logs.
var tlsState = tls.ConnectionState{HandshakeComplete: true, Version: tls.VersionTLS13}

// visit implements offline.Visit.
func (p *replay) visit(h *offline.Handler, r *http.Request) bool {
	q, err := rule.Evaluate(r, h.Limits, time.Unix(0, p.at))
	defer q.Release()
	if err != nil {
		p.refused = true
		p.reject(settle.Response{})
		return false
	}
	if p.time(q); p.withhold(q) == len(q.Entries()) {
		return true
	}
	if err := q.Decide(p.store, rule.How{Accounting: h.Accounting}); err != nil {
		p.refused = true
		return false
	}
	before := len(p.held)
	buckets, decided := p.decided(q)
	levels, err := p.roomy.fill(buckets)
	for i := range p.held[before:] {
		p.held[before+i].roomy = p.roomy.held
	}
	if err != nil {
		p.refused = true
		p.reject(settle.Response{})
		return false
	}
	denied := p.meet(buckets, decided, levels)
	if denied {
		p.rejected, p.rejection = before, settle.Response{Status: http.StatusTooManyRequests}
	}
	return !denied
}

// decided returns the entries that were decided and their buckets, each as if it were on its own, and adds what
// they hold.
func (p *replay) decided(q *rule.Request) (buckets []limiter.Bucket, decided []*rule.Entry) {
	for i := range q.Entries() {
		e := &q.Entries()[i]
		if !e.Decided {
			continue
		}
		if held := q.Held(i); held != nil {
			p.held = append(p.held, heldUnits{limit: p.of[e.Bucket], held: held, index: len(buckets)})
		}
		q := e.Query
		q.Borrows, q.Pool = false, false
		buckets, decided = append(buckets, q), append(decided, e)
	}
	return buckets, decided
}

// meet counts, at each limit, what was decided on a request, given the levels of its buckets, and reports whether it
// is denied.
func (p *replay) meet(buckets []limiter.Bucket, decided []*rule.Entry, levels []level) (denied bool) {
	leased := true
	for i, e := range decided {
		l := p.of[e.Bucket]
		d := e.Decision.Denied
		denied = denied || e.Denies()
		recent := l.keys.add(&buckets[i], p.now, levels[i], d)
		leased = leased && l.leasable && recent > leaseCalls && !d && e.Decision.Remaining >= leaseRoom
		if e.ByAddress() && p.entry.ClientIP != "" {
			l.keyless++
		}
		l.decided(e)
		p.met = append(p.met, metLimit{l, d, e.Decision.DryRun})
	}
	for _, e := range decided {
		if l := p.of[e.Bucket]; !denied { // as denials are remembered
			l.passed++
			if leased {
				l.leased++
			}
		}
	}
	return denied
}

// decided counts what was special about a decision.
func (l *replayedLimit) decided(e *rule.Entry) {
	if e.Began {
		l.bans++
	} else if e.Banned > 0 {
		l.banned++
	}
	if e.Decision.Borrowed && !e.Decision.Pool {
		l.borrowed++
	}
	if e.Over {
		l.over++
	}
	if e.Delay > 0 {
		l.delayed++
		l.longest = max(l.longest, e.Delay)
	}
}

// followingLimit is a limit that follows the load, which a log does not record.
type followingLimit struct {
	path     string
	bucket   *rule.Bucket
	latency  time.Duration
	answered int64
	took     time.Duration // that all answers did, until they ended
}

// time notes how long the request took at the limits that follow the load, if it was answered.
func (p *replay) time(q *rule.Request) {
	e := p.entry
	if e.Duration < 0 || e.Status < http.StatusOK || e.Status >= statusClientLeft || e.Status == http.StatusTooManyRequests {
		return
	}
	for i := range q.Loads() {
		for _, l := range p.following {
			if l.bucket == q.Loads()[i].Bucket {
				l.answered++
				l.took += time.Duration(e.Duration)
			}
		}
	}
}

// note returns what to know about l.
func (l *followingLimit) note() string {
	const enough, times = 30, 3
	text := "Limit " + l.path + " follows the load, which a log does not record: it denies nothing here."
	if l.answered < enough {
		return text
	}
	mean := (l.took / time.Duration(l.answered)).Round(time.Millisecond)
	if times*mean <= l.latency {
		return text
	}
	return text + fmt.Sprintf(" Its requests took %v on average. Its latency, %v, should be at least three times what is usual until responses begin: "+
		"%v, unless the upstream was busy or sending took long.", mean, l.latency, min(times*mean, time.Minute))
}

// withhold leaves out the buckets whose key the log does not say. It returns how many.
func (p *replay) withhold(q *rule.Request) (n int) {
	for i := range q.Entries() {
		l := p.of[q.Entries()[i].Bucket]
		switch {
		case len(l.fields) > 0:
			l.bodiless++
		case !slices.ContainsFunc(l.headers, p.entry.Withholds):
			continue
		case p.entry.Headers == accesslog.AllHeaders:
			l.redacted++
		default:
			l.headerless++
		}
		q.Withhold(i)
		n++
	}
	return n
}

// isDenied reports whether a limit has denied the request.
func (p *replay) isDenied() bool {
	return slices.ContainsFunc(p.met, func(m metLimit) bool { return m.denied && !m.dryRun })
}

// count counts the outcome of the request.
func (p *replay) count() {
	denied := p.isDenied()
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
		if denied && !m.denied && !p.refused {
			m.limit.spared++
		}
	}
}

// Options say what a replay counts.
type Options struct {
	ShowKeys bool
	Location *time.Location // for hours
	Host     string         // of requests whose log does not say
}

// With consistency lease 100ms, a node renews the lease of a key with many requests
// about every quarter of that. So of the requests of one key in that time, the first
// and a renewal use Redis, and no others, if there is enough room to lease something. This
// is a careful estimate: a busier key does so less often.
const (
	lease       = "lease 100ms"
	leasePeriod = 25 * time.Millisecond
	leaseCalls  = 2
	leaseRoom   = 8
)

// leaseAdvice returns what a lease would spare if l is exact and most of its calls would be
// spared, and otherwise "".
func (p *replay) leaseAdvice(l *replayedLimit) string {
	if p.config.Redis == nil || !l.exact || l.leased < l.passed/2+1 {
		return ""
	}
	return fmt.Sprintf("Most of its requests follow others of their key closely: with consistency %s, one Caddy would decide about %s of the %s that pass without asking Redis.",
		lease, humanize.Comma(l.leased), humanize.Comma(l.passed))
}

// sentences are what to know about numbers.
type sentences []string

// add adds a sentence about a number of requests, which comes first in it, unless that is 0.
func (s *sentences) add(n int64, format string, args ...any) {
	if n > 0 {
		*s = append(*s, fmt.Sprintf(format, append([]any{humanize.Comma(n)}, args...)...))
	}
}

// unusual returns what to know about the numbers of l, one sentence each.
func (p *replay) unusual(l *replayedLimit) []string {
	var text sentences
	headers := strings.Join(l.headers, ", ")
	text.add(l.redacted, "%s requests were left out, because the log redacts %s, which the key needs: "+
		"to replay this limit, log requests with log_credentials.", headers)
	text.add(l.headerless, "%s requests were left out, because the log does not have %s, which the key needs: "+
		"to replay this limit, log requests in Caddy's JSON with their header fields.", headers)
	if l.bodiless > 0 {
		text.add(l.bodiless, "%s requests were left out, because no log has their bodies, and the key needs {%s}.", l.fields[0])
	}
	if l.keyless > 0 && l.keyless == l.requests && l.redacted+l.headerless == 0 {
		text = append(text, fmt.Sprintf("No request had a value for the key %s, so clients were distinguished by their addresses. "+
			"If the log leaves out what the key is made of, these numbers mean nothing.", l.key))
	}
	bans := "It placed %s bans, which alone denied %s of the requests."
	if l.bans == 1 {
		bans = "It placed %s ban, which alone denied %s of the requests."
	}
	text.add(l.bans, bans, humanize.Comma(l.banned))
	if l.dryRun {
		text = append(text, "It is a dry run: requests that it denied here would have passed.")
	}
	text.add(l.over, "%s requests passed above its size, by soft.")
	text.add(l.delayed, "max_delay delayed %s requests, by at most %v.", l.longest.Round(time.Millisecond))
	text = append(text, l.unknown()...)
	text.add(l.borrowed, "It had no room for %s requests, which its pool had.")
	if l.factorVaries {
		text = append(text, "The sizes are those after the division by factor, which depends on the request.")
	}
	if l.keys.folded > 0 {
		text = append(text, fmt.Sprintf("There were more keys than the %d whose statistics are kept. "+
			"Those that came back after a while count as new ones.", l.keys.most))
	}
	for _, u := range p.store.Usage() {
		if u.Name == l.bucket && u.Forgotten > 0 {
			text = append(text, fmt.Sprintf("max_keys, %d, was too small: %d buckets were forgotten for new keys.", u.MaxKeys, u.Forgotten))
		}
		if u.Name == l.bucket && u.Shared > 0 {
			text = append(text, fmt.Sprintf("max_keys, %d, was too small: %d requests were decided by a bucket that keys share.", u.MaxKeys, u.Shared))
		}
	}
	return text
}
