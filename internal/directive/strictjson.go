package directive

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// UnmarshalBlock decodes a block. It accepts known fields only, as Caddy does, and says which field is
// meant by an unknown one.
func UnmarshalBlock(text []byte, b *config.Block) error {
	return unmarshalStrictly(text, b, config.FieldNames(b, &b.Zones, new(config.Limit), new(config.Auto), new(config.Zone)))
}

// UnmarshalApp decodes the options of the app, as UnmarshalBlock does those of a block.
func UnmarshalApp(text []byte, a *config.App) error {
	return unmarshalStrictly(text, a, config.FieldNames(a, new(config.Redis), new(config.Memory)))
}

// unmarshalStrictly decodes JSON, of which the fields are known.
func unmarshalStrictly(b []byte, into any, known []string) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		return nil
	}
	m := unknownField.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	name := m[1]
	meant := nearestOption(plainWord(name), known)
	if use, _ := instead(LimitScope, []string{name}); use != "" {
		if first := firstQuoted.FindStringSubmatch(use); first != nil && slices.Contains(known, first[1]) {
			meant = first[1]
		}
	}
	got := option.Quote(option.Shortened(name))
	switch meant {
	case "":
		return option.Errorf(got, "unknown field; see %sdirective.md", option.Docs)
	case name:
		return option.Errorf(got, "a field of another object; see %sdirective.md", option.Docs)
	}
	return option.Errorf(got, "unknown field; did you mean %s?", meant)
}

var (
	unknownField = regexp.MustCompile(`json: unknown field "(.*)"$`)
	firstQuoted  = regexp.MustCompile(`"([a-z_]+)`)
)
