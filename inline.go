package ratelimit

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
)

// setInLine sets what stands beside the directive: a name, a key and a rate, in any order.
// If it can't, it returns the words that are wrong, and what to use instead.
func (l *Limit) setInLine(args []string) (got, use string) {
	got = strings.Join(args, " ")
	var words []string // that are neither a key nor a rate
	for i := 0; i < len(args); i++ {
		n := wordsOfRate(args[i:])
		switch {
		case n > 0:
			if l.Rate != "" {
				return got, "one rate, and others in limits within the block"
			}
			l.Rate = Rate(strings.Join(args[i:i+n], " "))
			i += n - 1
		case option.HasPlaceholder(args[i]):
			if l.Key != "" {
				return got, "one key, which may have several placeholders, as in {client_ip}/{host}"
			}
			l.Key = args[i]
		default:
			words = append(words, args[i])
		}
	}
	switch {
	case inOneLine(args):
		return got, "a block, with " + ownLine
	case len(words) == 0:
		return "", ""
	case isMatcherToken(words[0]), slices.ContainsFunc(words, isMatcherToken) && matcherOption(words) == "":
		return got, `one matcher, before all else, or for several paths "match path /a /b" in a block`
	case len(words) > 1 || strings.Contains(words[0], "=") || optionsIn(args) != nil:
		if lines := l.linesOf(args, words); len(lines) > 0 || len(words) > 1 {
			return got, inBlock(lines)
		}
	}
	if use := l.insteadOf(words[0]); use != "" {
		return words[0], use
	}
	l.Name = words[0]
	return "", ""
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

// inBlock returns what to use instead of words that are no use beside the directive: lines
// of its block.
func inBlock(lines []string) string {
	use := "at most a name, a key and a rate, and a block with a line for each option"
	if len(lines) == 0 {
		return use
	}
	return use + ": " + quotedLines(lines)
}

// quotedLines returns lines as an error names them.
func quotedLines(lines []string) string {
	q := make([]string, len(lines))
	for i, line := range lines {
		q[i] = strconv.Quote(option.Redacted(line))
	}
	return option.InWords(q, "and")
}

// spelledRate matches a rate that is not written as one, such as 60 1m or 5 requests per
// minute, or 2 3 second, which has a burst.
var spelledRate = regexp.MustCompile(`(?:^| )([0-9]+)(?: ([0-9]+))?(?: (?:req|requests?|events?|times))?(?: (?:per|in|every|/))? ([0-9]*[a-z]+)(?: |$)`)

// Words that other limiters have behind the rate: the status of denials, the number of
// keys for which there is memory, and its size.
var (
	otherStatus = regexp.MustCompile(`^[45][0-9][0-9]$`)
	otherNumber = regexp.MustCompile(`^[0-9]+$`)
	otherSize   = regexp.MustCompile(`(?i)^[0-9]+[kmg]b?$`)
)

// linesOf returns the lines of a block that are meant by words beside the directive.
// They are args without the key and the rate.
func (l *Limit) linesOf(args, words []string) []string {
	if m := matcherOption(words); m != "" && optionsIn(args) == nil {
		return []string{m}
	}
	if lines := optionsIn(args); lines != nil {
		return lines
	}
	var lines []string
	text := strings.Join(words, " ")
	if m := spelledRate.FindStringSubmatch(text); m != nil && l.Rate == "" {
		if _, wrong := option.ParseRate(m[1] + "/" + m[3]); wrong == "" {
			lines = append(lines, "rate "+m[1]+"/"+m[3])
			if m[2] != "" {
				lines = append(lines, "size "+m[2])
			}
			words = strings.Fields(strings.Replace(text, m[0], " ", 1))
		}
	}
	for i, word := range words {
		if options := optionsIn(words[i:]); options != nil {
			return append(lines, options...)
		}
		switch {
		case otherStatus.MatchString(word):
			lines = append(lines, "status "+word)
		case otherNumber.MatchString(word) && l.Rate != "":
			lines = append(lines, "max_keys "+word)
		case otherNumber.MatchString(word) && len(lines) == 0:
			lines = append(lines, "rate "+word+"/s")
		}
	}
	return lines
}

// optionsIn returns the lines of a block for words that are options of a limit and their
// values, as in size 10, size=10 or burst=20, or nil if they begin with none.
func optionsIn(words []string) (lines []string) {
	var split []string
	for _, word := range words {
		if name, value, found := strings.Cut(word, "="); found && optionMeant(name) != "" {
			split = append(split, name, value)
		} else {
			split = append(split, word)
		}
	}
	if len(split) < 2 || optionMeant(split[0]) == "" {
		return nil
	}
	for _, word := range split {
		if name := optionMeant(word); name != "" {
			lines = append(lines, name)
		} else if useInstead(plainWord(word), blockScope) == "" {
			lines[len(lines)-1] += " " + word
		}
	}
	return lines
}

// optionMeant returns the option of a limit that a word is, or is elsewhere, or "".
func optionMeant(word string) string {
	if slices.Contains(limitOptions, word) {
		return word
	}
	if use := useInstead(plainWord(word), blockScope); slices.Contains(limitOptions, use) {
		return use
	}
	return ""
}

// insteadOf returns what to use instead of a word that can't be the name of a limit, or
// "". A word that is one beside a block may be meant otherwise if nothing but a rate is there.
func (l *Limit) insteadOf(word string) string {
	switch use := useInstead(plainWord(word), blockScope); {
	case otherStatus.MatchString(word):
		return quotedLines([]string{"status " + word}) + " in a block"
	case otherNumber.MatchString(word) && l.Rate == "":
		return "a name, or a rate such as " + word + "/s"
	case otherNumber.MatchString(word):
		return quotedLines([]string{"max_keys " + word}) + " in a block to set how many keys there may be, or a name"
	case l.Rate == "":
		return ""
	case otherSize.MatchString(word):
		return "a name, or nothing: memory is used as needed"
	case slices.Contains(blockScope.options, word):
		return "another name, or the option " + word + " in a block"
	case slices.Contains(limitOptions, use):
		return "another name, or the option " + use + " in a block"
	case use != "":
		return "another name, or in a block " + use
	}
	return ""
}

// oneForAll are words that beside a rate mean a bucket for all requests. Before a block they may be
// names, as of a limit for all requests that has others within it.
var oneForAll = []string{"all", "everyone", "global", "static"}

// insteadOfName returns what to use instead of a name that says by what to limit, while no
// key does, or "". besideRate tells that the name stands beside the rate.
func (l *Limit) insteadOfName(besideRate bool) string {
	if l.Key != "" || l.isGroup() {
		return ""
	}
	if besideRate && slices.Contains(oneForAll, l.Name) {
		return `"key static" in a block for one bucket for all, or the key {client_ip} beside it for one for each address`
	}
	word := strings.Trim(l.Name, "abcdefghijklmnopqrstuvwxyz") == "" // such as path, which before a block is a name too
	if meant := key.MeantBy(l.Name); meant != "" && (besideRate || !word) {
		return "the key {" + strings.Replace(meant, "http.request.header.", "header.", 1) + "}"
	}
	return ""
}
