package ratelimit

import (
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// maxTrackTop is the most counters of a limit.
const maxTrackTop = adminapi.MaxTop

// parseTrackTop parses the track_top option.
var parseTrackTop = option.Integer(1, maxTrackTop)

// topList finds the keys that ask most often at the limits whose buckets have one
// name. It is kept across reloads, as long as any config in use has such a limit.
type topList struct {
	*toplist.List
	id topID
}

// topID identifies a topList: the name of the buckets, and the number of counters.
type topID struct {
	name string
	n    int
}

// topListOf returns the list of an ID. The caller must release it.
func topListOf(id topID) *topList {
	t, _, _ := process.tops.LoadOrNew(id, func() (caddy.Destructor, error) {
		return &topList{toplist.New(id.n, nil), id}, nil
	})
	return t.(*topList)
}

// release releases the list, which ends with the last config that uses it.
func (t *topList) release() { _, _ = process.tops.Delete(t.id) }

// Destruct implements caddy.Destructor.
func (*topList) Destruct() error { return nil }

// record counts a request.
func (t *topList) record(b *limiter.Bucket, denied bool) {
	t.Record(b.Key, strings.HasSuffix(b.Name, addressSuffix), denied)
}
