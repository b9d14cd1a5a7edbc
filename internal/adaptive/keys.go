package adaptive

import (
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	maxKeys    = 1000        // that have a controller of their own
	mostRoutes = 10          // that are shown of all keys
	idle       = time.Minute // after which the controller of a key is forgotten
)

// Controllers are the controllers of one limit: one for each key, and for keys beyond maxKeys one that
// they share. A key that has not been asked for in a while starts anew.
type Controllers struct {
	Options Options

	mu        sync.Mutex
	byKey     map[string]*keyed
	rest      *Controller // of further keys; nil as long as there were none
	swept     time.Time
	forgotten State // what those have counted that are forgotten
}

// keyed is the controller of a key.
type keyed struct {
	*Controller
	asked time.Time // when it was asked for last
}

// NewControllers returns controllers with these options.
func NewControllers(o Options) *Controllers {
	return &Controllers{Options: o, byKey: make(map[string]*keyed)}
}

// Of returns the controller of a key.
func (s *Controllers) Of(key string, now time.Time) *Controller {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.byKey[key]
	if k == nil {
		s.sweep(now)
		if len(s.byKey) >= maxKeys {
			if s.rest == nil {
				s.rest = New(s.Options, now)
			}
			return s.rest
		}
		k = &keyed{Controller: New(s.Options, now)}
		s.byKey[strings.Clone(key)] = k
	}
	k.asked = now
	return k.Controller
}

// sweep forgets the controllers of idle keys, once a second at most.
func (s *Controllers) sweep(now time.Time) {
	if now.Sub(s.swept) < time.Second {
		return
	}
	s.swept = now
	for key, k := range s.byKey {
		if now.Sub(k.asked) < idle {
			continue
		}
		if state := k.State(now); state.InProgress+state.Overdue+state.Waiting == 0 {
			s.forgotten.add(state)
			delete(s.byKey, key)
		}
	}
}

// Peek returns what the controller that a key would have does at now.
func (s *Controllers) Peek(key string, now time.Time) State {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.byKey[key]; k != nil {
		return k.State(now)
	}
	if s.rest != nil && len(s.byKey) >= maxKeys {
		return s.rest.State(now)
	}
	return New(s.Options, now).State(now)
}

// State returns what all controllers together do at now. The verdict is the verdict of the slowest.
func (s *Controllers) State(now time.Time) State {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := State{Shed: s.forgotten.Shed, AtMin: s.forgotten.AtMin}
	for _, k := range s.byKey {
		all.add(k.State(now))
	}
	if s.rest != nil {
		all.add(s.rest.State(now))
	}
	if all.Keys == 0 { // no request recently
		all.add(New(s.Options, now).State(now))
	}
	all.Keys = len(s.byKey)
	return all
}

// add adds the state of one more controller.
func (s *State) add(other State) {
	if s.Keys == 0 || other.Mean > s.Mean {
		s.Mean, s.Verdict = other.Mean, other.Verdict
	}
	s.Keys += other.Keys
	s.Limit += other.Limit
	s.InProgress += other.InProgress
	s.Overdue += other.Overdue
	s.Waiting += other.Waiting
	s.Oldest = max(s.Oldest, other.Oldest)
	for _, name := range other.Routes {
		if len(s.Routes) < mostRoutes && !slices.Contains(s.Routes, name) {
			s.Routes = append(s.Routes, name)
		}
	}
	for class := range s.Shed {
		s.Shed[class] += other.Shed[class]
	}
	s.AtMin += other.AtMin
}
