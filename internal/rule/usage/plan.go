// Package usage reads from the bodies of responses, as they pass by, what requests have cost:
// numbers in JSON, in lines of JSON and in server-sent events, compressed or not. Nothing is
// buffered, and what it keeps of a body is about a kilobyte, however large that is.
package usage

import (
	"bytes"
	"math/big"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// Plan is where in a body the numbers are that the limits of a handler want. The zero Plan
// wants none. It must not change once bodies are read.
type Plan struct {
	root     node
	size     int            // how many counters there are
	counters map[string]int // by their paths
	hints    [][]byte       // a text with any of the numbers contains one of these
}

// hint notes what texts contain that have a number of some name, or of names it is a part of.
func (p *Plan) hint(name string) {
	if len(p.hints) == 0 {
		p.hints = [][]byte{[]byte(`\u`)} // any name may be escaped
	}
	if strings.Contains(name, "/") {
		name = "" // which may be escaped in another way
	}
	for _, h := range p.hints {
		if strings.Contains(name, string(h)) {
			return
		}
	}
	p.hints = append(p.hints, []byte(name))
}

// mayBeIn reports whether a text may have any of the numbers. It is far faster than to read it.
func (p *Plan) mayBeIn(text []byte) bool {
	return slices.ContainsFunc(p.hints, func(h []byte) bool { return bytes.Contains(text, h) })
}

// node is a place in a JSON text.
type node struct {
	names    []string
	children []*node
	counters []int    // that the number here belongs to
	marks    []string // values that say that the text is the last one
}

// child returns the node of a name, or nil if no path leads there.
func (n *node) child(name []byte) *node {
	for i, own := range n.names {
		if own == string(name) {
			return n.children[i]
		}
	}
	return nil
}

// Cost is how the numbers of a body make a cost. There are several ways, of which the first
// counts that finds any number.
type Cost struct {
	plan *Plan
	ways []way
}

// way is the sum of some counters.
type way struct {
	terms   []term
	repeats bool // whether the elements of an array repeat the number so far, and are no results of their own
}

// term is a counter, and what one of it costs.
type term struct {
	counter int
	weight  decimal
}

// Tokens is the cost that language models say.
const Tokens = "tokens"

// IsCost reports whether a text is meant to be a cost in a body.
func IsCost(text string) bool {
	word, _, _ := strings.Cut(text, " ")
	return word == Tokens || word == "json"
}

// Parse parses a cost and adds what it wants to p: Tokens, or json and counters. A counter is
// one or more paths with a | between them, and may have a weight behind a *. Its error is one
// of the option actual_cost.
func (p *Plan) Parse(text string) (*Cost, error) {
	c := &Cost{plan: p}
	for name, values := range lastTexts {
		p.at([]string{name}).marks = values
	}
	if text == Tokens {
		for _, part := range inNames {
			p.hint(part)
		}
		for _, api := range apis {
			terms, err := p.terms(strings.Fields(api.says))
			if err != nil {
				return nil, err
			}
			c.ways = append(c.ways, way{terms, api.repeats})
		}
		return c, nil
	}
	words := strings.Fields(text)
	switch {
	case words[0] == Tokens:
		return nil, option.Bad(optionName, text, "tokens alone, or json and paths, such as json usage.output_tokens*4")
	case len(words) == 1:
		return nil, option.Bad(optionName, text, "json and at least one path, such as json usage.total_tokens")
	}
	terms, err := p.terms(words[1:])
	c.ways = []way{{terms: terms}}
	return c, err
}

const optionName = "actual_cost"

// terms parses counters.
func (p *Plan) terms(words []string) (terms []term, err error) {
	for _, word := range words {
		paths, factor, weighted := strings.Cut(word, "*")
		weight, ok := decimal{digits: 1}, true
		if weighted {
			weight, ok = parseDecimal(factor)
		}
		if !ok || weight.digits == 0 || len(factor) > maxWeight || strings.ContainsAny(factor, "eE") {
			return nil, option.Bad(optionName, word, "a path and a weight that is a decimal above 0, such as usage.total_tokens*0.25")
		}
		counter, err := p.counter(paths)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(terms, func(t term) bool { return t.counter == counter }) {
			return nil, option.Bad(optionName, word, "each path once, with the sum of the weights")
		}
		terms = append(terms, term{counter, weight})
	}
	return terms, nil
}

// maxWeight is how many characters a weight may have.
const maxWeight = 18

// counter returns the counter of alternative paths.
func (p *Plan) counter(paths string) (int, error) {
	if i, known := p.counters[paths]; known {
		return i, nil
	}
	for path := range strings.SplitSeq(paths, "|") {
		names := strings.Split(path, ".")
		for _, name := range names {
			if name == "" || len(name) > maxText/2 || len(names) > maxNames || strings.ContainsFunc(name, notInName) {
				return 0, option.Bad(optionName, path, "at most 8 names with dots between them, such as usage.total_tokens: it can't be in an array, nor below $")
			}
		}
		at := p.at(names)
		at.counters = append(at.counters, p.size)
		p.hint(names[len(names)-1])
	}
	if p.counters == nil {
		p.counters = make(map[string]int)
	}
	p.counters[paths] = p.size
	p.size++
	return p.size - 1, nil
}

// at returns the node of a path, which it makes if there is none.
func (p *Plan) at(names []string) *node {
	at := &p.root
	for _, name := range names {
		next := at.child([]byte(name))
		if next == nil {
			next = new(node)
			at.names, at.children = append(at.names, name), append(at.children, next)
		}
		at = next
	}
	return at
}

// notInName reports whether c can't be in a name of a path. Some of these mean something in
// other languages of paths.
func notInName(c rune) bool { return c <= ' ' || strings.ContainsRune("\"'`\\*[](){}<>$?,;|", c) }

// Plan returns the plan of which c is a part.
func (c *Cost) Plan() *Plan { return c.plan }

// In returns what a body says that its request has cost, rounded up, and whether it says any
// number so far.
func (c *Cost) In(b *Body) (units int64, found bool) {
	for _, way := range c.ways {
		sum := new(big.Rat)
		for _, t := range way.terms {
			v := &b.json.values[t.counter]
			if !v.found {
				continue
			}
			found = true
			n := v.rat()
			if !way.repeats {
				n.Add(n, v.before.rat())
			}
			sum.Add(sum, n.Mul(n, t.weight.rat()))
		}
		if found {
			return roundUp(sum), true
		}
	}
	return 0, false
}
