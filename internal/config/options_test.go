package config

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestOptionsHaveRows guards that the tag of each field of a Limit says with which buckets it can be used.
func TestOptionsHaveRows(t *testing.T) {
	t.Parallel()
	forms := []string{"concurrency", "fixed_window", "sliding_window", "sliding_log", "warm_up", "rate", "speed", "max", "drip"}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Limit]()) {
		tag := f.Tag.Get("bucket")
		for form := range strings.FieldsSeq(tag) {
			if !slices.Contains(forms, form) && tag != "none" && tag != AnyBucket {
				t.Errorf("%s: no bucket has the form %s", f.Name, form)
			}
		}
		if tag == "" {
			t.Errorf("%s: its tag bucket is missing; use none, any, or those of %q of which it is a part", f.Name, forms)
		}
	}
	if n := reflect.TypeFor[Limit]().NumField(); len(Options) != n-2 { // name and auto
		t.Errorf("%d options of %d fields", len(Options), n)
	}
}
