package report

import (
	"fmt"
	"sort"
)

// verdict says in words what a limit did, and what to change.
type verdict struct {
	Label  string // one or two words
	Class  string // of the label: calm, good or warn
	Said   string
	Advice []string
}

// Shares of keys denied from which a limit counts as broad, and up to which as
// selective.
const (
	broad     = 0.1
	selective = 0.01
)

// judge returns the verdict on a limit.
func judge(l Limit) verdict {
	v := verdict{}
	all := total(l.Peaks)
	need := l.SizeFor(0)
	switch {
	case l.Requests == 0:
		v.Label, v.Class, v.Said = "no requests", "calm", "No request met this limit."
		v.Advice = append(v.Advice, "Either the logs have no such requests, or the limit's matcher or its place in the configuration keeps them away.")
		return v
	case l.Denied == 0 && l.DeniedAtMost <= 0:
		v.Label, v.Class = "denied nothing", "calm"
		v.Said = fmt.Sprintf("Denied none of %s, from %s.", plural(l.Requests, "request"), plural(l.Keys, "key"))
		switch {
		case l.Size > 0 && need > 0 && need <= l.Size/2:
			v.Advice = append(v.Advice, fmt.Sprintf(
				"The busiest key did not need the size of %s: a size of %s would have denied nothing either.",
				count(l.Size), count(need)))
		case l.Size > 0 && need > 0 && need <= l.Size:
			v.Advice = append(v.Advice, fmt.Sprintf(
				"The busiest key needed a size of %s, so the size of %s leaves little to spare.",
				count(need), count(l.Size)))
		}
		return v
	}

	v.Said = fmt.Sprintf("Denied %s of requests, from %s of %s.",
		share(l.Denied, l.Requests), count(l.KeysDenied), plural(l.Keys, "key"))
	if l.DeniedAtMost > l.Denied {
		v.Said = fmt.Sprintf("Denied %s to %s of requests; at the least from %s of %s.",
			share(l.Denied, l.Requests), share(l.DeniedAtMost, l.Requests), count(l.KeysDenied), plural(l.Keys, "key"))
	}
	part := fraction(l.KeysDenied, l.Keys)
	switch {
	case l.Keys == 1:
		v.Label, v.Class = "one key", "calm"
		v.Advice = append(v.Advice, "All requests had the same key, so the busiest client took from all others.")
	case part >= broad:
		v.Label, v.Class = "broad", "warn"
		v.Advice = append(v.Advice, fmt.Sprintf("It denied %s of the keys at least once: this many are rarely all abusive.", share(l.KeysDenied, l.Keys)))
	case part <= selective:
		v.Label, v.Class = "selective", "good"
		v.Advice = append(v.Advice, fmt.Sprintf("It never denied %s of the keys.", share(l.Keys-l.KeysDenied, l.Keys)))
	default:
		v.Label, v.Class = "moderate", "calm"
	}
	switch n, denied := concentration(l); n {
	case 0:
	case 1:
		v.Advice = append(v.Advice, fmt.Sprintf("A single key had %s of all denials.", share(denied, l.Denied)))
	default:
		v.Advice = append(v.Advice, fmt.Sprintf("The %s that were denied most had %s of all denials.", plural(int64(n), "key"), share(denied, l.Denied)))
	}
	if l.Size == 0 || all == 0 {
		return v
	}

	// A key that sends more than drips out needs ever more room, so a larger size
	// denies it only later. What counts in windows does not add up like that.
	over := above(l.Peaks, l.Size)
	switch {
	case over == 0:
	case 2*l.KeysLasting > over && !l.Windows:
		v.Advice = append(v.Advice, fmt.Sprintf(
			"%s of the %s with a peak above the size sent more than drips out for long, rather than in bursts. If they should be served, raise the drip rate rather than the size.",
			count(l.KeysLasting), plural(over, "key")))
	case part > selective && l.Keys > 1:
		if s := l.SizeFor(selective); s > l.Size && s < NoSize {
			bursts := "Most of them came in bursts: a"
			if l.Windows {
				bursts = "A"
			}
			v.Advice = append(v.Advice, fmt.Sprintf("%s size of %s would deny %s of the keys.",
				bursts, count(s), share(above(l.Peaks, s), all)))
		}
	}
	return v
}

// concentration returns how few of the top keys had half of the denials, if they
// are few, and how many denials they had.
func concentration(l Limit) (keys int, denied int64) {
	if l.Keys < 10 {
		return 0, 0
	}
	for i, k := range l.Top {
		denied += k.Denied
		if denied*2 >= l.Denied && int64(i+1)*10 <= l.KeysDenied {
			return i + 1, denied
		}
	}
	return 0, 0
}

// total returns how many keys there are.
func total(peaks []Peak) int64 {
	var n int64
	for _, p := range peaks {
		n += p.Keys
	}
	return n
}

// above returns how many keys a limit of a size would deny at least once.
func above(peaks []Peak, size int64) int64 {
	i := sort.Search(len(peaks), func(i int) bool { return peaks[i].Units > size })
	return total(peaks[i:])
}

// SizeFor returns the smallest size with which at most the given share of keys, from
// 0 to less than 1, would ever be denied, or 0 if there are none.
func (l *Limit) SizeFor(share float64) int64 {
	allowed := int64(share * float64(total(l.Peaks)))
	for i := len(l.Peaks) - 1; i >= 0; i-- {
		if allowed -= l.Peaks[i].Keys; allowed < 0 {
			return l.Peaks[i].Units
		}
	}
	return 0
}

// proposal is a size and what it would do.
type proposal struct {
	Target  string
	Size    int64
	Denied  int64
	Keys    int64
	Current bool
}

// proposals returns the sizes that would deny a few shares of the keys, as far as
// there are any, and the current one between them, in ascending order.
func proposals(l Limit) []proposal {
	all := total(l.Peaks)
	if all == 0 {
		return nil
	}
	var list []proposal
	add := func(target string, size int64, current bool) {
		if size == NoSize {
			return
		}
		p := proposal{target, size, above(l.Peaks, size), all, current}
		if n := len(list); n > 0 && list[n-1].Size == size {
			// The stricter target says more.
			p.Current = current || list[n-1].Current
			list[n-1] = p
			return
		}
		list = append(list, p)
	}
	for _, target := range []struct {
		name  string
		share float64
	}{{"at most 10" + sign, 0.1}, {"at most 1" + sign, 0.01}, {"at most 0.1" + sign, 0.001}, {"at most 0.01" + sign, 0.0001}, {"none", 0}} {
		add(target.name, l.SizeFor(target.share), false)
	}
	if l.Size == 0 {
		return list
	}
	i := sort.Search(len(list), func(i int) bool { return list[i].Size >= l.Size })
	if i < len(list) && list[i].Size == l.Size {
		list[i].Current = true
		return list
	}
	list = append(list, proposal{})
	copy(list[i+1:], list[i:])
	list[i] = proposal{"", l.Size, above(l.Peaks, l.Size), all, true}
	return list
}
