package ratelimit

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// TestRefusedAs guards which errors count as early data.
func TestRefusedAs(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]telemetry.Checked{
		rule.RefusalError{Status: http.StatusTooEarly, Err: key.ErrEarlyData}:    telemetry.CheckedEarlyData,
		rule.RefusalError{Status: http.StatusBadRequest, Err: errors.New("bad")}: telemetry.CheckedRefused,
		errors.New("of a matcher"): telemetry.CheckedRefused,
	} {
		if got := refusedAs(err); got != want {
			t.Errorf("%v is counted as %v, want %v", err, got, want)
		}
	}
}

// Guards that an error which is not the store's fault is a 500 and reported,
// whatever on_error says.
func TestUnexpectedStoreErrorIs500(t *testing.T) {
	t.Parallel()
	for _, policy := range []rule.OnError{rule.OnErrorFallback, rule.OnErrorAllow, rule.OnErrorDeny} {
		core, logs := observer.New(zap.DebugLevel)
		h := &Handler{settings: compile.Settings{OnError: policy}, logger: zap.New(core)}
		w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
		if h.admitsUndecided(storeError{errors.New("malformed")}) {
			t.Errorf("%s: admitted", policy)
		}
		err := h.handleStoreError(w, r, errors.New("malformed"))
		if err == nil || !strings.Contains(err.Error(), "HTTP 500") {
			t.Errorf("%s: got error %v, want a 500", policy, err)
		}
		if retry := w.Header().Get("Retry-After"); retry != "" {
			t.Errorf("%s: got Retry-After %s, though it is no help", policy, retry)
		}
		if logs.FilterLevelExact(zap.ErrorLevel).Len() != 1 {
			t.Errorf("%s: the log says %v", policy, logs.All())
		}
	}
}
