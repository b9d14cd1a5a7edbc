// Package placeholder says what is no text with placeholders of Caddy.
package placeholder

// BracesBalance reports whether every brace in text is part of a placeholder or
// escaped. A closing brace that matches an escaped one need not be escaped.
func BracesBalance(text string) bool {
	open, literal := false, 0
	for i := range len(text) {
		switch escaped := i > 0 && text[i-1] == '\\'; {
		case open && text[i] == '}' && !escaped:
			open = false
		case open && text[i] == '{' && !escaped:
			return false
		case open:
		case text[i] == '{' && escaped:
			literal++
		case text[i] == '{':
			open = true
		case text[i] == '}' && literal > 0:
			literal--
		case text[i] == '}' && !escaped:
			return false
		}
	}
	return !open
}
