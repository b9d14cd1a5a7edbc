// Package persist keeps the buckets of a Memory in a file, so that they survive the process.
package persist

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gofrs/flock"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

const (
	// every is how often the file is written at most, and worth for how long some bucket has to
	// last for that. Otherwise it is only written when the process stops.
	every = 30 * time.Second
	worth = time.Minute

	// bytesEach is by how many bytes of the file the time between writes is a second: with a
	// million buckets it is written every four minutes.
	bytesEach = 100_000
)

// DefaultPath returns the path of the file in a directory where Caddy keeps its data.
func DefaultPath(dir string) string {
	return filepath.Join(dir, "rate_limit", "buckets-"+strconv.Itoa(limiter.SavedFormat))
}

// ParsePath parses the path of a file: none if it is off.
func ParsePath(text string) (path, use string) {
	switch {
	case text == "off":
		return "", ""
	case !filepath.IsAbs(text) || strings.HasSuffix(text, string(filepath.Separator)):
		return "", "off, or the absolute path of a file, such as /var/lib/caddy/buckets"
	}
	return filepath.Clean(text), ""
}

// Options are what a config says of the file.
type Options struct {
	Path   string // empty if there is none
	Redis  bool   // whether buckets are kept in Redis, so that those in the file would be out of date later
	Logger *zap.Logger
}

// keeps reports whether the file is written.
func (o *Options) keeps() bool { return o.Path != "" && !o.Redis }

// File keeps the buckets of a Memory in a file. Of several processes with one file, that which has
// locked it writes. The zero value is not usable; use New.
type File struct {
	memory  *limiter.Memory
	exiting func() bool
	now     func() time.Time

	waiting atomic.Int32 // how many wait for mu but the ticker
	mu      sync.Mutex   // held while the file is read and written
	opt     Options
	used    bool
	lock    *flock.Flock // nil if this process has not locked the file
	next    time.Time    // when to write it, if something has changed
	stale   bool         // whether it lacks more than the Memory knows of
	stopped bool         // whether it was written since the process has begun to exit
	problem string       // what was logged last, and goes on

	savedMu sync.Mutex
	saved   time.Time
}

// New returns a File for a Memory that is not used before Use. exiting reports whether the process
// exits.
func New(memory *limiter.Memory, exiting func() bool) *File {
	return &File{memory: memory, exiting: exiting, now: time.Now}
}

// Use goes on with the options of another config. The first ones have the file loaded. With Redis
// it is removed then, and so is one that is no longer used: what it has will be out of date.
func (f *File) Use(opt Options) {
	f.waiting.Add(1)
	defer f.waiting.Add(-1)
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.opt
	f.opt = opt
	if f.used && before.Path == opt.Path && before.Redis == opt.Redis {
		return
	}
	if before.Path != opt.Path {
		f.discard(before.Path)
	}
	f.problem, f.next, f.stale = "", f.now().Add(every), f.used
	if f.stale {
		f.next = f.now()
	}
	first := !f.used
	f.used = true
	if opt.Path == "" || opt.Redis && f.lock == nil && !exists(opt.Path) {
		return // with Redis, a directory that can't be written is no problem
	}
	owns := f.own()
	if first {
		f.load(owns)
	}
	if opt.Redis {
		f.discard(opt.Path)
	}
}

// Tick writes the file if it is time to, or if the process has begun to exit: its servers may take
// long to stop, and it may be killed meanwhile. It is called every second.
func (f *File) Tick() {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case !f.opt.keeps():
		return
	case f.exiting() && !f.stopped:
		f.stopped = true
	case f.now().Before(f.next):
		return
	case !f.stale && f.memory.Unsaved() <= worth:
		f.next = f.now().Add(every)
		return
	}
	f.save()
}

// Close writes the file. Use may follow.
func (f *File) Close() {
	f.waiting.Add(1)
	defer f.waiting.Add(-1)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.opt.keeps() {
		f.save()
	}
	f.unlock()
	f.opt.Path = ""
}

// Saved returns when the file was written last, or the zero time if there is none.
func (f *File) Saved() time.Time {
	f.savedMu.Lock()
	defer f.savedMu.Unlock()
	return f.saved
}

func (f *File) setSaved(at time.Time) {
	f.savedMu.Lock()
	defer f.savedMu.Unlock()
	f.saved = at
}

// own locks the file, and reports whether this process has.
func (f *File) own() bool {
	if f.lock != nil {
		return true
	}
	err := os.MkdirAll(filepath.Dir(f.opt.Path), 0o700)
	var locked bool
	lock := flock.New(f.opt.Path+".lock", flock.SetPermissions(0o600))
	if other := regular(lock.Path()); err == nil && !errors.Is(other, fs.ErrNotExist) {
		err = other // to open a pipe would take forever
	}
	if err == nil {
		locked, err = lock.TryLock()
	}
	switch {
	case err != nil:
		_ = lock.Close()
		f.warn("the file of buckets can't be locked, so they will not survive a restart", err)
	case !locked:
		_ = lock.Close()
		f.warn("another process writes the file of buckets: what it has charged since it wrote that is unknown here, and buckets of this one will not survive a restart before it ends", nil)
	default:
		f.lock = lock
	}
	return f.lock != nil
}

// unlock lets another process write the file.
func (f *File) unlock() {
	if f.lock != nil {
		_ = f.lock.Close()
		f.lock = nil
	}
}

// discard removes a file, if this process has locked it, and unlocks it.
func (f *File) discard(path string) {
	if f.lock != nil {
		_ = os.Remove(path)
		f.unlock()
	}
	f.setSaved(time.Time{})
}

// warn logs a problem, unless it was logged before and goes on.
func (f *File) warn(problem string, err error) {
	if f.problem != problem {
		f.problem = problem
		f.opt.Logger.Warn(problem, zap.String("file", f.opt.Path), zap.Error(err))
	}
}

// load loads the file. If it is not what limiters write, it is moved aside by the process that
// owns it.
func (f *File) load(owns bool) {
	began := f.now()
	saved, err := f.read()
	switch {
	case err == nil:
		f.setSaved(saved.At)
		f.opt.Logger.Info("buckets are as they were before the restart", zap.String("file", f.opt.Path), zap.Int("buckets", saved.Buckets),
			zap.Duration("age", time.Since(saved.At)), zap.Duration("took", f.now().Sub(began)))
	case errors.Is(err, fs.ErrNotExist):
	case errors.Is(err, limiter.ErrNotSaved) && owns:
		aside, failed := setAside(f.opt.Path)
		f.opt.Logger.Warn("the file of buckets can't be used, so they start empty",
			zap.String("file", f.opt.Path), zap.Error(errors.Join(err, failed)), zap.String("moved_to", aside))
	default:
		f.opt.Logger.Warn("the file of buckets can't be read, so they start empty", zap.String("file", f.opt.Path), zap.Error(err))
	}
}

// read reads the file.
func (f *File) read() (limiter.Saved, error) {
	if err := regular(f.opt.Path); err != nil {
		return limiter.Saved{}, err
	}
	file, err := os.Open(f.opt.Path)
	if err != nil {
		return limiter.Saved{}, err
	}
	defer file.Close()
	return f.memory.Load(file)
}

// setAside renames a file, to another name if there is one already, and returns the new name. A
// third one takes the place of the second.
func setAside(path string) (string, error) {
	aside := path + ".damaged"
	if exists(aside) {
		aside += "-2"
	}
	return aside, os.Rename(path, aside)
}

// exists reports whether there is a file, or anything else.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// regular returns an error if there is no file, or if it is a directory, a device or the like.
func regular(path string) error {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: path, Err: errors.New("not a regular file")}
	}
	return err
}

// save writes the file, if this process may.
func (f *File) save() {
	f.next = f.now().Add(every)
	if !f.own() {
		f.stale = true
		return
	}
	saved, size, err := f.write()
	if err != nil {
		f.stale = true
		f.warn("the file of buckets can't be written; what it had is still there, but they will not survive a restart as they are now", err)
		return
	}
	if f.problem != "" {
		f.opt.Logger.Info("the file of buckets is written from now on", zap.String("file", f.opt.Path))
	}
	f.problem, f.stale = "", false
	f.next = f.now().Add(max(every, time.Duration(size)*time.Second/bytesEach))
	f.setSaved(saved.At)
}

// paced writes a file. A large one comes in pieces of 64 KiB, between which it leaves the processor
// to requests, unless it should hurry.
type paced struct {
	file    io.Writer
	hurries func() bool
}

// Write implements io.Writer.
func (p paced) Write(b []byte) (int, error) {
	if len(b) >= 1<<16 && !p.hurries() {
		time.Sleep(2 * time.Millisecond)
	}
	return p.file.Write(b)
}

// hurries reports whether writing should not take long: the process may be killed soon, or requests
// of another config wait for it.
func (f *File) hurries() bool { return f.exiting() || f.waiting.Load() > 0 }

// write writes another file, which then takes the place of the file, so that there is always a
// whole one. The name of the other one is always the same: only who has the lock writes it, and one
// that a process has left that was killed is no waste for ever.
func (f *File) write() (saved limiter.Saved, size int64, err error) {
	if err := regular(f.opt.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return saved, 0, err
	}
	unfinished := f.opt.Path + ".new"
	_ = os.Remove(unfinished)
	file, err := os.OpenFile(unfinished, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return saved, 0, err
	}
	saved, err = f.memory.Save(paced{file, f.hurries})
	if info, e := file.Stat(); e == nil {
		size = info.Size()
	}
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(unfinished, f.opt.Path)
	}
	if err != nil {
		_ = os.Remove(unfinished)
	}
	return saved, size, err
}
