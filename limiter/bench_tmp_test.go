package limiter
import ("testing";"time";"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest";"fmt")
func TestTmpCost(t *testing.T){
	s:=redistest.Start(t)
	r:=newTestRedis(t,s,nil)
	for _,n:=range []int64{10,100,1000,10000}{
		b:=Bucket{Name:"l",Key:fmt.Sprint(n),Limit:SlidingLog(n,time.Hour),Cost:1}
		m := NewMemory(nil)
		for i:=range n { if i==n-200 || i==0 && n<200 { s.Client().ConfigResetStat(t.Context())}; decide(t,r,AccountingAtomic,b); decide(t,m,AccountingAtomic,b)}
		x,_:=s.Client().Info(t.Context(),"commandstats").Result()
		fmt.Println(n,x)
		start:=time.Now()
		for range 1000 {decide(t,m,AccountingAtomic,b)}
		fmt.Println("memory denied", time.Since(start)/1000)
	}
	l:=hourly(10000)
	s.Client().ConfigResetStat(t.Context())
	for range 200 {decide(t,r,AccountingAtomic,l)}
		x,_:=s.Client().Info(t.Context(),"commandstats").Result()
		fmt.Println("leaky",x)
}
