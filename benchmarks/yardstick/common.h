/* What both programs share: the clock, a histogram, sockets. */
#ifndef COMMON_H
#define COMMON_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static inline uint64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

/* A log-linear histogram of nanoseconds: 128 buckets for each power of two, an error below 0.8 %. */
#define HIST_SUB 128
#define HIST_BITS 7
#define HIST_N ((44 - HIST_BITS + 1) * HIST_SUB)
typedef struct {
  uint64_t n, sum, max, min;
  uint32_t b[HIST_N];
} hist;

static inline int hist_index(uint64_t v) {
  if (v < HIST_SUB) return (int)v;
  int sh = 63 - __builtin_clzll(v) - HIST_BITS;
  int i = (sh + 1) * HIST_SUB + (int)((v >> sh) - HIST_SUB);
  return i < HIST_N ? i : HIST_N - 1;
}
static inline uint64_t hist_value(int i) { /* the middle of a bucket */
  if (i < HIST_SUB) return (uint64_t)i;
  int sh = i / HIST_SUB - 1;
  uint64_t lo = ((uint64_t)(i % HIST_SUB) + HIST_SUB) << sh;
  return lo + ((1ull << sh) >> 1);
}
static inline void hist_add(hist *h, uint64_t v) {
  h->n++;
  h->sum += v;
  if (v > h->max) h->max = v;
  if (h->n == 1 || v < h->min) h->min = v;
  h->b[hist_index(v)]++;
}
static inline uint64_t hist_percentile(const hist *h, double p) {
  if (!h->n) return 0;
  uint64_t want = (uint64_t)(p / 100.0 * (double)h->n + 0.9999999);
  if (want < 1) want = 1;
  uint64_t c = 0;
  for (int i = 0; i < HIST_N; i++) {
    c += h->b[i];
    if (c >= want) {
      uint64_t v = hist_value(i);
      return v > h->max ? h->max : v;
    }
  }
  return h->max;
}
static inline void hist_json(FILE *f, const char *name, const hist *h) {
  fprintf(f,
          "\"%s\":{\"n\":%llu,\"mean_us\":%.1f,\"p50_us\":%.1f,\"p90_us\":%.1f,"
          "\"p99_us\":%.1f,\"p999_us\":%.1f,\"max_us\":%.1f}",
          name, (unsigned long long)h->n, h->n ? (double)h->sum / (double)h->n / 1e3 : 0.0,
          (double)hist_percentile(h, 50) / 1e3, (double)hist_percentile(h, 90) / 1e3,
          (double)hist_percentile(h, 99) / 1e3, (double)hist_percentile(h, 99.9) / 1e3, (double)h->max / 1e3);
}
static inline void set_nonblock(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL, 0) | O_NONBLOCK); }
static inline void set_nodelay(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}
static inline void raise_nofile(void) {
  struct rlimit rl;
  if (!getrlimit(RLIMIT_NOFILE, &rl)) {
    rl.rlim_cur = rl.rlim_max;
    setrlimit(RLIMIT_NOFILE, &rl);
  }
}
static inline void die(const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vfprintf(stderr, fmt, ap);
  va_end(ap);
  fputc('\n', stderr);
  exit(2);
}
#endif
