package operation

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// prometheus is a Prometheus process.
type prometheus struct {
	t   testing.TB
	url string
}

// startPrometheus runs a Prometheus with a configuration file until the test ends,
// and returns when it is ready.
func startPrometheus(t testing.TB, config string) *prometheus {
	t.Helper()
	addr := redistest.FreeAddr(t)
	output := new(bytes.Buffer)
	cmd := exec.Command(program(t, "prometheus"),
		"--config.file", config, "--storage.tsdb.path", t.TempDir(), "--web.listen-address", addr,
		"--query.lookback-delta", "5s", "--log.level", "warn")
	cmd.Dir = filepath.Dir(config)
	cmd.Stdout, cmd.Stderr = output, output
	exited, err := redistest.Run(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-exited
	})
	p := &prometheus{t: t, url: "http://" + addr}
	redistest.WaitFor(t, patience, func() error {
		select {
		case <-exited:
			t.Fatalf("prometheus exited: %v\n%s", cmd.ProcessState, output)
		default:
		}
		res, err := http.Get(p.url + "/-/ready")
		if err == nil {
			_ = res.Body.Close()
			if res.StatusCode != http.StatusOK {
				err = fmt.Errorf("not ready: %s", res.Status)
			}
		}
		return err
	})
	return p
}

// api calls the API and decodes the data of its reply.
func (p *prometheus) api(path string, args url.Values, data any) error {
	res, err := http.Get(p.url + "/api/v1/" + path + "?" + args.Encode())
	if err != nil {
		return err
	}
	defer res.Body.Close()
	reply := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.NewDecoder(res.Body).Decode(&reply); err != nil {
		return err
	}
	if reply.Status != "success" {
		return fmt.Errorf("%s", reply.Error)
	}
	return nil
}

// timeSeries is a series of the answer to a query.
type timeSeries struct {
	Metric map[string]string
	Values [][2]any // time and value
}

// finite returns the number of values that a graph can show.
func (s timeSeries) finite() (n int) {
	for _, pair := range s.Values {
		text, _ := pair[1].(string)
		if v, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(v) && !math.IsInf(v, 0) {
			n++
		}
	}
	return n
}

// queryRange returns what a graph of a query shows since a time.
func (p *prometheus) queryRange(query string, since time.Time) ([]timeSeries, error) {
	var data struct{ Result []timeSeries }
	err := p.api("query_range", url.Values{
		"query": {query}, "step": {"1"},
		"start": {strconv.FormatInt(since.Unix(), 10)},
		"end":   {strconv.FormatInt(time.Now().Unix()+1, 10)},
	}, &data)
	return data.Result, err
}

// value returns the number that a query has now, and 0 if there is none.
func (p *prometheus) value(query string) float64 {
	p.t.Helper()
	var data struct {
		Result []struct{ Value [2]any }
	}
	if err := p.api("query", url.Values{"query": {query}}, &data); err != nil {
		p.t.Fatalf("%s: %v", query, err)
	}
	if len(data.Result) == 0 {
		return 0
	}
	text, _ := data.Result[0].Value[1].(string)
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		p.t.Fatal(err)
	}
	return v
}

// firing returns the labels of the alerts that fire, by the alert's name.
func (p *prometheus) firing() map[string][]map[string]string {
	p.t.Helper()
	var data struct {
		Alerts []struct {
			Labels map[string]string
			State  string
		}
	}
	if err := p.api("alerts", nil, &data); err != nil {
		p.t.Fatal(err)
	}
	found := make(map[string][]map[string]string)
	for _, a := range data.Alerts {
		if a.State == "firing" {
			found[a.Labels["alertname"]] = append(found[a.Labels["alertname"]], a.Labels)
		}
	}
	return found
}
