package limiter

import (
	"os"
	"testing"

	"github.com/redis/go-redis/v9/logging"
)

func TestMain(m *testing.M) {
	logging.Disable() // of each connection that can't be made
	os.Exit(m.Run())
}
