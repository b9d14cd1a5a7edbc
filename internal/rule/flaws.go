package rule

import (
	"iter"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
)

// placed is what is wrong with where a limit stands, and what to do. BY, PATH and TO are
// those of an obstacle.
type placed struct{ problem, remedy string }

// putFirst is the remedy where a limit should stand before another directive.
const putFirst = "Remove the global option order rate_limit if there is one, or put both in a route block, rate_limit first."

// obstacles are what is wrong with where limits stand, by the kinds of obstacles.
var obstacles = [...]placed{
	routes.Answered:     {"No request reaches it: the BY directive before it answers each one.", putFirst},
	routes.AnsweredPath: {"No request for its path PATH reaches it: the BY directive before it answers TO.", putFirst},
	routes.OtherBlock:   {"No request for its path PATH reaches it: an earlier block takes TO.", "Put the limit into that block."},
	routes.Stripped:     {"No request for its path PATH matches it: the prefix BY has been removed before.", "Write TO."},
	routes.Rewritten:    {"No request for its path PATH matches it: BY before it has made that TO.", "Write the path as it is after BY, or put both in a route block, rate_limit first."},
}

// behindAuthentication is what is wrong with a limit that counts what is answered before it.
var behindAuthentication = placed{"It counts the status 401, and the BY directive before it answers wrong passwords, so they do not count.", putFirst}

// flaw returns p as the flaw of a limit.
func (p placed) flaw(by, path, to string) key.Flaw {
	words := strings.NewReplacer("BY", by, "PATH", path, "TO", to)
	return key.Flaw{Problem: words.Replace(p.problem), Remedy: words.Replace(p.remedy)}
}

// flawOf returns an obstacle as the flaw of a limit.
func flawOf(o *routes.Obstacle) key.Flaw { return obstacles[o.Kind].flaw(o.By, o.Path, o.To) }

// Flaws returns what is wrong with limits that requests meet in one handler, as far as these
// and what is around the handler tell, which may be nil.
func Flaws(limits []*Limit, around *routes.Around) iter.Seq2[*Limit, Flaw] {
	return func(yield func(*Limit, Flaw) bool) {
		for b := range Buckets(limits) {
			if b.Off {
				continue
			}
			if o := around.Obstacle(); o != nil {
				yield(b.Limit, Flaw{Flaw: flawOf(o)})
				return
			}
			for _, sets := range around.Matchers() {
				for _, f := range matcherFlaws(sets, around) {
					if !yield(b.Limit, Flaw{Flaw: f}) {
						return
					}
				}
			}
			break
		}
		eachFlaw(limits, nil, around, yield)
	}
}

// Flaw is what is wrong with a limit.
type Flaw struct {
	key.Flaw
	Inherited bool // whether the limit around it has it too
}

// eachFlaw yields the flaws of limits that stand in another, until yield returns false.
func eachFlaw(limits []*Limit, parent *Limit, around *routes.Around, yield func(*Limit, Flaw) bool) bool {
	for _, l := range limits {
		if !slices.ContainsFunc(l.Buckets, func(b *Bucket) bool { return b.Off }) {
			for _, f := range l.flaws(around) {
				if !yield(l, Flaw{Flaw: f}) {
					return false
				}
			}
			for _, f := range l.Key.Template().Flaws(around) {
				if !yield(l, Flaw{Flaw: f, Inherited: parent != nil && l.Key == parent.Key}) {
					return false
				}
			}
		}
		if !eachFlaw(l.Within, l, around, yield) {
			return false
		}
	}
	return true
}

// flaws returns what is wrong with l, but for its key.
func (l *Limit) flaws(around *routes.Around) (found []key.Flaw) {
	if o := around.ObstacleTo(l.Matchers); o != nil {
		found = append(found, flawOf(o))
	}
	found = append(found, matcherFlaws(l.Matchers, around)...)
	for _, b := range l.Buckets {
		for _, number := range [][2]string{
			{b.Size.Option, b.Size.Template}, {b.Rate.Option, b.Rate.Template}, {b.Drip.Option, b.Drip.Template},
			{"factor", b.Factor.Template}, {"cost", b.Cost.Template},
		} {
			for _, name := range placeholder.In(number[1]) {
				if f, ok := key.NumberFlaw(number[0], name, around); ok && !slices.Contains(found, f) {
					found = append(found, f)
				}
			}
		}
	}
	if by := around.Authentication(); by != "" && l.countsUnauthorized() && l.Key.Template().User() == "" {
		found = append(found, behindAuthentication.flaw(by, "", ""))
	}
	return found
}

// countsUnauthorized reports whether only some responses count, and those to wrong passwords do.
func (l *Limit) countsUnauthorized() bool {
	const unauthorized = 401
	c := l.Settlement.Count
	return c != nil && len(c.StatusCode)+len(c.NotStatusCode) > 0 && c.MatchStatus(unauthorized)
}
