// Package compile makes of the options of a block what decides on requests: package rule has that.
package compile

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"regexp"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/usage"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

const defaultKey = "{" + placeholder.ClientIP + "}"

// defaultPrefixes are what usually one host or one customer has.
var defaultPrefixes = clientip.Prefixes{IPv4: 32, IPv6: 64}

// validName matches the names of limits.
var validName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// Compiler makes the limits of a block from what its config says. It is the same when a config is
// loaded and when a Caddyfile is adapted, except for what is not known then.
type Compiler struct {
	block        *config.Block
	Settings     Settings
	resolver     option.Resolver              // of global placeholders
	maxKeys      int                          // of all limits together
	consistency  limiter.Consistency          // by default
	countsDenied bool                         // whether any of the limits counts denied requests
	connections  bool                         // whether the limits are of connections
	zones        map[*config.Limit]*zone.Zone // that limits were
	paths        map[string]bool              // of the buckets so far
	usage        usage.Plan                   // what the limits so far want of bodies
	Logger       *zap.Logger                  // of the handler
	Location     Location                     // of the handler, as far as its routes are known
}

// New returns the compiler of a block. Its error is for an option that does not belong to a limit.
func New(b *config.Block, resolve option.Resolver) (*Compiler, error) {
	c := &Compiler{
		block: b, resolver: resolve, maxKeys: math.MaxInt, countsDenied: countDenied(b.Limits), paths: make(map[string]bool),
	}
	return c, c.Settings.set(b, resolve)
}

// LimitBuilder is a limit that is being compiled: its options, and what they become.
type LimitBuilder struct {
	*config.Limit
	*Compiler
	reader
	rule     *rule.Limit
	parent   *LimitBuilder   // of the containing limit; nil if there is none
	siblings []*config.Limit // in the same limit or block, l among them

	consistency limiter.Consistency // that limits within it inherit
}

// compile compiles all of l that its options alone determine, without its matchers, and
// those within it. siblings are the limits next to l, and l. If an option is
// invalid, the error names the limit and the option.
func (c *Compiler) compile(of *config.Limit, siblings []*config.Limit, parent *LimitBuilder) (*LimitBuilder, error) {
	l := &LimitBuilder{
		Limit: of, Compiler: c, reader: reader{resolve: c.resolver}, parent: parent, siblings: siblings,
		rule: &rule.Limit{Named: of.Name != "", Connections: c.connections, Zone: c.zones[of]},
	}
	if err := l.setPath(); err != nil {
		return nil, fmt.Errorf("limit %q: %w", option.Redacted(of.Name), err)
	}
	l.copyOptions()
	for _, set := range []func(*LimitBuilder) error{
		(*LimitBuilder).setKey, (*LimitBuilder).checkConnections, (*LimitBuilder).setBounds, (*LimitBuilder).setStatus, (*LimitBuilder).setExtra, (*LimitBuilder).setFairBy, (*LimitBuilder).setSettlement,
		(*LimitBuilder).checkTogether, (*LimitBuilder).setLoad, (*LimitBuilder).checkQueue, (*LimitBuilder).setBuckets, (*LimitBuilder).checkNumbers, (*LimitBuilder).setBans, (*LimitBuilder).setPool, (*LimitBuilder).setConsistency, (*LimitBuilder).addPaths,
	} {
		wrong := set(l)
		if err := cmp.Or(l.err, wrong); err != nil {
			return l, l.errorIn(err)
		}
	}
	return l, nil
}

// copyOptions copies the options that are shown as they are written.
func (l *LimitBuilder) copyOptions() {
	into, from := reflect.ValueOf(&l.rule.Options).Elem(), reflect.ValueOf(l.Limit).Elem()
	for i := range into.NumField() {
		if f := from.FieldByName(into.Type().Field(i).Name); f.Type() == into.Field(i).Type() {
			into.Field(i).Set(f)
		}
	}
	l.rule.Consistency = "" // each of its buckets has its own
	l.rule.DryRun = l.DryRun || l.parent != nil && l.parent.rule.DryRun
}

// Check compiles the limits of the block, and calls visit for each, see eachWithin.
func (c *Compiler) Check(visit func(*config.Limit, *LimitBuilder, error) error) error {
	return c.eachWithin(c.block.Limits, nil, visit)
}

// eachWithin compiles limits and those within them as they will be when they are loaded, except
// placeholders that have no value yet, and calls visit for each, with the error if there is
// one. It ends with the first error of visit.
func (c *Compiler) eachWithin(limits []*config.Limit, parent *LimitBuilder, visit func(*config.Limit, *LimitBuilder, error) error) error {
	for _, of := range limits {
		l, err := c.compile(of, limits, parent)
		if err := visit(of, l, err); err != nil {
			return err
		}
		if l == nil || l.rule.Key == nil {
			continue // because of a placeholder, and limits within may inherit it
		}
		if err := c.eachWithin(of.Limits.List, l, visit); err != nil {
			return err
		}
	}
	return nil
}

// Load makes the limits of the block of a config that is loaded, with what all its blocks share.
func (c *Compiler) Load(ctx caddy.Context, s *Shared) ([]*rule.Limit, error) {
	if err := c.setZones(); err != nil {
		return nil, err
	}
	if len(c.block.Limits) == 0 {
		return nil, errors.New("limits: none given; use at least one")
	}
	c.maxKeys, c.consistency = s.MaxKeys, s.consistency
	c.Settings.OnError = cmp.Or(c.Settings.OnError, s.OnError)
	limits, err := c.loadWithin(ctx, c.block.Limits, nil, s)
	if err == nil {
		c.warnZones(s)
	}
	return limits, err
}

// loadWithin compiles limits and those within them, adds them to what the config agrees on, and
// loads their matchers.
func (c *Compiler) loadWithin(ctx caddy.Context, limits []*config.Limit, parent *LimitBuilder, s *Shared) ([]*rule.Limit, error) {
	all := make([]*rule.Limit, len(limits))
	for i, of := range limits {
		if of == nil {
			if parent != nil {
				return nil, parent.errorIn(fmt.Errorf("limit %d within it is null", i))
			}
			return nil, fmt.Errorf("limits: limit %d is null", i)
		}
		l, err := c.compile(of, limits, parent)
		if err != nil {
			return nil, err
		}
		all[i] = l.rule
		if err = s.add(l); err == nil {
			err = l.setMatchers(ctx)
		}
		if err == nil {
			err = l.setClasses(ctx)
		}
		if err != nil {
			return nil, l.errorIn(err)
		}
		l.rule.Reporter.Begin(c.Logger, l.rule.Path, l.rule.Key)
		l.rule.ReadBody = c.readBody(of)
		if l.rule.Within, err = c.loadWithin(ctx, of.Limits.List, l, s); err != nil {
			return nil, err
		}
	}
	linkPools(limits, all)
	return all, nil
}

// errorIn returns an error that names l.
func (l *LimitBuilder) errorIn(err error) error {
	return fmt.Errorf("limit %q: %w", l.displayPath(), err)
}

// displayPath returns the path of l for messages.
func (l *LimitBuilder) displayPath() string { return cmp.Or(l.rule.Path, config.DefaultName) }

// setPath sets the path: the names of the limits that contain l and its
// own. A limit without a name that only groups others is not part of paths.
func (l *LimitBuilder) setPath() error {
	switch {
	case l.Name != "" && !validName.MatchString(l.Name):
		return option.Bad("name", l.Name, "1 to 64 letters, digits, '_', '.' or '-'")
	case l.Name == "" && l.parent != nil:
		return errors.New("nested limits need a name")
	case l.Name == "" && l.IsGroup():
		return nil
	}
	l.rule.Path = cmp.Or(l.Name, config.DefaultName)
	if l.parent != nil && l.parent.rule.Path != "" {
		l.rule.Path = l.parent.rule.Path + "/" + l.rule.Path
	}
	return nil
}

// addPaths adds the paths of the buckets. Each may occur once in a handler, since a request
// can't be charged twice in one step.
func (l *LimitBuilder) addPaths() error {
	for _, b := range l.rule.Buckets {
		if l.paths[b.Path] {
			return option.Errorf("name", "%q is the name of two limits of one block; use another for one of them", b.Path)
		}
		l.paths[b.Path] = true
	}
	return nil
}

// setKey sets the key. By default it is the parent's, and so are its prefix
// lengths.
func (l *LimitBuilder) setKey() (err error) {
	template, prefixes := l.Key, defaultPrefixes
	if template == "" && l.parent != nil {
		template, prefixes = l.parent.rule.Key.Source, l.parent.rule.Key.Prefixes
	}
	prefixes.IPv4 = cmp.Or(read(&l.reader, "ipv4_prefix", l.IPv4Prefix, option.Bits(32)), prefixes.IPv4)
	prefixes.IPv6 = cmp.Or(read(&l.reader, "ipv6_prefix", l.IPv6Prefix, option.Bits(128)), prefixes.IPv6)
	switch {
	case l.err != nil:
	case l.rule.Zone != nil:
		l.rule.Key, err = key.ParseZone(l.Key, prefixes)
	case l.parent != nil && l.Key == "" && prefixes == l.parent.rule.Key.Prefixes:
		l.rule.Key = l.parent.rule.Key
	default:
		l.rule.Key, err = key.Parse("key", cmp.Or(template, defaultKey), prefixes)
	}
	return err
}

// setBounds sets how many buckets the limit may have, what to
// do with new keys when it is full, and how many counters track them.
func (l *LimitBuilder) setBounds() error {
	if l.rule.MaxKeys = read(&l.reader, "max_keys", l.MaxKeys, ParseMaxKeys); l.rule.MaxKeys > l.Compiler.maxKeys {
		return option.Bad("max_keys", string(l.MaxKeys), fmt.Sprintf("at most %d, that of memory in the global option", l.Compiler.maxKeys))
	}
	l.rule.ShareWhenFull = readConstant(&l.reader, "when_full", l.WhenFull, option.Is("share", "forget", "share"))
	l.rule.TrackTop = read(&l.reader, "track_top", l.TrackTop, option.Integer(1, toplist.MaxCounters))
	return nil
}

// setStatus sets the status of denials.
func (l *LimitBuilder) setStatus() error {
	if l.connections {
		return nil // there are no responses
	}
	l.rule.Status = cmp.Or(read(&l.reader, "status", l.Status, option.Integer(400, 599)), http.StatusTooManyRequests)
	return nil
}

// setMatchers loads the matchers.
func (l *LimitBuilder) setMatchers(ctx caddy.Context) error {
	if l.MatcherSetsRaw == nil {
		return nil
	}
	l.rule.Match = l.MatcherSetsRaw
	sets, err := ctx.LoadModule(l.Limit, "MatcherSetsRaw")
	if err != nil {
		return option.Errorf("match", "%v", matcherError(err))
	}
	return l.rule.Matchers.FromInterface(sets)
}

// matcherError returns an error of one of Caddy's matchers as one line, without what says nothing to those who
// wrote the matcher: Caddy's steps and Go's types.
func matcherError(err error) error {
	text := loadingModule.ReplaceAllString(err.Error(), "$1: ")
	text = goType.ReplaceAllString(text, "$1 is not valid for it")
	text, _, _ = strings.Cut(text, "\n")
	return errors.New(text)
}

// What Caddy's errors have of its own steps, and those of JSON of Go.
var (
	loadingModule = regexp.MustCompile(`module name '([^']*)': (?:provision http\.matchers\.\S+: |decoding module config: http\.matchers\.\S+: )?`)
	goType        = regexp.MustCompile(`json: cannot unmarshal (\S+) into Go .*$`)
)

// addBucket completes b and adds it to the buckets of l.
func (l *LimitBuilder) addBucket(b *rule.Bucket, cost, factor config.Number) error {
	parse := option.Cost
	if b.Source.Option == "min_interval" {
		parse = costOfInterval
	} else {
		b.CostIsBody = cost == bodyCost
		l.rule.Settlement.CostIsBody = b.CostIsBody
	}
	if cost == bodyCost {
		cost = ""
	}
	b.Cost = readValue(&l.reader, "cost", cmp.Or(cost, "1"), parse)
	b.Factor = readOptional(&l.reader, "factor", factor, "1", option.ParseFactor)
	if l.err != nil {
		return l.err
	}
	b.Size.SetParser(l.planUnits())
	b.Drip.SetParser(l.planUnits())
	b.Limit = l.rule
	l.rule.Settlement.Path, l.rule.Settlement.Reporter = l.rule.Path, &l.rule.Reporter
	b.Holds = l.rule.Settlement.Holds() && b.IsMain()
	if err := b.Complete(); err != nil {
		return err
	}
	if z := l.rule.Zone; z != nil && z.Events == 0 {
		b.Constant.Limit.Size = 0
	}
	b.SetName(defaultKey)
	l.rule.Buckets = append(l.rule.Buckets, b)
	return nil
}

// costOfInterval parses what a request costs a minimum interval, which counts requests: one,
// unless it costs nothing.
func costOfInterval(text string) (int64, string) {
	n, use := option.Cost(text)
	return min(n, 1), use
}

// bodyCost is the cost of a request that is the length of its body.
const bodyCost = "body"
