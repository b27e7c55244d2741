/* A stand-in for UCX in tests of hostile.c: one process sends to itself, immediately, and records the events.
   cc -shared -fPIC -Wl,-soname,libucp.so.0 -o libucp.so.0 stub_ucp.c */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PUT, SIGNAL, MESSAGE, FENCE, FLUSH, PROGRESS, MOST = 1 << 16 };
struct event {
  uint64_t kind, address, value;
};
static struct event events[MOST];
static uint64_t number;
static char transports[64];

static void *happens(uint64_t kind, uint64_t address, uint64_t value) {
  if (number < MOST) events[number++] = (struct event){kind, address, value};
  return NULL; /* complete */
}

uint64_t stub_events(struct event *to) {
  uint64_t found = number;
  memcpy(to, events, found * sizeof *events);
  number = 0;
  return found;
}
const char *stub_transports(void) { return transports; }

void *ucp_put_nbx(void *ep, const void *from, size_t bytes, uint64_t to, void *rkey, const void *param) {
  (void)ep, (void)rkey;
  memcpy((void *)to, from, bytes);
  return happens(PUT, to, *(const int *)((const char *)param + 48)); /* memory type */
}
void *ucp_get_nbx(void *ep, void *to, size_t bytes, uint64_t from, void *rkey, const void *param) {
  (void)ep, (void)rkey, (void)param;
  memcpy(to, (const void *)from, bytes);
  return NULL;
}
void *ucp_am_send_nbx(void *ep, unsigned id, const void *header, size_t header_length, const void *data, size_t length,
                      const void *param) {
  (void)ep, (void)header, (void)header_length, (void)param, (void)length;
  const uint64_t *words = data; /* ep, size, value, compare, flag, address, return address, operation */
  int operation = id ? 0 : (int)words[7];
  if (operation == 9) *(uint64_t *)words[5] = words[2];
  if (operation == 10) *(uint64_t *)words[5] += words[2];
  return id ? happens(MESSAGE, id, 0) : happens(operation >= 8 && operation <= 10 ? SIGNAL : MESSAGE, words[5], words[2]);
}
int ucp_worker_fence(void *worker) { return happens(FENCE, (uint64_t)worker, 0) != NULL; }
unsigned ucp_worker_progress(void *worker) { return worker != NULL; }
void *ucp_worker_flush_nbx(void *worker, const void *param) {
  (void)param;
  return happens(FLUSH, (uint64_t)worker, 0);
}
void ucp_request_free(void *request) { free(request); }
int ucp_config_modify(void *config, const char *name, const char *value) {
  (void)config;
  if (!strcmp(name, "TLS")) strncpy(transports, value, sizeof transports - 1);
  return 0;
}
