package directive

import (
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
)

// parseConcurrency parses the option concurrency: a number, or auto with or without a block.
func (p *limitParser) parseConcurrency(l *config.Limit) error {
	head := p.Token()
	text, err := parseArgument(p.Dispenser)
	if l.Concurrency = config.Number(text); err != nil || text != config.ConcurrencyAuto {
		return err
	}
	a := new(config.Auto)
	parsers := fieldParsers(p.Dispenser, a)
	parsers["high"] = func() (err error) { a.HighRaw, err = parseMatch(p.Helper); return err }
	parsers["low"] = func() (err error) { a.LowRaw, err = parseMatch(p.Helper); return err }
	written := readBlock(p.Dispenser, autoScope, head)
	if len(written.lines) > 0 {
		l.Auto = a
		p.blocks[l].lines = append(p.blocks[l].lines, written.lines...) // which errors found later may be about
	}
	return written.parse(p.Dispenser, parsers)
}
