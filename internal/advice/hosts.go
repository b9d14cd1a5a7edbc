package advice

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// hosts advises on limits that match hosts which none of their sites has. Those of one name are one:
// a snippet may have limits for several sites.
func (c *collector) hosts() {
	type unserved struct {
		in         rule.Module
		path, host string
	}
	var found []unserved
	served := make(map[string]bool) // by the path
	c.each(func(h *rule.Handler, around *routes.Around) {
		for b := range rule.Buckets(h.Limits) {
			var conditions []caddyhttp.MatcherSets
			for _, rt := range around.Routes() {
				conditions = append(conditions, rt.MatcherSets)
			}
			for _, l := range append(slices.Clip(b.Around), b.Limit) {
				conditions = append(conditions, l.Matchers)
			}
			host := ""
			for _, sets := range conditions {
				if hosts := hostsIn(sets); len(hosts) > 0 && !slices.ContainsFunc(hosts, around.HasHost) {
					host = hosts[0]
				}
			}
			if served[b.Limit.Path] = served[b.Limit.Path] || host == "" || b.Off; host != "" {
				found = append(found, unserved{c.module, b.Limit.Path, host})
			}
		}
	})
	for _, u := range found {
		if c.module = u.in; !served[u.path] {
			c.limit(u.path, unmatched("host", u.host, "its site has a different host", "Put the limit into the site with that host, or write a host of this site."))
		}
	}
}

// hostsIn returns the hosts that matchers match, or nil if they match others too, or that is not
// known.
func hostsIn(sets caddyhttp.MatcherSets) (hosts []string) {
	for _, set := range sets {
		i := slices.IndexFunc(set, func(m any) bool { _, ok := m.(*caddyhttp.MatchHost); return ok })
		if i < 0 {
			return nil
		}
		hosts = append(hosts, *set[i].(*caddyhttp.MatchHost)...)
	}
	if slices.ContainsFunc(hosts, func(host string) bool { return unmatchedHost(host).Problem != "" }) {
		return nil
	}
	return hosts
}

// names advises on limits without matchers whose name is what they were probably meant to match.
func (c *collector) names(h *rule.Handler, around *routes.Around) {
	if around.Selects() {
		return
	}
	for b := range rule.Buckets(h.Limits) {
		if b.Off || b.Limit.Zone != nil || !b.IsMain() || !alwaysMet(b) {
			continue
		}
		name := b.Limit.Name()
		if meant := matcherMeantBy(name, around.Hosts(), c.HTTP); meant != "" {
			c.limit(b.Path, advise(MatcherAsName,
				fmt.Sprintf("%s is only its name, so it applies to all requests that get here.", name),
				fmt.Sprintf("Write match %s in its block, and give it another name.", meant)))
		}
	}
}

// matcherMeantBy returns the matcher that a name was meant to be, or "" if it is a name like others,
// such as that of the site.
func matcherMeantBy(name string, hosts []string, app *caddyhttp.App) string {
	lower := strings.ToLower(name)
	switch {
	case slices.Contains(methods, name):
		return "method " + name
	case slices.Contains([]string{".php", ".html", ".asp", ".aspx", ".cgi", ".jsp"}, path.Ext(lower)):
		return "path */" + name
	case slices.Contains(hosts, lower) || strings.Count(name, ".") == 0:
		return ""
	case slices.Contains(domains, path.Ext(lower)) || slices.Contains(allHosts(app), lower):
		return "host " + name
	}
	return ""
}

// domains are the domains that names of hosts most often end in, and names of limits do not.
var domains = []string{".com", ".org", ".net", ".io", ".dev", ".app", ".localhost", ".local", ".internal", ".lan", ".example", ".test"}

// allHosts returns the hosts of all sites.
func allHosts(app *caddyhttp.App) (hosts []string) {
	for _, srv := range app.Servers {
		for _, rt := range srv.Routes {
			for _, set := range rt.MatcherSets {
				hosts = append(hosts, hostsIn(caddyhttp.MatcherSets{set})...)
			}
		}
	}
	return hosts
}
