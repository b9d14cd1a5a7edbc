package option

import (
	"strings"
	"testing"
)

// Guards the sentences that errors are: what an option got, what is wrong with it and what to
// do instead, without the value of a flag, the password of a URL and the end of a long text.
func TestErrors(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 65)
	for _, tc := range []struct {
		err  error
		want string
	}{
		{Bad("size", "abc", "1 or more"), `size: "abc" is not valid; use 1 or more`},
		{Bad("size", "", "1 or more"), `size: nothing given; use 1 or more`},
		{Bad("size", long, "1 or more"), `size: "` + long[1:] + `…" is not valid; use 1 or more`},
		{Bad("db", "redis://u:p@h/2", "a number"), `db: "redis://…@h/2" is not valid; use a number`},
		{Needs("period", "day", "algorithm fixed_window"), `period: "day" needs algorithm fixed_window`},
		{Needs("pool", "true", "a size"), `pool: needs a size`},
		{Clash("max_delay", "5s", "count", "use a limit of its own for it"), `max_delay: "5s" can't be combined with count; use a limit of its own for it`},
		{Clash("pool", "true", "ban", "use ban in another limit"), `pool: can't be combined with ban; use ban in another limit`},
		{Clash("name", long, "x", "use y"), `name: "` + long[1:] + `…" can't be combined with x; use y`},
		{BadFrom("size", `"-1"`, "{n}", "1 or more"), `size: "-1" from {n} is not valid; use 1 or more`},
	} {
		if got := tc.err.Error(); got != tc.want {
			t.Errorf("got  %s\nwant %s", got, tc.want)
		}
	}
}
