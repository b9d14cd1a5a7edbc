package compile

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/field"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// maxReadBody is the most that may be read of a body for its fields: it is kept in memory.
const maxReadBody = 16 << 20

// parseReadBody parses the option read_body.
func parseReadBody(text string) (int64, string) {
	n, use := option.Bytes(text)
	if use != "" || n > maxReadBody {
		use = "a number of bytes from 1 to 16MiB, such as 1MiB"
	}
	return n, use
}

// readBody returns how much is read of a body for the fields of it that a limit names, or one within
// it, and 0 if they name none.
func (c *Compiler) readBody(l *config.Limit) int64 {
	text, err := json.Marshal(l)
	if err != nil || !slices.ContainsFunc(placeholderText.FindAllString(string(text), -1), mayBeField) {
		return 0
	}
	return c.Settings.ReadBody
}

// placeholderText matches a placeholder in JSON.
var placeholderText = regexp.MustCompile(`\{[A-Za-z_][^{}"\\\s]*\}`)

// mayBeField reports whether a placeholder, with its braces, is a field of a body, or may be one by
// another name: it is none of Caddy's, so a map may set it.
func mayBeField(text string) bool {
	name := strings.Trim(text, "{}")
	return strings.HasPrefix(name, field.Prefix) || !strings.HasPrefix(name, "http.") && !strings.HasPrefix(name, "time.") &&
		!placeholder.IsGlobal(name) && placeholder.Addresses[name] == ""
}
