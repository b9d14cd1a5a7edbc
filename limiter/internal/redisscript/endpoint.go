package redisscript

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"
)

// A cluster may not know the host names by which clients reach its servers, or may
// be configured not to announce them (cluster-preferred-endpoint-type
// unknown-endpoint). Then its replies name no host, which means the host that was
// queried.

// endpoints is a hook for the client of a cluster server that fills in these
// hosts. The client itself cannot read a reply without them.
type endpoints struct {
	hook
	addr  string
	learn func([]redis.ClusterSlot) // called with each reply
}

func (e endpoints) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		slots, ok := cmd.(*redis.ClusterSlotsCmd)
		if !ok {
			return next(ctx, cmd)
		}
		raw := redis.NewCmd(ctx, slots.Args()...)
		err := next(ctx, raw)
		if err == nil {
			var val []redis.ClusterSlot
			if val, err = e.slots(raw.Val()); err == nil {
				e.learn(val)
				slots.SetVal(val)
				return nil
			}
		}
		slots.SetErr(err)
		return err
	}
}

// slots reads a reply to CLUSTER SLOTS.
func (e endpoints) slots(reply any) ([]redis.ClusterSlot, error) {
	ranges, ok := reply.([]any)
	if !ok {
		return nil, unreadable("no list", reply)
	}
	slots := make([]redis.ClusterSlot, len(ranges))
	for i, entry := range ranges {
		fields, _ := entry.([]any)
		if len(fields) < 2 {
			return nil, unreadable("no range of slots", entry)
		}
		first, ok := fields[0].(int64)
		last, ok2 := fields[1].(int64)
		if !ok || !ok2 {
			return nil, unreadable("no range of slots", entry)
		}
		slots[i].Start, slots[i].End = int(first), int(last)
		for _, field := range fields[2:] {
			node, _ := field.([]any)
			if len(node) < 2 {
				return nil, unreadable("no server", field)
			}
			host, _ := node[0].(string) // empty if it is null
			port, ok := node[1].(int64)
			if !ok {
				return nil, unreadable("no port", node[1])
			}
			addr := e.fill(net.JoinHostPort(host, fmt.Sprint(port)))
			id := addr // of very old servers
			if len(node) > 2 {
				id, _ = node[2].(string)
			}
			slots[i].Nodes = append(slots[i].Nodes, redis.ClusterNode{ID: id, Addr: addr})
		}
	}
	return slots, nil
}

// unreadable returns an error about a reply that lacks something.
func unreadable(what string, got any) error {
	return fmt.Errorf("reply to CLUSTER SLOTS: %s in a value of type %T", what, got)
}

// fill returns addr in Go's form, with the host of the server that was queried if it
// has none. Servers omit the brackets around an IPv6 host.
func (e endpoints) fill(addr string) string {
	i := strings.LastIndexByte(addr, ':')
	if i < 0 {
		return addr
	}
	host := strings.Trim(addr[:i], "[]")
	if host == "" {
		host, _, _ = net.SplitHostPort(e.addr)
	}
	return net.JoinHostPort(host, addr[i+1:])
}
