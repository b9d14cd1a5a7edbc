package directive

import (
	"errors"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// block is a block of options. All its lines are known before any is parsed, as what a line means may
// depend on another: average 100 beside period 1m is no rate per second.
type block struct {
	scope *Scope
	head  caddyfile.Token // before the block
	lines []line
}

// line is an option in a block, without the block that it may have itself.
type line struct {
	token caddyfile.Token
	words []string
}

// readBlock returns the block that follows the current token, which stays the current one.
func readBlock(d *caddyfile.Dispenser, here *Scope, head caddyfile.Token) *block {
	b := &block{scope: here, head: head}
	ahead := *d
	for nesting := ahead.Nesting(); ahead.NextBlock(nesting); {
		b.lines = append(b.lines, line{ahead.Token(), append([]string{ahead.Val()}, ahead.RemainingArgs()...)})
		for within := ahead.Nesting(); ahead.NextBlock(within); {
		}
	}
	return b
}

// parse parses the options, each by the parser of that name. seen are those that stand elsewhere.
func (b *block) parse(d *caddyfile.Dispenser, parsers map[string]func() error, seen ...string) error {
	nesting := d.Nesting()
	for i := 0; d.NextBlock(nesting); i++ {
		name := d.Val()
		parse, known := parsers[name]
		if !known {
			return b.errorAt(i, b.unknownOption(i))
		}
		if slices.Contains(seen, name) && !repeatable(b.scope, name) {
			return d.WrapErr(b.duplicate(i))
		}
		seen = append(seen, name)
		if err := missingArgument(name, b.lines[i].words); err != nil {
			return d.WrapErr(err)
		}
		err := parse()
		if err == nil && d.NextBlock(d.Nesting()) {
			err = d.Errf("%s: it takes no block; use one line", name)
		}
		if err != nil {
			return b.orInstead(i, err)
		}
	}
	return nil
}

// repeatable reports whether an option may be there twice. What mholt/caddy-ratelimit has for a whole block
// may, as snippets may have it too: the last one counts.
func repeatable(here *Scope, name string) bool {
	switch here {
	case BlockScope:
		return slices.Contains([]string{"limit", "zone", "distributed", "storage", "log_key", "disable_metrics"}, name)
	case LimitScope, ListenerScope, listenerLimitScope:
		return name == "limit"
	case ZoneScope:
		return name == "match"
	}
	return false
}

// duplicate returns the error for an option that is there before.
func (b *block) duplicate(i int) error {
	name := b.lines[i].words[0]
	if name != "match" {
		return errors.New("duplicate option: " + name)
	}
	first := b.lines[b.index(name)]
	args := strings.Join(b.lines[i].words[1:], " ")
	return option.Clash(name, args, "another", "use "+useOneMatch(strings.Join(first.words[1:], " "), args))
}

// missingArgument returns an error if an argument of a snippet, which the words of an option have, was not given to it.
func missingArgument(name string, words []string) error {
	for _, word := range words {
		if strings.Contains(word, "{args[") {
			return option.Errorf(name, "%q has no value; use import with that argument", option.Shortened(word))
		}
	}
	return nil
}

// index returns the index of the first line of an option, or -1.
func (b *block) index(name string) int {
	return slices.IndexFunc(b.lines, func(l line) bool { return l.words[0] == name })
}

// at returns the token of the first line of an option, or else the head.
func (b *block) at(name string) caddyfile.Token {
	if i := b.index(name); i >= 0 {
		return b.lines[i].token
	}
	return b.head
}

// located adds file and line to an error that was found when the block was known: those of the option that it
// is about, or else those of the head. If it is known what is meant, the error says that.
func (b *block) located(err error) error {
	var wrong *option.Error
	if errors.As(err, &wrong) {
		i := b.index(wrong.Option)
		if i >= 0 && wrong.Unclear {
			return b.orInstead(i, b.errorAt(i, err))
		}
		return errorAt(b.at(wrong.Option), err)
	}
	return errorAt(b.head, err)
}

// errorAt adds the file and line of an option to an error.
func (b *block) errorAt(i int, err error) error { return errorAt(b.lines[i].token, err) }

// orInstead returns the error for a line with a known option, which says what is meant if that is known.
func (b *block) orInstead(i int, err error) error {
	words := b.lines[i].words
	if use, _ := b.instead(i); use != "" {
		return b.errorAt(i, option.Bad(words[0], strings.Join(words[1:], " "), use))
	}
	return err
}

// instead returns what to use instead of a line, and of others in the block.
func (b *block) instead(i int) (use string, taken int) {
	lines := make([][]string, len(b.lines))
	for j, l := range b.lines {
		lines[j] = splitWords(l.words)
	}
	return instead(b.scope, lines, i)
}

// errorAt adds the file and line of a token to an error.
func errorAt(token caddyfile.Token, err error) error {
	d := caddyfile.NewDispenser([]caddyfile.Token{token})
	d.Next()
	return d.WrapErr(err)
}
