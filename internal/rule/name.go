package rule

import (
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
)

// The names of buckets in stores are the paths of their limits, followed by what distinguishes
// buckets of one path. Telemetry takes the paths from them again.

// addressSuffix ends the names of the buckets of clients' addresses that replace
// keys. A limit's name has no "@".
const addressSuffix = "@client_ip"

// SetName sets the names of b in stores, given the default key. Limits of one name keep
// sharing buckets while their size changes. Limits without a name, as JSON may have them, are
// distinguished by their keys and numbers: otherwise a small limit of one site would deny what a
// large one of another has admitted.
//
// Limits that users named have one key. Limits that a Caddyfile named by their order may have
// another one in another Caddyfile, or after a reload. So they are distinguished by their keys
// too, except for the default key: otherwise clients could fill each other's buckets by values of
// another key, such as a header field.
func (b *Bucket) SetName(defaultKey string) {
	b.Name = b.Path
	first, _, _ := strings.Cut(b.Path, "/")
	k, numbers := b.Limit.Key, ""
	if !b.Limit.Named {
		numbers = b.Describe()
	}
	byOrder := first == "default" || strings.HasPrefix(first, "default-")
	if template := k.String(); byOrder && (template != defaultKey || numbers != "") {
		digest := fnv.New64a()
		fmt.Fprintf(digest, "%s %d %d", template, k.Prefixes.IPv4, k.Prefixes.IPv6)
		if numbers != "" {
			fmt.Fprintf(digest, "\x00%s", numbers)
		}
		b.Name += "@" + strconv.FormatUint(digest.Sum64(), 36)
	}
	b.AddressName = b.Name + addressSuffix
}
