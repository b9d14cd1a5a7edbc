package offline

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// CheckCommand returns the command check.
func CheckCommand() *cobra.Command {
	cmd := command.Runs(&cobra.Command{
		Use:   "check [FILE]",
		Short: "Advises on the limits of a config",
		Long: `
Finds valid limits that probably do not do what was intended: those that
clients can get around, those that deny all clients behind a proxy at once, those
that no request reaches, and others. For each it says what to change.

A config that Caddy would not load is an error, as with caddy validate, except that log
files are not opened: run it where the config's files and environment are. It needs no
running Caddy. With --redis it connects to the Redis of the config, has it decide a
request, and checks how it is set up. A Redis that can't be reached is one of the problems.

FILE is the config, as in --config.

The exit status is 2 if there is advice, 1 if Caddy would not load the config, and 0
if all is well.`,
		Example: "  caddy rate-limit check\n  caddy rate-limit check Caddyfile --redis",
		Args:    cobra.MaximumNArgs(1),
	}, func(cmd *cobra.Command, args []string) error { return runCheck(cmd, strings.Join(args, "")) })
	addConfigFlags(cmd)
	cmd.Flags().Bool("redis", false, "Connect to Redis and check how it is set up")
	return cmd
}

// runCheck runs the command check. file is its argument, or "".
func runCheck(cmd *cobra.Command, file string) error {
	d, err := loadConfigOf(cmd, file)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Validate(); err != nil {
		return fmt.Errorf("%s: Caddy would not load it: %w", d.Name, err)
	}
	c := newChecker(d)
	if withRedis, _ := cmd.Flags().GetBool("redis"); withRedis {
		c.checkRedis(cmd.Context())
	}
	if asJSON, _ := cmd.Flags().GetBool("json"); asJSON {
		err = terminal.PrintJSON(cmd.OutOrStdout(), c)
	} else {
		c.print(cmd.OutOrStdout())
	}
	if err == nil && len(c.Advice) > 0 {
		err = command.ErrProblems
	}
	return err
}

// checker collects advice on a config.
type checker struct {
	*Config `json:"-"`

	flawed map[[2]string]bool          // by limit and placeholder, what checkFlaws has found
	around map[string][]*routes.Around // by limit, what is around its handlers
	noted  []advice.Advice             // that is among the notes

	Advice []advice.Advice `json:"advice"`
	Notes  []string        `json:"notes"` // what could not be checked
}

// Check returns advice on a config.
func (d *Config) Check() []advice.Advice {
	c := newChecker(d)
	return append(c.Advice, c.noted...)
}

// newChecker returns the advice that can be given on the config alone.
func newChecker(d *Config) *checker {
	c := &checker{Config: d, flawed: make(map[[2]string]bool), around: make(map[string][]*routes.Around), Advice: []advice.Advice{}, Notes: []string{}}
	c.check()
	return c
}

// add adds advice, unless it was given before.
func (c *checker) add(a advice.Advice) {
	same := func(b advice.Advice) bool {
		return a.About() == b.About() && a.Problem == b.Problem && a.Remedy == b.Remedy
	}
	if !slices.ContainsFunc(c.Advice, same) {
		c.Advice = append(c.Advice, a)
	}
}

// hint adds advice that nothing else gives.
func (c *checker) hint(a advice.Advice) {
	a.OnCheck = true
	c.add(a)
}

// advise adds advice on what is neither a limit nor a server.
func (c *checker) advise(about, problem, remedy string) {
	c.hint(advice.Advice{Kind: advice.OfRedis, Of: about, Problem: problem, Remedy: remedy})
}

// print prints the advice.
func (c *checker) print(w io.Writer) {
	for _, a := range c.Advice {
		fmt.Fprintln(w, terminal.Wrapped(keytext.Safe(a.About())+": "+keytext.Safe(a.Problem)+" "+keytext.Safe(a.Remedy), 80, 2)+"\n")
	}
	switch n := len(c.Advice); n {
	case 0:
		fmt.Fprintln(w, "No problems found.")
	case 1:
		fmt.Fprintln(w, "1 warning.")
	default:
		fmt.Fprintf(w, "%d warnings.\n", n)
	}
	for _, note := range c.Notes {
		fmt.Fprintln(w, "Note: "+keytext.Safe(note))
	}
}

// check collects what can be found out from the config alone.
func (c *checker) check() {
	c.Notes = append(c.Notes, c.Warnings...)
	c.checkUnintended()
	for _, s := range c.Servers {
		for _, h := range s.handlers {
			for _, l := range h.inForce() {
				c.checkKey(s, h, l)
				c.checkNumbers(h, l)
			}
			if c.Redis != nil && h.limits.OnError == rule.OnErrorDeny {
				c.hint(advice.Advice{
					Kind: advice.Unavailable, Of: "server", Name: s.Name,
					Problem: "With on_error deny, clients get status 503 for every limited request while Redis is unavailable.",
					Remedy:  "Unless that is meant, use on_error fallback: each Caddy instance then limits separately until Redis is back.",
				})
			}
		}
	}
	limited := slices.ContainsFunc(c.Servers, func(s *Server) bool { return len(s.handlers) > 0 })
	if !limited && len(c.Notes) == 0 {
		c.Notes = append(c.Notes, "The config has no limits.")
	}
	c.checkRedisOptions()
}

// inForce returns the handler's limits that are not off.
func (h *handler) inForce() []*Limit {
	return slices.DeleteFunc(slices.Clone(h.limits.buckets), func(l *Limit) bool { return l.Off })
}

// checkUnintended gives the advice that is not check's alone.
func (c *checker) checkUnintended() {
	order, around := routes.Arounds[rule.Module](c.http)
	for _, h := range order {
		for b := range rule.Buckets(h.Compiled().Limits) {
			c.around[b.Path] = append(c.around[b.Path], around[h])
		}
	}
	for _, a := range advice.On(advice.Config{HTTP: c.http, Redis: c.Redis != nil}) {
		if a.Note {
			c.Notes, c.noted = append(c.Notes, a.About()+": "+a.Problem+" "+a.Remedy), append(c.noted, a)
			continue
		}
		c.add(a)
		c.flawed[[2]string{a.Name, a.Placeholder}] = true
	}
}

// chosen returns the first placeholder of a limit's key that clients can choose, or "", and the
// one that it is made from.
func (c *checker) chosen(l *Limit) (name, source string) {
	for _, a := range c.around[l.Path] {
		if name, source := advice.Chosen(l.Key(), a); name != "" {
			return name, source
		}
	}
	return "", ""
}

// bounds reports whether no client gets around a limit by its key or its numbers.
func (c *checker) bounds(l *Limit) bool {
	return !l.Free() && !slices.ContainsFunc(c.around[l.Path], func(a *routes.Around) bool {
		return !advice.Bounds(l.Key(), a) || advice.NumbersChosen(l.Bucket, a)
	})
}

// authenticated reports whether requests may reach a limit as users who are logged in.
func (c *checker) authenticated(l *Limit) bool {
	return slices.ContainsFunc(c.around[l.Path], func(a *routes.Around) bool { return a.Authentication() != "" || a.Plugins() })
}

// checkKey advises on a limit's key.
func (c *checker) checkKey(s *Server, h *handler, l *Limit) {
	limit := func(kind advice.Kind, problem, remedy string) {
		c.hint(advice.Advice{Kind: kind, Of: "limit", Name: l.Path, Problem: problem, Remedy: remedy})
	}
	if name := l.Key().User(); name != "" && !c.authenticated(l) && !c.flawed[[2]string{l.Path, name}] {
		limit(advice.KeyWithoutUser, "Its key has {"+name+"}, and no authentication comes before it, so it is empty.",
			"Put both in a route block, the authentication first.")
	}
	if name, source := c.chosen(l); name != "" && !c.bounded(s, h) && !c.flawed[[2]string{l.Path, name}] {
		problem := "which clients can set to anything"
		if source != name {
			problem = "which is made from {" + source + "}, " + problem
		}
		limit(advice.KeyChosen, "Its key has {"+name+"}, "+problem+", so they can get a fresh bucket for each request.",
			"Use a key that they can't choose, such as {client_ip} or, behind authentication, {http.auth.user.id}, or add a limit by {client_ip} to the block, with a rate that several honest clients share.")
	}
	if shared := !slices.ContainsFunc(l.Key(), func(p key.Part) bool { return p.Placeholder }); shared && l.Limit.Bans != nil {
		limit(advice.BanOfAll, "It bans its key, which all requests share: one client that is denied keeps everybody out.",
			"Use a key that distinguishes clients, such as {client_ip}, or no ban.")
	}
	proxied := len(s.raw["trusted_proxies"]) > 0 || string(s.raw["trusted_proxies_unix"]) == "true"
	if proxied && l.Key().Has(placeholder.RemoteHost) {
		limit(advice.KeyOfProxy, "Its key is the address of the connection, and the server has trusted proxies: all clients of a proxy share one bucket.",
			"Use {client_ip}, which is the address that the proxy reports.")
	}
	if proxied && h.exemptsConnections(l) {
		limit(advice.ProxyExempted, "A matcher with not remote_ip exempts by the address of the connection, and the server has trusted proxies: if the matcher has theirs, no client is limited.",
			"Use not client_ip, which is the address that the proxy reports.")
	}
	if !proxied && l.Key().Has(placeholder.ClientIP) && len(s.listen) > 0 && !slices.ContainsFunc(s.listen, reachableFromOutside) {
		c.hint(advice.Advice{
			Kind: advice.ProxyUntrusted, Of: "server", Name: s.Name,
			Problem: "It only listens on this host, and has no trusted proxies: if a proxy passes requests on to it, {client_ip} is the proxy's address, and all clients share one bucket.",
			Remedy:  "Set the global options servers > trusted_proxies, such as trusted_proxies static 127.0.0.1 ::1, or trusted_proxies_unix for a socket, and trusted_proxies_strict.",
		})
	}
}

// exemptsConnections reports whether l, or the routes to it, leave out requests by remote_ip.
func (h *handler) exemptsConnections(l *Limit) bool {
	sets := slices.Clone(l.Limit.Matchers)
	for _, outer := range l.Around {
		sets = append(sets, outer.Matchers...)
	}
	for _, rt := range h.routes {
		sets = append(sets, rt.MatcherSets...)
	}
	return slices.ContainsFunc(slices.Concat(sets...), func(m any) bool {
		not, ok := m.(*caddyhttp.MatchNot)
		return ok && slices.ContainsFunc(slices.Concat(not.MatcherSets...), func(m any) bool {
			_, ok := m.(*caddyhttp.MatchRemoteIP)
			return ok
		})
	})
}

// reachableFromOutside reports whether other hosts can connect to an address.
func reachableFromOutside(a caddy.NetworkAddress) bool {
	if a.IsUnixNetwork() {
		return false
	}
	ip, err := netip.ParseAddr(a.Host)
	return a.Host != "localhost" && (err != nil || !ip.IsLoopback())
}

// bounded reports whether requests that reach h always meet a limit whose key and
// numbers clients can't choose.
func (c *checker) bounded(s *Server, h *handler) bool {
	return slices.ContainsFunc(s.handlers, func(other *handler) bool {
		for _, rt := range other.routes {
			if !slices.Contains(h.routes, rt) && len(rt.MatcherSets) > 0 {
				return false
			}
		}
		return slices.ContainsFunc(other.inForce(), func(l *Limit) bool { return l.always() && c.bounds(l) })
	})
}

// checkNumbers advises on a limit's numbers.
func (c *checker) checkNumbers(h *handler, l *Limit) {
	if how := l.Options().Consistency; how != "" && c.Redis == nil {
		c.hint(advice.Advice{
			Kind: advice.ConsistencyUnused, Of: "limit", Name: l.Path,
			Problem: "Its consistency, " + how + ", has no effect without redis: this process decides all requests, exactly.",
			Remedy:  "Remove it, or set redis in the global option.",
		})
	}
	if l.deniesTwoAtOnce() && l.always() && !h.selective() {
		c.hint(advice.Advice{
			Kind: advice.OneAtOnce, Of: "limit", Name: l.Path,
			Problem: "It is for all requests of the site, and its bucket holds a single one: browsers send several at once, for a page with its images and scripts, and all but the first are denied.",
			Remedy:  "Give it a size of what a page needs, in place of a min_interval, or a matcher for the requests that it is meant for.",
		})
	}
}

// deniesTwoAtOnce reports whether of two simultaneous requests one is denied at once.
func (l *Limit) deniesTwoAtOnce() bool {
	size, _ := l.Sizes()
	of := l.Limit
	return size == 1 && !l.Free() && of.Soft == 0 && of.MaxDelay == 0 && !of.Settlement.HoldOff && !of.DryRun && of.Lender == nil
}

// selective reports whether routes select requests for the handler by more than
// the host.
func (h *handler) selective() bool {
	for _, rt := range h.routes {
		if rt.Group != "" {
			return true
		}
		for _, set := range rt.MatcherSets {
			for _, m := range set {
				if _, ok := m.(*caddyhttp.MatchHost); !ok {
					return true
				}
			}
		}
	}
	return false
}

// checkRedisOptions advises on how the config uses Redis.
func (c *checker) checkRedisOptions() {
	opt, err := c.redisOptions()
	if err != nil || c.Redis == nil { // Validate returns the error
		return
	}
	for _, address := range opt.Addresses {
		host, _, err := net.SplitHostPort(address)
		if err != nil || opt.Password != "" || opt.TLS != nil && len(opt.TLS.Certificates) > 0 {
			continue
		}
		if ip, err := netip.ParseAddr(host); host != "localhost" && (err != nil || !ip.IsLoopback()) {
			c.advise("redis", "It is used without a password: anyone who can connect to "+address+" can empty and fill all buckets.",
				"Create a user with a password and the permissions that "+option.Docs+"redis.md lists, and set username and password.")
			return
		}
	}
}

// redisOptions returns the options of the configured Redis.
func (c *checker) redisOptions() (limiter.RedisOptions, error) {
	if c.Redis == nil {
		return limiter.RedisOptions{}, nil
	}
	ctx, cancel := caddy.NewContext(c.ctx)
	defer cancel()
	return c.Redis(ctx)
}
