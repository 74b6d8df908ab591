/* Clients of an OpenAI endpoint: one thread, epoll, HTTP/1.1 keep-alive, 127.0.0.1 only, JSON on stdout.
 *
 *   llmload -u PORT [-p path] [-f body] [-H 'Name: value'] [-c connections | -r calls_per_s] [-m connections_max]
 *           [-w warmup_s] [-d window_s] [-n calls_max] [-R ramp_s] [-g grace_s] [-E events] [-1] [-b ms] [-A file]
 *
 * A closed loop (-c) or an open loop (-r), whose latencies count from the instant at which a call was due, so that
 * a stall is seen by all that it delays.  -E says how many events a stream must have, -1 that a connection makes one
 * call, -b that every call is left after so many milliseconds; -A keeps "<stream> <ns> <events>" of those left.  In
 * a body "@U" and 16 digits is a marker: every call has a number of its own there.
 */
#include "common.h"

#define HEAD_MAX 16384

typedef struct conn {
  int fd;
  enum { CLOSED, CONNECTING, IDLE, SENDING, IN_HEAD, IN_BODY } state;
  int out_armed, reused;
  size_t sent;
  uint64_t due_ns, first, last_ev, first_ev;
  int status, chunked, close, sse;
  long long length, got;
  enum { SIZE, DATA, DATA_END, TRAILER } part;
  size_t part_left;
  int part_extra; /* reading chunks: part, bytes left, extension or length of a trailer */
  char *line;
  size_t line_len, line_cap; /* the beginning of an SSE line */
  int events, seq, seqbad, done;
  uint32_t stream;
  int stream_known;
  char *head;
  int head_len; /* the head so far */
  char *own;    /* the request, where each is to differ */
  int abort_armed;
  int index;
} conn;

static struct sockaddr_in addr;
static char *request;
static size_t request_len;
static size_t *markers, markers_n;
static uint64_t unique;
static int poller, connections = 1, connections_max = 8192, events_expected = -1, once = 0;
static double rate_per_s = 0, window_s = 5, warmup_s = 0, ramp_s = 0, abort_ms = 0, grace_s = 10;
static long long calls_max = -1;
static FILE *aborts_file;
static conn *conns;
static int conns_n;
static int *idle;
static int idle_n;
static uint64_t *backlog;
static size_t backlog_head, backlog_tail, backlog_cap;
static uint64_t started_ns, window_ns, end_ns; /* the start, the end of the warm-up, the end of the window */
static hist first_byte, first_event, latency, gap, transit, refusal, first_transit;
static uint64_t n_done, n_ok, n_events, n_bytes, n_incomplete, n_seqbad, n_conn_err, n_io_err, n_eof, n_retry,
    n_started, n_aborted, n_too_short;
static uint64_t by_status[1000];
static int inflight, peak_inflight;
static volatile sig_atomic_t stopping;
static void on_signal(int s) {
  (void)s;
  stopping = 1;
}

/* Connections that begin later, in a closed loop: a binary heap on the instant. */
typedef struct {
  uint64_t t;
  int i;
} later;
static later *delayed;
static int delayed_n, delayed_cap;
static void delay(uint64_t t, int i) {
  if (delayed_n == delayed_cap)
    delayed =
        realloc(delayed, sizeof *delayed * (size_t)(delayed_cap = delayed_cap ? delayed_cap * 2 : 1024));
  int k = delayed_n++;
  delayed[k] = (later){t, i};
  while (k && delayed[(k - 1) / 2].t > delayed[k].t) {
    later x = delayed[k];
    delayed[k] = delayed[(k - 1) / 2];
    delayed[(k - 1) / 2] = x;
    k = (k - 1) / 2;
  }
}
static later next_delayed(void) {
  later r = delayed[0];
  delayed[0] = delayed[--delayed_n];
  int k = 0;
  for (;;) {
    int l = 2 * k + 1, m = k;
    if (l < delayed_n && delayed[l].t < delayed[m].t) m = l;
    if (l + 1 < delayed_n && delayed[l + 1].t < delayed[m].t) m = l + 1;
    if (m == k) break;
    later x = delayed[k];
    delayed[k] = delayed[m];
    delayed[m] = x;
    k = m;
  }
  return r;
}
/* Calls that are to be left: the delay is the same for all, so first in, first out. */
typedef struct {
  uint64_t t;
  int i;
  uint64_t tag;
} leaving;
static leaving *leavers;
static size_t leavers_head, leavers_tail, leavers_cap;

static void begin(conn *c, uint64_t due_ns);
static void next_closed(conn *c);
static inline int in_win(uint64_t t) { return t >= window_ns && t < end_ns; }

static void arm(conn *c, int out) {
  if (c->out_armed == out) return;
  c->out_armed = out;
  struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (out ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}
static void shut(conn *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
  c->state = CLOSED;
  c->out_armed = 0;
  c->reused = 0;
}
/* The call is over, its connection idle or closed. */
static void release(conn *c) {
  inflight--;
  if (c->abort_armed) c->abort_armed = 0;
  if (rate_per_s > 0) {
    if (backlog_head != backlog_tail && !once) {
      uint64_t s = backlog[backlog_head++ % backlog_cap];
      begin(c, s);
      return;
    }
    if (c->fd >= 0) c->state = IDLE;
    idle[idle_n++] = c->index;
  } else {
    if (c->fd >= 0) c->state = IDLE;
    next_closed(c);
  }
}
static void finish(conn *c, int ok_framing) {
  uint64_t t = now_ns();
  /* An open loop's call counts when it was due, a closed loop's when it ended. */
  if (in_win(rate_per_s > 0 ? c->due_ns : t)) {
    n_done++;
    if (c->status > 0 && c->status < 1000) by_status[c->status]++;
    if (c->status == 200) {
      int bad = 0;
      if (c->sse && !c->done) {
        n_incomplete++;
        bad = 1;
      }
      if (c->sse && events_expected >= 0 && c->seq != events_expected) {
        n_too_short++;
        bad = 1;
      }
      if (c->seqbad) {
        n_seqbad++;
        bad = 1;
      }
      if (!ok_framing) {
        n_eof++;
        bad = 1;
      }
      if (!bad) n_ok++;
      hist_add(&latency, t - c->due_ns);
    } else
      hist_add(&refusal, t - c->due_ns);
  }
  if (c->close) shut(c);
  release(c);
}
static void fail(conn *c, uint64_t *counter) {
  int state = c->state;
  shut(c);
  if (state < SENDING) return;
  if (in_win(rate_per_s > 0 ? c->due_ns : now_ns())) {
    (*counter)++;
    n_done++;
  }
  release(c);
}
static void do_abort(conn *c, uint64_t t) {
  if (aborts_file && c->stream_known)
    fprintf(aborts_file, "%08x %llu %d\n", c->stream, (unsigned long long)t, c->seq);
  else if (aborts_file)
    fprintf(aborts_file, "ffffffff %llu 0\n", (unsigned long long)t);
  n_aborted++;
  shut(c);
  inflight--;
}
static void event_line(conn *c, const char *p, size_t n, uint64_t t) {
  if (n && p[n - 1] == '\r') n--;
  if (n < 6 || memcmp(p, "data:", 5)) return;
  p += 5;
  n -= 5;
  while (n && *p == ' ') {
    p++;
    n--;
  }
  if (n >= 6 && !memcmp(p, "[DONE]", 6)) {
    c->done = 1;
    return;
  }
  int w = in_win(t);
  c->events++;
  if (w) n_events++;
  const char *m = memmem(p, n, "@T", 2);
  if (!m || (size_t)(p + n - m) < 34) return;
  uint64_t ts = 0;
  for (int i = 2; i < 18; i++) {
    int d = m[i];
    ts = ts << 4 | (uint64_t)(d <= '9' ? d - '0' : (d | 32) - 'a' + 10);
  }
  if (!c->stream_known) {
    c->stream =
        (uint32_t)strtoul((char[9]){m[19], m[20], m[21], m[22], m[23], m[24], m[25], m[26], 0}, NULL, 16);
    c->stream_known = 1;
  }
  int seq = 0;
  for (int i = 28; i < 34; i++) seq = seq * 10 + (m[i] - '0');
  if (seq != c->seq) c->seqbad = 1;
  c->seq = seq + 1;
  if (!c->first_ev) {
    c->first_ev = t;
    if (in_win(rate_per_s > 0 ? c->due_ns : t)) {
      hist_add(&first_event, t - c->due_ns);
      hist_add(&first_transit, t > ts ? t - ts : 0);
    }
  } else if (w)
    hist_add(&gap, t - c->last_ev);
  c->last_ev = t;
  if (w) {
    hist_add(&transit, t > ts ? t - ts : 0);
  }
}
static void sse_feed(conn *c, const char *p, size_t n, uint64_t t) {
  while (n) {
    const char *nl = memchr(p, '\n', n);
    if (!nl) {
      if (c->line_len + n > c->line_cap) c->line = realloc(c->line, c->line_cap = (c->line_len + n) * 2);
      memcpy(c->line + c->line_len, p, n);
      c->line_len += n;
      return;
    }
    size_t k = (size_t)(nl - p);
    if (c->line_len) {
      if (c->line_len + k > c->line_cap) c->line = realloc(c->line, c->line_cap = (c->line_len + k) * 2);
      memcpy(c->line + c->line_len, p, k);
      event_line(c, c->line, c->line_len + k, t);
      c->line_len = 0;
    } else
      event_line(c, p, k, t);
    p = nl + 1;
    n -= k + 1;
  }
}
static void body_bytes(conn *c, const char *p, size_t n, uint64_t t) {
  c->got += (long long)n;
  if (c->sse) sse_feed(c, p, n, t);
}
/* 1: the message is whole; 0: there is more; -1: it is broken. */
static int body_feed(conn *c, const char *p, size_t n, uint64_t t) {
  if (!c->chunked) {
    if (c->length >= 0 && (long long)n > c->length - c->got) n = (size_t)(c->length - c->got);
    body_bytes(c, p, n, t);
    return c->length >= 0 && c->got >= c->length;
  }
  while (n) {
    switch (c->part) {
      case SIZE: {
        char ch = *p++;
        n--;
        if (ch == '\n') {
          if (c->part_left == 0) {
            c->part = TRAILER;
            c->part_extra = 0;
          } else
            c->part = DATA;
        } else if (ch == ';')
          c->part_extra = 1;
        else if (!c->part_extra && isxdigit((unsigned char)ch))
          c->part_left = c->part_left * 16 + (size_t)(ch <= '9' ? ch - '0' : (ch | 32) - 'a' + 10);
        break;
      }
      case DATA: {
        size_t k = n < c->part_left ? n : c->part_left;
        body_bytes(c, p, k, t);
        p += k;
        n -= k;
        c->part_left -= k;
        if (!c->part_left) c->part = DATA_END;
        break;
      }
      case DATA_END: {
        char ch = *p++;
        n--;
        if (ch == '\n') {
          c->part = SIZE;
          c->part_left = 0;
          c->part_extra = 0;
        } else if (ch != '\r')
          return -1;
        break;
      }
      case TRAILER: {
        char ch = *p++;
        n--;
        if (ch == '\n') {
          if (c->part_extra == 0) return 1;
          c->part_extra = 0;
        } else if (ch != '\r')
          c->part_extra++;
        break;
      }
    }
  }
  return 0;
}
/* A kept connection that was closed meanwhile: the same call on a new one. */
static void again(conn *c) {
  n_retry++;
  shut(c);
  inflight--;
  begin(c, c->due_ns);
}
static void pump_send(conn *c) {
  while (c->sent < request_len) {
    ssize_t w = send(c->fd, (c->own ? c->own : request) + c->sent, request_len - c->sent, MSG_NOSIGNAL);
    if (w > 0) {
      c->sent += (size_t)w;
      continue;
    }
    if (w < 0 && errno == EINTR) continue;
    if (w < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      arm(c, 1);
      return;
    }
    if (c->reused && !c->first) {
      again(c);
      return;
    }
    if (errno == EPIPE || errno == ECONNRESET) { /* an answer may have come before it had read the request */
      arm(c, 0);
      c->sent = request_len;
      c->state = IN_HEAD;
      return;
    }
    fail(c, &n_io_err);
    return;
  }
  if (c->out_armed) arm(c, 0);
  c->state = IN_HEAD;
}
static void leave_later(conn *c) {
  if (leavers_tail - leavers_head == leavers_cap) {
    size_t cap = leavers_cap ? leavers_cap * 2 : 4096;
    leaving *grown = malloc(cap * sizeof *grown);
    for (size_t i = leavers_head; i < leavers_tail; i++) grown[i - leavers_head] = leavers[i % leavers_cap];
    leavers_tail -= leavers_head;
    leavers_head = 0;
    free(leavers);
    leavers = grown;
    leavers_cap = cap;
  }
  uint64_t at = now_ns() + (uint64_t)(abort_ms * 1e6);
  leavers[leavers_tail++ % leavers_cap] = (leaving){at, c->index, n_started};
  c->abort_armed = (int)n_started;
}
/* Whether the request can be sent now; without a connection the call has failed. */
static int connected(conn *c) {
  c->reused = c->fd >= 0;
  c->state = SENDING;
  if (c->reused) return 1;
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  int r = c->fd < 0 ? -1 : connect(c->fd, (void *)&addr, sizeof addr);
  if (c->fd < 0 || (r < 0 && errno != EINPROGRESS)) {
    fail(c, &n_conn_err);
    return 0;
  }
  set_nodelay(c->fd);
  c->out_armed = r < 0;
  if (r < 0) c->state = CONNECTING;
  struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (r < 0 ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
  return r == 0;
}
/* Writes a number that no other call has into every marker of the request. */
static void make_unique(conn *c) {
  if (!c->own) {
    c->own = malloc(request_len);
    memcpy(c->own, request, request_len);
  }
  unique++;
  char digits[17];
  snprintf(digits, sizeof digits, "%016llx", (unsigned long long)unique);
  for (size_t i = 0; i < markers_n; i++) memcpy(c->own + markers[i], digits, 16);
}
static void begin(conn *c, uint64_t due_ns) {
  if (markers_n) make_unique(c);
  inflight++;
  if (inflight > peak_inflight) peak_inflight = inflight;
  n_started++;
  c->due_ns = due_ns;
  c->sent = 0;
  c->first = c->last_ev = c->first_ev = 0;
  c->status = 0;
  c->chunked = c->close = c->sse = 0;
  c->length = -1;
  c->got = 0;
  c->part = SIZE;
  c->part_left = 0;
  c->part_extra = 0;
  c->line_len = 0;
  c->events = c->seq = c->seqbad = c->done = 0;
  c->head_len = 0;
  c->stream_known = 0;
  if (abort_ms > 0) leave_later(c);
  if (connected(c)) pump_send(c);
}
static int may_start(void) {
  return !stopping && (calls_max < 0 || (long long)n_started < calls_max) && now_ns() < end_ns;
}
static void next_closed(conn *c) {
  if (once || !may_start()) return;
  uint64_t pause_ns = c->fd < 0 && !c->status ? 1000000 : 0; /* 1 ms after a connection that failed */
  delay(now_ns() + pause_ns, c->index); /* by the loop: a call that began here would nest */
}
static void on_end(conn *c, int broken) {
  if (c->state <= IDLE) {
    shut(c);
  } else if (c->state == IN_BODY) {
    int until_closed = !c->chunked && c->length < 0 && !broken;
    c->close = 1;
    if (broken && in_win(now_ns())) n_io_err++;
    finish(c, until_closed);
  } else if (!c->first && c->reused) {
    again(c);
  } else {
    fail(c, &n_io_err);
  }
}
static int says(const char *header, const char *name, const char *value) {
  size_t n = strlen(name);
  if (strncasecmp(header, name, n)) return 0;
  header += n;
  while (*header == ' ') header++;
  return !strncasecmp(header, value, strlen(value));
}
static void read_headers(conn *c) {
  for (char *l = c->head; (l = strstr(l, "\r\n")); l += 2) {
    const char *header = l + 2;
    if (!strncasecmp(header, "content-length:", 15)) c->length = atoll(header + 15);
    if (says(header, "transfer-encoding:", "chunked")) c->chunked = 1;
    if (says(header, "connection:", "close")) c->close = 1;
    if (says(header, "content-type:", "text/event-stream")) c->sse = 1;
  }
  if (c->chunked) c->length = -1;
}
/* The bytes of `p` that belong to the head; -1 where it is too long.  It is whole once the state is IN_BODY. */
static ssize_t head_feed(conn *c, const char *p, size_t n) {
  if (!c->head) c->head = malloc(HEAD_MAX);
  size_t old = (size_t)c->head_len, room = HEAD_MAX - old, taken = n < room ? n : room;
  memcpy(c->head + old, p, taken);
  c->head_len += (int)taken;
  char *end = memmem(c->head, (size_t)c->head_len, "\r\n\r\n", 4);
  if (!end) return c->head_len < HEAD_MAX ? (ssize_t)n : -1;
  size_t head_len = (size_t)(end - c->head) + 4;
  c->head[head_len - 1] = 0;
  c->status = atoi(c->head + 9);
  if (c->status >= 200) {
    read_headers(c);
    c->state = IN_BODY;
  } else {
    c->head_len = 0;
  }
  return (ssize_t)(head_len - old);
}
static void take(conn *c, const char *p, size_t n, uint64_t t) {
  if (!c->first) c->first = t;
  if (c->state == SENDING) { /* answered before all was sent */
    c->state = IN_HEAD;
    c->close = 1;
  }
  while (c->state == IN_HEAD && n) {
    ssize_t used = head_feed(c, p, n);
    if (used < 0) {
      fail(c, &n_io_err);
      return;
    }
    p += used;
    n -= (size_t)used;
    if (c->state == IN_BODY && c->status == 200 && in_win(rate_per_s > 0 ? c->due_ns : t))
      hist_add(&first_byte, c->first - c->due_ns);
  }
  if (c->state != IN_BODY) return;
  int whole = n ? body_feed(c, p, n, t) : c->length == 0;
  if (whole < 0)
    fail(c, &n_io_err);
  else if (whole)
    finish(c, 1);
}
static void on_read(conn *c) {
  static char chunk[1 << 18];
  while (c->fd >= 0) {
    ssize_t r = recv(c->fd, chunk, sizeof chunk, 0);
    if (r < 0 && errno == EINTR) continue;
    if (r < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (r <= 0) {
      on_end(c, r < 0);
      return;
    }
    uint64_t t = now_ns();
    if (in_win(t)) n_bytes += (uint64_t)r;
    if (c->state <= IDLE) return;
    take(c, chunk, (size_t)r, t);
    if ((size_t)r < sizeof chunk) return;
  }
}
static char *slurp(const char *f, size_t *n) {
  FILE *fp = fopen(f, "rb");
  if (!fp) die("open %s: %s", f, strerror(errno));
  fseek(fp, 0, SEEK_END);
  long s = ftell(fp);
  rewind(fp);
  char *b = malloc((size_t)s + 1);
  *n = fread(b, 1, (size_t)s, fp);
  fclose(fp);
  return b;
}
static void start_open(uint64_t due_ns) {
  if (idle_n) {
    conn *c = &conns[idle[--idle_n]];
    begin(c, due_ns);
    return;
  }
  if (conns_n < connections_max) {
    conn *c = &conns[conns_n];
    c->index = conns_n++;
    c->fd = -1;
    begin(c, due_ns);
    return;
  }
  if (backlog_tail - backlog_head == backlog_cap) {
    size_t nc = backlog_cap ? backlog_cap * 2 : 4096;
    uint64_t *q = malloc(nc * 8);
    for (size_t i = backlog_head; i < backlog_tail; i++) q[i - backlog_head] = backlog[i % backlog_cap];
    backlog_tail -= backlog_head;
    backlog_head = 0;
    free(backlog);
    backlog = q;
    backlog_cap = nc;
  }
  backlog[backlog_tail++ % backlog_cap] = due_ns;
}
static const char *url, *path = "/v1/chat/completions", *body_name, *aborts_name;
static char headers[8192];

static void read_options(int argc, char **argv) {
  size_t used = 0;
  int option;
  while ((option = getopt(argc, argv, "u:p:f:c:r:d:n:w:H:A:b:R:E:m:g:1")) != -1) switch (option) {
      case 'u':
        url = optarg;
        break;
      case 'p':
        path = optarg;
        break;
      case 'f':
        body_name = optarg;
        break;
      case 'c':
        connections = atoi(optarg);
        break;
      case 'r':
        rate_per_s = atof(optarg);
        break;
      case 'd':
        window_s = atof(optarg);
        break;
      case 'n':
        calls_max = atoll(optarg);
        break;
      case 'w':
        warmup_s = atof(optarg);
        break;
      case 'H':
        used += (size_t)snprintf(headers + used, sizeof headers - used, "%s\r\n", optarg);
        if (used >= sizeof headers) die("too many headers");
        break;
      case 'A':
        aborts_name = optarg;
        break;
      case 'b':
        abort_ms = atof(optarg);
        break;
      case 'R':
        ramp_s = atof(optarg);
        break;
      case 'E':
        events_expected = atoi(optarg);
        break;
      case 'm':
        connections_max = atoi(optarg);
        break;
      case 'g':
        grace_s = atof(optarg);
        break;
      case '1':
        once = 1;
        break;
      default:
        die("the comment at the top of llmload.c has the options");
    }
  if (!url) die("-u PORT is needed");
}
static void build_request(void) {
  size_t body_len = 0;
  char *body = body_name ? slurp(body_name, &body_len) : NULL;
  int port = atoi(url);
  addr = (struct sockaddr_in){
      .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  request = malloc(body_len + 16384);
  int n = snprintf(request, 16384,
                   "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: llmload\r\naccept: "
                   "*/*\r\n%scontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                   path, port, headers, body_len);
  if (n < 0 || n >= 16384) die("the head is too long");
  if (body) memcpy(request + n, body, body_len);
  request_len = (size_t)n + body_len;
  free(body);
}
static void find_markers(void) {
  unique = now_ns(); /* no number of an earlier run comes again */
  for (char *p = request; (p = memmem(p, request_len - (size_t)(p - request), "@U", 2)); p += 18) {
    if ((size_t)(p - request) + 18 > request_len) return;
    markers = realloc(markers, (markers_n + 1) * sizeof *markers);
    markers[markers_n++] = (size_t)(p - request) + 2;
  }
}
static uint64_t open_due;
static long long open_started;
static int open_has_more(uint64_t now) {
  return rate_per_s > 0 && now < end_ns && (calls_max < 0 || open_started < calls_max);
}
/* Starts what is due; when the next call is, at the latest at `wake`. */
static uint64_t start_due(uint64_t now, uint64_t wake) {
  while (open_has_more(now) && open_due <= now) {
    start_open(open_due);
    open_started++;
    open_due += (uint64_t)(1e9 / rate_per_s);
  }
  if (open_has_more(now) && open_due < wake) wake = open_due;
  for (int i = 0; delayed_n && delayed[0].t <= now && i < 512; i++) {
    conn *c = &conns[next_delayed().i];
    if (may_start()) begin(c, now_ns());
  }
  return delayed_n && delayed[0].t < wake ? delayed[0].t : wake;
}
static uint64_t leave_due(uint64_t now, uint64_t wake) {
  while (leavers_head != leavers_tail && leavers[leavers_head % leavers_cap].t <= now) {
    leaving l = leavers[leavers_head++ % leavers_cap];
    conn *c = &conns[l.i];
    if (c->abort_armed == (int)l.tag && c->state >= CONNECTING && c->fd >= 0) do_abort(c, now_ns());
  }
  if (leavers_head == leavers_tail) return wake;
  uint64_t next = leavers[leavers_head % leavers_cap].t;
  return next < wake ? next : wake;
}
static int over(uint64_t now) {
  int drain = rate_per_s > 0 || calls_max >= 0 || once;
  if (now >= end_ns && !drain) return 1;
  if (now < end_ns && !once && (calls_max < 0 || (long long)n_started < calls_max)) return 0;
  int more = rate_per_s > 0 ? open_has_more(now) || backlog_head != backlog_tail : delayed_n > 0;
  return !more && inflight == 0;
}
static void on_event(conn *c, uint32_t events) {
  if (c->fd < 0) return;
  if (c->state == CONNECTING && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) {
    int error = 0;
    socklen_t len = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len);
    c->state = SENDING;
    if (error) {
      fail(c, &n_conn_err);
      return;
    }
    pump_send(c);
  } else if (c->state == SENDING && (events & EPOLLOUT))
    pump_send(c);
  if (c->fd >= 0 && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))) on_read(c);
}
/* The instant of its end. */
static uint64_t run(void) {
  static struct epoll_event events[1024];
  const uint64_t hard_end = end_ns + (uint64_t)(grace_s * 1e9);
  for (;;) {
    uint64_t now = now_ns();
    if (stopping || now > hard_end) return now;
    uint64_t wake = leave_due(now, start_due(now, now + 200000000ull));
    if (over(now)) return now;
    now = now_ns();
    struct timespec timeout = {0, wake > now ? (long)(wake - now) : 0};
    int n = epoll_pwait2(poller, events, 1024, &timeout, NULL);
    for (int i = 0; i < n; i++) on_event(events[i].data.ptr, events[i].events);
  }
}
static double cpu_s(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}
static void put_count(const char *name, uint64_t n) { printf("\"%s\":%llu,", name, (unsigned long long)n); }
static void report(uint64_t ended) {
  double seconds = ended < end_ns ? (double)(ended - window_ns) / 1e9 : window_s;
  if (ended <= window_ns || seconds <= 0) seconds = 1e-9;
  printf("{\"window_s\":%.3f,\"rps\":%.1f,\"ok_rps\":%.1f,\"events_s\":%.1f,\"mb_s\":%.2f,\"cpu_s\":%.3f,",
         seconds, (double)n_done / seconds, (double)n_ok / seconds, (double)n_events / seconds,
         (double)n_bytes / seconds / 1e6, cpu_s());
  put_count("completed", n_done);
  put_count("ok", n_ok);
  put_count("events", n_events);
  put_count("errors", n_conn_err + n_io_err + n_eof + n_incomplete + n_too_short + n_seqbad);
  put_count("conn_err", n_conn_err);
  put_count("io_err", n_io_err);
  put_count("truncated", n_eof);
  put_count("no_done", n_incomplete);
  put_count("short", n_too_short);
  put_count("seq_bad", n_seqbad);
  put_count("retries", n_retry);
  put_count("aborted", n_aborted);
  put_count("unfinished", (uint64_t)inflight + backlog_tail - backlog_head);
  put_count("peak_inflight", (uint64_t)peak_inflight);
  printf("\"status\":{");
  const char *comma = "";
  for (int i = 0; i < 1000; i++)
    if (by_status[i]) {
      printf("%s\"%d\":%llu", comma, i, (unsigned long long)by_status[i]);
      comma = ",";
    }
  struct {
    const char *name;
    const hist *h;
  } all[] = {{"ttfb", &first_byte}, {"ttft", &first_event}, {"latency", &latency},
             {"gap", &gap},         {"transit", &transit},  {"first_transit", &first_transit},
             {"non200", &refusal}};
  comma = "},";
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    printf("%s", comma);
    hist_json(stdout, all[i].name, all[i].h);
    comma = ",";
  }
  printf("}\n");
}
int main(int argc, char **argv) {
  read_options(argc, argv);
  build_request();
  find_markers();
  raise_nofile();
  signal(SIGPIPE, SIG_IGN);
  signal(SIGINT, on_signal);
  signal(SIGTERM, on_signal);
  if (aborts_name && !(aborts_file = fopen(aborts_name, "w"))) die("%s: %s", aborts_name, strerror(errno));
  poller = epoll_create1(0);
  size_t places = (size_t)(rate_per_s > 0 ? connections_max : connections);
  conns = calloc(places, sizeof *conns);
  idle = malloc(sizeof *idle * (places + 1));
  started_ns = open_due = now_ns();
  window_ns = started_ns + (uint64_t)(warmup_s * 1e9);
  end_ns = window_ns + (uint64_t)(window_s * 1e9);
  if (rate_per_s <= 0) {
    conns_n = connections;
    for (int i = 0; i < connections; i++) {
      conns[i].index = i;
      conns[i].fd = -1;
      delay(started_ns + (uint64_t)(ramp_s * 1e9 * i / connections), i);
    }
  }
  report(run());
  if (aborts_file) fclose(aborts_file);
  return 0;
}
