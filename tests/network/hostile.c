/* A hostile network: a preloaded library between NVSHMEM's UCX transport and UCX (tests/network/README.md).

   cc -O1 -shared -fPIC -o libhostile.so hostile.c -ldl -lpthread;  LD_PRELOAD=.../libhostile.so

   NVSHMEM's put with signal is here a ucp_put_nbx, a ucp_worker_fence and an active message with the signal
   (ucp_am_send_nbx), all of its proxy thread. The library holds such pairs back, and ucp_worker_progress passes them on:
   in any order between pairs, but never a signal before its own data. The source of a put is read when it is passed on.
   What is no pair passes at once. So an explicit nvshmem_fence() between two pairs does not order them.

   Besides: the transports of UCX by ALLSCAN_UCX_TLS, since NVSHMEM chooses them by itself; a symmetric heap in host
   memory is called that; and a name of a node by ALLSCAN_NODE, which gethostname(), uname() and the names of shared
   memory follow, so that processes of one host can be several nodes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/utsname.h>
#include <time.h>

/* The first fields of ucp_request_param_t, and the bits that say which are set (ucp.h) */
typedef void (*callback)(void *request, int status, void *user_data);
struct param {
  uint32_t mask, flags;
  void *request;
  callback sent;
  uint64_t datatype;
  void *user_data, *reply_buffer;
  int memory_type;
  uint64_t rest[5];
};
enum { HAS_FLAGS = 16, HAS_CALLBACK = 2, HAS_USER_DATA = 4, HAS_MEMORY_TYPE = 64, HOST_MEMORY = 0 };

/* The active message that NVSHMEM's transport makes of an atomic operation */
struct message {
  void *ep;
  uint64_t size, value, compare, return_flag;
  void *address, *return_address;
  int operation;
};
enum { SEND = 0, SIGNAL_ALONE = 8, SIGNAL_SET = 9, SIGNAL_ADD = 10, MOST_BYTES = 128 };

struct put {
  struct put *next;
  const void *from;
  size_t bytes;
  uint64_t to;
  void *rkey;
};
struct pair {
  struct pair *next;
  void *ep;
  uint64_t number;
  int64_t due;
  size_t bytes;
  struct put *puts;
  unsigned id;
  uint32_t flags;
  int loses;
  size_t length;
  _Alignas(8) char message[MOST_BYTES];
};

enum mode { PASS, REORDER, BANDWIDTH, STALL, NEVER };
enum count { HELD, PASSED, OVERTAKINGS, LOST, BYTES, MOST_HELD, FAILED, COUNTS };

static pthread_mutex_t lock;
static enum mode mode;
static uint64_t argument, numbers, state = 88172645463325252u, counts[COUNTS];
static int64_t last_due;
static struct pair *open_pairs, *held_pairs; /* the former have no signal yet */
static __thread int inside;

static void *real(const char *name) {
  static void *ucp; /* may be loaded in a local scope, where RTLD_NEXT does not look */
  if (!ucp) ucp = dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD);
  void *found = dlsym(ucp ? ucp : RTLD_NEXT, name);
  if (!found) {
    fprintf(stderr, "hostile network: UCX has no %s\n", name);
    abort();
  }
  return found;
}
#define REAL(result, name, ...)                       \
  static result (*call)(__VA_ARGS__);                 \
  if (!call) call = (result(*)(__VA_ARGS__))real(name)

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static uint64_t drawn(uint64_t below) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return below ? state % below : 0;
}

/* mode: see above; value: ns of delay at most, bytes a second, ns of stall from now on, or nothing. What is held comes
   by what was said when it was posted. */
void network_set(int new_mode, uint64_t value) {
  pthread_mutex_lock(&lock);
  mode = new_mode, argument = value;
  last_due = mode == STALL ? now() + (int64_t)value : 0;
  pthread_mutex_unlock(&lock);
}

void network_seed(uint64_t seed) { state = 88172645463325252u ^ (seed << 17 | seed); }

uint64_t network_count(int what) {
  pthread_mutex_lock(&lock);
  uint64_t found = what >= 0 && what < COUNTS ? counts[what] : 0;
  pthread_mutex_unlock(&lock);
  return found;
}

__attribute__((constructor)) static void begin(void) {
  static const char *const names[] = {"pass", "reorder", "bandwidth", "stall", "never"};
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lock, &kind);
  const char *given = getenv("ALLSCAN_NETWORK"); /* such as reorder:2000000 */
  for (int i = 0; given && i < 5; i++) {
    size_t length = strlen(names[i]);
    if (!strncmp(given, names[i], length) && (!given[length] || given[length] == ':'))
      network_set(i, given[length] ? strtoull(given + length + 1, NULL, 10) : 0);
  }
}

static int failed(void *request) {
  if ((uintptr_t)request < (uintptr_t)-100) return 0;
  counts[FAILED]++;
  fprintf(stderr, "hostile network: UCX failed with %d\n", (int)(intptr_t)request);
  return 1;
}

/* Of a put or message that was passed on: user_data, the pair of a message, may go */
static void sent(void *request, int status, void *user_data) {
  REAL(void, "ucp_request_free", void *);
  if (status) failed((void *)(intptr_t)status);
  free(user_data);
  call(request);
}

static void *put_now(void *ep, const struct put *put) {
  REAL(void *, "ucp_put_nbx", void *, const void *, size_t, uint64_t, void *, const struct param *);
  struct param param = {.mask = HAS_CALLBACK | HAS_MEMORY_TYPE, .sent = sent, .memory_type = HOST_MEMORY};
  return call(ep, put->from, put->bytes, put->to, put->rkey, &param);
}

static void pass_on(struct pair *pair) {
  REAL(void *, "ucp_am_send_nbx", void *, unsigned, const void *, size_t, const void *, size_t, const struct param *);
  for (struct put *put = pair->puts, *next; put; put = next) {
    next = put->next;
    if (!pair->loses) failed(put_now(pair->ep, put));
    free(put);
  }
  if (!pair->length) { /* puts without a signal */
    free(pair);
    return;
  }
  if (pair->loses) { /* NVSHMEM counts the answers: the message is one without effect */
    struct message *message = (struct message *)pair->message;
    message->operation = SIGNAL_ADD, message->value = 0;
    counts[LOST]++;
  } else {
    counts[PASSED]++;
    counts[BYTES] += pair->bytes;
  }
  struct param param = {.mask = HAS_CALLBACK | HAS_USER_DATA | HAS_FLAGS, .flags = pair->flags, .sent = sent,
                        .user_data = pair};
  void *request = call(pair->ep, pair->id, NULL, 0, pair->message, pair->length, &param);
  if (!request || failed(request)) free(pair);
}

/* Pass on what is due, the earliest first. With the lock. */
static void pass_due(void) {
  if (inside) return;
  inside = 1;
  for (int64_t time = now();;) {
    struct pair **first = NULL;
    for (struct pair **p = &held_pairs; *p; p = &(*p)->next)
      if (!first || (*p)->due < (*first)->due || ((*p)->due == (*first)->due && (*p)->number < (*first)->number))
        first = p;
    if (!first || (*first)->due > time) break;
    struct pair *pair = *first;
    *first = pair->next;
    counts[HELD]--;
    for (struct pair *p = held_pairs; p; p = p->next)
      if (p->ep == pair->ep && p->number < pair->number) {
        counts[OVERTAKINGS]++;
        break;
      }
    pass_on(pair);
  }
  inside = 0;
}

static struct pair *take_open(void *ep) {
  for (struct pair **p = &open_pairs; *p; p = &(*p)->next)
    if ((*p)->ep == ep) {
      struct pair *pair = *p;
      *p = pair->next;
      return pair;
    }
  return NULL;
}

static int64_t due_of(const struct pair *pair) {
  int64_t time = now();
  switch (mode) {
  case REORDER:
    return time + (int64_t)drawn(argument);
  case BANDWIDTH:
    last_due = (last_due > time ? last_due : time) + (int64_t)(pair->bytes * 1000000000ull / (argument ? argument : 1));
    return last_due;
  case STALL:
    return last_due > time ? last_due : time;
  default:
    return time;
  }
}

void *ucp_put_nbx(void *ep, const void *from, size_t bytes, uint64_t to, void *rkey, const struct param *param) {
  REAL(void *, "ucp_put_nbx", void *, const void *, size_t, uint64_t, void *, const struct param *);
  if (inside || mode == PASS || (param->mask & HAS_USER_DATA)) { /* the latter: a single value, of a barrier */
    struct param host = *param;
    host.mask |= HAS_MEMORY_TYPE, host.memory_type = HOST_MEMORY;
    return call(ep, from, bytes, to, rkey, &host);
  }
  struct put *put = malloc(sizeof *put);
  *put = (struct put){NULL, from, bytes, to, rkey};
  pthread_mutex_lock(&lock);
  struct pair *pair = take_open(ep);
  if (!pair) pair = calloc(1, sizeof *pair);
  pair->ep = ep, pair->bytes += bytes;
  struct put **last = &pair->puts;
  while (*last) last = &(*last)->next;
  *last = put;
  pair->next = open_pairs, open_pairs = pair;
  pthread_mutex_unlock(&lock);
  return NULL; /* done, as NVSHMEM sees it: it asks by quiet only */
}

void *ucp_get_nbx(void *ep, void *to, size_t bytes, uint64_t from, void *rkey, const struct param *param) {
  REAL(void *, "ucp_get_nbx", void *, void *, size_t, uint64_t, void *, const struct param *);
  struct param host = *param;
  host.mask |= HAS_MEMORY_TYPE, host.memory_type = HOST_MEMORY;
  return call(ep, to, bytes, from, rkey, &host);
}

void *ucp_am_send_nbx(void *ep, unsigned id, const void *header, size_t header_length, const void *data, size_t length,
                      const struct param *param) {
  REAL(void *, "ucp_am_send_nbx", void *, unsigned, const void *, size_t, const void *, size_t, const struct param *);
  struct pair *pair = NULL;
  if (!inside && id == SEND && length >= sizeof(struct message) && length <= MOST_BYTES) {
    pthread_mutex_lock(&lock);
    pair = take_open(ep);
    int operation = ((const struct message *)data)->operation;
    if (pair && (operation < SIGNAL_ALONE || operation > SIGNAL_ADD)) {
      pass_on(pair);
      pair = NULL;
    }
    if (pair) {
      pair->id = id, pair->length = length, pair->flags = param->flags, pair->number = ++numbers;
      pair->loses = mode == NEVER;
      memcpy(pair->message, data, length);
      pair->due = due_of(pair);
      pair->next = held_pairs, held_pairs = pair;
      if (++counts[HELD] > counts[MOST_HELD]) counts[MOST_HELD] = counts[HELD];
    }
    pthread_mutex_unlock(&lock);
  }
  return pair ? NULL : call(ep, id, header, header_length, data, length, param);
}

/* Between the puts and the signal of a pair that is held there is nothing to order yet */
int ucp_worker_fence(void *worker) {
  REAL(int, "ucp_worker_fence", void *);
  pthread_mutex_lock(&lock);
  int holds = open_pairs || held_pairs;
  pthread_mutex_unlock(&lock);
  return holds ? 0 : call(worker);
}

unsigned ucp_worker_progress(void *worker) {
  REAL(unsigned, "ucp_worker_progress", void *);
  /* not: wait for the lock; UCX may call this itself, with a lock that a thread wants which has ours */
  if (!inside && !pthread_mutex_trylock(&lock)) {
    pass_due();
    pthread_mutex_unlock(&lock);
  }
  return call(worker);
}

/* quiet: all that was held arrives first, when it is due */
void *ucp_worker_flush_nbx(void *worker, const struct param *param) {
  REAL(void *, "ucp_worker_flush_nbx", void *, const struct param *);
  for (int holds = 1; holds;) {
    pthread_mutex_lock(&lock);
    for (struct pair *pair; (pair = open_pairs);) {
      open_pairs = pair->next;
      inside = 1;
      pass_on(pair);
      inside = 0;
    }
    pass_due();
    holds = held_pairs != NULL;
    pthread_mutex_unlock(&lock);
    if (holds) ucp_worker_progress(worker);
  }
  return call(worker, param);
}

int ucp_config_modify(void *config, const char *name, const char *value) {
  REAL(int, "ucp_config_modify", void *, const char *, const char *);
  const char *transports = getenv("ALLSCAN_UCX_TLS");
  return call(config, name, transports && !strcmp(name, "TLS") ? transports : value);
}

/* Nodes */

int gethostname(char *name, size_t size) {
  struct utsname found;
  if (uname(&found)) return -1;
  if (size) strncpy(name, found.nodename, size - 1), name[size - 1] = 0;
  return 0;
}

int uname(struct utsname *found) {
  static int (*call)(struct utsname *);
  if (!call) call = (int (*)(struct utsname *))dlsym(RTLD_NEXT, "uname");
  int result = call(found);
  const char *node = getenv("ALLSCAN_NODE");
  if (!result && node) strncpy(found->nodename, node, sizeof found->nodename - 1);
  return result;
}

/* /name is /node-name: NVSHMEM gives a heap in host memory one fixed name */
static const char *of_node(const char *name, char *made, size_t size) {
  const char *node = getenv("ALLSCAN_NODE");
  if (!node) return name;
  snprintf(made, size, "/%s-%s", node, name + (*name == '/'));
  return made;
}

int shm_open(const char *name, int flags, mode_t permissions) {
  static int (*call)(const char *, int, mode_t);
  if (!call) call = (int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, "shm_open");
  char made[256];
  return call(of_node(name, made, sizeof made), flags, permissions);
}

int shm_unlink(const char *name) {
  static int (*call)(const char *);
  if (!call) call = (int (*)(const char *))dlsym(RTLD_NEXT, "shm_unlink");
  char made[256];
  return call(of_node(name, made, sizeof made));
}
