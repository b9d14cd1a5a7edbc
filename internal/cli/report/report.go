// Package report shows what a replay of access logs found, as one HTML file.
package report

import (
	"math"
	"time"
)

// Report is what a replay found.
type Report struct {
	Version   string    // of this module, or empty
	Generated time.Time // when the report was made

	// The access logs as they were named, and the time from the first request to
	// the last.
	Logs     []string
	From, To time.Time

	// The lines read, those that were used, and why others were not.
	Lines, Used int64
	Skipped     []Skipped

	// How exact the times in the logs are. With one second, which requests of a
	// second came at once is unknown, so Limit.Denied is a lower bound and
	// Limit.DeniedAtMost an upper one.
	Resolution time.Duration

	// What makes all numbers doubtful, one sentence each. They are shown first.
	Warnings []string

	// What the replay could not take into account, one sentence each.
	Notes []string

	// One configuration, or two to compare.
	Configs []Config
}

// Skipped counts lines that were not used.
type Skipped struct {
	Reason string
	Lines  int64
}

// Config is what the limits of one configuration would have done.
type Config struct {
	Name                       string // its file
	Requests, Admitted, Denied int64  // that any limit applied to
	Limits                     []Limit
}

// Limit is what one limit would have done. Its JSON is what the command prints.
type Limit struct {
	Path      string `json:"limit"`
	Algorithm string `json:"algorithm"`
	Numbers   string `json:"-"` // in words

	Size int64 `json:"size,omitempty"` // 0 if it depends on the request

	// Whether it admits up to its size in each window. Otherwise the size is the size of
	// a burst, and units drip out at a rate of their own.
	Windows bool `json:"-"`

	// Whether no size makes it admit more, as with warm_up: its rate alone decides.
	Sizeless bool `json:"-"`

	Requests     int64 `json:"requests"`    // that it applied to
	Admitted     int64 `json:"admitted"`    // by all limits
	Denied       int64 `json:"denied"`      // by this limit, with or without others
	DeniedAtMost int64 `json:"-"`           // see Report.Resolution; equal to Denied if times are exact
	Spared       int64 `json:"spared"`      // by this limit, which had room, where another one denied
	Keys         int64 `json:"keys"`        // that requests had
	KeysDenied   int64 `json:"keys_denied"` // that this limit denied at least once

	// Requests over time, in slots of equal length without gaps.
	Slot  time.Duration `json:"-"`
	Times []Slot        `json:"-"`

	// How many keys with a peak above the size reached it by sending more than drips
	// out for long, and not by a burst. It is of no use with Windows.
	KeysLasting int64 `json:"-"`

	// How many keys would have needed which size in order never to be denied, by
	// ascending size: the highest level that each key's bucket would have reached
	// if it could hold anything. A key is denied at least once by a limit of a
	// given size if and only if its peak is above that size. None if the limit has
	// no size.
	Peaks []Peak `json:"-"`

	Top     []Key       `json:"top,omitempty"`   // the keys with the most denied requests, then the most requests
	ByPath  []Breakdown `json:"-"`               // the paths with the most denied requests
	ByHour  [24]Count   `json:"-"`               // by hour of the day, in Location
	HourIn  string      `json:"-"`               // the name of that location
	Unusual []string    `json:"notes,omitempty"` // what to know about these numbers, one sentence each
}

// Count counts requests.
type Count struct {
	Requests int64 `json:"requests"`
	Denied   int64 `json:"denied"`
}

// Slot counts the requests from Start on.
type Slot struct {
	Start            time.Time
	Admitted, Denied int64
}

// Peak counts the keys whose bucket would have reached Units, rounded up to a few
// hundred different values.
type Peak struct{ Units, Keys int64 }

// NoSize is the peak of keys that a limit of any size would have denied.
const NoSize = math.MaxInt64

// Key is one key. Text is empty unless keys may be shown.
type Key struct {
	Text string `json:"key"`
	Count
	Peak int64 `json:"-"`
}

// Breakdown counts the requests of one path of a URL.
type Breakdown struct {
	Path string
	Count
}
