package offline

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Config is a config that is loaded only to find out which limits a request
// would have to pass: nothing is listened on, logged or connected to. Of the
// handlers, it only has the handlers of this module, handlers that contain others, and
// those that change the request on its way to a limit.
type Config struct {
	Name    string    // of the file
	Servers []*Server // by name
	MaxKeys int       // of all limits together
	Ignored []string  // the kinds of advice that are not given of any limit
	Redis   Redis     // as configured, though it is not used; nil without

	// The listener wrappers of this module, like HTTP.
	Listeners []*rule.Listener

	// What differs from the config as Caddy would run it, one sentence each.
	Warnings []string

	text   []byte // in JSON
	ctx    caddy.Context
	cancel func()

	// Its HTTP app: all of it once it was validated, until then without what is cut away.
	HTTP *caddyhttp.App
}

// Load loads a config file. The adapter is guessed as by other commands
// of Caddy if it is empty, and file may be "-" for standard input. The config must
// be closed.
//
// Logs of this process are discarded from now on.
func Load(file, adapter string) (*Config, error) {
	text, err := command.ReadConfig(file, adapter)
	if err != nil {
		return nil, err
	}
	d, err := New(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	d.Name = file
	return d, nil
}

// AddFlags adds the flags of commands that read a config file.
func AddFlags(cmd *cobra.Command) {
	cmd.Flags().StringP("config", "c", "", command.ConfigUsage)
	cmd.Flags().StringP("adapter", "a", "", "The adapter of the config file, if it is neither JSON nor a Caddyfile")
	cmd.Flags().Bool("json", false, "Print the result as JSON")
}

// LoadFor loads the config that the flags of a command name, or its argument FILE, which
// may be "".
func LoadFor(cmd *cobra.Command, argument string) (*Config, error) {
	file, err := command.ConfigFile(cmd, argument)
	if err != nil {
		return nil, err
	}
	adapter, _ := cmd.Flags().GetString("adapter")
	return Load(file, adapter)
}

// decodeAs decodes JSON into v if Caddy can load it as what module is. Caddy refuses
// options that it does not know: they may have been meant to hold limits.
func decodeAs(module any, text []byte, v any) error {
	if err := caddy.StrictUnmarshalJSON(text, module); err != nil {
		return err
	}
	return json.Unmarshal(text, v)
}

// New loads a config in JSON. It must be closed.
func New(text []byte) (*Config, error) {
	var cfg struct {
		Apps map[string]json.RawMessage `json:"apps"`
	}
	if err := decodeAs(new(caddy.Config), caddy.RemoveMetaFields(text), &cfg); err != nil {
		return nil, fmt.Errorf("decoding the config: %w", err)
	}
	var http struct {
		HTTPPort  int                                   `json:"http_port,omitempty"`
		HTTPSPort int                                   `json:"https_port,omitempty"`
		Servers   map[string]map[string]json.RawMessage `json:"servers,omitempty"`
	}
	if raw := cfg.Apps["http"]; raw != nil {
		if err := decodeAs(new(caddyhttp.App), raw, &http); err != nil {
			return nil, fmt.Errorf("decoding the http app: %w", err)
		}
	}
	d := &Config{text: text}
	for _, name := range slices.Sorted(maps.Keys(http.Servers)) {
		s, err := newServer(name, http.Servers[name], cmp.Or(http.HTTPPort, caddyhttp.DefaultHTTPPort),
			cmp.Or(http.HTTPSPort, caddyhttp.DefaultHTTPSPort))
		if err != nil {
			return nil, fmt.Errorf("server %q: %w", name, err)
		}
		if http.Servers[name], err = s.cut(d); err != nil {
			return nil, fmt.Errorf("server %q: %w", name, err)
		}
		d.Servers = append(d.Servers, s)
	}
	own, err := d.cutRedis(cfg.Apps[moduleName])
	if err != nil {
		return nil, err
	}
	httpApp, err := json.Marshal(http)
	if err != nil {
		return nil, err
	}
	return d, d.provision(map[string]json.RawMessage{"http": httpApp, moduleName: own})
}

// cutRedis returns the app's config without Redis.
func (d *Config) cutRedis(raw json.RawMessage) (json.RawMessage, error) {
	options := make(map[string]json.RawMessage)
	if raw != nil {
		if err := json.Unmarshal(raw, &options); err != nil {
			return nil, fmt.Errorf("decoding the rate_limit app: %w", err)
		}
	}
	if config := options["redis"]; config != nil && string(config) != "null" {
		var err error
		if d.Redis, err = readRedis(config); err != nil {
			return nil, fmt.Errorf("decoding the rate_limit app: %w", err)
		}
	}
	var ignored config.List
	if raw := options["ignore_advice"]; raw != nil && json.Unmarshal(raw, &ignored) == nil { // Validate returns an error
		d.Ignored = ignored
	}
	delete(options, "redis")
	return json.Marshal(options)
}

// discardLogs is a logging config with which nothing is logged. It has the writer
// of the default one, since Caddy would log that it is another.
func discardLogs() *caddy.Logging {
	return &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{Level: "FATAL"}},
	}}
}

// provision provisions the apps and compiles the routes of the servers.
func (d *Config) provision(apps map[string]json.RawMessage) error {
	cfg := &caddy.Config{Logging: discardLogs()}
	base, err := caddy.ProvisionContext(cfg)
	if err != nil {
		return err
	}
	cfg.AppsRaw = apps
	// A context of our own, since only Caddy can cancel the other.
	ctx, cancel := caddy.NewContext(base)
	d.ctx, d.cancel = ctx, cancel
	if err := d.compile(ctx); err != nil {
		cancel()
		return err
	}
	return nil
}

// compile provisions the apps and compiles the routes of the servers.
func (d *Config) compile(ctx caddy.Context) error {
	own, err := ctx.App(moduleName)
	if err != nil {
		return err
	}
	app, err := ctx.App("http")
	if err != nil {
		return err
	}
	d.HTTP = app.(*caddyhttp.App)
	d.MaxKeys, d.Listeners = own.(ownApp).Compiled().MaxKeys, own.(ownApp).Listeners()
	for _, s := range d.Servers {
		s.server = d.HTTP.Servers[s.Name]
	}
	return d.replaceHandlers()
}

// Validate returns why Caddy would not load the config: it provisions all of it, as
// caddy validate does, but opens no logs, so their files are not created.
func (d *Config) Validate() error {
	cfg := new(caddy.Config)
	if err := caddy.StrictUnmarshalJSON(caddy.RemoveMetaFields(d.text), cfg); err != nil {
		return fmt.Errorf("decoding the config: %w", err)
	}
	if err := d.discardWriters(cfg); err != nil {
		return err
	}
	apps := cfg.AppsRaw
	cfg.AppsRaw = nil
	base, err := caddy.ProvisionContext(cfg)
	if err != nil {
		return err
	}
	cfg.AppsRaw = apps
	ctx, cancel := caddy.NewContext(base) // as in provision
	cut := d.cancel
	d.cancel = func() { cancel(); cut() }
	for name := range apps {
		if _, err := ctx.App(name); err != nil {
			return err
		}
	}
	if app, err := ctx.AppIfConfigured("http"); err == nil {
		d.HTTP = app.(*caddyhttp.App)
	}
	if app, err := ctx.AppIfConfigured(moduleName); err == nil {
		d.Listeners = app.(ownApp).Listeners()
		return app.(ownApp).Link()
	}
	return nil
}

// ownApp is the app of this module, which is a type of the root package.
type ownApp interface {
	telemetry.App

	// Listeners returns what limits connections, and Link returns an error if bans are unknown that it names.
	Listeners() []*rule.Listener
	Link() error
}

// discardWriters has the logs of a config written nowhere. It returns an error if Caddy
// would not load a writer.
func (d *Config) discardWriters(cfg *caddy.Config) error {
	ctx, cancel := caddy.NewContext(d.ctx)
	defer cancel()
	logging := cmp.Or(cfg.Logging, new(caddy.Logging))
	cfg.Logging = discardLogs()
	discard := func(about string, log *caddy.BaseLog) error {
		if log.WriterRaw != nil {
			if _, err := ctx.LoadModule(log, "WriterRaw"); err != nil {
				return fmt.Errorf("setting up %s: loading log writer module: %w", about, err)
			}
		}
		log.WriterRaw = json.RawMessage(`{"output":"discard"}`)
		return nil
	}
	if cfg.Logging.Sink = logging.Sink; logging.Sink != nil {
		if err := discard("sink log", &logging.Sink.BaseLog); err != nil {
			return err
		}
	}
	for name, log := range logging.Logs {
		if cfg.Logging.Logs[name] = log; log == nil {
			return fmt.Errorf("setting up custom log %q: it is null; use a log", name)
		}
		if err := discard(fmt.Sprintf("custom log %q", name), &log.BaseLog); err != nil {
			return err
		}
	}
	return nil
}

// RedisOptions returns the options of the configured Redis.
func (d *Config) RedisOptions() (limiter.RedisOptions, error) {
	if d.Redis == nil {
		return limiter.RedisOptions{}, nil
	}
	ctx, cancel := caddy.NewContext(d.ctx)
	defer cancel()
	return d.Redis(ctx)
}

// Close releases what the config uses.
func (d *Config) Close() { d.cancel() }

// warn adds a warning, unless it is known.
func (d *Config) warn(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(d.Warnings, text) {
		d.Warnings = append(d.Warnings, text)
	}
}

// cut returns the server's config with all removed that does not decide which
// limits a request meets.
func (s *Server) cut(d *Config) (map[string]json.RawMessage, error) {
	kept := map[string]json.RawMessage{"automatic_https": json.RawMessage(`{"disable":true}`)}
	for _, option := range []string{"listen", "client_ip_headers", "trusted_proxies_strict", "trusted_proxies_unix"} {
		if raw, ok := s.raw[option]; ok {
			kept[option] = raw
		}
	}
	if raw, ok := s.raw["trusted_proxies"]; ok {
		var module struct {
			Source string `json:"source"`
		}
		if _ = json.Unmarshal(raw, &module); module.Source == "static" {
			kept["trusted_proxies"] = raw
		} else {
			d.warn("Server %s: the addresses of trusted_proxies %s are not looked up, so the client's address is the one of the connection.", s.Name, module.Source)
		}
	}
	if own := s.ownWrappers(); len(own) > 0 {
		kept["listener_wrappers"] = marshal(own)
	}
	c := cutter{Config: d, server: s.Name, named: s.named, limited: make(map[string]bool)}
	for name := range s.named {
		c.limited[name] = c.isLimited(name)
	}
	for name, route := range s.named {
		c.route(route, true)
		s.named[name] = route
	}
	s.routes, _ = c.routes(s.routes, false)
	if c.limitsIn(s.raw["errors"]) {
		d.warn("Server %s: limits in error routes are left out.", s.Name)
	}
	kept["routes"], _ = json.Marshal(s.routes)
	if len(s.named) > 0 {
		kept["named_routes"], _ = json.Marshal(s.named)
	}
	return kept, c.err
}

// ownWrappers returns those of the listener wrappers that limit connections.
func (s *Server) ownWrappers() (own []map[string]json.RawMessage) {
	_ = json.Unmarshal(s.raw["listener_wrappers"], &own) // if it is invalid, there are none
	return slices.DeleteFunc(own, func(w map[string]json.RawMessage) bool { return stringIn(w, "wrapper") != moduleName })
}

// SpeaksHTTP3 reports whether the server serves HTTP/3.
func (s *Server) SpeaksHTTP3() bool {
	var protocols []string
	_ = json.Unmarshal(s.raw["protocols"], &protocols)
	return s.TLS && (len(protocols) == 0 || slices.Contains(protocols, "h3"))
}

// rawRoute is a route in JSON.
type rawRoute map[string]json.RawMessage

// cutter removes what does not decide which limits a request meets from the
// routes of a server.
type cutter struct {
	*Config
	server  string
	named   map[string]rawRoute
	limited map[string]bool // the named routes that have limits, or invoke one that has
	err     error           // for a subroute that Caddy would not load; nil if there is none
}

// isLimited reports whether a named route has limits, or invokes one that has. Within are those that
// invoke it.
func (c *cutter) isLimited(name string, within ...string) (found bool) {
	if slices.Contains(within, name) {
		c.err = fmt.Errorf("invoke: named route %q invokes itself", name)
		return false
	}
	for _, h := range handlersIn(c.named[name]["handle"]) {
		found = found || h["handler"] == moduleName
		if inner, _ := h["name"].(string); h["handler"] == "invoke" {
			found = c.isLimited(inner, append(within, name)...) || found
		}
	}
	return found
}

// limitsIn reports whether limits are anywhere in a JSON value, without named
// routes.
func (c *cutter) limitsIn(raw json.RawMessage) bool {
	return slices.ContainsFunc(handlersIn(raw), func(h map[string]any) bool { return h["handler"] == moduleName })
}

// handlersIn returns the handlers that are anywhere in a JSON value.
func handlersIn(raw json.RawMessage) (found []map[string]any) {
	var value any
	_ = json.Unmarshal(raw, &value) // if it is invalid, there are none
	for within := []any{value}; len(within) > 0; within = within[1:] {
		switch value := within[0].(type) {
		case []any:
			within = append(within, value...)
		case map[string]any:
			if value["handler"] != nil {
				found = append(found, value)
			}
			within = slices.AppendSeq(within, maps.Values(value))
		}
	}
	return found
}

// routes cuts routes. after says whether requests may meet a limit after them;
// found, whether they may meet one in them.
func (c *cutter) routes(routes []rawRoute, after bool) (kept []rawRoute, found bool) {
	for _, route := range slices.Backward(routes) {
		has := c.route(route, after)
		if !has && !after || len(route["handle"]) == 0 && len(route["terminal"]) == 0 && len(route["match"]) == 0 {
			continue
		}
		kept = append(kept, route)
		found, after = found || has, true
	}
	slices.Reverse(kept)
	return kept, found
}

// route cuts a single route, like routes does.
func (c *cutter) route(route rawRoute, after bool) (found bool) {
	if string(route["terminal"]) == "true" {
		after = false
	}
	var handlers, kept []map[string]json.RawMessage
	_ = json.Unmarshal(route["handle"], &handlers) // if it is invalid, there are none
	for _, h := range slices.Backward(handlers) {
		has := false
		switch name := handlerName(h); c.kindOf(name, h) {
		case keepHandler:
			has = name == moduleName || name == "invoke" && c.limited[stringIn(h, "name")]
			if name == "subroute" {
				has = c.subroute(h, after)
			}
			if has || after {
				kept = append(kept, h)
			}
		case skipHandler:
		case guessHandler:
			if c.limitsIn(marshal(h)) {
				c.warn("Server %s: limits in the handler %s are left out.", c.server, name)
			}
			if after {
				c.warn("Server %s: the handler %s is not run; it is assumed to pass all requests on, as they are.", c.server, name)
			}
		case endHandler:
			if c.limitsIn(marshal(h)) {
				c.warn("Server %s: limits in the handler %s are left out.", c.server, name)
			}
			if found {
				c.warn("Server %s: limits after the handler %s are left out, since it passes no request on.", c.server, name)
			}
			kept, found, after = nil, false, false
			route["terminal"] = json.RawMessage("true")
		}
		found, after = found || has, after || has
	}
	slices.Reverse(kept)
	delete(route, "handle")
	if len(kept) > 0 {
		route["handle"] = marshal(kept)
	}
	return found
}

// subroute cuts a subroute, like routes does routes.
func (c *cutter) subroute(h map[string]json.RawMessage, after bool) (found bool) {
	if c.limitsIn(h["errors"]) {
		c.warn("Server %s: limits in error routes are left out.", c.server)
	}
	delete(h, "errors")
	options := maps.Clone(h)
	delete(options, "handler")
	var subroute struct {
		Routes []rawRoute `json:"routes"`
	}
	if err := decodeAs(new(caddyhttp.Subroute), marshal(options), &subroute); err != nil {
		c.err = cmp.Or(c.err, fmt.Errorf("decoding a subroute: %w", err))
	}
	routes, found := c.routes(subroute.Routes, after)
	h["routes"] = marshal(routes)
	return found
}

// handlerKind is what becomes of a handler in a Config.
type handlerKind uint8

const (
	keepHandler  handlerKind = iota // it runs
	skipHandler                     // it passes requests on, and does not change what limits see of them
	guessHandler                    // it may do anything, and is assumed to pass requests on
	endHandler                      // it passes no request on
)

// kindOf returns what becomes of a handler. It may remove options from it.
func (c *cutter) kindOf(name string, h map[string]json.RawMessage) handlerKind {
	switch name {
	case moduleName, "subroute", "invoke", "vars", "map", "rewrite":
		return keepHandler
	case "headers":
		delete(h, "response")
		if _, ok := h["request"]; !ok {
			return skipHandler
		}
		return keepHandler
	case "encode", "templates", "tracing", "log_append", "request_body", "push", "timeouts", "copy_response_headers":
		return skipHandler
	case "static_response", "error", "metrics", "copy_response":
		return endHandler
	case "file_server":
		if string(h["pass_thru"]) == "true" {
			return guessHandler
		}
		return endHandler
	case "reverse_proxy":
		// Routes for its responses may pass requests on: so does forward_auth.
		if len(h["handle_response"]) > 0 {
			return guessHandler
		}
		return endHandler
	}
	return guessHandler
}

// handlerName returns the module name of a handler in JSON.
func handlerName(h map[string]json.RawMessage) string { return stringIn(h, "handler") }

// stringIn returns the text of an option, empty if it has none.
func stringIn(options map[string]json.RawMessage, option string) (text string) {
	_ = json.Unmarshal(options[option], &text)
	return text
}

// marshal returns the JSON of what was decoded from JSON.
func marshal(value any) json.RawMessage {
	raw, _ := json.Marshal(value)
	return raw
}
