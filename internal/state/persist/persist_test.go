package persist

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// process is a process with a file, whose clock the test moves.
type process struct {
	*File
	t       *testing.T
	memory  *limiter.Memory
	clock   *time.Time
	exiting bool
	logs    *observer.ObservedLogs
	opt     Options
}

// start starts a process that has used nothing yet.
func start(t *testing.T, clock *time.Time) *process {
	p := &process{t: t, clock: clock}
	p.memory = limiter.NewMemoryWithClock(func() time.Duration { return time.Duration(clock.UnixNano()) })
	p.File = New(p.memory, func() bool { return p.exiting })
	p.now = func() time.Time { return *clock }
	var core zapcore.Core
	core, p.logs = observer.New(zapcore.InfoLevel)
	p.opt.Logger = zap.New(core)
	t.Cleanup(p.kill)
	return p
}

// use applies options.
func (p *process) use(path string, redis bool) {
	p.opt.Path, p.opt.Redis = path, redis
	p.Use(p.opt)
}

// kill ends the process as the system would: the file is unlocked and not written.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unlock()
}

// take charges the bucket of a key n times, each for an hour.
func (p *process) take(key string, n int) {
	p.t.Helper()
	for range n {
		_, err := p.memory.Take(context.Background(), limiter.Request{Buckets: []limiter.Bucket{hourly(key)}}, nil)
		if err != nil {
			p.t.Fatal(err)
		}
	}
}

func hourly(key string) limiter.Bucket {
	return limiter.Bucket{Name: "a", Key: key, Limit: limiter.Per(1, time.Hour).WithBurst(100), Cost: 1}
}

// units returns what the bucket of a key holds.
func (p *process) units(key string) int64 {
	l, err := p.memory.Peek(context.Background(), hourly(key))
	if err != nil {
		p.t.Fatal(err)
	}
	return l.Units
}

// tick lets some time pass, and has the file ticked each second.
func (p *process) tick(d time.Duration) {
	for ; d > 0; d -= time.Second {
		*p.clock = p.clock.Add(time.Second)
		p.Tick()
	}
}

// logged returns the levels and messages that were logged since the last call, as far as the
// first comma.
func (p *process) logged() (lines []string) {
	for _, e := range p.logs.TakeAll() {
		text, _, _ := strings.Cut(e.Message, ",")
		lines = append(lines, e.Level.CapitalString()+" "+text)
	}
	return lines
}

func (p *process) wantLogged(want ...string) {
	p.t.Helper()
	if got := p.logged(); !slices.Equal(got, want) {
		p.t.Errorf("logged %q, want %q", got, want)
	}
}

func (p *process) wantUnits(key string, want int64) {
	p.t.Helper()
	if got := p.units(key); got != want {
		p.t.Errorf("%s holds %d, want %d", key, got, want)
	}
}

// What is logged.
const (
	loaded  = "INFO buckets are as they were before the restart"
	again   = "INFO the file of buckets is written from now on"
	another = "WARN another process writes the file of buckets: what it has charged since it wrote that is unknown here"
	cantUse = "WARN the file of buckets can't be used"
)

func newClock() *time.Time {
	at := time.Date(2026, 11, 28, 0, 0, 0, 0, time.UTC)
	return &at
}

// Guards when the file is written: at the end, as soon as the process begins to exit, and each 30 s
// if something was decided and some bucket lasts for longer than a minute.
func TestWrittenWhenWorthIt(t *testing.T) {
	t.Parallel()
	path, clock := filepath.Join(t.TempDir(), "dir", "buckets"), newClock()
	p := start(t, clock)
	p.use(path, false)
	written := func(step string, want bool) {
		t.Helper()
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s: %v, want written: %v", step, err, want)
		}
		_ = os.Remove(path)
	}
	p.tick(time.Minute)
	written("unused", false)
	_, _ = p.memory.Take(context.Background(), limiter.Request{Buckets: []limiter.Bucket{{Name: "b", Key: "k", Limit: limiter.Per(1, time.Second), Cost: 1}}}, nil)
	p.tick(time.Minute)
	written("drained soon", false)
	p.take("k", 1)
	p.tick(25 * time.Second)
	p.take("k", 1)
	p.tick(10 * time.Second)
	written("half a minute", true)
	p.tick(time.Hour)
	written("nothing new", false)
	p.exiting = true
	p.tick(time.Second)
	written("exiting", true)
	p.tick(10 * time.Second)
	written("still exiting", false)
	p.Close()
	written("closed", true)
	p.wantLogged()
}

// Guards that a large file is written less often.
func TestLargeFileIsWrittenLessOften(t *testing.T) {
	t.Parallel()
	path, clock := filepath.Join(t.TempDir(), "buckets"), newClock()
	p := start(t, clock)
	p.use(path, false)
	for i := range 200_000 { // some 4.8 MB
		p.take(fmt.Sprint(i), 1)
	}
	p.tick(30 * time.Second)
	first := p.Saved()
	p.take("k", 1)
	if p.tick(45 * time.Second); !p.Saved().Equal(first) {
		t.Errorf("written again after %v", p.Saved().Sub(first))
	}
	if p.tick(10 * time.Second); p.Saved().Equal(first) {
		t.Error("not written again")
	}
}

// Guards what a process knows that starts after one was stopped, or killed.
func TestRestart(t *testing.T) {
	t.Parallel()
	path, clock := filepath.Join(t.TempDir(), "buckets"), newClock()
	p := start(t, clock)
	p.use(path, false)
	p.take("stopped", 3)
	*clock = clock.Add(time.Minute)
	p.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Error(info.Mode(), err)
	}

	p = start(t, clock)
	p.use(path, false)
	p.wantLogged(loaded)
	p.wantUnits("stopped", 3)
	if at := p.Saved(); !at.Equal(*clock) {
		t.Errorf("saved at %v, want %v", at, *clock)
	}
	p.take("written", 1)
	p.tick(31 * time.Second)
	p.take("lost", 1)
	p.kill()
	unfinished := []byte("killed while it wrote")
	filetest.Write(t, path+".new", unfinished)

	*clock = clock.Add(time.Hour)
	p = start(t, clock)
	p.use(path, false)
	p.wantUnits("stopped", 2)
	p.wantUnits("written", 0)
	p.wantUnits("lost", 0)
	p.Close()
	if _, err := os.Stat(path + ".new"); err == nil {
		t.Error("what was not finished is still there")
	}
}

// Guards that a file of something else, of another format or with a byte changed is moved aside,
// a second one beside the first, with one line.
func TestDamagedFileIsMovedAside(t *testing.T) {
	t.Parallel()
	dir, clock := t.TempDir(), newClock()
	path := filepath.Join(dir, "buckets")
	for i, text := range []string{"{}", "rlbucket\x02\x00\x00\x00 of a later version", ""} {
		filetest.Write(t, path, []byte(text))
		p := start(t, clock)
		p.use(path, false)
		p.wantLogged(cantUse)
		aside := path + ".damaged"
		if i > 0 {
			aside += "-2"
		}
		if got, err := os.ReadFile(aside); err != nil || string(got) != text {
			t.Errorf("%s has %q, want %q, %v", aside, got, text, err)
		}
		p.take("k", 1)
		p.Close()
		p = start(t, clock)
		p.use(path, false)
		p.wantUnits("k", 1)
		p.kill()
	}
}

// Guards that limits go on where there can be no file, with one line, and that it is written as
// soon as there can. It is never written over what is no file.
func TestFileThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	clock := newClock()
	const (
		locked = "WARN the file of buckets can't be locked"
		read   = "WARN the file of buckets can't be read"
		write  = "WARN the file of buckets can't be written; what it had is still there"
	)
	for _, tc := range []struct {
		name        string
		break_, fix func(path string) error
		want        []string
	}{
		{
			"a file in place of the directory",
			func(path string) error { return os.WriteFile(filepath.Dir(path), nil, 0o600) },
			func(path string) error { return os.Remove(filepath.Dir(path)) },
			[]string{locked, read, again},
		},
		{
			"a directory in place of the file",
			func(path string) error { return os.MkdirAll(path, 0o700) },
			os.Remove,
			[]string{read, write, again},
		},
		{
			"a device in place of the file",
			func(path string) error {
				return errorsJoin(os.MkdirAll(filepath.Dir(path), 0o700), os.Symlink("/dev/full", path))
			},
			os.Remove,
			[]string{read, write, again},
		},
		{
			"a directory in place of the other file",
			func(path string) error { return os.MkdirAll(filepath.Join(path+".new", "x"), 0o700) },
			func(path string) error { return os.RemoveAll(path + ".new") },
			[]string{write, again},
		},
		{
			"a device in place of the lock",
			func(path string) error {
				return errorsJoin(os.MkdirAll(filepath.Dir(path), 0o700), os.Symlink("/dev/full", path+".lock"))
			},
			func(path string) error { return os.Remove(path + ".lock") },
			[]string{locked, again},
		},
	} {
		path := filepath.Join(t.TempDir(), "dir", "buckets")
		if err := tc.break_(path); err != nil {
			t.Fatal(err)
		}
		p := start(t, clock)
		p.use(path, false)
		p.take("k", 2)
		p.tick(2 * time.Minute)
		if err := tc.fix(path); err != nil {
			t.Fatal(err)
		}
		p.tick(time.Minute)
		p.wantLogged(tc.want...)
		p.kill()
		p = start(t, clock)
		p.use(path, false)
		p.wantUnits("k", 2)
		p.kill()
	}
}

func errorsJoin(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Guards that writing a large file takes its time only while nothing waits for it: neither a process
// that exits nor another config, whose requests come later then.
func TestHurries(t *testing.T) {
	t.Parallel()
	p := start(t, newClock())
	if p.hurries() {
		t.Error("it hurries for nothing")
	}
	p.mu.Lock()
	used := make(chan struct{})
	go func() { p.Use(p.opt); close(used) }()
	for !p.hurries() {
		runtime.Gosched()
	}
	p.mu.Unlock()
	<-used
	if p.hurries() {
		t.Error("it hurries though the other config is used")
	}
	p.exiting = true
	if !p.hurries() {
		t.Error("it does not hurry when the process exits")
	}
}

// Guards that with Redis nothing is made or locked, and nothing reported, where there is no file: then
// the directory may not even be one that can be written.
func TestRedisNeedsNoFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	noDir := filepath.Join(dir, "file")
	filetest.Write(t, noDir, nil)
	for _, path := range []string{filepath.Join(dir, "new", "buckets"), filepath.Join(noDir, "buckets")} {
		p := start(t, newClock())
		p.use(path, true)
		p.take("k", 1)
		p.tick(time.Minute)
		p.Close()
		p.wantLogged()
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); err == nil {
		t.Error("the directory was made")
	}
}

// Guards that what was reset does not come back after a crash, though nothing else is worth
// writing the file then.
func TestResetSurvivesKill(t *testing.T) {
	t.Parallel()
	path, clock := filepath.Join(t.TempDir(), "buckets"), newClock()
	p := start(t, clock)
	p.use(path, false)
	p.take("k", 3)
	p.tick(31 * time.Second)
	if _, err := p.memory.Reset(context.Background(), hourly("k")); err != nil {
		t.Fatal(err)
	}
	p.tick(31 * time.Second)
	p.kill()
	p = start(t, clock)
	p.use(path, false)
	p.wantUnits("k", 0)
}

// Guards that of two processes with one file both read it, one writes it, and the other goes on
// when that one has ended.
func TestTwoProcesses(t *testing.T) {
	t.Parallel()
	path, clock := filepath.Join(t.TempDir(), "buckets"), newClock()
	a := start(t, clock)
	a.use(path, false)
	a.take("before", 1)
	a.tick(31 * time.Second)
	a.take("since", 1)
	b := start(t, clock)
	b.use(path, false)
	b.wantLogged(another, loaded)
	b.wantUnits("before", 1)
	b.wantUnits("since", 0) // as the line says
	b.take("b", 2)
	b.tick(5 * time.Minute)
	b.wantLogged()
	a.take("a", 1)
	a.Close()
	b.tick(time.Minute)
	b.wantLogged(again)
	c := start(t, clock)
	c.use(path, false)
	c.wantUnits("b", 2)
	c.wantUnits("a", 0)
}

// Guards that with Redis, and with another file or none, what a file has is not read again later:
// it would bring back what was reset, or has left.
func TestFileThatIsNoLongerUsed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path, other := filepath.Join(dir, "buckets"), filepath.Join(dir, "other")
	for _, tc := range []struct {
		path  string
		redis bool
		file  string // that there is then
	}{{path, true, ""}, {"", false, ""}, {other, false, other}} {
		for _, restart := range []bool{false, true} {
			if restart && !tc.redis {
				continue // nobody knows of that file any more
			}
			clock := newClock()
			p := start(t, clock)
			p.use(path, false)
			p.take("k", 2)
			p.tick(31 * time.Second)
			if restart {
				p.Close()
				p = start(t, clock)
			}
			p.use(tc.path, tc.redis)
			p.tick(time.Minute)
			p.wantUnits("k", 2)
			for _, file := range []string{path, other} {
				if _, err := os.Stat(file); (err == nil) != (file == tc.file) {
					t.Errorf("%+v, restart %v: %s: %v", tc, restart, file, err)
				}
			}
			if (tc.file != "") != !p.Saved().IsZero() {
				t.Errorf("%+v, restart %v: saved at %v", tc, restart, p.Saved())
			}
			p.use(path, false) // back, with what there is
			p.tick(2 * time.Second)
			p.kill()
			p = start(t, clock)
			p.use(path, false)
			p.wantUnits("k", 2)
			p.Close()
			_ = os.Remove(path)
			_ = os.Remove(other)
		}
	}
}
