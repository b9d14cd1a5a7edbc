package manifests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"go.yaml.in/yaml/v3"
)

// composeFile is the file of Docker Compose.
const composeFile = deploy + "/docker/compose.yml"

// passwords are what users have to set before they start the services.
var passwords = []string{"REDIS_PASSWORD=of-redis", "GRAFANA_PASSWORD=of-grafana"}

// loadCompose loads compose.yml with some environment variables, as Docker Compose does.
func loadCompose(t testing.TB, env ...string) (*types.Project, error) {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{composeFile}, cli.WithEnv(env))
	if err != nil {
		t.Fatal(err)
	}
	return options.LoadProject(t.Context())
}

// project returns what compose.yml says once all passwords are set.
func project(t testing.TB) *types.Project {
	t.Helper()
	p, err := loadCompose(t, passwords...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestComposeNeedsPasswords guards that nothing starts with an empty password.
func TestComposeNeedsPasswords(t *testing.T) {
	for i, missing := range passwords {
		name, _, _ := strings.Cut(missing, "=")
		if _, err := loadCompose(t, passwords[1-i]); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: error %v", name, err)
		}
	}
}

// TestComposeFile guards that Docker Compose accepts the file, and what it does not
// check: that images have fixed versions, files exist and are not written to, each
// service has a health check, and neither Redis nor an admin API is published.
func TestComposeFile(t *testing.T) {
	p := project(t)
	published := make(map[string]string)
	built := ""
	for name, s := range p.Services {
		if s.Build != nil {
			built = s.Image
			if _, err := os.Stat(filepath.Join(s.Build.Context, s.Build.Dockerfile)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, port := range s.Ports {
			published[fmt.Sprintf("%s:%s:%d", port.HostIP, port.Published, port.Target)] = name
		}
		for _, v := range s.Volumes {
			if v.Type != types.VolumeTypeBind {
				continue
			}
			if !v.ReadOnly {
				t.Errorf("%s: may write to %s", name, v.Source)
			}
			if _, err := os.Stat(v.Source); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for variable, value := range s.Environment {
			if strings.HasSuffix(variable, "PASSWORD") || strings.HasSuffix(variable, "AUTH") {
				if value == nil || !strings.HasPrefix(*value, "of-") {
					t.Errorf("%s: does not get %s from the environment", name, variable)
				}
			}
		}
		if h := s.HealthCheck; h == nil || h.Interval == nil || h.Timeout == nil {
			t.Errorf("%s: health check %+v", name, h)
		}
	}
	for name, s := range p.Services {
		if s.Image != built && !pinned.MatchString(s.Image) {
			t.Errorf("%s: image %q has no fixed version", name, s.Image)
		}
	}
	want := map[string]string{
		":8080:8080": "balancer", "127.0.0.1:9090:9090": "prometheus", "127.0.0.1:3000:3000": "grafana",
	}
	if fmt.Sprint(published) != fmt.Sprint(want) {
		t.Errorf("published are %v, want %v", published, want)
	}
	redis := p.Services["redis"]
	if names := redis.NetworksByPriority(); !slices.Equal(names, []string{"limits"}) || !p.Networks["limits"].Internal {
		t.Errorf("Redis is on networks %v", names)
	}
}

// TestMonitoringFiles guards what no Grafana and no DNS check here: the files of
// Prometheus and Grafana fit those of Docker, so that the one finds the other.
func TestMonitoringFiles(t *testing.T) {
	p := project(t)
	var config struct {
		Global struct {
			Interval string `yaml:"scrape_interval"`
		}
		Jobs []struct {
			DNS []struct {
				Names []string
				Port  int
			} `yaml:"dns_sd_configs"`
		} `yaml:"scrape_configs"`
	}
	var sources struct {
		Datasources []struct {
			Type, URL string
			JSONData  struct {
				TimeInterval string `yaml:"timeInterval"`
			} `yaml:"jsonData"`
		}
	}
	var dashboards struct {
		Providers []struct {
			Type    string
			Options struct{ Path string }
		}
	}
	for path, v := range map[string]any{
		"prometheus/prometheus.yml":                       &config,
		"grafana/provisioning/datasources/prometheus.yml": &sources,
		"grafana/provisioning/dashboards/rate-limit.yml":  &dashboards,
	} {
		if err := yaml.Unmarshal([]byte(read(t, deploy, path)), v); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	scraped := config.Jobs[0].DNS[0]
	if _, ok := p.Services[scraped.Names[0]]; !ok {
		t.Errorf("Prometheus scrapes %q, which is no service", scraped.Names)
	}
	if site := fmt.Sprintf("http://:%d {\n\tmetrics /metrics\n", scraped.Port); !strings.Contains(read(t, deploy, "docker/Caddyfile"), site) {
		t.Errorf("Prometheus scrapes port %d, where no metrics are", scraped.Port)
	}
	source := sources.Datasources[0]
	if source.Type != "prometheus" || source.URL != "http://prometheus:9090" || p.Services["prometheus"].Image == "" {
		t.Errorf("Grafana reads %+v", source)
	}
	if got, want := source.JSONData.TimeInterval, config.Global.Interval; got != want {
		t.Errorf("Grafana expects a scrape each %s, and Prometheus does one each %s", got, want)
	}
	provider := dashboards.Providers[0]
	mounted := slices.ContainsFunc(p.Services["grafana"].Volumes, func(v types.ServiceVolumeConfig) bool {
		return filepath.Base(v.Source) == "dashboard.json" && v.Target == provider.Options.Path+"/rate-limit.json"
	})
	if provider.Type != "file" || !mounted {
		t.Errorf("Grafana reads %+v, and has %v", provider, p.Services["grafana"].Volumes)
	}
}
