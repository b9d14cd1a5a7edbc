// Package explain is the command explain: which limits of a config a request would meet.
package explain

import (
	"cmp"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/spf13/cobra"
	"golang.org/x/net/http/httpguts"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Command returns the command explain.
func Command() *cobra.Command {
	cmd := command.Runs(&cobra.Command{
		Use:   "explain [FILE] [METHOD] URL",
		Short: "Shows which limits of a config a request would meet",
		Long: `
Shows which limits of a config a request would meet, with which keys, at what cost,
and why it would not meet the others. FILE is the config, as in --config, and METHOD, in
capitals, is GET by default, or POST with a body.

It does not need a running Caddy. The matchers, keys and numbers of the config are
evaluated, and the handlers vars, map, rewrite and request_header run. Other handlers are
assumed to pass the request on unchanged, and are listed.`,
		Example: `  caddy rate-limit explain https://example.com/search
  caddy rate-limit explain Caddyfile -H 'X-Api-Key: abc' --client-ip 203.0.113.7 POST https://example.com/login
  caddy rate-limit explain --data 'email=alice@example.com' https://example.com/login`,
		Args: cobra.RangeArgs(1, 3),
	}, func(cmd *cobra.Command, args []string) error { return runExplain(cmd, args) })
	offline.AddFlags(cmd)
	cmd.Flags().StringP("method", "X", "", "The method, instead of METHOD")
	cmd.Flags().StringP("data", "d", "", "The body of the request, whose fields a limit may name: a form, unless -H 'Content-Type: ...' says otherwise")
	cmd.Flags().StringArrayP("header", "H", nil, "A header field of the request, as 'Name: value'; may be repeated")
	cmd.Flags().String("client-ip", "192.0.2.1", "The address that the request comes from")
	cmd.Flags().String("user", "", "The user that is logged in, for {http.auth.user.id}")
	return cmd
}

// explanation is what explain finds.
type explanation struct {
	Request string   `json:"request"`
	From    string   `json:"from"`
	Server  string   `json:"server"`
	Listen  []string `json:"listen"`

	Limits  []explainedLimit `json:"limits"`  // that the request meets, in their order
	Others  []explainedOther `json:"others"`  // that it does not meet
	Refused string           `json:"refused"` // why it is rejected before any limit decides, empty if it is not
	Status  int              `json:"status,omitempty"`
	Notes   []string         `json:"notes"`
}

// explainedLimit is a limit that a request meets.
type explainedLimit struct {
	Limit string `json:"limit"`
	Key   string `json:"key"`
	NoKey bool   `json:"no_key,omitempty"` // it has none, so the key is the client's address
	Cost  int64  `json:"cost"`

	Connection bool `json:"connection,omitempty"` // whether it is the connection that meets it

	adminjson.Numbers // a period's window is as long as it is now
}

// explainedOther is a limit that a request does not meet.
type explainedOther struct {
	Limit string `json:"limit"`
	Why   string `json:"why"`
}

// runExplain runs the command explain.
func runExplain(cmd *cobra.Command, args []string) error {
	file := ""
	if n := len(args); n == 3 || n == 2 && args[0] != strings.ToUpper(args[0]) && !cmd.Flags().Changed("config") {
		file, args = args[0], args[1:]
	}
	req, err := parseRequest(cmd, args)
	if err != nil {
		return err
	}
	d, err := offline.LoadFor(cmd, file)
	if err != nil {
		return err
	}
	defer d.Close()
	e, err := explain(d, req)
	if err != nil {
		return err
	}
	if asJSON, _ := cmd.Flags().GetBool("json"); asJSON {
		return terminal.PrintJSON(cmd.OutOrStdout(), e)
	}
	e.print(cmd.OutOrStdout())
	return nil
}

// parseRequest returns the request that the arguments and flags describe.
func parseRequest(cmd *cobra.Command, args []string) (req offline.Request, err error) {
	method, target := http.MethodGet, args[len(args)-1]
	data, _ := cmd.Flags().GetString("data")
	if data != "" {
		method = http.MethodPost
	}
	if len(args) > 1 {
		method = args[0]
	}
	if flag, _ := cmd.Flags().GetString("method"); flag != "" {
		method = flag
	}
	at, err := url.Parse(target)
	if err != nil || at.Host == "" || at.Scheme != "http" && at.Scheme != "https" || at.User != nil {
		return req, fmt.Errorf("URL: %q is not valid; use one such as https://example.com/search?q=x", target)
	}
	r, err := http.NewRequestWithContext(cmd.Context(), method, target, http.NoBody)
	if err != nil {
		return req, fmt.Errorf("METHOD: %q is not valid; use one such as GET or POST", method)
	}
	r.Body = http.NoBody
	r.Host = at.Host
	r.URL.Scheme, r.URL.Host, r.URL.Fragment, r.URL.RawFragment = "", "", "", ""
	if r.URL.Path == "" {
		r.URL.Path = "/"
	}
	r.RequestURI = r.URL.RequestURI()
	if at.Scheme == "https" {
		r.TLS = &tls.ConnectionState{HandshakeComplete: true, Version: tls.VersionTLS13, ServerName: at.Hostname()}
	}
	headers, _ := cmd.Flags().GetStringArray("header")
	for _, field := range headers {
		name, value, ok := strings.Cut(field, ":")
		value = textproto.TrimString(value)
		if !ok || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return req, fmt.Errorf("header: %q is not valid; use a field such as 'X-Api-Key: abc'", field)
		}
		if strings.EqualFold(name, "Host") {
			r.Host = value
		} else {
			r.Header.Add(name, value)
		}
	}
	if data != "" {
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(data)), int64(len(data))
		if r.Header["Content-Type"] == nil {
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		}
	}
	address, _ := cmd.Flags().GetString("client-ip")
	if _, err := netip.ParseAddr(address); err != nil {
		return req, fmt.Errorf("client-ip: %q is not valid; use an IP address", address)
	}
	r.RemoteAddr = net.JoinHostPort(address, "50000")
	user, _ := cmd.Flags().GetString("user")
	return offline.Request{Request: r, UserID: user}, nil
}

// explain finds out which limits a request meets.
func explain(d *offline.Config, req offline.Request) (*explanation, error) {
	s, _ := d.ServerOf(req.Host, req.TLS != nil)
	if s == nil {
		return nil, errors.New("the config has no HTTP server")
	}
	scheme := "http"
	if req.TLS != nil {
		scheme = "https"
	}
	e := &explanation{
		Request: req.Method + " " + scheme + "://" + req.Host + req.RequestURI, Server: s.Name,
		From:   req.RemoteAddr[:strings.LastIndexByte(req.RemoteAddr, ':')],
		Limits: []explainedLimit{}, Others: []explainedOther{}, Notes: []string{}, Listen: []string{},
	}
	for _, a := range s.Listen {
		e.Listen = append(e.Listen, a.String())
	}
	if s.TLS != (req.TLS != nil) || !s.Accepts(req.Host, req.TLS != nil) {
		e.Refused = "No server of the config listens at that address; " + s.Name + " listens at " + strings.Join(e.Listen, " and ")
		if s.TLS && req.TLS == nil {
			e.Refused += ", for HTTPS. Caddy redirects plain HTTP to it by default, before any limit"
		}
		e.Refused += "."
		return e, nil
	}
	x := &explainer{explanation: e, reached: make(map[*offline.Handler]bool), chosen: make(map[string]bool)}
	x.connect(d, req)
	x.watch(s)
	if _, err := s.Serve(req, x.visit); err != nil {
		x.refuse(err)
	}
	for _, h := range s.Handlers {
		if !x.reached[h] {
			x.addOthers(h.Buckets, x.whyNot(h))
		}
	}
	e.Notes = append(e.Notes, d.Warnings...)
	return e, nil
}

// explainer explains a request while it passes through the routes.
type explainer struct {
	*explanation
	reached map[*offline.Handler]bool
	chosen  map[string]bool // the groups of which a route matched
}

// watched are the matchers of a route, with what they did.
type watched struct {
	x              *explainer
	group          string
	sets           caddyhttp.MatcherSets
	asked, matched bool
	failed         string // the matchers that do not match
}

// watch has the matchers of all routes watched.
func (x *explainer) watch(s *offline.Server) {
	for _, h := range s.Handlers {
		for _, rt := range h.Around.Routes() {
			if len(rt.MatcherSets) == 1 && len(rt.MatcherSets[0]) == 1 {
				if _, known := rt.MatcherSets[0][0].(*watched); known {
					continue
				}
			}
			rt.MatcherSets = caddyhttp.MatcherSets{{&watched{x: x, group: rt.Group, sets: rt.MatcherSets}}}
		}
	}
}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (m *watched) MatchWithError(r *http.Request) (bool, error) {
	matches, err := m.sets.AnyMatchWithError(r)
	m.asked, m.matched = true, matches || err != nil
	if m.matched {
		m.x.chosen[m.group] = true
	} else {
		m.failed = failedMatchers(m.sets, r)
	}
	return matches, err
}

// whyNot returns why a request did not reach a handler.
func (x *explainer) whyNot(h *offline.Handler) string {
	for _, rt := range h.Around.Routes() {
		switch m := rt.MatcherSets[0][0].(*watched); {
		case m.asked && !m.matched:
			return "its route does not match: " + m.failed
		case !m.asked && m.group != "" && x.chosen[m.group]:
			return "another handle block was chosen"
		}
	}
	if x.Refused != "" {
		return "the request is rejected before"
	}
	return "an earlier handler ends the request"
}

// visit explains the limits of a handler.
func (x *explainer) visit(h *offline.Handler, r *http.Request) bool {
	x.reached[h] = true
	q, err := rule.Evaluate(r, h.Limits, time.Time{})
	defer q.Release()
	met := make(map[*rule.Bucket]*rule.Entry)
	for _, entries := range [][]rule.Entry{q.Entries(), q.Loads(), q.Paced()} {
		for i := range entries {
			met[entries[i].Bucket] = &entries[i]
		}
	}
	for _, l := range h.Buckets {
		if e := met[l.Bucket]; e != nil {
			x.addMet(l, e)
			continue
		}
		sets, failure := unmet(l, r)
		switch {
		case sets != nil && failure == nil:
			x.addOthers([]*offline.Limit{l}, "its matcher does not match: "+failedMatchers(sets, r))
		case err == nil && l.Limit.Pool && !l.Off:
			x.addOthers([]*offline.Limit{l}, "no limit that the request meets borrows from it")
		case err == nil:
			x.addOthers([]*offline.Limit{l}, "it is off: its factor is 0")
		default: // the request is rejected here
			x.refuse(err)
			return false
		}
	}
	return true
}

// connect explains the limits of the request's connection, if it opens one.
func (x *explainer) connect(d *offline.Config, req offline.Request) {
	from, _ := netip.ParseAddrPort(req.RemoteAddr) // it is valid
	for _, l := range d.Listeners {
		if l.Server != x.Server {
			continue
		}
		h := &offline.Handler{Handler: &l.Handler}
		for b := range rule.Buckets(l.Limits) {
			h.Buckets = append(h.Buckets, &offline.Limit{LocatedBucket: b})
		}
		x.visit(h, rule.ConnectionFrom(from.Addr().Unmap().WithZone("").String()))
	}
	for i := range x.Limits {
		x.Limits[i].Connection = true
	}
}

// addMet adds a limit that the request meets.
func (x *explainer) addMet(l *offline.Limit, e *rule.Entry) {
	numbers := e.Query.Limit
	numbers.Size = e.Size()
	x.Limits = append(x.Limits, explainedLimit{
		Limit: l.Path, Key: keytext.Of(e.Query.Key), NoKey: e.ByAddress(), Cost: e.Estimate, Numbers: adminapi.NumbersFor(l.Bucket, &numbers),
	})
}

// addOthers adds limits that the request does not meet.
func (x *explainer) addOthers(limits []*offline.Limit, why string) {
	for _, l := range limits {
		x.Others = append(x.Others, explainedOther{l.Path, why})
	}
}

// refuse notes why the request is rejected.
func (x *explainer) refuse(err error) {
	x.Refused, x.Status = err.Error(), http.StatusInternalServerError
	if ref := (interface{ StatusCode() int })(nil); errors.As(err, &ref) {
		x.Status = ref.StatusCode()
	} else if refused := (caddyhttp.HandlerError{}); errors.As(err, &refused) {
		x.Status = cmp.Or(refused.StatusCode, x.Status)
	}
}

// unmet returns the matchers of l, or of the outermost limit around it, that do not
// match r, or nil if all match.
func unmet(l *offline.Limit, r *http.Request) (caddyhttp.MatcherSets, error) {
	for _, outer := range append(slices.Clip(l.Around), l.Limit) {
		if matches, err := outer.Matchers.AnyMatchWithError(r); err != nil || !matches {
			return outer.Matchers, err
		}
	}
	return nil, nil
}

// failedMatchers describes the first matcher of each set that r does not match.
func failedMatchers(sets caddyhttp.MatcherSets, r *http.Request) string {
	var failed []string
	for _, set := range sets {
		for _, m := range set {
			if matches, err := (caddyhttp.MatcherSet{m}).MatchWithError(r); err == nil && matches {
				continue
			}
			if text := describeMatcher(m); !slices.Contains(failed, text) {
				failed = append(failed, text)
			}
			break
		}
	}
	return strings.Join(failed, ", ")
}

// describeMatcher returns the name of a matcher and what it matches.
func describeMatcher(m any) string {
	module, ok := m.(caddy.Module)
	if !ok {
		return fmt.Sprintf("%T", m)
	}
	name := module.CaddyModule().ID.Name()
	switch text, err := json.Marshal(m); {
	case err != nil, string(text) == "{}", string(text) == "null":
		return name
	default:
		return name + " " + string(text)
	}
}

// print prints the explanation.
func (e *explanation) print(w io.Writer) {
	fmt.Fprintf(w, "%s from %s, handled by %s\n", keytext.Safe(e.Request), e.From, keytext.Safe(e.Server))
	if len(e.Limits) > 0 {
		met := terminal.NewTable("LIMIT", "KEY", "COST", "ALGORITHM", "SIZE", adminjson.PaceTitle, adminjson.OptionsTitle)
		for i := range e.Limits {
			l := &e.Limits[i]
			key := keytext.Safe(l.Key)
			if l.NoKey {
				key += " (no key)"
			}
			name := l.Limit
			if l.Connection {
				name += " (connection)"
			}
			met.Add(false, name, key, l.Cost, l.Algorithm, terminal.Number(adminjson.Number(l.Size)), l.Pace(), strings.Join(l.NonDefault(), ", "))
		}
		met.DropEmpty()
		fmt.Fprintln(w)
		met.Print(w)
	}
	if e.Status > 0 {
		fmt.Fprintf(w, "\nThe request is rejected with status %d: %s\n", e.Status, keytext.Safe(e.Refused))
	} else if e.Refused != "" {
		fmt.Fprintf(w, "\n%s\n", keytext.Safe(e.Refused))
	} else if len(e.Limits) == 0 {
		fmt.Fprintln(w, "\nNo limit applies to this request.")
	}
	if len(e.Others) > 0 {
		others := terminal.NewTable("NOT APPLIED", "REASON")
		for _, o := range e.Others {
			others.Add(false, o.Limit, keytext.Safe(o.Why))
		}
		fmt.Fprintln(w)
		others.Print(w)
	}
	if len(e.Notes) > 0 {
		fmt.Fprintln(w)
	}
	for _, note := range e.Notes {
		fmt.Fprintln(w, "Note: "+keytext.Safe(note))
	}
}
