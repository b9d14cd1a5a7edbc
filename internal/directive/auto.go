package directive

import (
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
)

// parseConcurrency parses the option concurrency: a number, or auto with or without a block.
func (p *limitParser) parseConcurrency(l *config.Limit) error {
	text, err := parseArgument(p.Dispenser)
	if l.Concurrency = config.Number(text); err != nil || text != config.ConcurrencyAuto {
		if err == nil {
			err = parseEnd(p.Dispenser, "concurrency")
		}
		return err
	}
	a := new(config.Auto)
	parsers, seen := fieldParsers(p.Dispenser, a), make(map[string]bool)
	parsers["high"] = func() (err error) { a.HighRaw, err = parseMatch(p.Helper); return err }
	parsers["low"] = func() (err error) { a.LowRaw, err = parseMatch(p.Helper); return err }
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		l.Auto = a
		name := p.Val()
		if seen[name] {
			return p.Errf("duplicate option: %s", name)
		}
		seen[name] = true
		p.note(l, name)
		if parsers[name] == nil {
			return unknownOption(p.Dispenser, autoScope)
		}
		if err := parsers[name](); err != nil {
			return err
		}
	}
	return nil
}
