package adminjson

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// Policies are the options of a limit that say what counts, and what happens at the limit,
// under their names in a config. Whatever shows a limit shows all of them, see Options.
type Policies struct {
	CountDenied bool              `json:"count_denied,omitempty"`
	Count       *option.Responses `json:"count,omitempty"`
	ActualCost  string            `json:"actual_cost,omitempty"`
	Hold        string            `json:"hold,omitempty" default:"on"` // whether requests hold units until they are charged

	DryRun bool `json:"dry_run,omitempty"`

	Soft       int64          `json:"soft,omitempty"`                       // units above the size that pass
	MaxDelay   option.Seconds `json:"max_delay,omitempty"`                  // for which requests may wait
	MaxWaiting int64          `json:"max_waiting,omitempty" default:"1000"` // how many may at once, in this process

	FairBy string `json:"fair_by,omitempty" default:"{http.vars.client_ip}"` // the clients that take turns as their requests wait

	Ban      []option.Seconds `json:"ban,omitempty"`                   // for which keys are banned that it denies
	BanAfter int64            `json:"ban_after,omitempty" default:"1"` // how many denials lead to a ban, if so

	Borrow string `json:"borrow,omitempty"` // the limit from which it borrows
	Pool   bool   `json:"pool,omitempty"`   // whether it counts only what others borrow

	Auto *Auto `json:"auto,omitempty"` // how concurrency auto follows the load

	Status int `json:"status" default:"429"` // of the response to denied requests

	Consistency string `json:"consistency,omitempty"` // who decides with Redis, unless that does itself
}

// Auto is how a limit follows the load. Its max is its size.
type Auto struct {
	Latency option.Seconds           `json:"latency"`
	Min     int                      `json:"min"`
	Until   string                   `json:"until"`
	High    caddyhttp.RawMatcherSets `json:"high,omitempty"`
	Low     caddyhttp.RawMatcherSets `json:"low,omitempty"`
}

// String returns it in a few words.
func (a *Auto) String() string {
	if a == nil {
		return ""
	}
	words := []string{"latency " + Interval(a.Latency), "min " + strconv.Itoa(a.Min), "until " + a.Until}
	for _, of := range []struct {
		class string
		sets  caddyhttp.RawMatcherSets
	}{{"high", a.High}, {"low", a.Low}} {
		if of.sets != nil {
			text, _ := json.Marshal(of.sets) // which was JSON
			words = append(words, of.class+" "+string(text))
		}
	}
	return strings.Join(words, " ")
}

// Options returns the policies that differ from the defaults, each as in a Caddyfile, such
// as "ban 10m 1h".
func (p *Policies) Options() (set []string) {
	unset := new(Policies).Settings()
	for i, o := range p.Settings() {
		switch {
		case o == unset[i]:
		case reflect.ValueOf(*p).Field(i).Kind() == reflect.Bool:
			set = append(set, o.Option)
		default:
			set = append(set, keytext.Safe(o.Option+" "+o.Text))
		}
	}
	return set
}

// Settings returns all policies, with their defaults where they are not set.
func (p *Policies) Settings() (all []option.Setting) {
	v := reflect.ValueOf(*p)
	for i := range v.NumField() {
		o := option.Setting{Text: optionText(v.Field(i).Interface())}
		o.Option, _, _ = strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if byDefault, ok := v.Type().Field(i).Tag.Lookup("default"); ok && v.Field(i).IsZero() {
			o.Text = byDefault
		}
		all = append(all, o)
	}
	return all
}

// optionText returns what an option is set to.
func optionText(value any) string {
	var words []string
	switch value := value.(type) {
	case option.Seconds:
		return Interval(value)
	case []option.Seconds:
		for _, d := range value {
			words = append(words, Interval(d))
		}
	case *option.Responses:
		return value.String()
	default:
		return fmt.Sprint(value)
	}
	return strings.Join(words, " ")
}

// OptionsTitle is the title of a column that has the policies of limits.
const OptionsTitle = "OPTIONS"

// Counted is one of the PolicyCounts.
type Counted struct {
	Name string
	N    *uint64
}

// List returns the counts by their names in JSON.
func (c *PolicyCounts) List() (all []Counted) {
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		all = append(all, Counted{name, v.Field(i).Interface().(*uint64)})
	}
	return all
}
