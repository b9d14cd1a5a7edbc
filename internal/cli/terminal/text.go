package terminal

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
)

// PrintJSON prints a value as JSON, indented and safe to print.
func PrintJSON(w io.Writer, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err == nil {
		_, err = io.WriteString(w, SafeJSON(string(text))+"\n")
	}
	return err
}

// SafeJSON returns JSON with everything escaped that is not safe to print.
func SafeJSON(text string) string {
	var b strings.Builder
	for _, r := range text {
		switch {
		case unicode.IsPrint(r) || r == '\n':
			b.WriteRune(r)
		case r > 0xffff:
			high, low := 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// Briefly returns a duration with about three digits.
func Briefly(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(time.Second).String()
	case d >= 10*time.Millisecond:
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(time.Microsecond).String()
}

// Wrapped returns a text in lines of at most that many characters, broken between words, that
// are indented except the first. Words that are too long stay whole. 0 is any length.
func Wrapped(text string, most, indent int) string {
	var b strings.Builder
	line := []rune(text)
	for most > 0 && len(line) > most {
		at := -1
		for i := indent + 1; i < len(line) && (i <= most || at < 0); i++ {
			if line[i] == ' ' {
				at = i
			}
		}
		if at < 0 {
			break
		}
		b.WriteString(string(line[:at]) + "\n")
		line = []rune(strings.Repeat(" ", indent) + string(line[at+1:]))
	}
	return b.String() + string(line)
}
