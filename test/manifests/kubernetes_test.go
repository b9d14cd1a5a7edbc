package manifests

import (
	"bufio"
	"errors"
	"flag"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// object is any object of Kubernetes.
type object interface {
	runtime.Object
	metav1.Object
}

// readObjects returns the objects in a file, as the API server decodes them: unknown
// and duplicate fields, kinds and versions are errors.
func readObjects(t testing.TB, name string) []object {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, batchv1.AddToScheme, networkingv1.AddToScheme,
		policyv1.AddToScheme, monitoringv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	var objects []object
	documents := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(read(t, deploy, "kubernetes", name))))
	for {
		text, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		decoded, kind, err := decoder.Decode(text, nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		o := decoded.(object)
		if o.GetName() == "" || o.GetLabels()["app"] == "" {
			t.Errorf("%s: %s %q lacks its name or label", name, kind.Kind, o.GetName())
		}
		objects = append(objects, o)
	}
}

// find returns the object with a type and a name, or nil.
func find[T object](objects []object, name string) (found T) {
	for _, o := range objects {
		if o, ok := o.(T); ok && o.GetName() == name {
			return o
		}
	}
	return found
}

// workload is what runs pods.
type workload struct {
	object

	pods     corev1.PodTemplateSpec
	selector *metav1.LabelSelector // nil for a job
	claims   []corev1.PersistentVolumeClaim
}

// workloads returns those of some objects that run pods.
func workloads(objects []object) (all []workload) {
	for _, o := range objects {
		switch o := o.(type) {
		case *appsv1.Deployment:
			all = append(all, workload{o, o.Spec.Template, o.Spec.Selector, nil})
		case *appsv1.StatefulSet:
			all = append(all, workload{o, o.Spec.Template, o.Spec.Selector, o.Spec.VolumeClaimTemplates})
		case *batchv1.Job:
			all = append(all, workload{o, o.Spec.Template, nil, nil})
		}
	}
	return all
}

// selectedBy reports whether a selector selects a workload's pods.
func (w workload) selectedBy(t testing.TB, selector *metav1.LabelSelector) bool {
	t.Helper()
	s, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		t.Fatal(err)
	}
	return s.Matches(labels.Set(w.pods.Labels))
}

// TestKubernetesFiles guards that the API server accepts the files, and what only a
// cluster would show: what the objects refer to exists, containers have few rights and
// bounded memory, and no Service leads to the metrics or an admin API.
func TestKubernetesFiles(t *testing.T) {
	for _, file := range []string{"caddy.yaml", "redis.yaml", "redis-cluster.yaml"} {
		objects := readObjects(t, file)
		for _, w := range workloads(objects) {
			t.Run(file+"/"+w.GetName(), func(t *testing.T) { checkWorkload(t, w, objects) })
		}
		for _, o := range objects {
			switch o := o.(type) {
			case *appsv1.StatefulSet:
				if find[*corev1.Service](objects, o.Spec.ServiceName) == nil {
					t.Errorf("%s: %s: no Service %s", file, o.Name, o.Spec.ServiceName)
				}
			case *policyv1.PodDisruptionBudget:
				checkSelects(t, file, o.Spec.Selector, objects)
			case *networkingv1.NetworkPolicy:
				checkSelects(t, file, &o.Spec.PodSelector, objects)
			}
		}
	}
}

// checkSelects checks that a selector selects the pods of some workload.
func checkSelects(t *testing.T, file string, selector *metav1.LabelSelector, objects []object) {
	t.Helper()
	if !slices.ContainsFunc(workloads(objects), func(w workload) bool { return w.selectedBy(t, selector) }) {
		t.Errorf("%s: no pods have %v", file, selector)
	}
}

// checkWorkload checks a workload among the objects of its file.
func checkWorkload(t *testing.T, w workload, objects []object) {
	pod := w.pods.Spec
	if w.selector != nil && !w.selectedBy(t, w.selector) {
		t.Errorf("it selects %v, and its pods are %v", w.selector, w.pods.Labels)
	}
	if on := pod.AutomountServiceAccountToken; on == nil || *on || !isTrue(pod.SecurityContext.RunAsNonRoot) {
		t.Error("its pods have more rights than they need")
	}
	volumes := make(map[string]bool)
	for _, v := range pod.Volumes {
		volumes[v.Name] = true
		if v.ConfigMap != nil && find[*corev1.ConfigMap](objects, v.ConfigMap.Name) == nil {
			t.Errorf("no ConfigMap %s", v.ConfigMap.Name)
		}
	}
	for _, v := range w.claims {
		volumes[v.Name] = true
	}
	for _, c := range pod.Containers {
		if !pinned.MatchString(c.Image) {
			t.Errorf("image %s has no fixed version", c.Image)
		}
		if s := c.SecurityContext; s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !isTrue(s.ReadOnlyRootFilesystem) {
			t.Error("its container has more rights than it needs")
		}
		for _, v := range c.VolumeMounts {
			if !volumes[v.Name] {
				t.Errorf("no volume %s", v.Name)
			}
		}
		for _, e := range c.Env {
			if e.ValueFrom == nil || e.ValueFrom.SecretKeyRef == nil {
				continue
			}
			// The one that caddy.yaml says how to create.
			if s := e.ValueFrom.SecretKeyRef; s.Name != "redis" || s.Key != "password" {
				t.Errorf("no key %s in a Secret %s", s.Key, s.Name)
			}
		}
		ports := make(map[string]bool)
		for _, p := range c.Ports {
			ports[p.Name] = true
		}
		if w.selector == nil {
			continue // A job ends by itself, and serves nothing.
		}
		if c.Resources.Limits.Memory().IsZero() {
			t.Error("its memory has no limit")
		}
		for _, p := range []*corev1.Probe{c.ReadinessProbe, c.LivenessProbe} {
			if p == nil || !ports[probed(p).StrVal] {
				t.Errorf("probe %+v asks no port of its own", p)
			}
		}
		for _, o := range objects {
			s, ok := o.(*corev1.Service)
			if !ok || !w.selectedBy(t, &metav1.LabelSelector{MatchLabels: s.Spec.Selector}) {
				continue
			}
			for _, p := range s.Spec.Ports {
				if !ports[p.TargetPort.StrVal] || p.TargetPort.StrVal == "metrics" {
					t.Errorf("Service %s leads to port %s", s.Name, p.TargetPort.StrVal)
				}
			}
		}
	}
}

func isTrue(b *bool) bool { return b != nil && *b }

// probed returns the port that a probe asks.
func probed(p *corev1.Probe) intstr.IntOrString {
	if p.HTTPGet != nil {
		return p.HTTPGet.Port
	}
	return p.TCPSocket.Port
}

// TestPodMonitor guards that a Prometheus of the operator finds the instances, by the port
// of their metrics.
func TestPodMonitor(t *testing.T) {
	caddy := workloads(readObjects(t, "caddy.yaml"))[0]
	monitor := find[*monitoringv1.PodMonitor](readObjects(t, "monitoring.yaml"), "caddy")
	if !caddy.selectedBy(t, &monitor.Spec.Selector) {
		t.Errorf("it selects %v, and the pods are %v", monitor.Spec.Selector, caddy.pods.Labels)
	}
	for _, e := range monitor.Spec.PodMetricsEndpoints {
		named := func(p corev1.ContainerPort) bool { return e.Port != nil && p.Name == *e.Port }
		if !slices.ContainsFunc(caddy.pods.Spec.Containers[0].Ports, named) {
			t.Errorf("Caddy's container has no port %+v", e)
		}
	}
}

// writeRules is the flag that writes the PrometheusRule instead of comparing it.
var writeRules = flag.Bool("rules", false, "write the alerts of alerts.yml to monitoring.yaml")

// TestPrometheusRule guards that the operator's alerts are those of alerts.yml, which
// are tested there. `go test -run PrometheusRule . -args -rules` copies them.
func TestPrometheusRule(t *testing.T) {
	const from, to = deploy + "/prometheus/alerts.yml", deploy + "/kubernetes/monitoring.yaml"
	_, groups, _ := strings.Cut(read(t, from), "\ngroups:\n")
	var rules strings.Builder
	for line := range strings.Lines(groups) {
		if line != "\n" {
			rules.WriteString("  ")
		}
		rules.WriteString(line)
	}
	before, after, ok := strings.Cut(read(t, to), "\n  groups:\n")
	if !ok {
		t.Fatal("monitoring.yaml has no groups of rules")
	}
	switch {
	case *writeRules:

		if err := os.WriteFile(to, []byte(before+"\n  groups:\n"+rules.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	case after != rules.String():
		t.Errorf("%s has other alerts than %s: run go test -run PrometheusRule . -args -rules", filepath.Base(to), filepath.Base(from))
	}
	rule := find[*monitoringv1.PrometheusRule](readObjects(t, "monitoring.yaml"), "caddy-rate-limit")
	severities := make(map[string]int)
	for _, r := range rule.Spec.Groups[0].Rules {
		severities[r.Labels["severity"]]++
	}
	if got := slices.Sorted(maps.Keys(severities)); !slices.Equal(got, []string{"critical", "info", "warning"}) {
		t.Errorf("alerts have severities %v", severities)
	}
}
