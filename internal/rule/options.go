package rule

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Options are the options of a limit that say what counts, and what happens at the limit, under
// their names in a config. Whatever shows a limit shows all of them, and limits of one name have
// to agree in them. Those of the same type as in config.Limit are copied from there, see package
// compile.
type Options struct {
	CountDenied bool              `json:"count_denied,omitempty"`
	Count       *option.Responses `json:"count,omitempty"`
	Clear       *option.Responses `json:"clear,omitempty"`
	ActualCost  string            `json:"actual_cost,omitempty"`
	Hold        string            `json:"hold,omitempty" default:"on"` // whether requests hold units until they are charged

	DryRun bool `json:"dry_run,omitempty"`

	Speed string `json:"speed,omitempty"` // at which responses are sent

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
	words := []string{"latency " + a.Latency.String(), "min " + strconv.Itoa(a.Min), "until " + a.Until}
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

// Options returns the options of b. The bucket of a minimum interval has few of those of its limit.
func (b *Bucket) Options() Options {
	o := b.Limit.Options
	if !b.IsMain() {
		o = Options{CountDenied: o.CountDenied, DryRun: o.DryRun, Status: o.Status}
	}
	if b.Consistency != (limiter.Consistency{}) {
		o.Consistency = b.Consistency.String()
	}
	return o
}

// NonDefault returns the options that differ from their defaults, each as in a Caddyfile, such
// as "ban 10m 1h".
func (o *Options) NonDefault() (set []string) {
	unset := new(Options).Settings()
	for i, s := range o.Settings() {
		switch {
		case s == unset[i]:
		case reflect.ValueOf(*o).Field(i).Kind() == reflect.Bool:
			set = append(set, s.Option)
		default:
			set = append(set, keytext.Safe(s.Option+" "+s.Text))
		}
	}
	return set
}

// Settings returns all options, with their defaults where they are not set.
func (o *Options) Settings() (all []option.Setting) {
	v := reflect.ValueOf(*o)
	for i := range v.NumField() {
		s := option.Setting{Text: optionText(v.Field(i).Interface())}
		s.Option, _, _ = strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if byDefault, ok := v.Type().Field(i).Tag.Lookup("default"); ok && v.Field(i).IsZero() {
			s.Text = byDefault
		}
		all = append(all, s)
	}
	return all
}

// optionText returns what an option is set to.
func optionText(value any) string {
	if list, ok := value.([]option.Seconds); ok {
		words := make([]string, len(list))
		for i, d := range list {
			words[i] = d.String()
		}
		return strings.Join(words, " ")
	}
	return fmt.Sprint(value)
}
