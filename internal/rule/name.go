package rule

import (
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
)

// The names of buckets in stores are the paths of their limits and what tells buckets of one
// path apart, from which telemetry takes the paths again.

// addressSuffix ends the names of the buckets of clients' addresses that replace
// keys. A limit's name has no "@".
const addressSuffix = "@client_ip"

// SetName sets the names of b in stores, given the default key. Limits without a name are
// told apart by their keys and numbers. Limits of one name keep sharing buckets while their
// size changes.
//
// Limits of the same name agree in their keys, but limits without a name need not. Without a
// suffix, clients could fill each other's buckets by values of another key, such as a header
// field, and a small limit of one site would deny what a large one of another has admitted.
// The default key without numbers has none.
func (b *Bucket) SetName(defaultKey string) {
	b.Name = b.Path
	first, _, _ := strings.Cut(b.Path, "/")
	k, numbers := b.Limit.Key, ""
	if !b.Limit.Named {
		numbers = b.Describe()
	}
	if template := k.String(); first == "default" && (template != defaultKey || numbers != "") {
		digest := fnv.New64a()
		fmt.Fprintf(digest, "%s %d %d", template, k.Prefixes.IPv4, k.Prefixes.IPv6)
		if numbers != "" {
			fmt.Fprintf(digest, "\x00%s", numbers)
		}
		b.Name += "@" + strconv.FormatUint(digest.Sum64(), 36)
	}
	b.AddressName = b.Name + addressSuffix
}
