package directive

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// setInline sets what is on the directive's line: a name, a key and a rate, in any order.
// If it can't, it returns the words that are wrong, and what to use instead.
func setInline(l *config.Limit, args []string) (got, use string) {
	in, use := readInline(args)
	if use = cmp.Or(use, in.instead()); use != "" {
		return strings.Join(args, " "), use
	}
	l.Name, l.Key, l.Rate = in.name(), in.key, config.Rate(in.rate)
	return "", ""
}

// inline is what is on the directive's line. Hints say what its words mean that are neither a key
// nor a rate, or else they are names.
type inline struct {
	names     []string // at most one
	key, rate string
	rewritten bool     // whether the rate or the key was written in another way
	lines     []string // what to write in the block instead of other words, in quotes
	others    []string // what else to use instead
}

func (in *inline) name() string { return strings.Join(in.names, "") }

// readInline reads what is on the directive's line. If it is unclear what is meant, it returns what to use.
func readInline(args []string) (in inline, use string) {
	if inOneLine(args) {
		return in, "a block, with " + ownLine
	}
	var words []string // that are neither a key nor a rate
	filled := false    // whether a word before a matcher means nothing
	for i := 0; i < len(args); i++ {
		n, next := wordsOfRate(args[i:]), args[i+1:]
		other, _ := instead(LimitScope, [][]string{append([]string{"rate"}, args[i:i+n]...)}, 0)
		switch {
		case other != "" && n > 0:
			in.use(other)
			i += n - 1
		case n > 0 && in.rate != "":
			return in, "one rate, and others in limits within the block"
		case n > 0:
			in.rate = strings.Join(args[i:i+n], " ")
			i += n - 1
		case option.HasPlaceholder(args[i]) && in.key != "":
			return in, "one key, which may have several placeholders, as in {client_ip}/{host}"
		case option.HasPlaceholder(args[i]):
			in.key = args[i]
		case slices.Contains(fillers, args[i]) && len(next) > 0 && isMatcherToken(next[0]):
			filled = true
		case args[i] == "rate" && wordsOfRate(next) > 0, slices.Contains(strings.Split(amounts, "|"), args[i]) && wordsOfRate(next) > 0, args[i] == "key" && len(next) > 0 && option.HasPlaceholder(next[0]):
			in.rewritten = true // without that word
		default:
			words = append(words, args[i])
		}
	}
	meant := ""
	if len(words) > 1 {
		meant, _ = instead(BlockScope, [][]string{words}, 0)
	}
	switch i := slices.IndexFunc(args, isMatcherToken); {
	case i == 0 || i > 0 && slices.IndexFunc(args[i+1:], isMatcherToken) >= 0: // a second one
		return in, "one matcher, before all else, or for several paths match path /a /b in a block"
	case i > 0 && (filled || words[0] == args[i] || matcherOption(words) == "" && meant == ""):
		return in, "one matcher, before all else, as in " + inQuotes(strings.Join(slices.DeleteFunc(slices.Concat(args[i:i+1], args[:i], args[i+1:]), func(word string) bool {
			return filled && slices.Contains(fillers, word)
		}), " "))
	}
	alone := len(words) == 1 && in.rate == "" // a name, whatever else it may mean
	words = splitWords(words)
	if alone && len(words) == 1 && !beginsWithDigit(words[0]) {
		in.names = words
		return in, ""
	}
	for len(words) > 0 {
		use, taken := in.meantBy(words)
		switch {
		case use != "":
			in.use(use)
		case len(in.names) > 0:
			return in, "at most a name, a key and a rate, and a block with a line for each option"
		default:
			in.names = append(in.names, words[0])
		}
		words = words[max(taken, 1):]
	}
	return in, ""
}

// meantBy returns what to use instead of words that follow others, and how many of them it replaces,
// or "" if the first may be a name.
func (in *inline) meantBy(words []string) (use string, taken int) {
	scopes := []*Scope{BesideScope, BlockScope}
	switch {
	case strings.Contains(in.rate, "r/"):
		scopes[0] = BesideRequestsScope
	case in.rate != "":
		scopes[0] = BesideRateScope
	}
	if len(in.names) > 0 && in.key == "" {
		scopes = append(scopes, BesideNameScope)
	}
	for _, scope := range scopes {
		if use, taken = instead(scope, [][]string{words}, 0); use != "" {
			return use, taken
		}
	}
	if slices.Contains(config.LimitOptions, words[0]) {
		for taken = 1; taken < len(words) && !slices.Contains(config.LimitOptions, words[taken]); taken++ {
			if use, _ := instead(BlockScope, [][]string{words[taken:]}, 0); use != "" {
				break
			}
		}
		if taken == 1 && config.OptionsOf[bool](new(config.Limit))[words[0]] == nil {
			return words[0] + " with its value", 1
		}
		return inQuotes(strings.Join(words[:taken], " ")), taken
	}
	if m := matcherOption(words); m != "" {
		return inQuotes(m), len(words)
	}
	return "", 0
}

// use adds what to use in the block. A rate is on the directive's line if there is none.
func (in *inline) use(use string) {
	if rate, isRate := strings.CutPrefix(use, `"rate `); isRate && in.rate == "" {
		in.rate, use, _ = strings.Cut(rate, `"`)
		in.rewritten = true
		if use, isRate = strings.CutPrefix(use, " and "); !isRate {
			return // another way to write it
		}
	}
	if use[0] == '"' {
		in.lines = append(in.lines, use)
	} else {
		in.others = append(in.others, use)
	}
}

// instead returns what to use instead of the line, or "" if it is right.
func (in *inline) instead() string {
	uses := strings.Join(slices.Concat(in.lines, in.others), " and ")
	line := strings.Join(strings.Fields(in.name()+" "+in.key+" "+in.rate), " ")
	switch {
	case uses == "" && !in.rewritten:
		return ""
	case line == "":
		return "a block with " + uses
	case uses != "":
		uses = ", and in a block " + uses
	}
	return inQuotes(line) + uses
}

// limitMeant returns what to write instead of the words of a directive without the directive: a name,
// and a rate with or without a key.
func limitMeant(words []string) string {
	in, use := readInline(words)
	if use != "" || in.rate == "" || in.rewritten || len(in.names) == 0 {
		return ""
	}
	if _, wrong := option.ParseRate(in.rate); wrong != "" {
		return ""
	}
	if one, _ := instead(BesideNameScope, [][]string{in.names}, 0); in.key != "" {
		in.use(inQuotes("key " + in.key))
	} else if one != "" {
		in.use(one)
	}
	return inQuotes("limit "+in.name()) + " with " + option.InWords(slices.Concat(in.lines, in.others, []string{inQuotes("rate " + in.rate)}), "and") + " in it"
}

// fillers are words that people write before a matcher.
var fillers = []string{"for", "on", "to", "at", "in", "if"}

// isMatcherToken reports whether a word can only be a matcher: a path, or a name of one.
func isMatcherToken(word string) bool {
	return strings.HasPrefix(word, "/") || strings.HasPrefix(word, "@")
}

// wordsOfRate returns with how many words of a rate args begin, valid or not, or 0 if they begin
// with something else.
func wordsOfRate(args []string) int {
	switch {
	case len(args) == 0 || !beginsWithDigit(args[0]) || isNetwork(args[0]):
		return 0
	case strings.Contains(args[0], "/") || strings.Contains(args[0], " per "):
		return 1
	case len(args) < 3 || args[1] != "per":
		return 0
	case len(args) > 3 && strings.Trim(args[2], "0123456789") == "":
		return 4 // 10 per 15 minutes
	}
	return 3
}

// isNetwork reports whether a word is the prefix of addresses, which no rate is.
func isNetwork(word string) bool { _, err := netip.ParsePrefix(word); return err == nil }

func beginsWithDigit(word string) bool { return word != "" && word[0] >= '0' && word[0] <= '9' }

// inQuotes returns a line as an error names it.
func inQuotes(line string) string { return strconv.Quote(option.Shortened(option.Redacted(line))) }

// quotedLines returns lines as an error names them.
func quotedLines(lines []string) string {
	q := make([]string, len(lines))
	for i, line := range lines {
		q[i] = inQuotes(line)
	}
	return option.InWords(q, "and")
}

// insteadOfName returns what to use instead of a name that says by what to limit, while no
// key does, or "". besideRate reports whether a rate is on the same line.
func insteadOfName(l *config.Limit, besideRate bool) string {
	if l.Key != "" || l.IsGroup() {
		return ""
	}
	if one, _ := instead(BesideNameScope, [][]string{{l.Name}}, 0); besideRate && one != "" {
		return inQuotes(l.Name+" "+string(l.Rate)) + ", and in a block " + one + " for one bucket for all, or the key {client_ip} beside it for one for each address"
	}
	word := strings.Trim(l.Name, "abcdefghijklmnopqrstuvwxyz") == "" // such as path, which before a block is a name too
	if meant := advice.MeantBy(l.Name); meant != "" && (besideRate || !word) {
		return "the key {" + strings.Replace(meant, "http.request.header.", "header.", 1) + "}"
	}
	return ""
}
