package bench

import (
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"
)

// slowest sends n requests on schedule, one each time every has passed, whether those before are answered or
// not, and returns within what time 99 of 100 are answered.
func slowest(b *testing.B, client *http.Client, url string, n int, every time.Duration) time.Duration {
	b.Helper()
	took := make([]time.Duration, n)
	var all sync.WaitGroup
	for i, due := 0, time.Now(); i < n; i, due = i+1, due.Add(every) {
		time.Sleep(time.Until(due))
		all.Go(func() {
			res, err := client.Get(url)
			if err != nil {
				wrong(b, "%v", err)
				return
			}
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
			took[i] = time.Since(due)
		})
	}
	all.Wait()
	slices.Sort(took)
	return took[n*99/100]
}
