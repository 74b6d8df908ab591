/* A backend that speaks like vLLM's OpenAI server and costs next to nothing: what a proxy is measured in front of.
 *
 *   mockvllm -p PORT [-n tokens] [-i interval_ms] [-t ttft_ms] [-b bytes_per_event] [-k events_per_write]
 *            [-m MODEL] [-L life_s]
 *
 * One thread, epoll, 127.0.0.1 only; it ends by itself after `life_s` (3,600).  Every event carries
 * "@T<16 hex: ns of CLOCK_MONOTONIC>#<8 hex: stream>.<6 digits: number>" in its text, so that the load generator on
 * the same machine can tell how long it was on its way, also through a proxy that writes the JSON anew.
 *
 * GET /set?tokens=50&interval=100&ttft=0&bytes=256&burst=1 changes the knobs while it runs; /stats has the counters,
 * /aborts a line "<stream> <ns> <streamed> <events>" for each answer whose reader left, /reset forgets both.
 */
#include "common.h"

typedef struct conn {
  int fd, want_out, dead;
  char *in;
  size_t in_len, in_cap;
  enum { IN_HEAD, IN_BODY, IN_CHUNKS, ANSWERING } reading;
  size_t head_len, request_len; /* bytes of the head, of the whole request */
  size_t chunk_at;              /* chunked: where the next chunk begins */
  size_t body_len;              /* chunked: decoded bytes, which are moved to right behind the head */
  int keepalive, stream, chat, usage, metered;
  char *out;
  size_t out_len, out_sent, out_cap;
  enum { NOTHING, WHOLE_LATER, STREAMING, FLUSHING } answer;
  int events_left, seq, tokens_n;
  uint32_t id;
  uint64_t due;
  int heap_index; /* index in heap or -1 */
  int in_ready;   /* on the as-fast-as-possible list */
  size_t prompt_bytes;
  struct conn *next_dead;
} conn;

static int knob_tokens = 16, knob_burst = 1, knob_event_bytes = 256;
static double knob_interval_ms = 0, knob_ttft_ms = 0;
static const char *model = "mock-model";
static int poller;
static volatile sig_atomic_t stopping;

static struct {
  uint64_t conns, open, requests, streams, completed, aborted, events, bytes_in, active, peak, gets, bad;
} stats;
static hist late;
typedef struct {
  uint32_t id;
  uint64_t ns;
  int stream, seq;
} abort_seen;
static abort_seen *aborts;
static size_t aborts_n, aborts_cap;
static uint32_t next_id = 1;

/* Timers: a binary heap on the instant at which a connection's next event is due. */
static conn **heap;
static int heap_n, heap_cap;
static void heap_swap(int a, int b) {
  conn *t = heap[a];
  heap[a] = heap[b];
  heap[b] = t;
  heap[a]->heap_index = a;
  heap[b]->heap_index = b;
}
static void heap_up(int i) {
  while (i && heap[(i - 1) / 2]->due > heap[i]->due) {
    heap_swap(i, (i - 1) / 2);
    i = (i - 1) / 2;
  }
}
static void heap_down(int i) {
  for (;;) {
    int l = 2 * i + 1, m = i;
    if (l < heap_n && heap[l]->due < heap[m]->due) m = l;
    if (l + 1 < heap_n && heap[l + 1]->due < heap[m]->due) m = l + 1;
    if (m == i) return;
    heap_swap(i, m);
    i = m;
  }
}
static void set_timer(conn *c, uint64_t due) {
  if (heap_n == heap_cap)
    heap = realloc(heap, sizeof *heap * (size_t)(heap_cap = heap_cap ? heap_cap * 2 : 1024));
  c->due = due;
  c->heap_index = heap_n;
  heap[heap_n++] = c;
  heap_up(c->heap_index);
}
static void clear_timer(conn *c) {
  int i = c->heap_index;
  if (i < 0) return;
  heap_n--;
  if (i != heap_n) {
    heap[i] = heap[heap_n];
    heap[i]->heap_index = i;
    heap_down(i);
    heap_up(heap[i]->heap_index);
  }
  c->heap_index = -1;
}
/* Streams without an interval: each gets one write a round. */
static conn **ready;
static size_t ready_n, ready_cap;
static void ready_add(conn *c) {
  if (c->in_ready) return;
  if (ready_n == ready_cap)
    ready = realloc(ready, sizeof *ready * (ready_cap = ready_cap ? ready_cap * 2 : 1024));
  c->in_ready = 1;
  ready[ready_n++] = c;
}

static conn *graveyard;
static void end_answer(conn *c);

static void close_conn(conn *c) {
  if (c->dead) return;
  if (c->answer) {
    stats.active--;
    if (c->answer == WHOLE_LATER || c->answer == STREAMING || c->out_sent < c->out_len) {
      stats.aborted++;
      if (aborts_n == aborts_cap)
        aborts = realloc(aborts, sizeof *aborts * (aborts_cap = aborts_cap ? aborts_cap * 2 : 4096));
      aborts[aborts_n++] = (abort_seen){c->id, now_ns(), c->stream, c->seq};
    }
  }
  clear_timer(c);
  close(c->fd);
  stats.open--;
  c->dead = 1;
  c->next_dead = graveyard;
  graveyard = c;
}
static void bury(void) {
  if (!graveyard) return;
  size_t k = 0;
  for (size_t i = 0; i < ready_n; i++)
    if (!ready[i]->dead) ready[k++] = ready[i];
  ready_n = k;
  while (graveyard) {
    conn *c = graveyard;
    graveyard = c->next_dead;
    free(c->in);
    free(c->out);
    free(c);
  }
}
static void out_room(conn *c, size_t n) {
  if (c->out_sent == c->out_len) c->out_sent = c->out_len = 0;
  if (c->out_len + n > c->out_cap) {
    c->out_cap = (c->out_len + n) * 2;
    if (c->out_cap < 1024) c->out_cap = 1024;
    c->out = realloc(c->out, c->out_cap);
  }
}
static void out_put(conn *c, const char *p, size_t n) {
  out_room(c, n);
  memcpy(c->out + c->out_len, p, n);
  c->out_len += n;
}
static void want_write(conn *c, int on) {
  if (c->want_out == on) return;
  c->want_out = on;
  struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (on ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}
/* 0: all is sent; 1: the reader is slow; -1: closed. */
static int flush(conn *c) {
  while (c->out_sent < c->out_len) {
    ssize_t w = send(c->fd, c->out + c->out_sent, c->out_len - c->out_sent, MSG_NOSIGNAL);
    if (w > 0) {
      c->out_sent += (size_t)w;
      continue;
    }
    if (w < 0 && errno == EINTR) continue;
    if (w < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      want_write(c, 1);
      return 1;
    }
    close_conn(c);
    return -1;
  }
  c->out_sent = c->out_len = 0;
  want_write(c, 0);
  return 0;
}

/* Events are copied from a template and stamped in place: by kind, 0 completion and 1 chat. */
static char *template[2];
static size_t template_len[2], body_at[2], stamp_at[2];
static void build_template(int chat) {
  char pre[512];
  if (chat)
    snprintf(pre, sizeof pre,
             "data: "
             "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,"
             "\"model\":\"%s\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"",
             model);
  else
    snprintf(pre, sizeof pre,
             "data: "
             "{\"id\":\"cmpl-mock\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"%s\","
             "\"choices\":[{\"index\":0,\"text\":\"",
             model);
  const char *suf = chat ? "\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n"
                         : "\",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
  size_t core = strlen(pre) + 2 + 16 + 1 + 8 + 1 + 6 + strlen(suf);
  size_t pad = (size_t)knob_event_bytes > core ? (size_t)knob_event_bytes - core : 0, n = core + pad;
  char *b = malloc(n + 64);
  int h = sprintf(b, "%zx\r\n", n);
  size_t o = (size_t)h;
  body_at[chat] = o;
  memcpy(b + o, pre, strlen(pre));
  o += strlen(pre);
  memcpy(b + o, "@T", 2);
  o += 2;
  stamp_at[chat] = o;
  memcpy(b + o, "0000000000000000#00000000.000000", 32);
  o += 32;
  memset(b + o, 'x', pad);
  o += pad;
  memcpy(b + o, suf, strlen(suf));
  o += strlen(suf);
  memcpy(b + o, "\r\n", 2);
  o += 2;
  free(template[chat]);
  template[chat] = b;
  template_len[chat] = o;
}
static const char HEX_DIGITS[] = "0123456789abcdef";
static inline void put_hex(char *p, uint64_t v, int n) {
  for (int i = n - 1; i >= 0; i--) {
    p[i] = HEX_DIGITS[v & 15];
    v >>= 4;
  }
}
/* The template with what has been written so far behind it, as `continuous_usage_stats` asks; where its stamp goes. */
static char *put_metered(conn *c, char *p) {
  int k = c->chat, written = c->seq + 1;
  size_t prompt = c->prompt_bytes / 4, core = template_len[k] - body_at[k] - strlen("}\n\n\r\n");
  char u[160];
  size_t n = (size_t)snprintf(
      u, sizeof u, ",\"usage\":{\"prompt_tokens\":%zu,\"total_tokens\":%zu,\"completion_tokens\":%d}}\n\n",
      prompt, prompt + (size_t)written, written);
  int h = sprintf(p, "%zx\r\n", core + n);
  memcpy(p + h, template[k] + body_at[k], core);
  memcpy(p + h + core, u, n);
  memcpy(p + h + core + n, "\r\n", 2);
  c->out_len += (size_t)h + core + n + 2;
  return p + h + (stamp_at[k] - body_at[k]);
}
static void put_event(conn *c) {
  int k = c->chat;
  size_t n = template_len[k];
  out_room(c, n + 192);
  char *p = c->out + c->out_len, *t = p + stamp_at[k];
  if (c->metered) {
    t = put_metered(c, p);
  } else {
    memcpy(p, template[k], n);
    c->out_len += n;
  }
  put_hex(t, now_ns(), 16);
  put_hex(t + 17, c->id, 8);
  int s = c->seq++;
  for (int i = 5; i >= 0; i--) {
    t[26 + i] = (char)('0' + s % 10);
    s /= 10;
  }
  c->events_left--;
  stats.events++;
}
static void put_chunk(conn *c, const char *s) {
  char h[32];
  size_t n = strlen(s);
  int k = sprintf(h, "%zx\r\n", n);
  out_put(c, h, (size_t)k);
  out_put(c, s, n);
  out_put(c, "\r\n", 2);
}
static void put_tail(conn *c) {
  char b[1024];
  if (c->chat)
    snprintf(
        b, sizeof b,
        "data: "
        "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":\"%"
        "s\",\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n",
        model);
  else
    snprintf(b, sizeof b,
             "data: "
             "{\"id\":\"cmpl-mock\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"%s\","
             "\"choices\":[{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n",
             model);
  put_chunk(c, b);
  if (c->usage) {
    snprintf(b, sizeof b,
             "data: "
             "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,"
             "\"model\":\"%s\",\"choices\":[],\"usage\":{\"prompt_tokens\":%zu,\"total_tokens\":%zu,"
             "\"completion_tokens\":%d}}\n\n",
             model, c->prompt_bytes / 4, c->prompt_bytes / 4 + (size_t)c->tokens_n, c->tokens_n);
    put_chunk(c, b);
  }
  put_chunk(c, "data: [DONE]\n\n");
  out_put(c, "0\r\n\r\n", 5);
}
static void put_answer(conn *c, int code, const char *ctype, const char *body, size_t n) {
  char h[256];
  int k =
      snprintf(h, sizeof h,
               "HTTP/1.1 %d %s\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %zu\r\n%s\r\n", code,
               code == 200   ? "OK"
               : code == 404 ? "Not Found"
                             : "Bad Request",
               ctype, n, c->keepalive ? "" : "connection: close\r\n");
  out_put(c, h, (size_t)k);
  out_put(c, body, n);
}
static void whole_answer(conn *c) {
  size_t pad = (size_t)c->tokens_n * 4;
  char *b = malloc(pad + 1024);
  int n = 0;
  if (c->chat)
    n = sprintf(b,
                "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion\",\"created\":1790000000,\"model\":"
                "\"%s\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"",
                model);
  else
    n = sprintf(b,
                "{\"id\":\"cmpl-mock\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"%"
                "s\",\"choices\":[{\"index\":0,\"text\":\"",
                model);
  n += sprintf(b + n, "@T%016llx#%08x.000000", (unsigned long long)now_ns(), c->id);
  memset(b + n, 'x', pad);
  n += (int)pad;
  n += sprintf(b + n,
               "%s,\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":%zu,\"total_"
               "tokens\":%zu,\"completion_tokens\":%d}}",
               c->chat ? "\"}" : "\"", c->prompt_bytes / 4, c->prompt_bytes / 4 + (size_t)c->tokens_n,
               c->tokens_n);
  put_answer(c, 200, "application/json", b, (size_t)n);
  free(b);
  stats.events += (uint64_t)c->tokens_n;
  c->events_left = 0;
}
/* Up to `k` events; negative where the connection is closed. */
static int emit(conn *c, int k) {
  while (k-- > 0 && c->events_left > 0) put_event(c);
  if (c->events_left <= 0) {
    put_tail(c);
    c->answer = FLUSHING;
  }
  int r = flush(c);
  if (r < 0) return -1;
  if (c->answer == FLUSHING && r == 0) end_answer(c);
  return 0;
}
static void consume(conn *c) {
  size_t used = c->request_len;
  if (used > c->in_len) used = c->in_len;
  memmove(c->in, c->in + used, c->in_len - used);
  c->in_len -= used;
  c->reading = IN_HEAD;
  c->head_len = c->request_len = c->chunk_at = c->body_len = 0;
  if (c->in_cap > 65536 && c->in_len < 16384) {
    c->in_cap = 16384;
    c->in = realloc(c->in, c->in_cap);
  }
}
static void parse(conn *c);
static void end_answer(conn *c) {
  stats.active--;
  if (c->id) stats.completed++;
  c->answer = NOTHING;
  if (!c->keepalive) {
    close_conn(c);
    return;
  }
  parse(c);
}
/* Where the value of a header begins, or NULL. */
static const char *header_value(const char *h, size_t n, const char *name) {
  size_t l = strlen(name);
  for (size_t i = 0; i + l + 2 < n; i++)
    if (h[i] == '\n' && !strncasecmp(h + i + 1, name, l) && h[i + 1 + l] == ':') {
      const char *v = h + i + 2 + l;
      while (*v == ' ') v++;
      return v;
    }
  return NULL;
}
static int json_true(const char *b, size_t n, const char *key) {
  const char *p = b, *e = b + n;
  size_t l = strlen(key);
  while (p < e && (p = memmem(p, (size_t)(e - p), key, l))) {
    p += l;
    const char *q = p;
    while (q < e && (*q == ' ' || *q == ':')) q++;
    if (q + 4 <= e && !memcmp(q, "true", 4)) return 1;
  }
  return 0;
}
static void begin_answer(conn *c) {
  c->answer = FLUSHING;
  stats.active++;
  if (stats.active > stats.peak) stats.peak = stats.active;
  c->id = 0;
}
static void finish_answer(conn *c) {
  int r = flush(c);
  if (r == 0) end_answer(c);
}
static double query_number(const char *q, const char *k, double d) {
  const char *p = strstr(q, k);
  return p ? atof(p + strlen(k)) : d;
}
static int set_knobs(const char *path, char *b, size_t n) {
  knob_tokens = (int)query_number(path, "tokens=", knob_tokens);
  knob_interval_ms = query_number(path, "interval=", knob_interval_ms);
  knob_ttft_ms = query_number(path, "ttft=", knob_ttft_ms);
  knob_event_bytes = (int)query_number(path, "bytes=", knob_event_bytes);
  knob_burst = (int)query_number(path, "burst=", knob_burst);
  build_template(0);
  build_template(1);
  return snprintf(b, n, "{\"tokens\":%d,\"interval_ms\":%g,\"ttft_ms\":%g,\"bytes\":%d,\"burst\":%d}\n",
                  knob_tokens, knob_interval_ms, knob_ttft_ms, knob_event_bytes, knob_burst);
}
static int put_stats(char *b, size_t n) {
  unsigned long long running = stats.active - 1; /* this request is none */
  return snprintf(
      b, n,
      "{\"conns_total\":%llu,\"conns_open\":%llu,\"requests\":%llu,\"streams\":%llu,\"completed\":%llu,"
      "\"aborted\":%llu,\"active\":%llu,\"peak_active\":%llu,\"events\":%llu,\"body_bytes\":%llu,"
      "\"late_p50_us\":%.1f,\"late_p99_us\":%.1f,\"late_max_us\":%.1f}\n",
      (unsigned long long)stats.conns, (unsigned long long)stats.open, (unsigned long long)stats.requests,
      (unsigned long long)stats.streams, (unsigned long long)stats.completed,
      (unsigned long long)stats.aborted, running, (unsigned long long)stats.peak,
      (unsigned long long)stats.events, (unsigned long long)stats.bytes_in,
      (double)hist_percentile(&late, 50) / 1e3, (double)hist_percentile(&late, 99) / 1e3,
      (double)late.max / 1e3);
}
static int put_metrics(char *b, size_t n) {
  unsigned long long running = stats.active - 1, tokens = stats.events;
  return snprintf(b, n,
                  "# TYPE vllm:num_requests_running gauge\n"
                  "vllm:num_requests_running{engine=\"0\",model_name=\"%s\"} %llu\n"
                  "# TYPE vllm:num_requests_waiting gauge\n"
                  "vllm:num_requests_waiting{engine=\"0\",model_name=\"%s\"} 0\n"
                  "# TYPE vllm:kv_cache_usage_perc gauge\n"
                  "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"%s\"} 0.25\n"
                  "# TYPE vllm:num_preemptions_total counter\n"
                  "vllm:num_preemptions_total{engine=\"0\",model_name=\"%s\"} 0\n"
                  "# TYPE vllm:generation_tokens_total counter\n"
                  "vllm:generation_tokens_total{engine=\"0\",model_name=\"%s\"} %llu\n",
                  model, running, model, model, model, model, tokens);
}
static int put_models(char *b, size_t n) {
  return snprintf(b, n,
                  "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1790000000,"
                  "\"owned_by\":\"vllm\",\"root\":\"%s\",\"parent\":null,\"max_model_len\":131072}]}",
                  model, model);
}
static int put_server_info(char *b, size_t n) {
  return snprintf(b, n,
                  "{\"model_path\":\"%s\",\"served_model_name\":\"%s\",\"model_id\":\"%s\",\"tp_size\":1,"
                  "\"dp_size\":1,\"is_generation\":true,\"version\":\"0.0\"}",
                  model, model, model);
}
static void put_aborts(conn *c) {
  char *b = malloc(aborts_n * 64 + 16);
  size_t n = 0;
  for (size_t i = 0; i < aborts_n; i++)
    n += (size_t)sprintf(b + n, "%08x %llu %d %d\n", aborts[i].id, (unsigned long long)aborts[i].ns,
                         aborts[i].stream, aborts[i].seq);
  put_answer(c, 200, "text/plain", b, n);
  free(b);
}
static void reset(void) {
  uint64_t open = stats.open, active = stats.active;
  memset(&stats, 0, sizeof stats);
  stats.open = open;
  stats.active = stats.peak = active;
  memset(&late, 0, sizeof late);
  aborts_n = 0;
}
static int starts(const char *path, const char *with) { return !strncmp(path, with, strlen(with)); }
static void handle_get(conn *c, const char *path) {
  static const char json[] = "application/json", metrics[] = "text/plain; version=0.0.4";
  char b[4096];
  int n = 0, code = 200;
  const char *kind = json;
  stats.gets++;
  begin_answer(c);
  if (starts(path, "/aborts")) {
    put_aborts(c);
    finish_answer(c);
    return;
  }
  if (starts(path, "/set"))
    n = set_knobs(path, b, sizeof b);
  else if (starts(path, "/reset"))
    reset();
  else if (starts(path, "/stats"))
    n = put_stats(b, sizeof b);
  else if (starts(path, "/v1/models"))
    n = put_models(b, sizeof b);
  else if (starts(path, "/metrics"))
    kind = metrics, n = put_metrics(b, sizeof b);
  else if (strstr(path, "server_info") || strstr(path, "model_info"))
    n = put_server_info(b, sizeof b);
  else if (!starts(path, "/health") && strcmp(path, "/"))
    code = 404, n = snprintf(b, sizeof b, "{\"detail\":\"Not Found\"}");
  put_answer(c, code, kind, b, (size_t)n);
  finish_answer(c);
}
static void handle(conn *c) {
  char path[512];
  char *sp = memchr(c->in, ' ', c->head_len);
  size_t pl = 0;
  int post = !memcmp(c->in, "POST", 4);
  if (sp) {
    sp++;
    while (pl < sizeof path - 1 && sp[pl] != ' ' && sp[pl] != '\r') {
      path[pl] = sp[pl];
      pl++;
    }
  }
  path[pl] = 0;
  char *body = c->in + c->head_len;
  size_t bl = c->reading == IN_CHUNKS ? c->body_len : c->request_len - c->head_len;
  c->reading = ANSWERING;
  if (!post) {
    consume(c);
    c->reading = ANSWERING;
    handle_get(c, path);
    if (!c->dead && c->reading == ANSWERING && !c->answer) c->reading = IN_HEAD;
    return;
  }
  c->chat = strstr(path, "chat/completions") != NULL;
  if (!c->chat && !strstr(path, "/completions")) {
    consume(c);
    c->reading = ANSWERING;
    begin_answer(c);
    put_answer(c, 404, "application/json", "{\"detail\":\"Not Found\"}", 22);
    finish_answer(c);
    return;
  }
  c->stream = json_true(body, bl, "\"stream\"");
  c->usage = json_true(body, bl, "\"include_usage\"");
  c->metered = json_true(body, bl, "\"continuous_usage_stats\"");
  c->prompt_bytes = bl;
  stats.bytes_in += bl;
  stats.requests++;
  consume(c);
  c->reading = ANSWERING;
  begin_answer(c);
  c->id = next_id++;
  c->seq = 0;
  c->events_left = c->tokens_n = knob_tokens;
  uint64_t t = now_ns();
  if (!c->stream) {
    double d = knob_ttft_ms + knob_interval_ms * (knob_tokens - 1);
    c->answer = WHOLE_LATER;
    if (d <= 0) {
      whole_answer(c);
      c->answer = FLUSHING;
      finish_answer(c);
    } else
      set_timer(c, t + (uint64_t)(d * 1e6));
    return;
  }
  stats.streams++;
  static const char H[] =
      "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; "
      "charset=utf-8\r\ntransfer-encoding: chunked\r\n";
  out_put(c, H, sizeof H - 1);
  if (!c->keepalive) out_put(c, "connection: close\r\n", 19);
  out_put(c, "\r\n", 2);
  c->answer = STREAMING;
  if (knob_ttft_ms > 0) {
    if (flush(c) < 0) return;
    set_timer(c, t + (uint64_t)(knob_ttft_ms * 1e6));
    return;
  }
  if (knob_interval_ms > 0) {
    if (emit(c, 1) < 0) return;
    if (c->answer == STREAMING) set_timer(c, t + (uint64_t)(knob_interval_ms * 1e6));
    return;
  }
  ready_add(c);
}
static void parse(conn *c) {
  static int depth; /* an answer parses what was pipelined behind its request */
  if (c->dead || c->reading == ANSWERING) {
    if (c->answer) return;
    c->reading = IN_HEAD;
  }
  if (depth > 32) return;
  depth++;
  if (c->reading == IN_HEAD && c->in_len >= 4) {
    char *e = memmem(c->in, c->in_len, "\r\n\r\n", 4);
    if (e) {
      c->head_len = (size_t)(e - c->in) + 4;
      const char *v;
      size_t hl = c->head_len;
      c->keepalive = 1;
      if ((v = header_value(c->in, hl, "connection")) && !strncasecmp(v, "close", 5)) c->keepalive = 0;
      char *le = memchr(c->in, '\r', hl);
      if (le && le - c->in >= 8 && !memcmp(le - 8, "HTTP/1.0", 8)) {
        if (!(v && !strncasecmp(v, "keep-alive", 10))) c->keepalive = 0;
      }
      if ((v = header_value(c->in, hl, "expect")) && !strncasecmp(v, "100", 3)) {
        send(c->fd, "HTTP/1.1 100 Continue\r\n\r\n", 25, MSG_NOSIGNAL);
      }
      if ((v = header_value(c->in, hl, "transfer-encoding")) && !strncasecmp(v, "chunked", 7)) {
        c->reading = IN_CHUNKS;
        c->chunk_at = c->head_len;
        c->body_len = 0;
      } else {
        v = header_value(c->in, hl, "content-length");
        c->request_len = c->head_len + (v ? (size_t)strtoull(v, NULL, 10) : 0);
        c->reading = IN_BODY;
      }
    } else if (c->in_len > 65536) {
      stats.bad++;
      close_conn(c);
      depth--;
      return;
    }
  }
  if (c->reading == IN_BODY && c->in_len >= c->request_len)
    handle(c);
  else if (c->reading == IN_CHUNKS) {
    for (;;) {
      char *p = c->in + c->chunk_at;
      size_t n = c->in_len - c->chunk_at;
      char *nl = memchr(p, '\n', n);
      if (!nl) break;
      size_t sz = strtoull(p, NULL, 16), hl = (size_t)(nl - p) + 1;
      if (n < hl + sz + 2) break;
      memmove(c->in + c->head_len + c->body_len, p + hl, sz);
      c->body_len += sz;
      c->chunk_at += hl + sz + 2;
      if (sz == 0) {
        c->request_len = c->chunk_at;
        handle(c);
        break;
      }
    }
  }
  depth--;
}
static void on_read(conn *c) {
  for (;;) {
    if (c->in_cap - c->in_len < 4096) {
      size_t want = c->in_cap ? c->in_cap * 2 : 4096;
      if (c->reading == IN_BODY && c->request_len + 4096 > want) want = c->request_len + 4096;
      c->in = realloc(c->in, c->in_cap = want);
    }
    size_t room = c->in_cap - c->in_len;
    ssize_t r = recv(c->fd, c->in + c->in_len, room, 0);
    if (r > 0) {
      c->in_len += (size_t)r;
      parse(c);
      if (c->dead) return;
      if ((size_t)r < room) return;
      continue;
    }
    if (r < 0 && errno == EINTR) continue;
    if (r < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    close_conn(c);
    return;
  }
}
static void on_signal(int number) {
  (void)number;
  stopping = 1;
}

static int listening(int port) {
  int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = {
      .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (void *)&a, sizeof a) || listen(listener, 4096))
    die("port %d: %s", port, strerror(errno));
  set_nonblock(listener);
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
  epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
  return listener;
}
static void accept_some(int listener) {
  for (int i = 0; i < 256; i++) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
    if (fd < 0) return;
    set_nodelay(fd);
    conn *c = calloc(1, sizeof *c);
    c->fd = fd;
    c->heap_index = -1;
    stats.conns++;
    stats.open++;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
  }
}
static void on_event(conn *c, uint32_t events) {
  if (c->dead) return;
  if (events & EPOLLOUT) {
    int r = flush(c);
    if (r < 0) return;
    if (r == 0 && c->answer == FLUSHING)
      end_answer(c);
    else if (r == 0 && c->answer == STREAMING && knob_interval_ms <= 0 && c->heap_index < 0)
      ready_add(c);
  }
  if (!c->dead && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))) on_read(c);
}
static void run_timers(void) {
  const size_t stalled_bytes = 1u << 20;
  uint64_t now = now_ns();
  for (int i = 0; heap_n && heap[0]->due <= now && i < 512; i++) {
    conn *c = heap[0];
    uint64_t due = c->due, interval_ns = (uint64_t)(knob_interval_ms * 1e6);
    clear_timer(c);
    hist_add(&late, now - due);
    if (c->answer == WHOLE_LATER) {
      whole_answer(c);
      c->answer = FLUSHING;
      finish_answer(c);
      continue;
    }
    if (c->answer != STREAMING) continue;
    if (knob_interval_ms <= 0) {
      ready_add(c);
      continue;
    }
    if (c->out_len - c->out_sent > stalled_bytes) {
      set_timer(c, now + interval_ns);
      continue;
    }
    if (emit(c, knob_burst) < 0) continue;
    if (c->answer == STREAMING) set_timer(c, due + interval_ns);
  }
}
static void run_ready(void) {
  size_t n = ready_n, kept = 0;
  for (size_t i = 0; i < n; i++) {
    conn *c = ready[i];
    if (c->dead) continue;
    c->in_ready = 0; /* the next request may put it there again */
    if (c->answer != STREAMING || c->want_out) continue;
    if (emit(c, knob_burst) < 0) continue;
    if (c->answer == STREAMING && !c->want_out && !c->in_ready) {
      c->in_ready = 1;
      ready[kept++] = c;
    }
  }
  size_t added = ready_n - n;
  if (n) memmove(ready + kept, ready + n, added * sizeof *ready);
  ready_n = kept + added;
}
static struct timespec until_next(uint64_t now) {
  if (ready_n) return (struct timespec){0, 0};
  if (!heap_n || heap[0]->due >= now + 1000000000) return (struct timespec){1, 0};
  return (struct timespec){0, heap[0]->due > now ? (long)(heap[0]->due - now) : 0};
}
static void serve(int listener, uint64_t end) {
  static struct epoll_event events[1024];
  for (uint64_t now = now_ns(); !stopping && now < end; now = now_ns()) {
    struct timespec timeout = until_next(now);
    int n = epoll_pwait2(poller, events, 1024, &timeout, NULL);
    for (int i = 0; i < n; i++) {
      if (events[i].data.ptr)
        on_event(events[i].data.ptr, events[i].events);
      else
        accept_some(listener);
    }
    run_timers();
    run_ready();
    bury();
  }
}
int main(int argc, char **argv) {
  int port = 9100, option;
  double life_s = 3600;
  while ((option = getopt(argc, argv, "p:n:i:t:b:k:m:L:")) != -1) switch (option) {
      case 'p':
        port = atoi(optarg);
        break;
      case 'n':
        knob_tokens = atoi(optarg);
        break;
      case 'i':
        knob_interval_ms = atof(optarg);
        break;
      case 't':
        knob_ttft_ms = atof(optarg);
        break;
      case 'b':
        knob_event_bytes = atoi(optarg);
        break;
      case 'k':
        knob_burst = atoi(optarg);
        break;
      case 'm':
        model = optarg;
        break;
      case 'L':
        life_s = atof(optarg);
        break;
      default:
        die("the comment at the top of mockvllm.c has the options");
    }
  raise_nofile();
  signal(SIGPIPE, SIG_IGN);
  struct sigaction action = {.sa_handler = on_signal};
  sigaction(SIGTERM, &action, NULL);
  sigaction(SIGINT, &action, NULL);
  build_template(0);
  build_template(1);
  poller = epoll_create1(0);
  serve(listening(port), now_ns() + (uint64_t)(life_s * 1e9));
  return 0;
}
