package sitetest

import (
	"errors"
	"fmt"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
)

// loading is held while a config is loaded or stopped, when Caddy and this module use what is
// global.
var loading sync.Mutex

// Alone calls f while no other config is loaded or stopped.
func Alone(f func() error) error {
	loading.Lock()
	defer loading.Unlock()
	return f()
}

// In calls f, which loads configs or stops them, alone and in a process.
func In(p *state.Process, f func() error) error {
	return Alone(func() error {
		original := state.Default
		state.Default = p
		defer func() { state.Default = original }()
		return f()
	})
}

// instance is a config that runs beside others in one process, which Caddy's Run does not
// allow. It has no admin endpoint.
type instance struct {
	caddy.Context
	cancel func()
	apps   []caddy.App // that have started
}

// newInstance does what Caddy does to run a config.
func newInstance(config []byte) (_ *instance, err error) {
	cfg := new(caddy.Config)
	if err := caddy.StrictUnmarshalJSON(config, cfg); err != nil {
		return nil, err
	}
	// The apps are made in a context that can be canceled, which the config's own can't.
	apps := cfg.AppsRaw
	cfg.AppsRaw = nil
	parent, err := caddy.ProvisionContext(cfg)
	if err != nil {
		return nil, err
	}
	cfg.AppsRaw = apps
	i := new(instance)
	i.Context, i.cancel = caddy.NewContext(parent)
	defer func() {
		if err != nil {
			err = errors.Join(err, i.stop())
		}
	}()
	for name := range apps {
		if _, err := i.App(name); err != nil {
			return nil, err
		}
	}
	return i, i.start()
}

// start starts the apps of the config, and those that they have loaded.
func (i *instance) start() error {
	for _, module := range caddy.GetModules("") {
		loaded, err := i.AppIfConfigured(string(module.ID))
		if errors.Is(err, caddy.ErrNotConfigured) {
			continue
		}
		app, ok := loaded.(caddy.App)
		if err != nil || !ok {
			return fmt.Errorf("app %s is a %T: %w", module.ID, loaded, err)
		}
		if err := app.Start(); err != nil {
			return fmt.Errorf("%s app module: start: %w", module.ID, err)
		}
		i.apps = append(i.apps, app)
	}
	i.emit("started")
	return nil
}

// stop stops the apps that have started, and ends the config, if there is one.
func (i *instance) stop() error {
	if i == nil {
		return nil
	}
	i.emit("stopping")
	errs := make([]error, 0, len(i.apps))
	for _, app := range i.apps {
		errs = append(errs, app.Stop())
	}
	i.cancel()
	return errors.Join(errs...)
}

func (i *instance) emit(event string) {
	if events, err := i.AppIfConfigured("events"); err == nil {
		events.(*caddyevents.App).Emit(i.Context, event, nil)
	}
}
