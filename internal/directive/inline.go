package directive

import (
	"slices"
	"strconv"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// setInLine sets what stands beside the directive: a name, a key and a rate, in any order.
// If it can't, it returns the words that are wrong, and what to use instead.
func setInLine(l *config.Limit, args []string) (got, use string) {
	got = strings.Join(args, " ")
	in, use := readLine(args)
	if use == "" {
		use = in.instead()
	}
	if use != "" {
		return got, use
	}
	l.Key, l.Rate = in.key, config.Rate(in.rate)
	if len(in.names) > 0 {
		l.Name = in.names[0]
	}
	return "", ""
}

// inLine is what stands beside the directive.
type inLine struct {
	names []string // the words that may be a name
	key   string
	rate  string
	wrong bool     // whether a rate or a key is written in another way
	uses  []string // what to write in the block instead of other words
}

// readLine reads what stands beside the directive. If there is no telling what is meant, it returns
// what to use.
func readLine(args []string) (in inLine, use string) {
	if inOneLine(args) {
		return in, "a block, with " + ownLine
	}
	var words []string // that are neither a key nor a rate
	for i := 0; i < len(args); i++ {
		rest := args[i+1:]
		n := wordsOfRate(args[i:])
		switch {
		case n > 0 && in.rate != "":
			return in, "one rate, and others in limits within the block"
		case n > 0:
			in.rate = strings.Join(args[i:i+n], " ")
			i += n - 1
		case option.HasPlaceholder(args[i]) && in.key != "":
			return in, "one key, which may have several placeholders, as in {client_ip}/{host}"
		case option.HasPlaceholder(args[i]):
			in.key = args[i]
		case args[i] == "rate" && len(rest) > 0 && wordsOfRate(rest) > 0, args[i] == "key" && len(rest) > 0 && option.HasPlaceholder(rest[0]):
			in.wrong = true // what follows needs no such word
		default:
			words = append(words, args[i])
		}
	}
	if len(args) > 0 && isMatcherToken(args[0]) { // a second one
		return in, "one matcher, before all else, or for several paths match path /a /b in a block"
	}
	if i := slices.IndexFunc(args, isMatcherToken); i > 0 && (words[0] == args[i] || matcherOption(words) == "") {
		return in, "one matcher, before all else, as in " + inQuotes(strings.Join(slices.Concat(args[i:i+1], args[:i], args[i+1:]), " "))
	}
	alone := len(words) == 1 && in.rate == "" // a name, whatever else it may mean
	words = splitWords(words)
	if alone && len(words) == 1 && (words[0] == "" || words[0][0] < '0' || words[0][0] > '9') {
		in.names = words
		return in, ""
	}
	for len(words) > 0 {
		use, taken := in.meantBy(words)
		if use == "" {
			in.names = append(in.names, words[0])
		} else {
			in.use(use)
		}
		words = words[max(taken, 1):]
	}
	return in, ""
}

// meantBy returns what to use instead of words behind those that were read, and for how many of them
// that stands, or "" if the first may be a name.
func (in *inLine) meantBy(words []string) (use string, taken int) {
	places := []*Scope{BesideScope, BlockScope}
	switch {
	case strings.Contains(in.rate, "r/"):
		places[0] = BesideRequestsScope
	case in.rate != "":
		places[0] = BesideRateScope
	}
	if len(in.names) > 0 && in.key == "" {
		places = append(places, BesideNameScope)
	}
	for _, at := range places {
		if use, taken = instead(at, words); use != "" {
			return use, taken
		}
	}
	if slices.Contains(config.LimitOptions, words[0]) {
		for taken = 1; taken < len(words) && !slices.Contains(config.LimitOptions, words[taken]); taken++ {
			if use, _ := instead(BlockScope, words[taken:]); use != "" {
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

// use adds what to use in the block. A rate stands beside the directive if there is none.
func (in *inLine) use(use string) {
	if rate, isRate := strings.CutPrefix(use, `"rate `); isRate && in.rate == "" {
		in.rate, use, _ = strings.Cut(rate, `"`)
		in.wrong = true
		if use, isRate = strings.CutPrefix(use, " and "); !isRate {
			return // another way to write it
		}
	}
	in.uses = append(in.uses, use)
}

// instead returns what to use instead of a line, or "" if it is right.
func (in *inLine) instead() string {
	switch {
	case len(in.names) > 1:
		return "at most a name, a key and a rate, and a block with a line for each option"
	case len(in.uses) == 0 && !in.wrong:
		return ""
	}
	lines, others := in.uses[:0:0], in.uses[:0:0]
	for _, use := range in.uses {
		if use[0] == '"' {
			lines = append(lines, use)
		} else {
			others = append(others, use)
		}
	}
	uses := strings.Join(append(lines, others...), " and ")
	beside := strings.TrimSpace(strings.Join(in.names, "") + " " + in.key)
	if beside = strings.TrimSpace(beside + " " + in.rate); beside == "" {
		return "a block with " + uses
	}
	if uses != "" {
		uses = ", and in a block " + uses
	}
	return inQuotes(beside) + uses
}

// limitMeant returns what to write instead of words that are those of a directive without the
// directive: a name, and a rate with or without a key.
func limitMeant(words []string) string {
	in, use := readLine(words)
	if use != "" || in.rate == "" || in.wrong || len(in.names) != 1 {
		return ""
	}
	if in.key != "" {
		in.uses = append(in.uses, inQuotes("key "+in.key))
	} else if one, _ := instead(BesideNameScope, in.names); one != "" {
		in.uses = append(in.uses, one)
	}
	return inQuotes("limit "+in.names[0]) + " with " + option.InWords(append(in.uses, inQuotes("rate "+in.rate)), "and") + " in it"
}

// isMatcherToken reports whether a word can only be a matcher: a path, or a name of one.
func isMatcherToken(word string) bool {
	return strings.HasPrefix(word, "/") || strings.HasPrefix(word, "@")
}

// wordsOfRate returns how many words a rate has with which args begin, whether it is a
// valid one or not, and 0 if they begin with something else.
func wordsOfRate(args []string) int {
	switch word := args[0]; {
	case word == "" || word[0] < '0' || word[0] > '9':
		return 0
	case strings.Contains(word, "/") || strings.Contains(word, " per "):
		return 1
	case len(args) < 3 || args[1] != "per":
		return 0
	case len(args) > 3 && strings.Trim(args[2], "0123456789") == "":
		return 4 // 10 per 15 minutes
	}
	return 3
}

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
// key does, or "". besideRate tells that the name stands beside the rate.
func insteadOfName(l *config.Limit, besideRate bool) string {
	if l.Key != "" || l.IsGroup() {
		return ""
	}
	if one, _ := instead(BesideNameScope, []string{l.Name}); besideRate && one != "" {
		return inQuotes(l.Name+" "+string(l.Rate)) + ", and in a block " + one + " for one bucket for all, or the key {client_ip} beside it for one for each address"
	}
	word := strings.Trim(l.Name, "abcdefghijklmnopqrstuvwxyz") == "" // such as path, which before a block is a name too
	if meant := advice.MeantBy(l.Name); meant != "" && (besideRate || !word) {
		return "the key {" + strings.Replace(meant, "http.request.header.", "header.", 1) + "}"
	}
	return ""
}
