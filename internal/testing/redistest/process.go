package redistest

import (
	"os/exec"
	"strconv"
)

// Run starts a process that ends with this one, however this one ends. The channel
// is closed when the process has exited and was reaped.
func Run(cmd *exec.Cmd) (exited <-chan struct{}, err error) {
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	// If the test binary dies without cleaning up, for instance on a timeout, the
	// guard's input closes and it stops the process. A signal to the process
	// group, such as Ctrl-C, must not end the guard: a paused process would
	// outlive it.
	//nolint:gosec // a number
	guard := exec.Command("sh", "-c", `trap "" HUP INT TERM; read _; kill -9 "$0"`,
		strconv.Itoa(cmd.Process.Pid))
	_, err = guard.StdinPipe()
	if err == nil {
		err = guard.Start()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait()
		if guard.Process != nil {
			_ = guard.Process.Kill()
			_ = guard.Wait()
		}
	}()
	if err != nil {
		_ = cmd.Process.Kill()
		<-done
	}
	return done, err
}
