package advice

import (
	"fmt"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// misplacement is what is wrong with the position of a limit, and what to do. BY, PATH and TO are
// the fields of an obstacle.
type misplacement struct{ problem, remedy string }

// putFirst is the remedy where a limit should come before another directive.
const putFirst = "Remove the global option order rate_limit if there is one, or put both in a route block, with rate_limit first."

// obstacles are what is wrong with positions of limits, by the kinds of obstacles.
var obstacles = [...]misplacement{
	routes.Answered:     {"No request reaches it: the BY directive before it answers each one.", putFirst},
	routes.AnsweredPath: {"No request for its path PATH reaches it: the BY directive before it answers TO.", putFirst},
	routes.OtherBlock:   {"No request for its path PATH reaches it: an earlier block takes TO.", "Put the limit into that block."},
	routes.Stripped:     {"No request for its path PATH matches it: the prefix BY has been removed before it.", "Write TO."},
	routes.Rewritten:    {"No request for its path PATH matches it: BY before it has rewritten the path to TO.", "Write the path as it is after BY, or put both in a route block, with rate_limit first."},
}

// advice returns p as advice on a limit.
func (p misplacement) advice(by, path, to string) Advice {
	words := strings.NewReplacer("BY", by, "PATH", path, "TO", to)
	return Advice{Kind: Unreachable, Problem: words.Replace(p.problem), Remedy: words.Replace(p.remedy)}
}

// unreachable returns advice on a limit that no request reaches because of an obstacle.
func unreachable(o *routes.Obstacle) Advice {
	to := o.To
	if o.Kind == routes.Stripped {
		to = withOtherForm(to)
	}
	return obstacles[o.Kind].advice(o.By, o.Path, to)
}

// handler advises on the limits of a handler one by one, as far as these and what is around it
// tell.
func (c *collector) handler(limits []*rule.Limit, around *routes.Around) {
	for b := range rule.Buckets(limits) {
		if b.Off {
			continue
		}
		if o := around.Obstacle(); o != nil {
			c.limit(b.Limit.Path, unreachable(o))
			return
		}
		var found []Advice
		for _, rt := range around.Routes() {
			found = append(found, onMatchers(rt.MatcherSets, around)...)
		}
		for _, sets := range around.Matchers() {
			found = append(found, onPaths(sets, around, true)...)
		}
		for _, a := range found {
			c.limit(b.Limit.Path, a)
		}
		break
	}
	c.limits(limits, nil, around)
}

// limits advises on limits within another, which may be nil, and on those within them.
func (c *collector) limits(limits []*rule.Limit, parent *rule.Limit, around *routes.Around) {
	for _, l := range limits {
		if !slices.ContainsFunc(l.Buckets, func(b *rule.Bucket) bool { return b.Off }) {
			for _, a := range onLimit(l, around) {
				c.limit(l.Path, a)
			}
			for _, a := range OnKey(l.Key, around) {
				if a.Placeholder != "" && a.Placeholder == uncountedUser(l, around) {
					continue // no order of the directives would help
				}
				if a.Kind == KeyConstant && l.Zone != nil {
					continue // which is how mholt/caddy-ratelimit has one bucket for all
				}
				a.Inherited = parent != nil && l.Key == parent.Key
				c.limit(l.Path, a)
			}
		}
		c.limits(l.Within, l, around)
	}
}

// onLimit returns advice on a limit, except on its key.
func onLimit(l *rule.Limit, around *routes.Around) (found []Advice) {
	if o := around.ObstacleTo(l.Matchers); o != nil {
		found = append(found, unreachable(o))
	}
	found = append(found, onMatchers(l.Matchers, around)...)
	found = append(found, onPaths(l.Matchers, around, false)...)
	for _, b := range l.Buckets {
		found = append(found, onNumbers(b, around)...)
	}
	found = append(found, onResponses(&l.Settlement, around)...)
	return append(found, onUnauthorized(l, around)...)
}

// number is a number of a bucket that may depend on the request.
type number struct {
	option, template string
	effect           chosenEffect
}

// chosenEffect is what clients gain who choose a number.
type chosenEffect string

const (
	choosesLimit   chosenEffect = "so they choose their own limit"
	choosesBucket  chosenEffect = "each of its values has its own buckets, so they can get a fresh bucket for each request"
	choosesNothing chosenEffect = "with 0, all of their requests pass"
)

// numbersIn returns the numbers of a bucket.
func numbersIn(b *rule.Bucket) []number {
	return []number{
		{b.Rate.Option, b.Rate.Template, choosesBucket},
		{b.Drip.Option, b.Drip.Template, choosesBucket},
		{b.Size.Option, b.Size.Template, choosesLimit},
		{"factor", b.Factor.Template, choosesLimit},
		{"cost", b.Cost.Template, choosesNothing},
	}
}

// onNumbers returns advice on numbers that depend on the request.
func onNumbers(b *rule.Bucket, around *routes.Around) (found []Advice) {
	for _, n := range numbersIn(b) {
		for _, name := range placeholder.In(n.template) {
			if a, ok := setLaterThanNumber(n.option, name, around); ok && !slices.Contains(found, a) {
				found = append(found, a)
			}
		}
		if name := controlled(n.template, around); name != "" {
			kind := SizeChosen
			if n.effect == choosesBucket {
				kind = RateChosen
			}
			found = append(found, advise(kind,
				fmt.Sprintf("Its %s has {%s}, which clients can set to anything: %s.", n.option, name, n.effect),
				"Use a value that they can't choose, such as a variable that vars or map sets for the logged-in user."))
		}
	}
	return found
}

// NumbersChosen reports whether clients can choose any number of a bucket.
func NumbersChosen(b *rule.Bucket, around *routes.Around) bool {
	return slices.ContainsFunc(numbersIn(b), func(n number) bool { return controlled(n.template, around) != "" })
}

// onUnauthorized returns advice on a limit that counts failed logins where it sees none.
func onUnauthorized(l *rule.Limit, around *routes.Around) []Advice {
	if user := uncountedUser(l, around); user != "" {
		return []Advice{{
			Kind: UncountedUser, Placeholder: user,
			Problem: "It counts the status 401, and its key has {" + user + "}, which is empty in every failed login, whatever the order of the directives.",
			Remedy:  "Use {client_ip}, or {http.rate_limit.basic_user} for the unverified name, and put the limit before the authentication.",
		}}
	}
	if by := around.Authentication(); by != "" && countsUnauthorized(l, true) && l.Key.User() == "" {
		return []Advice{{
			Kind:    Uncounted,
			Problem: "It counts the status 401, and the " + by + " directive before it answers wrong passwords, so they do not count.",
			Remedy:  putFirst,
		}}
	}
	return nil
}

// uncountedUser returns the placeholder in the key of a limit that is empty in the requests that
// it counts, which are failed logins, or "".
func uncountedUser(l *rule.Limit, around *routes.Around) string {
	behind := around.Authentication() != "" // where other statuses 4xx may well be what it counts
	if !countsUnauthorized(l, !behind) {
		return ""
	}
	return l.Key.User()
}

// countsUnauthorized reports whether only some responses count, and those to wrong passwords do,
// by their status or, if that is enough, by its class.
func countsUnauthorized(l *rule.Limit, byClass bool) bool {
	const unauthorized = 401
	c := l.Settlement.Count
	return c != nil && (slices.Contains(c.StatusCode, unauthorized) ||
		byClass && len(c.StatusCode)+len(c.NotStatusCode) > 0 && c.MatchStatus(unauthorized))
}
