package behaviour

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// restarting is a Caddy in a process of its own, with a directory that stays when it is restarted.
type restarting struct {
	t    *testing.T
	dir  string
	addr string
	*caddytest.Process
}

// start starts it with c. The one before must have ended.
func (r *restarting) start(c sitetest.Config) {
	r.t.Helper()
	err := caddytest.Retry(func() error {
		r.addr = redistest.FreeAddr(r.t)
		file := filepath.Join(r.dir, "Caddyfile")
		text := strings.Replace(string(c.Caddyfile(r.addr, r.logPath())), "grace_period 1s", "", 1) // endless, as by default
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			return err
		}
		r.Process = sitetest.RunCaddy(r.t, nil, file)
		return r.Serves(r.addr)
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *restarting) logPath() string { return filepath.Join(r.dir, "log") }

// get returns the status of a request.
func (r *restarting) get(path string) int {
	r.t.Helper()
	client := http.Client{Timeout: sitetest.Patience, Transport: caddytest.FreshConnections("")}
	res, err := client.Get("http://" + r.addr + path)
	if err != nil {
		r.t.Fatal(err)
	}
	res.Body.Close()
	return res.StatusCode
}

// admitted sends n requests and returns how many were admitted.
func (r *restarting) admitted(n int) (admitted int) {
	r.t.Helper()
	for range n {
		if r.get("/") == http.StatusOK {
			admitted++
		}
	}
	return admitted
}

// stop has Caddy stop as service managers do, and kills it after some time.
func (r *restarting) stop(kill time.Duration) {
	r.t.Helper()
	if err := r.Signal(syscall.SIGTERM); err != nil {
		r.t.Fatal(err)
	}
	select {
	case <-r.Exited:
	case <-time.After(kill):
		r.Stop()
	}
}

// file returns the path of the file of buckets.
func (r *restarting) file() string {
	return filepath.Join(r.dir, "caddy", "rate_limit", "buckets-1")
}

// quota is a site with a monthly quota for each client, and a ban.
const quota = "rate_limit quota {\nalgorithm fixed_window\nperiod month\nsize 10\nban 1h\n}\nrespond ok"

// Guards that quotas and bans are as they were when Caddy is started again: stopped with a
// request open, so that it is killed before its servers have stopped; behind a configuration
// without limits; and with its file in the directory that persist names.
func TestLimitsSurviveRestart(t *testing.T) {
	t.Parallel()
	r := &restarting{t: t, dir: sitetest.TempDir(t)}
	slow := sitetest.NewUpstream(t, func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() })
	site := sitetest.Config{Site: strings.Replace(quota, "respond ok", "reverse_proxy /slow "+slow+"\nrespond ok", 1)}
	r.start(site)
	if n := r.admitted(4); n != 4 {
		t.Fatalf("%d of 4 admitted", n)
	}
	open := sitetest.Dial(t, r.addr)
	fmt.Fprintf(open, "GET /slow HTTP/1.1\r\nHost: %s\r\n\r\n", r.addr)
	time.Sleep(100 * ms) // it counts once it has arrived
	r.stop(5 * time.Second)
	if info, err := os.Stat(r.file()); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatal(err, info)
	}

	r.start(site)
	if n := r.admitted(7); n != 5 {
		t.Errorf("%d of 5 left were admitted", n)
	}
	r.stop(sitetest.Patience)

	r.start(sitetest.Config{Site: "respond ok"})
	r.stop(sitetest.Patience)
	adminAddr := redistest.FreeAddr(t)
	r.start(sitetest.Config{Site: quota, Admin: adminAddr})
	if r.get("/") != http.StatusTooManyRequests {
		t.Error("the ban is gone")
	}
	if bans := sitetest.NewAdmin(t, adminAddr).Ask("GET", "bans", ""); len(bans["bans"].([]any)) != 1 {
		t.Errorf("bans lists %v, want the ban that has denied a request", bans)
	}
	r.stop(sitetest.Patience)

	elsewhere := sitetest.Config{Site: quota, Global: "rate_limit {\nmemory {\npersist " + filepath.Join(r.dir, "new", "dir", "buckets") + "\n}\n}"}
	r.start(elsewhere)
	if n := r.admitted(12); n != 10 {
		t.Errorf("%d of 10 were admitted in another file", n)
	}
	r.stop(sitetest.Patience)
	r.start(elsewhere)
	if n := r.admitted(1); n != 0 {
		t.Error("the other file was not read")
	}
	r.Stop()
	log, err := os.ReadFile(r.logPath())
	if got := strings.Count(string(log), "buckets are as they were before the restart"); err != nil || got != 3 || strings.Contains(string(log), "the file of buckets") {
		t.Errorf("told %d times, %v, in\n%s", got, err, log)
	}
}

// Guards the bound of a crash at any moment: what is admitted again is what the killed process
// admitted since its file was written. Here that is only at the end, so nothing it had when it was
// started is lost, and the file is never half of one.
func TestLimitsSurviveKill(t *testing.T) {
	t.Parallel()
	r := &restarting{t: t, dir: sitetest.TempDir(t)}
	r.start(sitetest.Config{Site: quota})
	r.admitted(6)
	r.stop(sitetest.Patience)
	for range 4 {
		r.start(sitetest.Config{Site: quota})
		if n := r.admitted(5); n != 4 {
			t.Errorf("%d of 4 left were admitted", n)
		}
		if rand.IntN(2) == 0 { // perhaps while it writes
			_ = r.Signal(syscall.SIGTERM)
			time.Sleep(time.Duration(rand.Int64N(int64(3 * ms))))
			r.Stop()
			break // whether it was written is not known
		}
		r.Stop()
	}
	r.start(sitetest.Config{Site: quota})
	if n := r.admitted(5); n != 4 && n != 0 {
		t.Errorf("%d of 4 or of none left were admitted", n)
	}
}

// Guards that a Caddy which replaces another one while that still runs, as deployments overlap,
// goes on with its buckets, and hands them on when both have ended.
func TestLimitsSurviveHandover(t *testing.T) {
	t.Parallel()
	dir := sitetest.TempDir(t)
	site := sitetest.Config{Site: quota, Global: "rate_limit {\nmemory {\npersist " + filepath.Join(dir, "buckets") + "\n}\n}"}
	first, second := &restarting{t: t, dir: sitetest.TempDir(t)}, &restarting{t: t, dir: sitetest.TempDir(t)}
	first.start(site)
	first.admitted(3)
	first.stop(sitetest.Patience)
	first.start(site)
	second.start(site)
	if n := second.admitted(2); n != 2 {
		t.Errorf("%d of 2 admitted beside the other one", n)
	}
	first.stop(sitetest.Patience)
	second.stop(sitetest.Patience)
	first.start(site)
	if n := first.admitted(6); n != 5 {
		t.Errorf("%d of 5 left were admitted", n)
	}
}

// Guards that zones as mholt/caddy-ratelimit has them survive a restart too.
func TestZonesSurviveRestart(t *testing.T) {
	t.Parallel()
	r := &restarting{t: t, dir: sitetest.TempDir(t)}
	site := sitetest.Config{Site: "rate_limit {\nzone all {\nkey static\nevents 5\nwindow 1h\n}\n}\nrespond ok"}
	for i, want := range []int{3, 2, 0} {
		r.start(site)
		if n := r.admitted(3); n != want {
			t.Errorf("start %d: %d were admitted, want %d", i+1, n, want)
		}
		r.stop(sitetest.Patience)
	}
}

// Guards what happens to the file when buckets are kept elsewhere: what it has goes to Redis once,
// and is not read again when Redis is no longer used.
func TestRestartIntoRedis(t *testing.T) {
	t.Parallel()
	r := &restarting{t: t, dir: sitetest.TempDir(t)}
	server := redistest.Start(t)
	quota := strings.Replace(quota, "ban 1h\n", "", 1)
	inRedis := sitetest.Config{Site: quota, Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout)}
	r.start(sitetest.Config{Site: quota})
	r.admitted(4)
	r.stop(sitetest.Patience)

	r.start(inRedis)
	if n := r.admitted(7); n != 6 {
		t.Errorf("%d of 6 left were admitted by redis", n)
	}
	if _, err := os.Stat(r.file()); err == nil {
		t.Error("the file is still there")
	}
	r.stop(sitetest.Patience)

	r.start(sitetest.Config{Site: quota})
	if n := r.admitted(11); n != 10 {
		t.Errorf("%d of 10 were admitted without what redis knows", n)
	}
}

// Guards that a configuration that is only looked at reads and locks nothing.
func TestValidateLeavesFileAlone(t *testing.T) {
	dir := filepath.Join(sitetest.TempDir(t), "none")
	original := state.Default.DataDir
	state.Default.DataDir = func() string { return dir }
	t.Cleanup(func() { state.Default.DataDir = original })
	if err := configtest.ValidateCaddyfile(":8080 {\n" + quota + "\n}"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("validate has made the directory")
	}
}

// Guards that reloads keep the file: through a configuration without limits, for longer than the
// buckets are kept in memory meanwhile, and that a request which comes before the app has started
// finds them.
func TestFileThroughReloads(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{Site: quota})
	if a := s.Get("/"); a.StatusCode != http.StatusOK {
		t.Fatal(a)
	}
	path := filepath.Join(s.Process.DataDir(), "rate_limit", "buckets-1")
	s.Reload(sitetest.Config{Site: "respond ok"})
	sitetest.Eventually(t, "the file", func() bool { _, err := os.Stat(path); return err == nil })
	s.Process.IdleMemory.Store(nil)
	s.Reload(sitetest.Config{Site: quota})
	if a := s.Get("/"); a.Header.Get("X-RateLimit-Remaining") != "8" {
		t.Errorf("after a configuration without limits: %v", a)
	}
	if saved := s.Process.Newest().Saved(); saved.IsZero() {
		t.Error("nothing tells when it was saved")
	}
	s.Reload(sitetest.Config{Site: quota, Global: "rate_limit {\nmemory {\npersist off\n}\n}"})
	if _, err := os.Stat(path); err == nil {
		t.Error("the file is still there, with persist off")
	}
	if a := s.Get("/"); a.Header.Get("X-RateLimit-Remaining") != "7" {
		t.Errorf("with persist off: %v", a)
	}
	if lines := s.Log("warn", "rate_limit"); len(lines) > 0 {
		t.Error(lines)
	}
}
